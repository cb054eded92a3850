"""Masks: literal small matrices, what they refuse, and what −inf means."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asrmask.errors import OptionError
from asrmask.model import masks


def test_causal_of_four_is_the_textbook_matrix():
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    assert torch.equal(masks.causal(4, 4), expected[None, None])


def test_causal_with_a_cache_sees_everything_before_its_queries():
    expected = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    assert torch.equal(masks.causal(3, 5), expected[None, None])
    assert torch.equal(masks.causal(1, 5), torch.ones(1, 1, 1, 5, dtype=torch.bool))


@given(st.integers(1, 12), st.integers(0, 12))
def test_causal_rows_are_those_of_the_whole_square(n_queries, n_before):
    n_keys = n_queries + n_before
    whole = masks.causal(n_keys, n_keys)
    assert torch.equal(masks.causal(n_queries, n_keys), whole[:, :, n_before:])


def test_padding_and_cross_show_the_first_positions_of_each_clip():
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    assert torch.equal(masks.padding([1, 3, 4], 4), expected[:, None, None])
    assert torch.equal(masks.padding(torch.tensor([1, 3, 4]), 4), expected[:, None, None])


def test_a_sink_is_shown_to_each_clip():
    expected = torch.tensor([[1, 0, 0, 0, 1, 1], [1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    assert torch.equal(masks.padding([1, 3, 5], 6, sink=2), expected[:, None, None])
    assert torch.equal(masks.padding([1, 3, 5], 6, sink=0), masks.padding([1, 3, 5], 6))


@pytest.mark.parametrize("lengths", [[0, 1501], [-1], [1501], []])
def test_lengths_out_of_range_are_refused_by_name(lengths):
    with pytest.raises(OptionError, match=r"lengths must be in 1\.\.1500, got"):
        masks.padding(lengths, 1500)


@pytest.mark.parametrize(("n_queries", "n_keys"), [(0, 3), (4, 3)])
def test_queries_must_be_among_the_keys(n_queries, n_keys):
    with pytest.raises(OptionError, match="n_queries"):
        masks.causal(n_queries, n_keys)


def test_a_row_with_nothing_visible_is_refused():
    mask = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    mask[0, 0, 0, 1] = False
    assert masks.validated(mask) is mask
    mask[1, 0, 2] = False
    with pytest.raises(OptionError, match=r"nothing in rows .*\[\[1, 0, 2\]\]"):
        masks.validated(mask)


@pytest.mark.parametrize("mask", [torch.zeros(1, 1, 2, 2).int(), torch.ones(2, 2).bool()])
def test_only_masks_and_biases_of_four_dimensions_are_taken(mask):
    with pytest.raises(OptionError, match=r"bool \(or a float bias\) of shape"):
        masks.validated(mask)


def test_a_mask_that_hides_nothing_is_none():
    assert masks.validated(None) is None
    assert masks.validated(torch.ones(2, 1, 1, 4, dtype=torch.bool)) is None


def test_a_bias_has_numbers_and_minus_infinity():
    bias = masks.counted(torch.tensor([[1, 0, 16]]))
    assert masks.validated(bias) is bias
    for wrong in (torch.inf, torch.nan):
        with pytest.raises(OptionError, match="got \\+inf or NaN"):
            masks.validated(torch.tensor([0.0, wrong])[None, None, None])
    with pytest.raises(OptionError, match="something visible"):
        masks.validated(masks.counted(torch.tensor([[0, 0]])))


def test_a_counted_key_has_the_mass_of_that_many():
    scores = torch.tensor([0.3, -1.0, 2.0])
    counts = torch.tensor([[1, 3, 2]])
    mine = (scores + masks.counted(counts)[0, 0, 0]).softmax(dim=-1)
    spelled_out = scores.repeat_interleave(counts[0]).softmax(dim=-1)
    assert torch.allclose(mine, torch.stack([p.sum() for p in spelled_out.split([1, 3, 2])]))


def softmax_with(fill, scores, mask):
    return scores.masked_fill(~mask, fill).softmax(dim=-1)


def test_minus_1e9_and_minus_infinity_agree_in_float32():
    scores = 10 * torch.randn(3, 2, 5, 7)
    mask = masks.padding([7, 3, 1], 7)
    assert torch.equal(softmax_with(-1e9, scores, mask), softmax_with(-torch.inf, scores, mask))


def test_where_minus_1e9_breaks_in_float16():
    """−1e9 is not a float16: stored as one it is −inf, and the largest finite value still leaks."""
    assert torch.tensor(-1e9).half().item() == -torch.inf
    with pytest.raises(RuntimeError, match="overflow"):
        torch.zeros(1, dtype=torch.float16).masked_fill(torch.tensor([True]), -1e9)
    largest = torch.finfo(torch.float16).min
    # scores near the end of the range: the "hidden" key gets the same weight as the visible one
    scores = torch.full((1, 2), largest, dtype=torch.float16)
    mask = torch.tensor([[True, False]])
    assert softmax_with(largest, scores, mask)[0, 1] == 0.5
    assert softmax_with(-torch.inf, scores, mask)[0, 1] == 0.0
