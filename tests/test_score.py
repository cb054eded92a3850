"""Word errors, the interval of their difference, and its test."""

import doctest
from itertools import product

import pytest

from asrmask.evaluation import score
from asrmask.evaluation.score import (
    Errors,
    clopper_pearson_upper,
    difference_interval,
    difference_p,
    min_p,
)


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


def p_of(differences):
    """p of clips with so many errors more than the others'."""
    ours = [Errors(20 + d, 0, 0, 30) for d in differences]
    names = [str(i) for i in range(len(differences))]
    return difference_p(ours, [Errors(20, 0, 0, 30)] * len(differences), names)


def test_p_is_the_share_of_signs_by_hand():
    assert p_of([0, 0, 0]) == 1
    assert p_of([3]) == 1
    assert p_of([5, 1, 2, 8, 60]) == 2 / 32 == min_p(5)
    assert p_of([0, 0, 1, 3]) == 0.5  # a clip without a difference is no evidence
    differences = [3, -1, 4, 1, -5, 9, 2, -6, 5, 3]
    found = abs(sum(differences))
    sums = [
        sum(s * d for s, d in zip(signs, differences, strict=True))
        for signs in product((1, -1), repeat=len(differences))
    ]
    assert p_of(differences) == pytest.approx(sum(abs(s) >= found for s in sums) / len(sums))
    assert p_of([1] * 200) == pytest.approx(2.0**-199)


def test_p_is_as_rare_as_it_says_without_a_difference():
    sizes = (1, 1, 2, 3, 7, 40, 200)
    ps = [
        p_of([sign * n for sign, n in zip(signs, sizes, strict=True)])
        for signs in product((1, -1), repeat=len(sizes))
    ]
    for alpha in sorted(set(ps)):
        assert sum(p <= alpha for p in ps) / len(ps) <= alpha + 1e-12
    assert min(ps) == min_p(len(sizes))


def test_clips_of_one_speaker_have_one_sign():
    ours, theirs = [Errors(1, 0, 0, 10)] * 60, [Errors(0, 0, 0, 10)] * 60
    assert difference_p(ours, theirs, [str(i % 6) for i in range(60)]) == 2 / 64


def test_what_equal_texts_exclude():
    assert clopper_pearson_upper(0, 5) == pytest.approx(1 - 0.05 ** (1 / 5))
    assert clopper_pearson_upper(0, 3000) == pytest.approx(1 - 0.05 ** (1 / 3000))
    assert clopper_pearson_upper(1, 10) == pytest.approx(
        0.39416, abs=1e-5
    )  # a table of Clopper-Pearson
    assert clopper_pearson_upper(10, 10) == 1
