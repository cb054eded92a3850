"""Aggregation and online statistics: values worked out by hand, and the four classic mistakes."""

import math
import pickle
from functools import reduce
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asrmask.errors import OptionError
from asrmask.inspection import aggregate
from asrmask.inspection.diagnosis import padding_by_span
from asrmask.inspection.online import Moments, Tally, heads_table

X = torch.tensor([[[1.0, 10.0], [2.0, 20.0], [6.0, 60.0], [8.0, 80.0]]])  # one sample, N = 4
NAN = [math.nan, math.nan]


def mask(*bits):
    return torch.tensor([bits], dtype=torch.bool)


def total(parts):
    """The moments of all samples together."""
    return reduce(Moments.__add__, parts)


def same(got, expected):
    assert np.allclose(np.asarray(got, float), expected, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(
    ("bits", "at_last", "on_average"),
    [
        ((1, 1, 1, 1), [8, 80], [4.25, 42.5]),  # all: (1 + 2 + 6 + 8) / 4
        ((0, 0, 0, 0), NAN, NAN),  # none: no value, and not 0
        ((1, 1, 0, 0), [2, 20], [1.5, 15]),  # padding behind
        ((0, 0, 1, 1), [8, 80], [7, 70]),  # padding before
        ((0, 1, 1, 0), [6, 60], [4, 40]),  # padding on both sides
        ((1, 0, 1, 0), [6, 60], [3.5, 35]),  # a hole
        ((1, 0, 0, 0), [1, 10], [1, 10]),
        ((0, 0, 0, 1), [8, 80], [8, 80]),
    ],
)
def test_last_and_mean_by_hand(bits, at_last, on_average):
    same(aggregate.last(X, mask(*bits))[0], at_last)
    same(aggregate.mean(X, mask(*bits))[0], on_average)


def test_each_sample_of_a_batch_has_its_own_positions():
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0], [1.0, 1.0, 1.0]])
    valid = torch.tensor([[1, 0, 0], [0, 1, 1], [1, 0, 1], [0, 0, 0]], dtype=torch.bool)
    same(aggregate.last(x, valid), [1, 6, 9, math.nan])
    same(aggregate.mean(x, valid), [1, 5.5, 8, math.nan])


def test_what_does_not_count_may_be_anything():
    x = torch.tensor([[1.0, 3.0, math.nan, math.inf]])
    same(aggregate.mean(x, mask(1, 1, 0, 0)), [2])
    same(aggregate.last(x, mask(1, 1, 0, 0)), [3])


def test_padding_by_span_by_hand():
    profile = np.arange(8.0)[None, :, None] + [-1, 1]  # two heads: their means are 0 … 7
    profile[:, [5, 7]] = math.nan
    other = np.full((1, 8, 2), 0.5)
    profiles = {"decoder.0.cross": profile, "decoder.0.self": other, "decoder.1.cross": other}
    spans = [(0, 2), (1, 5), (4, 7), (5, 6), (0, 8), (3, 3)]
    masses = padding_by_span(profiles, "decoder.cross", spans)
    # 0.5; (1 + 2 + 3 + 4) / 4; (4 + 6) / 2, without the hole; nothing counts; 16 / 6
    same(masses[:, 0], [0.5, 2.5, 5.0, math.nan, 16 / 6, math.nan])
    same(masses[:, 1], [0.5] * 5 + [math.nan])
    assert padding_by_span(profiles, "decoder.cross", []).shape == (0, 2)
    assert np.isnan(padding_by_span({}, "encoder.self", [(0, 2)])).all()


def test_word_times_become_positions():
    """50 positions a second: a word of 0.5 … 0.61 s touches 25 … 30."""
    assert aggregate.positions(0.0, 0.02, 1500) == (0, 1)
    assert aggregate.positions(0.5, 0.61, 1500) == (25, 31)
    assert aggregate.positions(0.28, 0.3, 1500) == (14, 15)  # 0.28 · 50 is 14.000000000000002
    assert aggregate.positions(3.0, 3.0, 1500) == (150, 151)  # no length: one position
    assert aggregate.positions(29.9, 31.0, 1500) == (1495, 1500)


@pytest.mark.parametrize(
    "bad", [torch.ones(1, 4), torch.ones(1, 3, dtype=torch.bool), torch.ones(4, dtype=torch.bool)]
)
def test_a_mask_of_another_kind_or_shape_is_an_error(bad):
    with pytest.raises(OptionError, match=r"a mask must be bool of shape \(B, N\)"):
        aggregate.mean(X, bad)


# The four classic mistakes. Each test has the wrong formula beside the right one, on a case where
# they differ, and fails if the right function computed the wrong one.


def test_mistake_1_the_last_padded_position_is_not_the_last_token():
    x = torch.tensor([[1.0, 2.0, 99.0, 99.0], [5.0, 6.0, 7.0, 8.0]])
    valid = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    right, wrong = [2.0, 8.0], x[:, -1].tolist()
    assert wrong == [99.0, 8.0] != right
    same(aggregate.last(x, valid), right)
    # counting from the front is as wrong where the padding lies before the text
    left = torch.tensor([[0, 0, 1, 1]], dtype=torch.bool)
    before = torch.tensor([[99.0, 99.0, 1.0, 2.0]])
    assert float(before[0, int(left.sum()) - 1]) == 99.0
    same(aggregate.last(before, left), [2.0])


def test_mistake_2_the_mean_is_not_over_padding():
    x = torch.tensor([[2.0, 4.0, 0.0, 0.0]])
    valid = torch.tensor([[1, 1, 0, 0]], dtype=torch.bool)
    right, wrong = 3.0, float(x.mean(dim=1))
    assert wrong == 1.5 != right
    # nor is it a sum over valid positions that is divided by all of them
    assert float((x * valid).sum() / valid.numel()) == 1.5
    same(aggregate.mean(x, valid), [right])


def test_mistake_3_a_layer_that_recorded_nothing_is_not_zero():
    """Layer 1 of three has no data: its cells are NaN, it is named, and no mean contains it."""
    places = [f"encoder.{i}.self" for i in range(3)]
    tally = Tally([(place, "padding") for place in places])
    tally.add({(place, "padding"): np.array([[0.4, 0.6]]) for place in places if "1" not in place})
    grid = tally.grid("encoder.self", "padding", 2)
    filled = np.nan_to_num(grid)
    right, wrong = 0.5, filled.mean()
    assert math.isclose(wrong, 1 / 3)
    same(np.nanmean(grid), right)
    assert np.isnan(grid[1]).all()
    assert not np.isnan(grid[[0, 2]]).any()
    assert tally.missing == ["encoder.1.self"]


def test_mistake_4_samples_are_weighed_not_batches():
    """Three batches of 32 whose values are 1 and one of 2 whose values are 50: 96 : 2."""
    batches = [np.ones((32, 1))] * 3 + [np.full((2, 1), 50.0)]
    right, wrong = (96 * 1 + 2 * 50) / 98, np.mean([batch.mean() for batch in batches])
    assert (right, wrong) == (2.0, 13.25)
    same(total(map(Moments.of, batches)).means(), [right])


# Online statistics


def parts_of_98():
    values = np.random.default_rng(0).normal(3, 100, size=(98, 4))
    return values, np.split(values, [32, 64, 96])


def close(a, b):
    assert (a.n == b.n).all()
    for name in ("mean", "m2"):
        assert np.allclose(getattr(a, name), getattr(b, name), rtol=1e-9, atol=1e-9), name


def test_batches_of_32_32_32_and_2_equal_one_of_98_in_any_order():
    values, parts = parts_of_98()
    whole = Moments.of(values)
    same(whole.means(), values.mean(axis=0))
    assert np.allclose(whole.variance(), values.var(axis=0, ddof=1), rtol=1e-9, atol=0)
    orders = [(0, 1, 2, 3), (3, 2, 1, 0), (3, 0, 2, 1), (1, 3, 0, 2)]
    for order in orders:
        close(total(Moments.of(parts[i]) for i in order), whole)
    a, b, c, d = map(Moments.of, parts)
    close((a + b) + (c + d), whole)
    close(a + (b + (c + d)), whole)
    close(total(Moments.of(row[None]) for row in values), whole)  # one by one, as Welford's


def test_the_work_of_several_processes_adds_up():
    values, parts = parts_of_98()
    with get_context("spawn").Pool(2) as pool:
        found = pool.map(Moments.of, parts)
    close(total(found), Moments.of(values))
    close(pickle.loads(pickle.dumps(found[0])), Moments.of(parts[0]))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_any_split_gives_the_same(sizes, seed):
    rng = np.random.default_rng(seed)
    parts = [rng.normal(5, 2, size=(n, 2)) for n in sizes]
    for part in parts:
        part[rng.random(part.shape) < 0.2] = np.nan  # samples without data
    close(total(map(Moments.of, parts)), Moments.of(np.concatenate(parts)))


def test_a_large_offset_loses_nothing():
    values = 1e9 + np.array([[4.0], [7.0], [13.0], [16.0]])
    same(total(Moments.of(v[None]) for v in values).variance(), [30.0])


def test_what_has_no_data_is_left_out_entry_by_entry():
    moments = Moments.of(np.array([[1.0, math.nan, 2.0], [3.0, math.nan, math.nan]]))
    assert moments.n.tolist() == [2, 0, 1]
    same(moments.means(), [2, math.nan, 2])
    same(moments.variance(), [2, math.nan, math.nan])
    with pytest.raises(OptionError, match="finite, or NaN where there is no data, got infinity"):
        Moments.of(np.array([[math.inf]]))
    with pytest.raises(OptionError, match="statistics must be of one shape"):
        moments + Moments.of(np.empty((0, 2)))
    close(moments + Moments.of(np.empty((0, 3))), moments)


def test_the_interval_is_students():
    low, high = Moments.of(np.array([[1.0], [2.0], [3.0], [6.0]])).interval()
    # mean 3, deviation √(14/3), t(3) = 3.18245
    half = 3.182446305 * math.sqrt(14 / 3 / 4)
    assert np.allclose([low[0], high[0]], [3 - half, 3 + half], atol=1e-6)
    assert np.isnan(Moments.of(np.array([[1.0]])).interval()[0]).all()


def test_a_tally_adds_batches_up_and_names_what_is_missing():
    expected = [("encoder.0.self", "padding"), ("encoder.0.self", "entropy")]
    expected += [("decoder.0.cross", "padding")]
    tally = Tally(expected)
    tally.add({expected[0]: np.array([[0.1, 0.3]])})
    tally.add({expected[0]: np.array([[0.5, 0.5], [0.6, 1.0]])})
    same(tally.moments[expected[0]].means(), [0.4, 0.6])
    assert tally.missing == ["encoder.0.self entropy", "decoder.0.cross"]
    tally.add({expected[1]: np.array([[math.nan, math.nan]])})  # a sample, but without data
    assert "encoder.0.self entropy" in tally.missing


def test_heads_are_ranked_by_their_mean_and_those_without_data_left_out():
    tally = Tally()
    tally.add(
        {("decoder.0.cross", "padding"): np.array([[0.2, 0.5, math.nan], [0.4, 0.7, math.nan]])}
    )
    tally.add({("decoder.1.cross", "padding"): np.array([[0.5], [0.5]])})
    tally.add({("decoder.0.self", "padding"): np.array([[0.9], [0.9]])})
    tally.add({("decoder.0.cross", "entropy"): np.array([[2.0, 3.0, 4.0]])})
    found = tally.ranked("decoder.cross", "padding")
    assert [(row.place, row.head) for row in found] == [
        ("decoder.0.cross", 1),
        ("decoder.1.cross", 0),
        ("decoder.0.cross", 0),
    ]
    same([row.mean for row in found], [0.6, 0.5, 0.3])
    assert found[0].low < 0.6 < found[0].high


def test_the_table_of_heads_has_a_row_for_every_head_and_none_where_there_is_no_data():
    tally = Tally()
    tally.add({("encoder.1.self", "padding"): np.array([[0.25, math.nan]] * 2)})
    table = heads_table([("full", tally), ("full", tally)], "policy", "clips")
    assert table.csv().splitlines() == [
        "policy,attention,layer,head,quantity,clips,mean,low,high",
        *["full,encoder.self,1,0,padding,2,0.25,0.25,0.25", "full,encoder.self,1,1,padding,0,,,"]
        * 2,
    ]
