"""Int8: whole numbers row by row, so that a batch says what its clips say alone."""

import pytest
import torch
import torch.nn.functional as F

from asrmask import int8, masks
from asrmask.attention import Shared
from asrmask.audio import Features
from asrmask.checkpoints import load_model
from asrmask.encoding import encode, encode_all
from asrmask.errors import OptionError
from asrmask.instruments.diagnosis import Diagnose
from asrmask.instruments.subject import Own
from asrmask.int8 import Int8Attention, Int8Cross, Int8Linear
from asrmask.model import ModelDimensions, Room, Whisper
from asrmask.policy import Policy
from asrmask.transcriber import stream
from asrmask.walk import Watcher

DIMS = ModelDimensions(80, 1500, 32, 2, 2, 51864, 448, 32, 2, 2)


@pytest.fixture(scope="module")
def quantised():
    """The real tiny.en in int8."""
    return load_model("tiny.en", compute_type="int8")


def test_a_row_of_whole_numbers_is_exact():
    weight = torch.tensor([[64.0, -32.0], [0.0, 64.0]])
    layer = Int8Linear(weight if int8.most_weight() == 64 else weight * 127 / 64, None)
    x = torch.tensor([[127.0, -127.0], [127.0, 3.0], [0.0, 0.0]])
    weight = layer.weight * layer.scale[:, None]
    torch.testing.assert_close(layer(x), F.linear(x, weight), rtol=1e-6, atol=0)


def test_the_product_is_near_and_does_not_depend_on_the_other_rows():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator)
    x = torch.randn(20, 64, generator=generator) * torch.logspace(-3, 3, 20)[:, None]
    layer = Int8Linear(weight, None)
    exact = F.linear(x, weight)
    error = (layer(x) - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 0.03
    alone = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(layer(x), alone)


def test_the_parts_of_a_fused_projection_are_the_projections():
    whisper = Whisper(DIMS).eval()
    attn = whisper.encoder.blocks[0].attn
    norm = torch.rand(32) + 0.5, torch.randn(32)
    turn, head = int8.ones_kept(32), int8.orthonormal(16)
    mine = Int8Attention(attn, turn, norm)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    q, k, v = attn.projections(x * norm[0] + norm[1])
    for got, expected in zip(mine.projections(x @ turn), (q, k, v @ head), strict=True):
        assert (got - expected).abs().max() < 0.05


@torch.inference_mode()
@pytest.mark.parametrize("n_texts", [1, 3])
def test_features_are_attended_to_as_their_keys_and_values_would_be(n_texts):
    """Also where some are hidden, and where all clips share more keys."""
    generator = torch.Generator().manual_seed(0)
    attn = Whisper(DIMS).eval().decoder.blocks[0].cross_attn
    norm, source = ((torch.rand(32) + 0.5, torch.randn(32)) for _ in range(2))
    turn = int8.ones_kept(32)
    mine = Int8Cross(attn, turn, norm, source)
    x = torch.randn(2 * n_texts, 3, 32, generator=generator)
    features, others = (torch.randn(b, n, 32, generator=generator) for b, n in ((2, 7), (1, 4)))
    mask = masks.padding([5, 7], 7)
    bias = torch.randn(2, 1, 1, 4, generator=generator)

    def real(x):
        return x * source[0] + source[1]

    exact = attn(
        attn.queries(x * norm[0] + norm[1]),
        *attn.keys_values(real(features)),
        mask,
        shared=Shared(*attn.keys_values(real(others)), bias),
    )
    wide = (features @ turn)[:, None]
    shared = Shared(*mine.keys_values(others @ turn), bias)
    q = mine.queries(x @ turn)
    got = mine(q, wide, wide, mask, shared=shared)
    spelled = mine(q, wide, wide, mask, lambda *_: None, shared)
    for found in (got, spelled):
        assert (found @ turn.T - exact).norm() / exact.norm() < 0.03
    alone = mine(q[:n_texts], wide[:1, :, :5], wide[:1, :, :5], shared=_of_first(shared))
    assert torch.allclose(got[:n_texts], alone, atol=1e-6)


def _of_first(shared):
    return Shared(shared.keys, shared.values, shared.mask[:1])


def test_an_int8_model_remembers_features_once_for_all_layers(quantised):
    window = Features(torch.zeros(80, 3000), 200)
    memory = encode(quantised, [window], Policy("virtual"))
    assert len(memory.keys) == len(memory.values) == quantised.dims.n_text_layer
    assert len({x.data_ptr() for x in memory.keys + memory.values}) == 1
    assert memory.keys[0].shape == (1, 1, 160, 384)
    assert Room.bytes_of_key(quantised) == 4 * 384


def test_a_turn_changes_neither_products_nor_norms():
    turn = int8.ones_kept(48)
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0)) + 2
    assert torch.allclose(turn @ turn.T, torch.eye(48), atol=1e-5)
    assert torch.allclose(F.layer_norm(x @ turn, (48,)), F.layer_norm(x, (48,)) @ turn, atol=1e-5)


def test_turned_channels_share_what_one_of_them_had():
    """The outlier that costs a row its precision is gone, and the product is nearer."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 96, generator=generator), torch.randn(8, 96, generator=generator)
    x[:, 5] *= 30
    exact = F.linear(x, weight)
    turn, mix = int8.orthonormal(96), int8.evenly(16)
    plain, turned, in_parts = (
        float((layer(given) - exact).norm() / exact.norm())
        for layer, given in (
            (Int8Linear(weight, None), x),
            (Int8Linear(weight, None, turn), x @ turn),
            (Int8Linear(weight, None, mix=mix), x),
        )
    )
    assert turned < plain / 2
    assert in_parts < plain / 2


def test_the_largest_weight_is_one_that_the_processor_adds_without_overflow():
    most = int8.most_weight()
    assert most in {64, 127}
    x = torch.full((32, 384), 127, dtype=torch.int8)
    w = torch.full((384, 64), most, dtype=torch.int8)
    assert (torch._int_mm(x, w) == 384 * 127 * most).all()


def test_weights_are_a_quarter_and_features_near(model, quantised, sample):
    from asrmask.audio import Recording, Spectrogram

    n_bytes = [
        sum(x.numel() * x.element_size() for x in one.state_dict().values())
        for one in (model, quantised)
    ]
    assert n_bytes[1] < 0.3 * n_bytes[0]
    spectrogram = Spectrogram(Recording.open(sample), 80)
    window = spectrogram.window(0, spectrogram.n_frames, fill="zero")
    real, mine = (
        encode(one, [window]).features[0, : window.n_positions] for one in (model, quantised)
    )
    norm = model.encoder.ln_post
    mine = mine @ int8.ones_kept(model.dims.n_audio_state).T * norm.weight + norm.bias
    assert (mine - real).norm() / real.norm() < 0.04


def test_compute_types_are_checked():
    with pytest.raises(OptionError, match=r"compute_type must be one of float32, .* got 'int4'"):
        load_model("tiny.en", compute_type="int4")


def test_int8_is_for_a_cpu():
    with pytest.raises(OptionError, match="int8 is for a CPU, got meta"):
        load_model("tiny.en", device="meta", compute_type="int8")


@torch.inference_mode()
def test_an_int8_model_can_be_looked_into(quantised, model, sample):
    """Its readout gives its logits, and heads look at padding as those of the float model do."""
    subject = Own(quantised)
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(0))
    logits = quantised.decoder.logits(quantised.decoder.ln(x))
    for token in (0, 1000, 50256):
        got = subject.readout(token).logit(x)
        assert (got - logits[:, token]).abs().max() < 0.02 * logits.std()
    attn = quantised.decoder.blocks[0].attn
    outputs = torch.randn(1, 6, 2, 64, generator=torch.Generator().manual_seed(0))
    joined = torch.einsum("bhqd,hdn->bqn", outputs, subject.projection("decoder.0.self"))
    real = attn.merged(outputs) - attn.out.bias
    assert (joined - real).norm() / real.norm() < 0.02
    diagnoses = []
    for one in (model, quantised):
        watch = Watcher(heard=Diagnose(one))
        (segment,) = stream(one, sample, watch=watch).result().segments
        diagnoses.append(segment.diagnosis)
    assert abs(diagnoses[0].attention_on_padding - diagnoses[1].attention_on_padding) < 0.02


@torch.inference_mode()
def test_what_a_clip_gives_does_not_depend_on_the_others_of_its_batch(quantised):
    generator = torch.Generator().manual_seed(0)
    windows = [Features(torch.randn(80, n, generator=generator), n) for n in (40, 333, 700, 2990)]
    decoder, policy = quantised.decoder, Policy("virtual")
    tokens = torch.randint(0, 50_000, (5, len(windows), 1), generator=generator)

    def steps(windows, tokens):
        memory = encode_all(quantised, windows, policy)
        cache = decoder.cache(len(windows), len(tokens))
        found = []
        for some in tokens:
            x, cache = decoder(some, memory, cache)
            found += [x[:, 0], decoder.logits(x[:, 0])]
        return found

    together = steps(windows, tokens)
    for i, window in enumerate(windows):
        for several, alone in zip(together, steps([window], tokens[:, i : i + 1]), strict=True):
            assert torch.equal(several[i], alone[0])
