"""Quantities of heads: by hand, by intervention, and under every policy on real speech."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Spectrogram
from asrmask.decoding.task import decode
from asrmask.errors import OptionError
from asrmask.inspection.adapters import OpenAI
from asrmask.inspection.inspected_model import InspectedModel, Readout
from asrmask.inspection.key_labels import KeyLabels, cross_key_labels, encoder_key_labels
from asrmask.inspection.measure import ForcedText, measure, measure_decoder
from asrmask.inspection.quantities import Meter, Scope, expected
from asrmask.inspection.recording import ActivationCache, combine_recorders
from asrmask.model import masks
from asrmask.model.attention import KeyValues
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.encoding import encode, plan
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.tokenizer import get_tokenizer

POLICIES = [
    *("full", "full,positions=last", "mask:encoder", "mask:cross", "mask:both", "trim"),
    *("trim,margin=1,positions=last", "virtual"),
    *("trim,margin=1,sink=0.5", "mask:both,sink=0.5"),
]


def bits(*rows):
    return torch.tensor(rows, dtype=torch.bool)


# Labels


@pytest.mark.parametrize(
    ("n", "spans", "last_second", "speech"),
    [
        (2, [(0.0, 0.02)], [0, 1], [0]),  # shorter than a second
        (60, [(0.1, 0.2), (1.0, 99.0)], list(range(10, 60)), [*range(5, 10), *range(50, 60)]),
    ],
)
def test_the_labels_of_a_clip(n, spans, last_second, speech):
    labels = KeyLabels.of(n, 61, speech=spans)
    assert (int(labels.audio.sum()), int(labels.padding.sum())) == (n, 61 - n)
    assert labels.last_second[0].nonzero().flatten().tolist() == last_second
    assert labels.speech[0].nonzero().flatten().tolist() == speech


def test_labels_know_padding_in_front_hidden_keys_and_counts():
    last = KeyLabels.of(2, 5, first=3, mask=masks.padding([3], 5, last=True))
    assert last.audio[0].tolist() == [False, False, False, True, True]
    assert last.padding[0].tolist() == [False, False, True, False, False]
    assert last.starts[0].tolist() == [-3, -2, -1, 0, 1]
    sink = KeyLabels.of(2, 5, sink=2)
    assert sink.starts[0].tolist() == [0, 1, 2, 1498, 1499]
    assert sink.audio[0].tolist() == [True, True, False, False, False]
    virtual = KeyLabels.of(2, 5, mask=masks.counted(torch.tensor([[1, 1, 1, 16, 7]])))
    assert virtual.counts[0].tolist() == [1, 1, 1, 16, 7]
    assert virtual.starts[0].tolist() == [0, 1, 2, 3, 19]
    assert virtual.padding[0].tolist() == [False, False, True, True, True]
    with pytest.raises(OptionError, match="audio must be 1 position or more of 3 keys"):
        KeyLabels.of(4, 3)


def test_the_labels_of_a_cache_whose_mask_hides_audio_at_both_ends(model):
    """A mask that is not about padding: keys that nobody sees are left out of the cache."""
    visible = torch.zeros(1, 1, 1, 1500, dtype=torch.bool)
    visible[..., [8, 9, 20, 99, 200]] = True
    with torch.inference_mode():
        encoded = model.decoder.cross_attention_cache(
            torch.zeros(1, 1500, model.dims.n_audio_state), visible
        )
    labels = cross_key_labels(encoded, 100, [(0.18, 0.4)])
    assert labels.starts[0, [0, -1]].tolist() == [8, 200]
    seen = labels.counts[0] > 0
    assert labels.starts[0][seen].tolist() == [8, 9, 20, 99, 200]
    assert labels.audio[0][seen].tolist() == [True, True, True, True, False]
    assert labels.speech[0][seen].tolist() == [False, True, False, False, False]
    assert labels.padding[0].nonzero().flatten().tolist() == [192]
    long = cross_key_labels(encoded, 1500)
    assert long.audio.all()
    assert not long.padding.any()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_labels_of_a_policy_has_all_positions_that_can_be_seen(model, policy):
    policy = Policy.parse(policy)
    n = 355
    visible = policy.visible(n)
    window = Spectrogram(Recording.of(np.zeros(n * 320, np.float32)), 80).window(
        0, 2 * n, fill=policy.fill
    )
    encoded = encode(model, [window], policy)
    cross, encoder = cross_key_labels(encoded, n), encoder_key_labels(plan(policy, [visible]), n)
    hides = {"mask:encoder": (True, False), "mask:cross": (False, True)}
    in_encoder, in_cross = hides.get(policy.kind, (policy.kind not in {"full", "virtual"},) * 2)
    for labels, hidden in ((encoder, in_encoder), (cross, in_cross)):
        assert int(labels.audio.sum()) == n
        n_padding = float((labels.counts * labels.padding).sum())
        assert n_padding == (visible - n + policy.sink_positions if hidden else 1500 - n)
        if policy.sink:
            assert labels.starts[0, -25:].tolist() == list(range(1475, 1500))


# Meters, by hand


class Stub:
    """A subject of one head of width 1 in a stream of width 2."""

    dims = ModelDimensions(80, 4, 2, 1, 1, 9, 4, 2, 1, 1)

    def projection(self, place):
        return torch.tensor([[[3.0, 4.0]]])  # (H, d, D): what is found, times (3, 4)

    def readout(self, token):
        # logit = 2 · (x₀ − x₁) / width
        return Readout(torch.tensor([2.0, 2.0]), torch.zeros(2), 0.0, torch.tensor([1.0, -1.0]))


WEIGHTS = torch.tensor(
    [
        [0.5, 0.25, 0.25, 0.0],
        [0.0, 0.5, 0.0, 0.5],
        [0.25, 0.25, 0.25, 0.25],
        [9.0, 9.0, 9.0, 9.0],  # no real query: it must not count
    ]
)[None, None]


def test_masses_and_entropy_by_hand():
    labels = KeyLabels.of(2, 4, speech=[(0.0, 0.02)])  # keys: speech, pause, padding, padding
    meter = Meter(Stub(), {"decoder.cross": Scope(bits([1, 1, 1, 0]), labels)})
    meter("decoder.0.cross", "weights", WEIGHTS)
    value = {name: v.item() for (_, name), v in meter.values.items()}
    assert value["padding"] == pytest.approx((0.25 + 0.5 + 0.5) / 3)
    assert value["speech"] == pytest.approx((0.5 + 0 + 0.25) / 3)
    assert value["last_second"] == pytest.approx(1 - value["padding"])
    entropies = (1.5 * math.log(2), math.log(2), math.log(4))
    assert value["entropy"] == pytest.approx(sum(entropies) / 3)
    profile = meter.profiles["decoder.0.cross"][0, :, 0]
    assert np.allclose(profile, [0.25, 0.5, 0.5, math.nan], equal_nan=True)


def test_a_key_that_stands_for_several_positions_counts_with_its_weight():
    """One key for 16 positions is 16 keys with a 16th of its weight each."""
    wide = KeyLabels.of(1, 2, mask=masks.counted(torch.tensor([[1, 16]])))
    each = KeyLabels.of(1, 17)
    row = torch.tensor([0.2, *[0.05] * 16])
    found = []
    for labels, weights in ((wide, torch.tensor([0.2, 0.8])), (each, row)):
        meter = Meter(Stub(), {"encoder.self": Scope(bits([1]), labels)})
        meter("encoder.0.self", "weights", weights[None, None, None])
        found.append(meter.values)
    for name in ("padding", "entropy"):
        key = ("encoder.0.self", name)
        assert found[0][key].item() == pytest.approx(found[1][key].item(), abs=1e-6)
    assert found[0]["encoder.0.self", "padding"].item() == pytest.approx(0.8)


def test_norms_by_hand():
    meter = Meter(Stub(), {"encoder.self": Scope(bits([1, 0, 1]), KeyLabels.of(1, 3))})
    meter("encoder.0.self", "outputs", torch.tensor([2.0, 100.0, -4.0])[None, None, :, None])
    assert meter.values["encoder.0.self", "output_norm"].item() == pytest.approx(3)
    assert meter.values["encoder.0.self", "contribution_norm"].item() == pytest.approx(15)


def test_the_end_logit_by_hand():
    """The last real query is the second of three."""
    meter = Meter(Stub(), {"decoder.cross": Scope(bits([1, 1, 0]), KeyLabels.of(2, 3))}, 7)
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.25, 0.25], [0.0, 0.0, 1.0]])
    meter("decoder.0.cross", "weights", weights[None, None])
    meter("decoder.0.cross", "values", torch.tensor([2.0, 4.0, 8.0])[None, None, :, None])
    meter("decoder.0", "residual", torch.tensor([[9.0, 1.0], [5.0, 1.0], [0.0, 7.0]])[None])
    # audio: 0.5 · 2 + 0.25 · 4 = 2 → (6, 8): 2 · (6 − 8) = −4; padding: 2 likewise; width 2
    assert meter.values["decoder.0.cross", "end_audio"].item() == pytest.approx(-2)
    assert meter.values["decoder.0.cross", "end_padding"].item() == pytest.approx(-2)
    assert meter.end_logit.item() == pytest.approx(2 * (5 - 1) / 2)


def test_where_there_is_no_padding_there_is_no_data_rather_than_0():
    meter = Meter(Stub(), {"encoder.self": Scope(bits([1, 1]), KeyLabels.of(2, 2))})
    meter("encoder.0.self", "weights", torch.tensor([[0.5, 0.5], [1.0, 0.0]])[None, None])
    assert np.isnan(meter.values["encoder.0.self", "padding"]).all()
    assert np.isnan(meter.values["encoder.0.self", "speech"]).all()  # nobody has said where
    assert meter.values["encoder.0.self", "last_second"].item() == pytest.approx(1)


def test_a_place_without_a_scope_is_left_alone():
    meter = Meter(Stub(), {})
    meter("encoder.9.other", "weights", WEIGHTS)
    meter("encoder.0.self", "weights", WEIGHTS)
    assert meter.values == {}


# The end token's logit, on whole models


def test_all_shares_of_the_end_logit_add_up_where_nothing_else_speaks():
    """A small model whose feed-forward and self-attention add nothing: the rest is known."""
    torch.manual_seed(1)
    dims = ModelDimensions(4, 6, 8, 2, 1, 60, 10, 8, 2, 3)
    small = Whisper(dims).eval()
    for block in small.decoder.blocks:
        for module in (block.mlp[2], block.attn.out):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)
    tokens = torch.randint(60, (1, 5))
    with torch.inference_mode():
        encoded = small.decoder.cross_attention_cache(torch.randn(1, 6, 8))
        labels = KeyLabels.of(4, 6)
        meter = Meter(InspectedModel(small), {"decoder.cross": Scope(bits([1] * 5), labels)}, 11)
        cache = ActivationCache(dims, "decoder.*.residual")
        x, _ = small.decoder(
            tokens, encoded, small.decoder.cache(1, 5), combine_recorders(meter, cache)
        )
        logit = small.decoder.logits(x)[0, -1, 11]
        readout = InspectedModel(small).readout(11)
        biases = sum(block.cross_attn.out.bias for block in small.decoder.blocks)
        rest = cache.tensors["decoder.input.residual"][0, -1] + biases
        width = readout.width(cache.tensors["decoder.2.residual"][0, -1])
        constant = readout.shift @ readout.embedding
    shares = [v.sum() for (_, name), v in meter.values.items() if name.startswith("end_")]
    assert len(shares) == 6
    assert float(meter.end_logit) == pytest.approx(float(logit), abs=1e-5)
    got = sum(shares) + float(readout.share(rest) / width + constant)
    assert got == pytest.approx(float(logit), abs=1e-5)


@pytest.fixture(scope="module")
def heard(model, sample):
    """A window of real speech and its text."""
    spectrogram = Spectrogram(Recording.open(sample), model.dims.n_mels)
    window = spectrogram.window(0, spectrogram.n_frames, fill="zero")
    result = decode(model, window, without_timestamps=True)
    return window, ForcedText.untimed(get_tokenizer(False), result.tokens)


def test_the_share_of_padding_is_what_a_head_without_it_lacks(model, heard):
    """Values of padding set to 0 in one head: what its output loses, through the projection."""
    window, text = heard
    layer, head, n = 2, 3, window.n_positions
    encoded = encode(model, [window])
    measurement = measure_decoder(model, encoded, n, text)
    row, _ = text.inputs(448)

    def passed(encoded):
        cache = ActivationCache(model.dims, f"decoder.{layer}.cross.outputs", "decoder.3.residual")
        model.decoder(row, encoded, model.decoder.cache(*row.shape), cache)
        outputs = cache.tensors[f"decoder.{layer}.cross.outputs"]
        joined = model.decoder.blocks[layer].cross_attn.out(outputs.transpose(1, 2).flatten(2))
        return joined[0, -1], cache.tensors["decoder.3.residual"][0, -1]

    with torch.inference_mode():
        layers = list(encoded.layers)
        ((keys, values, mask),) = layers[layer]
        values = values.clone()
        values[:, head, n:] = 0
        layers[layer] = (KeyValues(keys, values, mask),)
        whole, residual = passed(encoded)
        without, _ = passed(replace(encoded, layers=tuple(layers)))
        norm, weight = model.decoder.ln, model.decoder.token_embedding.weight[text.tokenizer.eot]
        width = (residual.var(unbiased=False) + norm.eps).sqrt()

        def frozen(x):
            return (norm.weight * (x - x.mean()) / width + norm.bias) @ weight

        expected = float(frozen(residual) - frozen(residual - (whole - without)))
    got = measurement.values[f"decoder.{layer}.cross", "end_padding"][0, head]
    assert abs(expected) > 1e-3
    assert got == pytest.approx(expected, abs=1e-4)
    assert measurement.end_logit == pytest.approx(float(frozen(residual)), abs=1e-4)


# Real speech


@pytest.mark.parametrize("policy", POLICIES)
def test_a_measurement_under_every_policy(model, heard, policy):
    window, text = heard
    policy = Policy.parse(policy)
    found = measure(model, window, policy, text, speech=[(0.3, 6.5)], keep_weights=True)
    assert set(found.values) == set(expected(model.dims))
    for (place, name), values in found.values.items():
        hides = policy.margin == policy.sink == 0 and policy.kind not in {"full", "virtual"}
        kind = "encoder" if policy.kind == "mask:encoder" else "decoder"
        only = policy.kind in {"mask:encoder", "mask:cross"}
        hidden = hides and (not only or place.startswith(kind))
        empty = hidden and name in {"padding", "end_padding"}
        assert np.isnan(values).all() == empty, (place, name)
        assert values.shape == (1, 6)
    for place in ("encoder.1.self", "decoder.2.cross"):
        shares = [found.values[place, name] for name in ("padding", "speech", "last_second")]
        assert all((np.isnan(s) | ((s >= 0) & (s <= 1 + 1e-6))).all() for s in shares)
        assert (np.nan_to_num(shares[0]) + shares[1] <= 1 + 1e-5).all()
    n_tokens = len(text.tokens) + 1
    weights = found.weights["decoder.2.cross"]
    assert weights.shape[:2] == (6, n_tokens)
    padded = weights[..., found.cross_keys.padding[0].numpy()].sum(axis=-1).mean(axis=1)
    assert np.allclose(padded, np.nan_to_num(found.values["decoder.2.cross", "padding"][0]))


def test_virtual_padding_is_looked_at_as_real_padding_is(model, heard):
    """A share of attention differs by 0.005 on average; zeros or a missing count by 0.1 or more."""
    window, text = heard
    full = measure(model, window, Policy(), text)
    virtual = measure(model, window, Policy("virtual"), text)
    differences = [
        np.abs(full.values[key] - virtual.values[key]).mean()
        for key in full.values
        if key[1] == "padding"
    ]
    assert np.mean(differences) < 0.01


def test_trimming_measures_what_masking_does(model, heard):
    window, text = heard
    for sink in (0.0, 0.5):
        both_masked = measure(model, window, Policy("mask:both", sink=sink), text)
        trimmed = measure(model, window, Policy("trim", sink=sink), text)
        for key, values in both_masked.values.items():
            assert np.allclose(values, trimmed.values[key], atol=1e-3, equal_nan=True), key


def test_openai_whisper_measures_the_same(model, upstream_model, heard):
    window, text = heard
    n = window.n_positions
    ours = measure(model, window, Policy(), text)
    subject = OpenAI(upstream_model)
    labels = KeyLabels.of(n, 1500)
    row, queries = text.inputs(448)
    scopes = {
        "encoder.self": Scope(labels.audio, labels),
        "decoder.self": Scope(queries),
        "decoder.cross": Scope(queries, labels),
    }
    meter = Meter(subject, scopes, text.tokenizer.eot)
    with torch.inference_mode():
        subject.logits(row, subject.encode(window.mel[None], meter), meter)
    for key, values in ours.values.items():
        assert np.allclose(values, meter.values[key], atol=1e-4, equal_nan=True), key
