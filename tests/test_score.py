"""Word errors and the interval of their difference."""

import doctest

import pytest

from asrmask import score
from asrmask.score import Errors, difference_interval


def test_examples_in_the_docstrings():
    assert doctest.testmod(score).failed == 0


def test_equal_results_have_no_difference():
    clips = [Errors(1, 0, 0, 10), Errors(0, 2, 0, 7)]
    assert difference_interval(clips, clips, ["a", "b"]) == (0.0, 0.0)


def test_one_block_has_one_value():
    ours, theirs = [Errors(2, 0, 0, 10), Errors(0, 0, 1, 10)], [Errors(1, 0, 0, 10)] * 2
    low, high = difference_interval(ours, theirs, ["same", "same"])
    assert low == high == pytest.approx(0.05)


def test_the_interval_is_over_blocks_and_not_over_clips():
    # one speaker is worse by a word in ten, the other equal: drawn, 0, 0.05 or 0.1
    ours = [Errors(1, 0, 0, 10)] * 50 + [Errors(0, 0, 0, 10)] * 50
    theirs = [Errors(0, 0, 0, 10)] * 100
    by_speaker = difference_interval(ours, theirs, ["a"] * 50 + ["b"] * 50)
    assert by_speaker == pytest.approx((0.0, 0.1))
    low, high = difference_interval(ours, theirs, [str(i) for i in range(100)])
    assert 0.03 < low < 0.05 < high < 0.07


def test_the_interval_covers_the_truth_as_often_as_it_says():
    import numpy as np

    rng = np.random.default_rng(1)
    n_hits = 0
    for i in range(200):
        ours = [Errors(int(n), 0, 0, 10) for n in rng.binomial(10, 0.2, 40)]
        theirs = [Errors(int(n), 0, 0, 10) for n in rng.binomial(10, 0.1, 40)]
        names = [str(j) for j in range(40)]
        low, high = difference_interval(ours, theirs, names, n_draws=500, seed=i)
        n_hits += low <= 0.1 <= high
    assert 178 <= n_hits <= 200
