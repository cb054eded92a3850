"""Policies at work: what is equal to what, with the real model and real speech."""

from dataclasses import replace

import pytest
import torch

from asrmask import load_model
from asrmask.audio.recording import Recording, load_audio
from asrmask.audio.spectrogram import Features, Spectrogram
from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.quality import runaway_reason
from asrmask.decoding.task import decode, detect_language
from asrmask.errors import OptionError
from asrmask.evaluation import corpus
from asrmask.model import masks
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.encoding import encode, plan
from asrmask.model.policy import KINDS, Policy
from asrmask.model.whisper import Whisper
from asrmask.transcription.word_timing import align

PLACES = [
    *KINDS,
    "mask:both,margin=0.16,fill=silence",
    "trim,margin=1.28",
    "trim,fill=noise:-50",
    "trim,margin=0.64,positions=last",
    "mask:encoder,positions=last",
    "trim,margin=1.28,sink=0.5",
    "mask:both,fill=silence,sink=0.5",
    "mask:cross,sink=0.5",
]
GREEDY = DecodingOptions(without_timestamps=True, language="en")


def window(path, policy="full"):
    spectrogram = Spectrogram(Recording.open(path), 80)
    return spectrogram.window(0, spectrogram.n_frames, fill=Policy.parse(policy).fill)


@pytest.fixture(scope="module")
def half_minute(samples):
    """30 s of speech without a gap."""
    joined = torch.cat([torch.from_numpy(load_audio(path)) for path in samples])
    return torch.cat([joined, joined])[: 30 * 16_000]


@pytest.fixture(scope="module")
def exact_model():
    """The real tiny.en in double precision, where rounding does not grow to 1e-4."""
    return load_model("tiny.en", compute_type="float64")


@torch.inference_mode()
def logits(model, encoded, record=None):
    """Teacher-forced logits of a fixed text for each clip."""
    tokens = torch.tensor([[50257, 50362, 843, 1770, 13, 1757]]).repeat(encoded.n_clips, 1)
    x, _ = model.decoder(tokens, encoded, model.decoder.cache(*tokens.shape), record)
    return model.decoder.logits(x)


@pytest.fixture(scope="module")
def without_policy(model, half_minute):
    """Frames, memory, logits and result of 30 s of audio that no policy has touched."""
    mel = Spectrogram(Recording.of(half_minute), 80).window(0, 3000, fill="zero").mel
    encoded = encode(model, mel[None])
    return mel, encoded, logits(model, encoded), decode(model, mel)


@pytest.mark.parametrize("text", [*KINDS, "trim,positions=last", "mask:both,fill=silence"])
def test_thirty_seconds_of_audio_make_every_policy_a_no_op(
    model, half_minute, without_policy, text
):
    policy = Policy.parse(text)
    whole = Spectrogram(Recording.of(half_minute), 80).window(0, 3000, fill=policy.fill)
    mel, encoded, expected, result = without_policy
    mine = encode(model, [whole], policy)
    assert all(group.mask is None for (group,) in mine.layers)
    assert torch.equal(whole.mel, mel)
    assert torch.equal(mine.features, encoded.features)
    assert torch.equal(logits(model, mine), expected)
    found = decode(model, whole, padding=policy)
    assert (found.tokens, found.avg_logprob) == (result.tokens, result.avg_logprob)


def test_a_margin_that_reaches_the_end_is_a_no_op_too(model, sample):
    clip = window(sample)
    for text in ("trim,margin=30", "trim,margin=10,sink=20", "trim,sink=30"):
        mine = encode(model, [clip], text)
        assert torch.equal(mine.features, encode(model, [clip]).features)


def test_an_all_valid_mask_changes_no_bit(model, sample):
    mel = window(sample).mel[None]
    everything = masks.padding([1500], 1500)
    features = model.encode(mel)
    assert torch.equal(model.encode(mel, everything), features)
    a = model.decoder.cross_attention_cache(features, everything)
    b = model.decoder.cross_attention_cache(features)
    assert torch.equal(logits(model, a), logits(model, b))


@pytest.mark.parametrize("margin", [0, 0.16, 1.28])
@pytest.mark.parametrize(
    "more",
    [*("", ",fill=silence", ",positions=last", ",fill=noise:-40"), ",sink=0.5,fill=silence"],
)
def test_trim_is_mask_both(model, exact_model, samples, margin, more):
    trim, both = (f"{kind},margin={margin}{more}" for kind in ("trim", "mask:both"))
    clip = window(list(samples)[int(margin > 0)], trim)
    check_equal(exact_model, clip, trim, both, 1e-9)
    found = [decode(model, clip, GREEDY, padding=p, sample_len=30) for p in (trim, both)]
    assert found[0].tokens == found[1].tokens


def check_equal(model, clip, trim, both, tolerance):
    a, b = encode(model, [clip], trim), encode(model, [clip], both)
    policy = Policy.parse(trim)
    n, sink = policy.visible(clip.n_positions), policy.sink_positions
    assert a.features.shape[1] == n + sink
    seen = [*range(a.origin, a.origin + n), *range(1500 - sink, 1500)]
    assert (a.features - b.features[:, seen]).abs().max() < tolerance
    assert (logits(model, a) - logits(model, b)).abs().max() < max(tolerance, 1e-4)


def test_trim_is_mask_both_on_shared_clips(model, shared):
    margins = (0, 0.16, 1.28)
    for i, listed in enumerate(corpus.read(shared / "librispeech-test-other")[::4]):
        clip = window(listed.path)
        trim, both = (f"{kind},margin={margins[i % 3]}" for kind in ("trim", "mask:both"))
        check_equal(model, clip, trim, both, 1e-4)


def test_trim_is_mask_both_with_a_sink_on_shared_clips(exact_model, shared):
    """In double precision: the sink's features are so sensitive that float32 is 2e-4 off."""
    for listed in corpus.read(shared / "librispeech-test-other")[::30]:
        clip = window(listed.path)
        check_equal(exact_model, clip, "trim,sink=1", "mask:both,sink=1", 1e-9)


@pytest.mark.parametrize("text", PLACES)
def test_a_batch_gives_each_clip_what_it_gets_alone(model, samples, half_minute, text):
    policy = Policy.parse(text)
    clips = [window(path, policy) for path in list(samples)[:3]]
    whole = Spectrogram(Recording.of(half_minute), 80)
    clips.insert(2, whole.window(0, 3000, fill=policy.fill))
    together = logits(model, encode(model, clips, policy))
    alone = torch.cat([logits(model, encode(model, [clip], policy)) for clip in clips])
    assert (together - alone).abs().max() < 1e-4
    beam = DecodingOptions(language="en", beam_size=3)
    has_beam = text in {"virtual", "trim,margin=1.28", "trim,margin=1.28,sink=0.5"}
    for options in (GREEDY, beam) if has_beam else (GREEDY,):
        options = replace(options, sample_len=12)
        batch = decode(model, clips, options, padding=policy)
        singles = [decode(model, clip, options, padding=policy) for clip in clips]
        assert [r.tokens for r in batch] == [r.tokens for r in singles]
        assert [r.policy for r in batch] == [r.policy for r in singles]


@pytest.mark.parametrize(
    "text",
    [
        *("mask:both", "trim", "mask:both,margin=0.3,positions=last"),
        *("mask:both,margin=0.3,sink=0.5", "trim,margin=0.3,sink=0.5"),
    ],
)
def test_what_lies_in_hidden_padding_changes_nothing(model, sample, text):
    clip = window(sample)
    policy = Policy.parse(text)
    n_visible = 2 * policy.visible(clip.n_positions)
    end = 3000 - 2 * policy.sink_positions
    garbage = clip.mel.clone()
    garbage[:, n_visible:end] = 1e4 * torch.randn(80, end - n_visible)
    before, after = (
        encode(model, [Features(mel, clip.n_frames)], policy) for mel in (clip.mel, garbage)
    )
    assert (logits(model, before) - logits(model, after)).abs().max() < 1e-5


@pytest.mark.parametrize("text", ["mask:both,margin=0.3", "trim,margin=0.3", "virtual"])
def test_what_lies_in_the_margin_changes_something(model, sample, text):
    clip = window(sample)
    changed = clip.mel.clone()
    changed[:, clip.n_frames + 4 : clip.n_frames + 12] += 1
    before, after = (
        encode(model, [Features(mel, clip.n_frames)], text) for mel in (clip.mel, changed)
    )
    assert (logits(model, before) - logits(model, after)).abs().max() > 1e-3


@pytest.mark.parametrize("text", ["mask:both,sink=0.5", "trim,sink=0.5", "mask:cross,sink=0.5"])
def test_what_lies_in_the_sink_changes_something(model, sample, text):
    clip = window(sample)
    changed = clip.mel.clone()
    changed[:, 2950] += 1  # its first frame
    before, after = (
        encode(model, [Features(mel, clip.n_frames)], text) for mel in (clip.mel, changed)
    )
    assert (logits(model, before) - logits(model, after)).abs().max() > 1e-4


def test_cross_mask_leaves_the_encoder_alone_and_encoder_mask_the_decoder(model, sample):
    clip = window(sample)
    full, inner, cross = (encode(model, [clip], p) for p in ("full", "mask:encoder", "mask:cross"))
    assert torch.equal(cross.features, full.features)
    ((cross_keys, _, _),), ((inner_keys, _, _),) = cross.layers[0], inner.layers[0]
    assert cross_keys.shape[2] == clip.n_positions
    assert inner_keys.shape[2] == 1500
    assert not torch.allclose(inner.features, full.features, atol=1e-2)


@pytest.mark.parametrize("text", PLACES)
def test_recorded_attention_is_the_fast_one(model, samples, text):
    policy = Policy.parse(text)
    encoded = encode(model, [window(path, policy) for path in samples], policy)
    seen = {}
    recorded = logits(model, encoded, lambda place, name, x: seen.__setitem__((place, name), x))
    assert (recorded - logits(model, encoded)).abs().max() < 1e-4
    weights = seen["decoder.3.cross", "weights"]
    assert torch.allclose(weights.sum(dim=-1), torch.ones(()), atol=1e-5)


def test_times_and_words_count_from_the_audio_wherever_it_lies(model, sample):
    from asrmask.tokenizer.tokenizer import get_tokenizer

    tokenizer = get_tokenizer(False)
    policies = ("full", "trim", "trim,positions=last", "full,positions=last", "virtual")
    for text in (*policies, "trim,margin=1.28,sink=0.5"):
        clip = window(sample)
        result = decode(model, clip, padding=text, policy_fallback=False)
        times = [t - tokenizer.timestamp_begin for t in result.tokens if t >= 50363]
        assert times
        assert times[0] <= 50  # the text begins within a second
        assert all(0 <= t <= clip.n_positions + 50 for t in times)
        words = [t for t in result.tokens if t < tokenizer.eot]
        encoded = encode(model, [clip], text)
        timings = align(model, tokenizer, words, encoded, clip.n_frames)
        assert timings[0].start < 1
        assert 4 < timings[-1].end <= clip.n_frames / 100


def test_a_text_that_runs_away_is_decoded_again_with_all_the_padding(model, sample):
    clip = window(sample)
    bare = decode(model, clip, GREEDY, padding="trim", policy_fallback=False, sample_len=3)
    assert (str(bare.policy), bare.fallback, bare.ended) == ("trim", None, False)
    safe = decode(model, clip, GREEDY, padding="trim", sample_len=3)
    assert (str(safe.policy), safe.fallback) == ("full", "no end")
    silent = window(sample, "full,fill=silence")
    safe = decode(model, silent, GREEDY, padding="trim,fill=silence", sample_len=3)
    assert str(safe.policy) == "full,fill=silence"


def test_reasons_for_decoding_again(model, sample):
    good = decode(model, window(sample), padding="virtual")
    assert good.fallback is None
    n = window(sample).n_positions
    assert runaway_reason(good, n) is None
    assert runaway_reason(replace(good, ended=False), n) == "no end"
    assert runaway_reason(replace(good, compression_ratio=2.5), n) == "repetition"
    words = [t for t in good.tokens if t < 50256]
    assert (
        runaway_reason(replace(good, tokens=words + words, compression_ratio=1.9), n)
        == "repetition"
    )
    assert runaway_reason(replace(good, avg_logprob=-0.8), n) == "unsure"
    assert runaway_reason(replace(good, avg_logprob=-0.8, tokens=good.tokens[:3]), n) is None
    assert runaway_reason(replace(good, last_start=8.2), n) == "times past the end"
    assert runaway_reason(replace(good, last_start=8.0), n) is None


def test_policies_need_to_know_how_much_is_real(model, sample):
    clip = window(sample)
    with pytest.raises(OptionError, match="needs Features, which know how many frames are real"):
        decode(model, clip.mel, padding="trim")
    with pytest.raises(OptionError, match="filled as the policy says, got zero with trim,fill=sil"):
        decode(model, clip, padding="trim,fill=silence")


def test_no_policy_takes_windows_as_they_are(model, sample):
    silent = window(sample, "full,fill=silence")
    result = decode(model, silent, GREEDY)
    assert str(result.policy) == "full,fill=silence"
    assert result.tokens == decode(model, silent.mel, GREEDY).tokens


@pytest.mark.parametrize("text", ["full", "trim,margin=1.28", "virtual"])
def test_languages_are_detected_under_a_policy(base_model, shared, text):
    for name in ("de-000", "fr-001", "es-002"):
        clip = window(shared / "fleurs" / f"fleurs-{name}.ogg")
        token, probabilities = detect_language(base_model, clip, padding=text)
        assert max(probabilities, key=probabilities.get) == name[:2]
        assert token.ndim == 0


def test_a_plan_says_what_is_computed():
    assert plan(Policy("trim"), [10, 30]).positions == (0, 30)
    assert plan(Policy("trim", positions="last"), [10, 30]).positions == (1470, 1500)
    assert plan(Policy("mask:both"), [10, 30]).positions == (0, 1500)
    assert plan(Policy("trim"), [30, 30]).encoder_mask is None  # equally long: nothing to hide
    mixed = plan(Policy("trim"), [1, 3]).encoder_mask
    assert mixed[:, 0, 0].int().tolist() == [[1, 0, 0], [1, 1, 1]]


def test_a_plan_computes_the_sink_beside_the_others():
    sink = Policy("trim", sink=0.04)
    mixed = plan(sink, [1, 3])
    assert (mixed.positions, mixed.sink, mixed.n_computed) == ((0, 3), 2, 5)
    expected = [[1, 0, 0, 1, 1], [1, 1, 1, 1, 1]]
    assert mixed.encoder_mask[:, 0, 0].int().tolist() == expected
    assert torch.equal(mixed.cross_mask, mixed.encoder_mask)
    long = plan(sink, [1, 1499])  # reaches into it: everything is computed
    assert (long.positions, long.sink, long.n_computed) == ((0, 1500), 0, 1500)
    assert long.encoder_mask[0, 0, 0].nonzero().flatten().tolist() == [0, 1498, 1499]
    assert plan(sink, [1498, 1499]).encoder_mask is None
    both = plan(Policy("mask:both", sink=0.04), [3])
    assert (both.positions, both.sink) == ((0, 1500), 0)
    assert both.cross_mask[0, 0, 0].nonzero().flatten().tolist() == [0, 1, 2, 1498, 1499]
    cross = plan(Policy("mask:cross", sink=0.04), [3])
    assert cross.encoder_mask is None
    assert torch.equal(cross.cross_mask, both.cross_mask)


@torch.inference_mode()
@pytest.mark.parametrize(
    "policy", ["full", "mask:both", "trim,margin=0.5", "trim,sink=0.5", "virtual"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_shapes_and_dtypes(policy, dtype, tmp_path, monkeypatch):
    """As on a GPU: a batch of clips of other lengths, to logits in float32."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # for the bank of these weights
    torch.manual_seed(0)
    model = Whisper(ModelDimensions(80, 1500, 32, 2, 2, 51864, 448, 32, 2, 2)).eval().to(dtype)
    windows = [Features(torch.randn(80, n), n) for n in (120, 500, 2800)]
    encoded = encode(model, windows, policy)
    tensors = [x for (group,) in encoded.layers for x in (group.keys, group.values)]
    assert {x.dtype for x in (encoded.features, *tensors)} == {dtype}
    tokens = torch.full((3, 2), 1000)
    x, cache = model.decoder(tokens, encoded, model.decoder.cache(3, 4))
    assert (x.shape, x.dtype, cache.keys[0].dtype) == ((3, 2, 32), dtype, dtype)
    logits = model.decoder.logits(x)
    assert (logits.shape, logits.dtype) == ((3, 2, 51864), torch.float32)
    assert logits.isfinite().all()
