"""Recording: every place and its shape; the same numbers as without, and as in other projects."""

import pytest
import torch

from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Spectrogram
from asrmask.errors import MissingPackageError, OptionError
from asrmask.inspection import recording
from asrmask.inspection.adapters import HuggingFace, OpenAI
from asrmask.inspection.inspected_model import InspectedModel
from asrmask.inspection.recording import (
    ATTENTION,
    ActivationCache,
    attention_places,
    combine_recorders,
    recorded_names,
)
from asrmask.model import masks
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.encoding import encode
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper

POLICIES = [
    *("full", "full,positions=last", "mask:encoder", "mask:cross", "mask:both,margin=0.5"),
    *("trim", "trim,margin=1,positions=last", "virtual"),
    *("trim,margin=1,sink=0.5", "mask:both,sink=0.5"),
]
TOKENS = torch.tensor([[50257, 50362, 843, 1770, 13, 1757]])


@pytest.fixture(scope="module")
def window(sample, model):
    spectrogram = Spectrogram(Recording.open(sample), model.dims.n_mels)
    return spectrogram.window(0, spectrogram.n_frames, fill="zero")


@pytest.fixture(scope="module")
def own(model, window):
    """Everything that a pass records, its features and its logits."""
    return everything(model, window)


def everything(subject, window):
    cache = ActivationCache(subject.dims, "*")
    with torch.inference_mode():
        features = subject.encode(window.mel[None], record=cache)
        logits = subject.logits(TOKENS, features, record=cache)
    return cache, features, logits


def test_every_name_is_recorded_with_the_shape_that_is_stated(own, model):
    cache, _, _ = own
    dims = model.dims
    assert set(cache.tensors) == set(recorded_names(dims))
    n_audio, n_text, d = dims.n_audio_ctx, TOKENS.shape[1], dims.n_text_state // dims.n_text_head
    sizes = {"encoder.self": (n_audio, n_audio), "decoder.self": (n_text, n_text)}
    sizes["decoder.cross"] = (n_text, n_audio)
    for place in attention_places(dims):
        part, _, what = place.split(".")
        n_queries, n_keys = sizes[f"{part}.{what}"]
        shapes = {
            "scores": (n_queries, n_keys),
            "weights": (n_queries, n_keys),
            "values": (n_keys, d),
            "outputs": (n_queries, d),
        }
        for quantity in ATTENTION:
            got = cache.tensors[f"{place}.{quantity}"].shape
            assert got == (1, dims.n_text_head, *shapes[quantity]), (place, quantity)
    assert cache.tensors["encoder.input.residual"].shape == (1, n_audio, dims.n_audio_state)
    assert cache.tensors["decoder.3.residual"].shape == (1, n_text, dims.n_text_state)


def test_the_residual_stream_is_what_the_last_norm_reads(own, model):
    cache, features, logits = own
    assert torch.equal(model.encoder.ln_post(cache.tensors["encoder.3.residual"]), features)
    read = model.decoder.logits(model.decoder.ln(cache.tensors["decoder.3.residual"]))
    assert torch.allclose(read, logits, atol=1e-4)


def tensors(encoded):
    return [encoded.features, *(group.keys for (group,) in encoded.layers)]


@pytest.mark.parametrize("policy", POLICIES)
def test_recording_changes_nothing_under_any_policy(model, window, policy):
    cache = ActivationCache(model.dims, "encoder.*.weights", "encoder.*.residual")
    plain, seen = encode(model, [window], policy), encode(model, [window], policy, cache)
    for a, b in zip(tensors(plain), tensors(seen), strict=True):
        assert (a - b).norm() < 1e-5 * a.norm()
    names = [name for name in recorded_names(model.dims) if name.startswith("encoder.")]
    assert set(cache.tensors) == {n for n in names if n.endswith((".weights", ".residual"))}
    for name, weights in cache.tensors.items():
        if name.endswith("weights"):
            assert torch.allclose(weights.sum(dim=-1), torch.ones(weights.shape[:3]), atol=1e-5)


def test_virtual_padding_records_the_groups_that_stand_for_it(model, window):
    cache = ActivationCache(model.dims, "encoder.0.self.weights")
    encode(model, [window], "virtual", cache)
    n_own = Policy("virtual").visible(window.n_positions)
    n_groups = -(-(1500 - n_own) // 16)
    assert cache.tensors["encoder.0.self.weights"].shape[2:] == (n_own, n_own + n_groups)


def test_values_are_kept_although_the_next_layer_writes_over_them(model, window):
    cache = ActivationCache(model.dims, "encoder.*.self.values", "encoder.*.self.weights")
    outputs = ActivationCache(model.dims, "encoder.*.self.outputs")
    encode(model, [window], "virtual", combine_recorders(cache, outputs))
    for i in range(model.dims.n_audio_layer):
        place = f"encoder.{i}.self"
        again = cache.tensors[f"{place}.weights"] @ cache.tensors[f"{place}.values"]
        assert torch.allclose(again, outputs.tensors[f"{place}.outputs"], atol=1e-5), place


def test_weights_equal_openai_whispers_without_fused_attention(own, model, upstream_model, window):
    ours, features, logits = own
    theirs, their_features, their_logits = everything(OpenAI(upstream_model), window)
    assert set(theirs.tensors) == set(recorded_names(model.dims))
    compare(ours.tensors, theirs.tensors, 1e-5)
    assert torch.allclose(features, their_features, atol=1e-4)
    assert torch.allclose(logits, their_logits, atol=1e-4)


def test_openai_whisper_is_as_fast_as_before_afterwards(upstream_model, window):
    from asrmask.systems import upstream

    attention = upstream.whisper().model.MultiHeadAttention
    everything(OpenAI(upstream_model), window)
    assert attention.use_sdpa
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in upstream_model.modules()]
    assert not any(hooks)


def test_weights_equal_hugging_faces(own, model, window):
    pytest.importorskip("transformers", reason="the optional package transformers is not installed")
    from asrmask.systems.huggingface import twin

    subject = HuggingFace(twin(model, attention="eager"))
    assert subject.dims == model.dims
    theirs, features, logits = everything(subject, window)
    assert set(theirs.tensors) == set(recorded_names(model.dims))
    compare(own[0].tensors, theirs.tensors, 1e-5)
    assert torch.allclose(own[1], features, atol=1e-4)
    assert torch.allclose(own[2], logits, atol=1e-3)
    for place in attention_places(model.dims):
        assert torch.equal(subject.projection(place), InspectedModel(model).projection(place)), (
            place
        )
    assert torch.equal(subject.readout(7).embedding, InspectedModel(model).readout(7).embedding)


def test_hugging_faces_fast_attention_is_refused(model):
    pytest.importorskip("transformers", reason="the optional package transformers is not installed")
    from asrmask.systems.huggingface import twin

    with pytest.raises(OptionError, match="attn_implementation=\"eager\", got 'sdpa'"):
        HuggingFace(twin(model))


def test_without_transformers_a_line_says_how_to_get_it(monkeypatch):
    import sys

    from asrmask.systems import huggingface

    monkeypatch.setitem(sys.modules, "transformers", None)
    huggingface.transformers.cache_clear()
    told = r"needs transformers: pip install 'asrmask\[transformers\]'$"
    with pytest.raises(MissingPackageError, match=told):
        huggingface.transformers()
    huggingface.transformers.cache_clear()


def compare(ours, theirs, tolerance):
    """Weights to the tolerance; what is not a share of 1, relative to its size."""
    for name, mine in ours.items():
        other = theirs[name]
        assert mine.shape == other.shape, name
        hidden = mine == -torch.inf
        assert (other[hidden] < -1e30).all(), name
        far = float((mine - other)[~hidden].abs().max())
        size = 1.0 if name.endswith("weights") else float(mine[~hidden].abs().max())
        assert far <= tolerance * size, (name, far, size)


def test_an_activation_cache_refuses_unknown_names_and_a_second_pass(model):
    with pytest.raises(OptionError, match="a name to record must be like encoder"):
        ActivationCache(model.dims, "decoder.9.cross.weights")
    cache = ActivationCache(model.dims, "decoder.*.cross.weights")
    cache("decoder.1.cross", "weights", torch.zeros(1))
    cache("decoder.1.cross", "scores", torch.zeros(1))
    assert list(cache.tensors) == ["decoder.1.cross.weights"]
    with pytest.raises(OptionError, match=r"one pass, got decoder\.1\.cross\.weights"):
        cache("decoder.1.cross", "weights", torch.zeros(1))


def test_a_batch_with_masks_records_what_its_clips_record_alone():
    """A random small model: two clips of different lengths, masked, beside one clip."""
    torch.manual_seed(0)
    dims = ModelDimensions(4, 12, 8, 2, 2, 60, 10, 8, 2, 2)
    small = Whisper(dims).eval()
    mel = torch.randn(2, 4, 24)
    cache, alone = (
        ActivationCache(dims, "encoder.*.weights"),
        ActivationCache(dims, "encoder.*.weights"),
    )
    with torch.inference_mode():
        small.encode(mel, masks.padding([5, 12], 12), cache)
        small.encode(mel[:1], masks.padding([5], 12), alone)
    for name, weights in alone.tensors.items():
        assert torch.allclose(weights[0], cache.tensors[name][0], atol=1e-6)
        assert weights[..., 5:].eq(0).all()


def test_the_table_of_places_is_in_the_documentation():
    for word in ("encoder.N.self", "decoder.N.cross", "(B, H, Q, K)"):
        assert word in recording.__doc__
