"""Int8: whole numbers row by row, so that a batch says what its clips say alone."""

import platform
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from asrmask import kernels
from asrmask.audio.spectrogram import Features
from asrmask.checkpoints import load_model
from asrmask.errors import OptionError
from asrmask.inspection.diagnosis import Diagnose
from asrmask.inspection.inspected_model import InspectedModel
from asrmask.kernels import PackedFeatures
from asrmask.model import int8, masks, rotation
from asrmask.model.attention import KeyValues
from asrmask.model.calibration import calibrate
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.encoding import encode, encode_all
from asrmask.model.int8 import Int8CrossAttention, Int8Linear, Int8SelfAttention
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.transcription.api import stream
from asrmask.transcription.window_loop import Callbacks

DIMS = ModelDimensions(80, 1500, 32, 2, 2, 51864, 448, 32, 2, 2)


@pytest.fixture(scope="module")
def quantized():
    """The real tiny.en in int8."""
    return load_model("tiny.en", compute_type="int8")


def test_a_row_of_whole_numbers_is_exact():
    weight = torch.tensor([[64.0, -32.0], [0.0, 64.0]])
    layer = Int8Linear.of(weight if int8.max_weight() == 64 else weight * 127 / 64, None)
    x = torch.tensor([[127.0, -127.0], [127.0, 3.0], [0.0, 0.0]])
    torch.testing.assert_close(layer(x), F.linear(x, layer.dequantize()), rtol=1e-6, atol=0)


def test_the_product_is_near_and_does_not_depend_on_the_other_rows():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator)
    x = torch.randn(20, 64, generator=generator) * torch.logspace(-3, 3, 20)[:, None]
    layer = Int8Linear.of(weight, None)
    exact = F.linear(x, weight)
    error = (layer(x) - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 0.03
    alone = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(layer(x), alone)


def test_two_digits_are_more_exact_than_one():
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 64, generator=generator) for n in (96, 20))
    errors = []
    for two_digits in (False, True):
        layer = Int8Linear.of(weight, None, two_digits=two_digits)
        exact = F.linear(x, layer.dequantize())
        errors.append((layer(x) - exact).norm() / exact.norm())
        assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))
    assert errors[1] < errors[0] / 100


def test_weights_are_rounded_for_the_inputs_that_come():
    """Inputs of few directions: outputs are several times nearer, and no weight is far off."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    x = torch.randn(500, 8, generator=generator) @ torch.randn(8, 64, generator=generator)
    plain, compensated = (Int8Linear.of(weight, None, moments=m) for m in (None, x.T @ x))
    exact = F.linear(x, weight)
    far, near = ((F.linear(x, la.dequantize()) - exact).norm() for la in (plain, compensated))
    assert near < far / 3
    step = weight.abs().amax(dim=1, keepdim=True) / int8.max_weight()
    assert ((compensated.dequantize() - weight) / step).abs().max() < 4


def test_inputs_without_correlation_round_each_weight_by_itself():
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    plain, compensated = (Int8Linear.of(weight, None, moments=m) for m in (None, torch.eye(64)))
    assert torch.equal(plain.dequantize(), compensated.dequantize())


@torch.inference_mode()
def test_calibration_passes_speech_through_every_layer():
    whisper = Whisper(DIMS).eval()
    found = list(calibrate(whisper.encoder))
    assert [block for block, _ in found] == list(whisper.encoder.blocks)
    for _, seen in found:
        assert [len(x) for x in (seen.attn, seen.attn_out, seen.up, seen.down)] == [32, 32, 32, 128]
        assert seen.attn.trace() == pytest.approx(1500 * 32, rel=1e-2)  # a layer norm's outputs
        assert torch.allclose(seen.down, seen.down.T)


@torch.inference_mode()
def test_close_logits_are_those_of_float16_rows(quantized):
    embedding = quantized.decoder.token_embedding
    x = torch.randn(3, 2, 384, generator=torch.Generator().manual_seed(0))
    logits = embedding.logits(x)
    exact = (x @ embedding.weight.T + embedding.bias) @ embedding(torch.arange(51864)).T
    assert logits.shape == exact.shape
    best = logits.argmax(dim=-1, keepdim=True)
    assert (logits - exact).gather(-1, best).abs().max() < 0.01
    assert (logits - exact).abs().max() < int8.CLOSE_LOGIT / 2


def test_the_parts_of_a_fused_projection_are_the_projections():
    whisper = Whisper(DIMS).eval()
    attn = whisper.encoder.blocks[0].attn
    norm = nn.LayerNorm(32)
    norm.weight, norm.bias = nn.Parameter(torch.rand(32) + 0.5), nn.Parameter(torch.randn(32))
    turn, head = rotation.mean_preserving_rotation(32), rotation.random_rotation(16)
    mine = Int8SelfAttention.of(attn, turn, (norm.weight, norm.bias))
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    q, k, v = attn.projections(norm(x))
    for got, expected in zip(mine.projections(x @ turn), (q, k, v @ head), strict=True):
        assert (got - expected).abs().max() < 0.05


@torch.inference_mode()
@pytest.mark.parametrize("n_texts", [1, 3])
def test_features_are_attended_to_as_their_keys_and_values_would_be(n_texts):
    """Recorded or not, and a hidden position is inert."""
    generator = torch.Generator().manual_seed(0)
    attn = Whisper(DIMS).eval().decoder.blocks[0].cross_attn
    norm, source = ((torch.rand(32) + 0.5, torch.randn(32)) for _ in range(2))
    turn = rotation.mean_preserving_rotation(32)
    mine = Int8CrossAttention.of(attn, turn, norm, source)
    x = torch.randn(2 * n_texts, 3, 32, generator=generator)
    features = torch.nn.functional.layer_norm(torch.randn(2, 7, 32, generator=generator), (32,))
    mask = masks.padding([5, 7], 7)
    real = features * source[0] + source[1]
    float_queries = attn.queries(F.layer_norm(x, (32,)) * norm[0] + norm[1])
    exact = attn(float_queries, [KeyValues(*attn.keys_values(real), mask)])
    q = mine.queries(x @ turn)
    group = mine.group(int8.quantize_features(features @ turn), mask)
    keys, values, _ = group
    got = mine(q, [group])
    assert (got @ turn.T - exact).norm() / exact.norm() < 0.03
    records = {}
    spelled = mine(q, [group], lambda _, name, x: records.update({name: x}))
    assert torch.allclose(got, spelled, atol=1e-5)
    assert records["weights"].shape == (2, 2, 3 * n_texts, 7)
    assert records["weights"][0, :, :, 5:].eq(0).all()
    float_values = attn.keys_values(real)[1]
    rotated = float_values @ rotation.random_rotation(16)
    assert (records["values"] - rotated).norm() / rotated.norm() < 0.01
    changed = keys.clone()
    changed[0, :, 5:] += 9
    assert torch.equal(mine(q, [KeyValues(changed, changed, mask)]), got)
    changed[0, :, 4] += 9
    assert not torch.equal(mine(q, [KeyValues(changed, changed, mask)]), got)
    alone = mine(q[:n_texts], [KeyValues(keys[:1, :, :5], values[:1, :, :5])])
    assert torch.allclose(got[:n_texts], alone, atol=1e-6)


def test_an_int8_model_keeps_features_once_for_all_layers(quantized):
    window = Features(torch.zeros(80, 3000), 200)
    audio = encode(quantized, [window], Policy("virtual"))
    groups = [group for (group,) in audio.layers]
    assert len(groups) == quantized.dims.n_text_layer
    assert len({id(x) for keys, values, _ in groups for x in (keys, values)}) == 1
    features = groups[0].keys
    if isinstance(features, PackedFeatures):
        features = features.unpack()[:, None]
    assert features.shape == (1, 1, 160 + 83 + 25, 384)  # own, groups from 160, tail
    assert features.dtype == torch.int8


def test_a_turn_changes_neither_products_nor_norms():
    turn = rotation.mean_preserving_rotation(48)
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0)) + 2
    assert torch.allclose(turn @ turn.T, torch.eye(48), atol=1e-5)
    assert torch.allclose(F.layer_norm(x @ turn, (48,)), F.layer_norm(x, (48,)) @ turn, atol=1e-5)


def test_turned_channels_share_what_one_of_them_had():
    """The outlier that costs a row its precision is gone, and the product is nearer."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 96, generator=generator), torch.randn(8, 96, generator=generator)
    x[:, 5] *= 30
    exact = F.linear(x, weight)
    turn = rotation.random_rotation(96)
    plain, turned, in_parts = (
        float((layer(given) - exact).norm() / exact.norm())
        for layer, given in (
            (Int8Linear.of(weight, None), x),
            (Int8Linear.of(weight, None, turn), x @ turn),
            (Int8Linear.of(weight, None, in_blocks=True), x),
        )
    )
    assert turned < plain / 2
    assert in_parts < plain / 2


def test_the_largest_weight_is_one_that_the_processor_adds_without_overflow():
    most = int8.max_weight()
    assert most in {64, 127}
    x = torch.full((32, 384), 127, dtype=torch.int8)
    w = torch.full((384, 64), most, dtype=torch.int8)
    assert (torch._int_mm(x, w) == 384 * 127 * most).all()


def test_weights_are_a_quarter_and_features_near(model, quantized, sample):
    from asrmask.audio.recording import Recording
    from asrmask.audio.spectrogram import Spectrogram

    halves = "decoder.token_embedding.table"  # of which a text reads a few rows
    n_bytes = [
        sum(x.nbytes for name, x in one.state_dict().items() if name != halves)
        for one in (model, quantized)
    ]
    assert n_bytes[1] < 0.3 * n_bytes[0]
    spectrogram = Spectrogram(Recording.open(sample), 80)
    window = spectrogram.window(0, spectrogram.n_frames, fill="zero")
    real, mine = (
        encode(one, [window]).features[0, : window.n_positions] for one in (model, quantized)
    )
    norm = model.encoder.ln_post
    mine = (
        mine @ rotation.mean_preserving_rotation(model.dims.n_audio_state).T * norm.weight
        + norm.bias
    )
    assert (mine - real).norm() / real.norm() < 0.04


def test_the_kernels_run_where_they_can():
    info = Path("/proc/cpuinfo")
    if not info.exists() or "x86_64" not in platform.machine():
        pytest.skip("the kernels are for Linux on x86-64")
    (flags, *_) = (line for line in info.read_text().splitlines() if line.startswith("flags"))
    needed = {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni", "fma", "f16c"}
    assert kernels.available() == (needed <= set(flags.split()))


def test_compute_types_are_checked():
    with pytest.raises(OptionError, match=r"compute_type must be one of float32, .* got 'int4'"):
        load_model("tiny.en", compute_type="int4")


def test_int8_is_for_a_cpu():
    with pytest.raises(OptionError, match="int8 is for a CPU, got meta"):
        load_model("tiny.en", device="meta", compute_type="int8")


@torch.inference_mode()
def test_an_int8_model_can_be_looked_into(quantized, model, sample):
    """Its readout gives its logits, and heads look at padding as those of the float model do."""
    subject = InspectedModel(quantized)
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(0))
    embedding = quantized.decoder.token_embedding
    projected = quantized.decoder.ln(x) @ embedding.weight.T + embedding.bias
    for token in (0, 1000, 50256):
        expected = projected @ embedding(torch.tensor(token))
        got = subject.readout(token).logit(x)
        assert (got - expected).abs().max() < 1e-3
    attn = quantized.decoder.blocks[0].attn
    outputs = torch.randn(1, 6, 2, 64, generator=torch.Generator().manual_seed(0))
    joined = torch.einsum("bhqd,hdn->bqn", outputs, subject.projection("decoder.0.self"))
    real = attn.out(outputs.transpose(1, 2).flatten(2)) - attn.out.bias
    assert (joined - real).norm() / real.norm() < 0.02
    diagnoses = []
    for one in (model, quantized):
        watch = Callbacks(on_window=Diagnose(one))
        segment = stream(one, sample, callbacks=watch).result().segments[0]
        diagnoses.append(segment.diagnosis)
    assert abs(diagnoses[0].attention_on_padding - diagnoses[1].attention_on_padding) < 0.02


@torch.inference_mode()
def test_what_a_clip_gives_does_not_depend_on_the_others_of_its_batch(quantized):
    generator = torch.Generator().manual_seed(0)
    windows = [Features(torch.randn(80, n, generator=generator), n) for n in (40, 333, 700, 2990)]
    decoder, policy = quantized.decoder, Policy("virtual")
    tokens = torch.randint(0, 50_000, (5, len(windows), 1), generator=generator)

    def steps(windows, tokens):
        encoded = encode_all(quantized, windows, policy)
        cache = decoder.cache(len(windows), len(tokens))
        found = []
        for some in tokens:
            x, cache = decoder(some, encoded, cache)
            found += [x[:, 0], decoder.logits(x[:, 0])]
        return found

    together = steps(windows, tokens)
    for i, window in enumerate(windows):
        for several, alone in zip(together, steps([window], tokens[:, i : i + 1]), strict=True):
            assert torch.equal(several[i], alone[0])
