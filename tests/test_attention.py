"""`attend`: fast = recorded, hidden keys do nothing, visible ones do something."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asrmask.model import masks
from asrmask.model.attention import KeyValues, MultiHeadAttention, attend, attend_groups
from asrmask.model.kv_cache import KVCache


@st.composite
def cases(draw):
    """Queries, keys, values and one of every kind of mask."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    n_batch, n_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n_queries = draw(st.integers(1, 6))
    n_keys = n_queries + draw(st.integers(0, 6))
    q = torch.randn(n_batch, n_heads, n_queries, 8)
    k, v = (torch.randn(n_batch, n_heads, n_keys, 8) for _ in range(2))
    lengths = [draw(st.integers(1, n_keys)) for _ in range(n_batch)]
    free = torch.rand(n_batch, n_heads, n_queries, n_keys) < 0.5
    free[..., 0] = True
    kind = draw(st.sampled_from(["none", "padding", "causal", "both", "free"]))
    mask = {
        "none": None,
        "padding": masks.padding(lengths, n_keys),
        "causal": masks.causal(n_queries, n_keys),
        "both": masks.causal(n_queries, n_keys) & masks.padding([n_keys] * n_batch, n_keys),
        "free": free,
    }[kind]
    return q, k, v, mask


def recorded(q, k, v, mask):
    places = {}
    out = attend(q, k, v, mask, record=lambda _, name, x: places.__setitem__(name, x), place="p")
    return out, places


@given(cases())
@settings(max_examples=60, deadline=None)
def test_fast_equals_recorded_for_every_mask(case):
    q, k, v, mask = case
    out, places = recorded(q, k, v, mask)
    assert torch.allclose(attend(q, k, v, mask), out, atol=1e-6)
    assert torch.equal(places["outputs"], out)
    assert torch.allclose(places["weights"].sum(dim=-1), torch.ones(q.shape[:3]))
    if mask is not None:
        assert places["weights"].masked_select(~mask.expand_as(places["weights"])).eq(0).all()


@given(cases())
@settings(max_examples=60, deadline=None)
def test_a_hidden_key_changes_nothing_and_a_visible_one_something(case):
    q, k, v, mask = case
    whole = torch.ones(*q.shape[:3], k.shape[2], dtype=torch.bool)
    visible = whole if mask is None else mask.expand_as(whole)
    before = attend(q, k, v, mask)
    for key in range(k.shape[2]):
        changed_k, changed_v = k.clone(), v.clone()
        changed_k[:, :, key] += 5
        changed_v[:, :, key] += 5
        moved = (attend(q, changed_k, changed_v, mask) != before).any(dim=-1)  # (B, H, Q)
        assert not moved[~visible[..., key]].any()
        assert moved[visible[..., key]].all()


@pytest.mark.parametrize("n_queries", [1, 3, 4, 33])
def test_an_all_valid_mask_is_bit_identical_to_none(n_queries):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, n_queries, 64), *torch.randn(2, 2, 6, 1500, 64)
    assert torch.equal(attend(q, k, v, masks.padding([1500, 1500], 1500)), attend(q, k, v))


def test_no_gradient_reaches_a_hidden_position():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 3, 8, requires_grad=True) for _ in range(3))
    attend(q, k, v, masks.padding([1, 2], 3)).sum().backward()
    hidden = ~masks.padding([1, 2], 3)[:, :, 0, :, None].expand(2, 2, 3, 8)
    for tensor in (k, v):
        assert tensor.grad[hidden].eq(0).all()
    assert v.grad[~hidden].ne(0).all()


def test_beams_of_a_clip_share_its_keys():
    """Texts over one clip's keys equal the same texts over repeated keys."""
    torch.manual_seed(0)
    module = MultiHeadAttention(32, 4, "test")
    q = module.queries(torch.randn(6, 3, 32))  # 2 clips × 3 beams
    keys, values = module.keys_values(torch.randn(2, 11, 32))
    mask = masks.padding([11, 4], 11)
    repeated = KeyValues(*(x.repeat_interleave(3, dim=0) for x in (keys, values, mask)))
    alone = module(q, [repeated])
    assert torch.allclose(module(q, [KeyValues(keys, values, mask)]), alone, atol=1e-6)


def test_cache_gives_back_what_was_put_and_moves_rows():
    cache = KVCache.empty(2, (3, 1, 5, 2), torch.zeros(1))
    first, second = torch.randn(3, 1, 2, 2), torch.randn(3, 1, 1, 2)
    for layer in range(2):
        cache.put(layer, first, -first)
    cache = cache.advanced(2)
    keys, values = cache.put(1, second, -second)
    assert torch.equal(keys, torch.cat([first, second], dim=2))
    assert torch.equal(values, -keys)
    moved = cache.advanced(1).select(torch.tensor([2, 2, 0, 1]))
    assert moved.n_rows == 4
    assert torch.equal(moved.keys[1][:, :, :3], torch.cat([first, second], 2)[[2, 2, 0, 1]])
    assert torch.equal(moved.select(torch.tensor([3, 0, 1, 2])).keys[0][0, :, :2], first[1])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_groups_are_attended_to_apart(dtype):
    """Clips with other numbers of keys: as if each group were alone, recorded or not."""
    q = torch.randn(5, 2, 3, 8).to(dtype)
    first, second = (
        KeyValues(*torch.randn(2, n, 2, k, 8).to(dtype), mask)
        for n, k, mask in ((2, 7, masks.padding([4, 7], 7)), (3, 4, None))
    )
    found = attend_groups(q, [first, second])
    assert torch.equal(found[:2], attend(q[:2], *first))
    assert torch.equal(found[2:], attend(q[2:], *second))
    spelled = attend_groups(q, [first, second], lambda *_: None)
    assert torch.allclose(found, spelled, atol=2e-2 if dtype == torch.bfloat16 else 1e-6)
