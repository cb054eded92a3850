"""The packed product: F.linear's numbers, only where it is the way, and never of old weights."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from asrmask import packed
from asrmask.packed import MOST_ROWS, Packed

pytestmark = pytest.mark.skipif(
    torch.backends.quantized.engine not in {"fbgemm", "x86"}, reason="no FBGEMM on this machine"
)


class Layer(nn.Module):
    """A weight of float16 values and what is packed of it, as the decoder has them."""

    def __init__(self, n_in=48, n_out=32, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(n_out, n_in).half().float())
        self.packed = Packed()

    def product(self, x):
        return self.packed.product(x, self.weight)

    def forward(self, x):
        out = self.product(x)
        return F.linear(x, self.weight) if out is None else out


def rows(n=3, n_in=48):
    return torch.randn(n, n_in, generator=torch.Generator().manual_seed(1))


def assert_follows(layer, x):
    """The layer computes with the weights that it has now."""
    expected = F.linear(x, layer.weight)
    limit = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=limit)


# --- the numbers


@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (2, 3, 48), (0, 48), (MOST_ROWS, 48)])
@torch.no_grad()
def test_packed_product_is_the_product(shape):
    layer, x = Layer(), torch.randn(shape)
    out = layer.product(x)
    expected = F.linear(x.double(), layer.weight.double())
    assert (out.dtype, out.shape) == (torch.float32, expected.shape)
    assert (out - expected).norm() <= 1e-5 * expected.norm()


@torch.no_grad()
def test_packed_product_is_the_product_with_the_vocabulary(model):
    weight = model.decoder.token_embedding.weight
    x = torch.randn(5, model.dims.n_text_state)
    expected = F.linear(x, weight)
    out = Packed().product(x, weight)
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()
    torch.testing.assert_close(model.decoder.logits(x), out, rtol=0, atol=0)


@torch.no_grad()
def test_smallest_and_largest_float16_values_and_strided_rows_are_exact_too():
    layer, x = Layer(), torch.randn(48, 3).T
    layer.weight[0], layer.weight[1] = 2.0**-24, 65504.0
    out, expected = layer.product(x), F.linear(x, layer.weight)
    for i in range(3):
        scale = expected[:, i].abs().max()
        assert (out[:, i] - expected[:, i]).abs().max() <= 1e-5 * scale


# --- only where it is the way


@pytest.mark.parametrize("value", [1 / 3, 1e-9, 1e5, float("inf"), float("nan")])
@torch.no_grad()
def test_not_with_weights_that_are_no_finite_float16_values(value):
    layer, x = Layer(), rows()
    assert layer.product(x) is not None
    layer.weight[3, 4] = value
    assert layer.product(x) is None
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight), equal_nan=True)


def test_not_where_gradients_are_wanted():
    layer, x = Layer(), rows()
    assert layer.product(x) is None
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert layer.product(x) is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@torch.no_grad()
def test_not_in_another_precision(dtype):
    layer, x = Layer().to(dtype), rows().to(dtype)
    assert layer.product(x) is None
    assert layer(x).dtype == dtype


@torch.no_grad()
def test_not_with_many_rows():
    layer = Layer()
    assert layer.product(rows(MOST_ROWS)) is not None
    assert layer.product(rows(MOST_ROWS + 1)) is None
    assert layer.product(rows(2 * MOST_ROWS).view(2, -1, 48)) is None


@torch.no_grad()
def test_a_single_vector_has_its_product_too():
    assert_follows(Layer(), rows(1)[0])


@torch.no_grad()
def test_not_where_there_is_no_fbgemm(monkeypatch):
    class Engine:
        engine = "qnnpack"

    monkeypatch.setattr(torch.backends, "quantized", Engine)
    assert Layer().product(rows()) is None


def test_weights_made_in_inference_mode_have_their_product_too():
    with torch.inference_mode():
        layer, x = Layer(), rows()
        for _ in range(2):
            assert_follows(layer, x)
            layer.weight.mul_(2)  # not counted: nothing may be packed
            assert_follows(layer, x)


@torch.no_grad()
def test_wrong_widths_are_refused():
    for x in (rows(n_in=47), rows(n_in=96)):
        with pytest.raises(RuntimeError):
            Layer()(x)


# --- never of old weights


CHANGES = {
    "in place": lambda layer: layer.weight.mul_(2),
    "one row": lambda layer: layer.weight[3].add_(1),
    "through a view": lambda layer: layer.weight.view(-1)[:40].add_(1),
    "through detach": lambda layer: layer.weight.detach().neg_(),
    "no float16 values": lambda layer: layer.weight.div_(3),
    "loaded": lambda layer: layer.load_state_dict(Layer(seed=5).state_dict()),
    "assigned": lambda layer: layer.load_state_dict(Layer(seed=5).state_dict(), assign=True),
    "new data": lambda layer: setattr(layer.weight, "data", Layer(seed=5).weight.data),
    "new parameter": lambda layer: setattr(layer, "weight", Layer(seed=5).weight),
    "another precision and back": lambda layer: layer.bfloat16().float(),
    "half and back": lambda layer: layer.half().float(),
    "initialised": lambda layer: nn.init.normal_(layer.weight),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_product_follows_the_weights(name):
    layer, x = Layer(), rows()
    for _ in range(3):
        assert_follows(layer, x)
        CHANGES[name](layer)
    assert_follows(layer, x)


@pytest.mark.parametrize("n", [16, 64, 256])
@torch.no_grad()
def test_other_weights_at_the_same_address_are_not_taken_for_the_old(n):
    layer, x = Layer(n, n), rows(n_in=n)
    for i in range(1, 20):
        assert_follows(layer, x)
        del layer.weight  # its memory is free for what comes next
        layer.weight = nn.Parameter(torch.full((n, n), float(i)))
        assert_follows(layer, x)
        layer.weight.data = torch.empty(0)
        layer.weight.data = torch.full((n, n), float(-i))
        assert_follows(layer, x)
        layer.weight.copy_(Layer(n, n, seed=i).weight)
        assert_follows(layer, x)
        layer.bfloat16().float()


@pytest.mark.parametrize("choices", [{}, {"foreach": True}, {"fused": True}])
def test_product_follows_training(choices):
    layer, x = Layer(), rows()
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        steps = optimizer(layer.parameters(), lr=0.5, **choices)
        with torch.no_grad():
            layer.weight.copy_(layer.weight.half())
            assert layer.product(x) is not None
        layer(x).square().mean().backward()
        steps.step()
        with torch.no_grad():
            assert_follows(layer, x)


@torch.no_grad()
def test_the_same_weights_are_packed_once(monkeypatch):
    layer, calls = Layer(), []
    monkeypatch.setattr(packed, "_packed", lambda weight: calls.append(weight))
    for _ in range(3):
        layer(rows())
    assert len(calls) == 1


@torch.no_grad()
def test_weights_left_behind_are_not_kept_in_memory():
    layer = Layer()
    layer(rows())
    old = torch.multiprocessing.reductions.StorageWeakRef(layer.weight.untyped_storage())
    layer.half()
    layer(rows().half())
    assert old.expired()


# --- copies


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "file"]
)
@torch.no_grad()
def test_copies_have_weights_of_their_own(copied):
    layer, x = Layer(), rows()
    layer(x)
    other = copied(layer)
    torch.testing.assert_close(other(x), layer(x), rtol=0, atol=0)
    layer.weight.mul_(2)
    assert_follows(layer, x)
    assert_follows(other, x)


@torch.no_grad()
def test_a_whole_model_can_be_copied_and_saved(model, tmp_path):
    x = torch.randn(1, model.dims.n_text_state)
    expected = model.decoder.logits(x)
    torch.save(model, tmp_path / "model")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model", weights_only=False)):
        torch.testing.assert_close(other.decoder.logits(x), expected, rtol=0, atol=0)
        assert set(other.state_dict()) == set(model.state_dict())
