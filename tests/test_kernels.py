"""The kernels in C: the same numbers as PyTorch's operations, row by row, with the same masks."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention

from asrmask import kernels, load_model
from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Features, Spectrogram
from asrmask.errors import OptionError
from asrmask.kernels import PackedFeatures
from asrmask.model import masks
from asrmask.model.decoder import TextDecoder
from asrmask.model.encoding import encode, encode_all
from asrmask.model.int8 import Int8CrossAttention, Int8FeedForward, Int8Linear
from asrmask.model.policy import Policy

pytestmark = pytest.mark.skipif(
    not kernels.available(), reason="the kernels need Linux, x86-64 and AVX-512 VNNI"
)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def without(monkeypatch):
    """Build something as on a processor that has no kernels."""

    def build(make):
        with patch.object(kernels, "_library", lambda: None):
            return make()

    return build


@pytest.fixture(scope="module")
def quantized():
    return load_model("tiny.en", compute_type="int8")


@pytest.fixture(params=[1, 2])
def n_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(7, 16), (64, 32), (130, 64), (2, 100, 48)])
def test_what_was_packed_can_be_unpacked(shape):
    integers = torch.randint(-128, 128, shape, dtype=torch.int8)
    packed = kernels.pack(integers)
    *several, n, k = shape
    assert packed.shape == (*several, -(-n // 64), k // 4, 64, 4)
    assert torch.equal(kernels.unpack(packed, n), integers)
    if not several:
        rows = torch.tensor([[n - 1], [0]])
        assert torch.equal(kernels.packed_rows(packed, rows), integers[rows])


def test_packed_numbers_stand_where_a_tile_reads_them():
    packed = kernels.pack(torch.arange(128, dtype=torch.int8).view(8, 16))
    assert packed[0, 1, 2].tolist() == [128 + 2 * 16 + 4 + i for i in range(4)]
    assert packed[0, 0, 8].tolist() == [128] * 4  # a row of padding


@torch.inference_mode()
@pytest.mark.parametrize("n_rows", [1, 5, 6, 64, 65, 400])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (200, 48), (51, 1536)])
@pytest.mark.parametrize("two_digits", [False, True])
@pytest.mark.parametrize("options", [{}, {"normalizes": True}, {"in_blocks": True}])
def test_a_linear_layer_gives_what_pytorch_gives(
    without, n_threads, n_rows, n, k, options, two_digits
):
    options = {**options, "two_digits": two_digits}
    weight, bias, x, residual = random(n, k), random(n), random(n_rows, k), random(n_rows, n)
    x[0] = 0  # a row of zeros has a scale, too
    layer = Int8Linear.of(weight, bias, **options)
    other = without(lambda: Int8Linear.of(weight, bias, **options))
    assert layer.is_packed
    assert not other.is_packed
    assert torch.equal(layer.dequantize(), other.dequantize())
    got, expected = layer(x, residual), other(x, residual)
    # at a tie of rounding, one integer of an activation may be another one
    step = (x.abs().amax() * 3 / 127) * weight.abs().amax() / (254 if two_digits else 1)
    exact = len(options) == 1 and not two_digits
    assert (got - expected).abs().max() <= (1e-4 if exact else step)
    assert torch.equal(layer(x[n_rows // 2], residual[n_rows // 2]), got[n_rows // 2])


@torch.inference_mode()
@pytest.mark.parametrize("two_digits", [False, True])
@pytest.mark.parametrize("n_rows", [1, 64, 65, 200])
def test_a_feed_forward_part_gives_what_pytorch_gives(without, n_threads, n_rows, two_digits):
    x = random(n_rows, 64)
    digits = {"two_digits": two_digits}

    def make():
        up = Int8Linear.of(random(256, 64), random(256, seed=1), normalizes=True, **digits)
        down = Int8Linear.of(random(64, 256, seed=2), None, in_blocks=True, **digits)
        return Int8FeedForward(up, torch.nn.GELU(), down)

    got, expected = make()(x, x), without(lambda: make()(x, x))
    assert (got - expected).norm() / expected.norm() < (1e-5 if two_digits else 2e-3)
    rest = x[n_rows // 2 :]
    assert torch.equal(make()(rest, rest), got[n_rows // 2 :])


def test_gelu_is_exact_where_it_matters():
    """A layer of weights 1 and 0 hands its inputs to GELU as they are."""
    x = torch.linspace(-8, 8, 127 * 16 + 1)[:-1].view(-1, 16)
    layer = Int8Linear.of(torch.eye(16), None)
    linear = kernels.linear(x, *layer.matrix, 16)
    got = kernels.linear(x, *layer.matrix, 16, kernels.GELU)
    assert (got - F.gelu(linear)).abs().max() < 1e-6


MASKS = {
    "none": None,
    "padding": masks.padding([40, 77], 77),
    "bias": masks.counted(torch.tensor([[1] * 60 + [16] * 16 + [0], [0] * 5 + [1] * 72])),
    "one for all": masks.padding([50], 77),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_attention_is_pytorchs_attention(n_threads, mask):
    q, k, v = (random(2, 3, n, 64, seed=n) for n in (100, 77, 77))
    v = random(2, 3, 77, 64, seed=1)
    got = kernels.attention(q, k, v, mask)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert (got - expected).norm() / expected.norm() < 1e-3
    alone = kernels.attention(q[1:, :, 30:50], k[1:], v[1:], None if mask is None else mask[-1:])
    assert torch.equal(alone, got[1:, :, 30:50])


def test_a_hidden_key_changes_nothing_and_a_visible_one_something():
    q, k, v = (random(1, 2, 70, 64, seed=seed) for seed in range(3))
    mask = masks.padding([69], 70)
    got = kernels.attention(q, k, v, mask)
    changed = v.clone()
    changed[:, :, 69] *= 0.5  # it may not be larger: keys of a block share a scale
    assert torch.equal(kernels.attention(q, k, changed, mask), got)
    changed[:, :, 68] *= 0.5
    assert not torch.equal(kernels.attention(q, k, changed, mask), got)


@pytest.mark.parametrize(
    "case",
    [
        (random(1, 2, 70, 32), None),
        (random(1, 2, 70, 64).half(), None),
        (random(1, 2, 70, 64), masks.causal(70, 70)),
        (random(1, 2, 3, 64), None),
        (random(1, 2, 64, 70).transpose(2, 3), None),
    ],
    ids=["width", "dtype", "mask of queries", "few queries", "strides"],
)
def test_what_the_kernel_does_not_do_is_left_to_pytorch(case):
    x, mask = case
    assert kernels.attention(x, x, x, mask) is None


@torch.inference_mode()
@pytest.mark.parametrize("n_queries", [1, 3, 9])
def test_cross_attention_is_the_spelled_out_one(model, n_threads, n_queries):
    """For groups of clips, each with its own keys and mask; and each clip as it is alone."""
    attn = model.decoder.blocks[0].cross_attn
    norm = torch.ones(384), torch.zeros(384)
    mine = Int8CrossAttention.of(attn, torch.eye(384), norm, norm)
    q = random(4, 6, n_queries, 64)
    features = torch.randint(-127, 128, (4, 300, 384), dtype=torch.int8)
    groups = [
        mine.group(features[:1, :100], None),
        mine.group(features[1:3], masks.padding([290, 12], 300)),
        mine.group(features[3:, :64], masks.counted(torch.arange(64)[None])),
    ]
    got = mine.heads(q, groups)
    recorded = mine.heads(q, groups, lambda *_: None)
    assert (got - recorded).norm() / recorded.norm() < 1e-4
    assert torch.equal(mine.heads(q[2:3], [mine.group(features[2:3, :12], None)]), got[2:3])


def test_packed_features_can_be_cut_into_clips():
    features = torch.randint(-127, 128, (3, 70, 64), dtype=torch.int8)
    packed = PackedFeatures.of(features, masks.padding([70, 1, 69], 70))
    assert packed.bias[1].isinf().sum() == 127
    assert torch.equal(packed.unpack(), features)
    assert torch.equal(packed[1:2].unpack(), features[1:2])
    assert packed[1:2].clips() == packed.clips()[4:8]


@torch.inference_mode()
@pytest.mark.parametrize("policy", ["full", "mask:both", "trim,margin=0.5", "virtual"])
def test_a_model_encodes_speech_as_without_the_kernels(sample, policy, without):
    spectrogram = Spectrogram(Recording.open(sample), 80)
    window = spectrogram.window(0, spectrogram.n_frames, fill="zero")
    policy = Policy.parse(policy)

    def features():
        model = load_model("tiny.en", compute_type="int8")
        return encode(model, [window], policy).features[0, : window.n_positions]

    got, expected = features(), without(features)
    assert (got - expected).norm() / expected.norm() < 0.02  # int8 itself is about 0.04 off


@torch.inference_mode()
@pytest.mark.parametrize("positions", [(0, 1500), (0, 1), (0, 200), (37, 90), (1475, 1500)])
def test_the_convolutions_are_pytorchs(quantized, without, n_threads, positions):
    """At any stretch of the window, whatever stands in the frames that it does not read."""
    first, end = positions
    mel = random(1, 80, 3000)
    other = without(lambda: load_model("tiny.en", compute_type="int8"))
    got, expected = (one.encoder.embed(mel, first, end) for one in (quantized, other))
    assert got.shape == (1, end - first, 384)
    assert (got - expected).norm() / expected.norm() < 1e-3
    changed = mel.clone()
    changed[:, :, 2 * end + 2 :] *= 9
    changed[:, :, : max(2 * first - 2, 0)] *= 9
    assert torch.equal(quantized.encoder.embed(changed, first, end), got)


@torch.inference_mode()
@pytest.mark.parametrize("n_rows", [1, 6, 17])
def test_a_product_with_float16_weights(n_threads, n_rows):
    x, weight, bias = random(n_rows, 100), random(100, 128).half(), random(128)
    got = kernels.project(x, weight, bias)
    assert torch.allclose(got, x @ weight.float() + bias, atol=1e-4)
    assert torch.equal(kernels.project(x[n_rows - 1 :], weight, bias), got[n_rows - 1 :])


@torch.inference_mode()
@pytest.mark.parametrize("n_texts", [1, 3])
def test_a_step_is_the_steps_of_all_layers(quantized, n_threads, n_texts):
    """Near the modules called one by one, and the same for every copy of a text."""
    generator = torch.Generator().manual_seed(0)
    windows = [Features(torch.randn(80, n, generator=generator), n) for n in (40, 333, 333, 700)]
    decoder = quantized.decoder
    tokens = torch.randint(0, 50_000, (6, len(windows), 1), generator=generator)
    encoded = encode_all(quantized, windows, Policy("virtual"))

    def steps(forward, n_texts):
        cache, found = decoder.cache(len(windows) * n_texts, 2), []
        for some in tokens:
            x, cache = forward(decoder, some.repeat_interleave(n_texts, 0), encoded, cache)
            found.append(x)
        return torch.stack(found)

    got, spelled = (steps(one.forward, n_texts) for one in (type(decoder), TextDecoder))
    assert (got - spelled).norm() / spelled.norm() < 0.02  # integers at a tie of rounding differ
    for i in range(n_texts):
        assert torch.equal(got[:, i::n_texts], steps(type(decoder).forward, 1))


def test_a_converted_model_is_refused_in_one_line(quantized):
    model = copy.deepcopy(quantized).half()
    with pytest.raises(OptionError, match=r"must be float32 on the CPU, got torch.float16 on cpu"):
        encode(model, [Features(random(80, 200), 200)])


def test_a_copy_of_a_model_steps_with_its_own_weights(quantized):
    window, tokens = Features(random(80, 200), 200), torch.tensor([[5]])
    copied = copy.deepcopy(quantized)
    for block in copied.decoder.blocks:
        block.mlp[2].scale.zero_()

    def step(model):
        with torch.inference_mode():
            encoded = encode_all(model, [window], Policy())
            _, cache = model.decoder(tokens, encoded, model.decoder.cache(1, 2))
            return model.decoder(tokens, encoded, cache)[0]

    before = step(quantized)
    assert not torch.allclose(step(copied), before)
    assert torch.equal(step(quantized), before)


def test_the_largest_logits_are_computed_again(n_threads):
    table, x = random(1000, 64, seed=1).half(), random(5, 64)
    exact = x @ table.float().T
    logits = exact + 0.1 * random(5, 1000, seed=2)
    is_close = logits >= logits.amax(1, keepdim=True) - 1
    expected = torch.where(is_close, exact, logits)
    kernels.refine(logits, x, table, 1.0)
    assert (logits - expected).abs().max() < 1e-4
    assert torch.equal(logits[~is_close], expected[~is_close])
    assert 5 <= is_close.sum() < 50


def test_the_likeliest_tokens_are_pytorchs(n_threads):
    logits = random(5, 51_865) * 3
    logits[1, :51_000] = -torch.inf
    logits[2, [7, 70]] = 100.0  # of equals, the first
    tokens, logprobs = kernels.choose_tokens(logits)
    best, expected = TextDecoder.best_tokens(logits)
    assert tokens == best
    assert tokens[2] == 7
    assert logprobs == pytest.approx(expected, abs=1e-5)
