"""The packed product: exact, from the weights as they are now, and None where unsupported."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from asrmask.model.packed import MAX_ROWS, Packed

pytestmark = pytest.mark.skipif(
    torch.backends.quantized.engine not in {"fbgemm", "x86"}, reason="no FBGEMM on this machine"
)


class Layer(nn.Module):
    """A weight of float16 values and its packed copy, as in the decoder."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(32, 48).half().float())
        self.packed = Packed()

    def product(self, x):
        return self.packed.product(x, self.weight)

    def forward(self, x):
        out = self.product(x)
        return F.linear(x, self.weight) if out is None else out


def rows(*shape):
    return torch.randn(*shape, 48, generator=torch.Generator().manual_seed(1))


def assert_exact(layer, x):
    """The layer computes with the weights that it has now."""
    expected = F.linear(x, layer.weight)
    limit = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=limit)


# --- exact


@pytest.mark.parametrize("shape", [(1,), (2, 3), (0,), (MAX_ROWS,)])
@torch.no_grad()
def test_packed_product_is_the_product(shape):
    layer = Layer()
    layer.weight[0], layer.weight[1] = 2.0**-24, 65504.0  # the smallest and largest of float16
    x = rows(*shape)
    out, expected = layer.product(x), F.linear(x.double(), layer.weight.double())
    assert (out.dtype, out.shape) == (torch.float32, expected.shape)
    for ours, theirs in zip(out.flatten(0, -2).T, expected.flatten(0, -2).T, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@torch.no_grad()
def test_logits_are_the_product_with_the_vocabulary(model):
    x = torch.randn(5, model.dims.n_text_state)
    embedding = model.decoder.token_embedding
    expected = F.linear(x, embedding.weight)
    assert embedding.packed.product(x, embedding.weight) is not None
    assert (model.decoder.logits(x) - expected).abs().max() <= 1e-5 * expected.abs().max()


# --- weights that change are followed


CHANGES = {
    "in place": lambda layer: layer.weight.mul_(2),
    "through a view": lambda layer: layer.weight.view(-1)[:40].add_(1),
    "no float16 values": lambda layer: layer.weight.div_(3),
    "loaded": lambda layer: layer.load_state_dict(Layer(seed=5).state_dict()),
    "new data": lambda layer: setattr(layer.weight, "data", Layer(seed=5).weight.data),
    "new parameter": lambda layer: setattr(layer, "weight", Layer(seed=5).weight),
    "another precision and back": lambda layer: layer.bfloat16().float(),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_product_follows_the_weights(name):
    layer, x = Layer(), rows(3)
    for _ in range(3):
        assert_exact(layer, x)
        CHANGES[name](layer)
    assert_exact(layer, x)


@torch.no_grad()
def test_other_weights_at_the_same_address_are_not_taken_for_the_old():
    layer, x = Layer(), rows(3)
    for i in range(1, 20):
        assert_exact(layer, x)
        del layer.weight  # its memory is free for the next weight
        layer.weight = nn.Parameter(torch.full((32, 48), float(i)))
        assert_exact(layer, x)


@pytest.mark.parametrize("choices", [{}, {"fused": True}])
def test_product_follows_training(choices):
    layer, x = Layer(), rows(3)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5, **choices)
    with torch.no_grad():
        assert layer.product(x) is not None
    layer(x).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        assert_exact(layer, x)


@torch.no_grad()
def test_copies_have_weights_of_their_own():
    layer, x = Layer(), rows(3)
    layer(x)
    other = copy.deepcopy(layer)
    layer.weight.mul_(2)
    assert_exact(layer, x)
    assert_exact(other, x)


@torch.no_grad()
def test_a_model_can_be_saved_whole(model, tmp_path):
    x = torch.randn(1, model.dims.n_text_state)
    expected = model.decoder.logits(x)
    torch.save(model, tmp_path / "model")
    other = torch.load(tmp_path / "model", weights_only=False)
    torch.testing.assert_close(other.decoder.logits(x), expected, rtol=0, atol=0)


# --- None where unsupported


def test_not_with_gradients_or_weights_of_inference_mode():
    layer, x = Layer(), rows(3)
    assert layer.product(x) is None
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    with torch.inference_mode():
        assert layer.product(x) is not None
        assert Layer().product(x) is None  # changes of these weights are not counted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@torch.no_grad()
def test_not_in_another_precision(dtype):
    layer, x = Layer().to(dtype), rows(3).to(dtype)
    assert layer.product(x) is None
    assert layer(x).dtype == dtype


@pytest.mark.parametrize("value", [1 / 3, 1e-9, 1e5, float("inf"), float("nan")])
@torch.no_grad()
def test_not_with_weights_that_float16_cannot_hold(value):
    layer, x = Layer(), rows(3)
    assert layer.product(x) is not None
    layer.weight[3, 4] = value
    assert layer.product(x) is None


@torch.no_grad()
def test_not_with_many_rows_or_without_fbgemm(monkeypatch):
    assert Layer().product(rows(MAX_ROWS + 1)) is None
    monkeypatch.setattr("torch.backends.quantized", type("", (), {"engine": "qnnpack"}))
    assert Layer().product(rows(3)) is None
