"""Word times: the path of dynamic time warping and the rules on its times, against upstream's."""

import doctest
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asrmask.systems import upstream
from asrmask.transcription import word_timing
from asrmask.transcription.punctuation import APPEND_PUNCTUATIONS, PREPEND_PUNCTUATIONS
from asrmask.transcription.result import Segment, Word
from asrmask.transcription.word_timing import (
    WordTiming,
    attention_map,
    dtw_path,
    merge_punctuations,
)


def test_examples_in_the_docstrings():
    assert doctest.testmod(word_timing).failed == 0


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 30), st.booleans())
@settings(max_examples=40, deadline=None)
def test_path_equals_upstream(seed, n_rows, n_columns, ties):
    cost = np.random.default_rng(seed).normal(size=(n_rows, n_columns))
    if ties:
        cost = cost.round()
    theirs = upstream.whisper().timing.dtw_cpu(cost)
    assert np.array_equal(np.stack(dtw_path(cost)), theirs)


@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (2, 2)])
def test_path_without_numbers_equals_upstream(shape):
    cost = np.full(shape, np.nan)  # what a window of a single position gives
    theirs = upstream.whisper().timing.dtw_cpu(cost)
    assert np.array_equal(np.stack(dtw_path(cost)), theirs)


def test_attention_map_equals_upstream():
    torch.manual_seed(0)
    weights = torch.rand(3, 5, 40).softmax(dim=-1)
    timing = upstream.whisper().timing
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    theirs = timing.median_filter((weights - mean) / std, 7).mean(dim=0)
    assert torch.equal(attention_map(weights), theirs)
    short = torch.rand(2, 4, 3)
    assert attention_map(short).shape == (4, 3)


def test_median_network_on_every_order():
    rows = torch.tensor(list(product([0.0, 1.0], repeat=7)))  # the 0-1 principle: enough for all
    medians = word_timing.median_of_seven(list(rows.T))
    assert torch.equal(medians, rows.sort().values[:, 3])


WORDS = st.lists(st.sampled_from([" a", " “", ".", "b", " (", ",", " -", "?", " "]), max_size=8)


@given(WORDS)
def test_punctuation_goes_where_upstream_puts_it(texts):
    ours = [WordTiming(text, [i], 0.0, 1.0, 1.0) for i, text in enumerate(texts)]
    timing = upstream.whisper().timing
    theirs = [timing.WordTiming(text, [i], 0.0, 1.0, 1.0) for i, text in enumerate(texts)]
    merge_punctuations(ours, PREPEND_PUNCTUATIONS, APPEND_PUNCTUATIONS)
    timing.merge_punctuations(theirs, PREPEND_PUNCTUATIONS, APPEND_PUNCTUATIONS)
    assert [(t.word, t.tokens) for t in ours] == [(t.word, t.tokens) for t in theirs]


def segment(start, end, spoken):
    return Segment(0, 0, start, end, "", [], 0.0, 0.0, 1.0, 0.0, spoken)


def test_end_is_the_last_word_or_the_last_segment():
    spoken = [Word(" a", 1.0, 2.0, 0.9)]
    assert word_timing.last_word_end([]) is None
    assert word_timing.last_word_end([segment(0, 5, [])]) == 5
    assert word_timing.last_word_end([segment(0, 5, spoken), segment(5, 9, [])]) == 2.0


def test_a_text_without_words_has_no_times(model):
    from asrmask.tokenizer.tokenizer import get_tokenizer

    encoded = model.decoder.cross_attention_cache(torch.zeros(1, 1500, 384))
    assert word_timing.align(model, get_tokenizer(False), [], encoded, 3000) == []
