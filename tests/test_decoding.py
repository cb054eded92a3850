"""Search and filters: equal to openai-whisper's, and a batch equal to its clips one by one."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asrmask import audio
from asrmask.decoding.filters import (
    NoRepeatNgram,
    RepetitionPenalty,
    SuppressTokens,
    TimestampRules,
)
from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.search import Beam, Candidate, Greedy, SearchState
from asrmask.decoding.task import decode, decode_encoded, detect_language, encode
from asrmask.errors import OptionError
from asrmask.systems import upstream
from asrmask.tokenizer.tokenizer import get_tokenizer
from asrmask.transcription.settings import Settings

MODES = {
    "greedy": {},
    "greedy without times": {"without_timestamps": True},
    "beam": {"beam_size": 3},
    "patient beam": {"beam_size": 2, "patience": 2.0, "length_penalty": 0.6},
    "impatient beam": {"beam_size": 4, "patience": 0.4},
    "prompted": {"prompt": "Mrs. Dashwood and her daughters"},
}
PREFIXED = {
    "greedy": {"without_timestamps": True},
    "beam": {"without_timestamps": True, "beam_size": 3},
    "prompted": {"without_timestamps": True, "prompt": "Mrs. Dashwood and her daughters"},
    "with times": {},
    "beam with times": {"beam_size": 3},
}


@pytest.fixture(scope="module")
def windows(samples):
    return [audio.log_mel_spectrogram(audio.pad_or_trim(audio.load_audio(p))) for p in samples]


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_equals_its_clips_one_by_one(model, windows, mode):
    options = DecodingOptions(language="en", **MODES[mode])
    together = decode(model, torch.stack(windows), options)
    for window, result in zip(windows, together, strict=True):
        alone = decode(model, window, options)
        assert result.tokens == alone.tokens
        assert result.avg_logprob == pytest.approx(alone.avg_logprob, abs=1e-4)
        assert result.no_speech_prob == pytest.approx(alone.no_speech_prob, abs=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_scores_equal_upstream(model, upstream_model, windows, mode):
    whisper = upstream.whisper()
    ours = decode(model, windows[0], DecodingOptions(language="en", **MODES[mode]))
    options = whisper.DecodingOptions(language="en", fp16=False, **MODES[mode])
    theirs = whisper.decode(upstream_model, windows[0], options)
    assert ours.tokens == theirs.tokens
    assert ours.text == theirs.text
    for name in ("avg_logprob", "no_speech_prob", "compression_ratio", "temperature"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=1e-4)


@pytest.mark.parametrize("mode", PREFIXED)
def test_the_prefix_begins_the_text_alone_and_in_a_batch(model, windows, mode):
    options = DecodingOptions(language="en", prefix="And Mr.", **PREFIXED[mode])
    given = get_tokenizer(False).encode(" And Mr.")
    if not options.without_timestamps:
        given = [get_tokenizer(False).timestamp_begin, *given]
    together = decode(model, torch.stack(windows[:2]), options)
    for window, result in zip(windows, together, strict=False):
        alone = decode(model, window, options)
        assert result.tokens == alone.tokens
        assert alone.tokens[: len(given)] == given
        assert len(alone.tokens) > len(given)
        assert alone.text.startswith("And Mr.")
        assert result.avg_logprob == pytest.approx(alone.avg_logprob, abs=1e-4)


@pytest.mark.parametrize("mode", [name for name in PREFIXED if "times" not in name])
def test_without_times_what_follows_a_prefix_and_its_score_equal_upstream(
    model, upstream_model, windows, mode
):
    whisper = upstream.whisper()
    given = get_tokenizer(False).encode(" And Mr.")
    ours = decode(model, windows[0], language="en", prefix="And Mr.", **PREFIXED[mode])
    options = whisper.DecodingOptions(language="en", prefix="And Mr.", fp16=False, **PREFIXED[mode])
    theirs = whisper.decode(upstream_model, windows[0], options)
    assert ours.tokens == given + theirs.tokens
    assert ours.avg_logprob == pytest.approx(theirs.avg_logprob, abs=1e-4)


def test_a_prefix_may_be_all_of_the_text(model, windows):
    choices = {"language": "en", "without_timestamps": True, "suppress_blank": False}
    whole = decode(model, windows[1], **choices)
    again = decode(model, windows[1], prefix=whole.tokens, **choices)
    assert again.tokens == whole.tokens
    assert again.ended


def test_a_prefix_of_spaces_is_none(model, windows):
    plain, blank = (decode(model, windows[1], language="en", prefix=p) for p in (None, "  "))
    assert plain.tokens == blank.tokens


def test_a_prefix_must_leave_room(model, windows):
    with pytest.raises(OptionError, match=r"^prompt and prefix must leave room in 448 tokens, got"):
        decode(model, windows[0], language="en", prefix=[1000] * 448)


def test_a_prefix_begins_at_the_audio_wherever_that_lies(model, samples):
    spectrogram = audio.Spectrogram(audio.Recording.open(next(iter(samples))), 80)
    window = spectrogram.window(0, spectrogram.n_frames, fill="zero")
    options = DecodingOptions(language="en", prefix="And Mr.")
    result = decode(
        model, window, options, padding="trim,margin=5,positions=last", policy_fallback=False
    )
    begin = get_tokenizer(False).timestamp_begin
    assert result.tokens[0] == begin
    assert result.text.startswith("And Mr.")
    times = [token - begin for token in result.tokens if token >= begin]
    assert max(times) <= spectrogram.n_frames // 2 + 250


@pytest.mark.parametrize("choices", [{"temperature": 0.7}, {"temperature": 1.0, "best_of": 4}])
def test_sampling_draws_what_upstream_draws(model, upstream_model, windows, choices):
    whisper = upstream.whisper()
    torch.manual_seed(3)
    ours = decode(model, windows[1], DecodingOptions(language="en", **choices))
    torch.manual_seed(3)
    options = whisper.DecodingOptions(language="en", fp16=False, **choices)
    assert ours.tokens == whisper.decode(upstream_model, windows[1], options).tokens


def test_batches_can_be_sampled(model, windows):
    torch.manual_seed(0)
    results = decode(model, torch.stack(windows), temperature=0.8, best_of=2, language="en")
    assert len(results) == len(windows)
    assert all(result.text for result in results)


def test_audio_is_encoded_once_however_often_it_is_decoded(model, windows, monkeypatch):
    calls = []
    forward = model.encoder.forward
    monkeypatch.setattr(
        model.encoder, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k)
    )
    encoded = encode(model, windows[0][None])
    for choices in ({}, {"beam_size": 2}, {"temperature": 0.5}):
        decode_encoded(model, encoded, DecodingOptions(language="en", **choices))
    assert len(calls) == 1


def test_texts_end_at_the_most_tokens_they_may_have(model, windows):
    for choices in ({}, {"beam_size": 2}):
        result = decode(model, windows[0], language="en", sample_len=5, **choices)
        assert len(result.tokens) == 5
        assert not result.ended
    assert decode(model, windows[0], language="en").ended


def test_a_prompt_that_fills_the_context_still_decodes(model, upstream_model, windows):
    whisper = upstream.whisper()
    prompt = list(range(1000, 1500))
    ours = decode(model, windows[1], language="en", prompt=prompt)
    options = whisper.DecodingOptions(language="en", prompt=prompt, fp16=False)
    assert ours.tokens == whisper.decode(upstream_model, windows[1], options).tokens


@pytest.mark.parametrize("temperature", [1e-6, 1e-37, 1e-45, 1e-300])
def test_temperatures_near_0_give_what_0_gives(model, windows, temperature):
    expected = decode(model, windows[0], language="en")
    result = decode(model, windows[0], language="en", temperature=temperature, best_of=2)
    assert result.tokens == expected.tokens
    assert result.avg_logprob == pytest.approx(expected.avg_logprob, abs=1e-4)


@pytest.mark.parametrize("temperature", ["nan", "inf", "-inf", "-1e-37", "1e300"])
def test_temperatures_that_cannot_be_are_refused_in_one_line(temperature):
    value = float(temperature)
    told = re.escape(f"temperature must be in 0..1000, got {value}")
    with pytest.raises(OptionError, match=f"^{told}$"):
        DecodingOptions(temperature=value).check()
    with pytest.raises(OptionError, match=f"^{told}$"):
        Settings(temperature=(0.0, value)).check()


@pytest.mark.parametrize(
    "bad",
    [
        {"beam_size": 2, "best_of": 2},
        {"best_of": 2},
        {"beam_size": 2, "temperature": 0.5},
        {"patience": 1.0},
        {"length_penalty": 1.5, "beam_size": 2},
        {"beam_size": 0},
        {"temperature": -1.0},
        {"task": "sing"},
        {"language": "klingon"},
        {"suppress_tokens": "a,b"},
        {"suppress_tokens": [99_999]},
        {"sample_len": 0},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("nan")},
        {"no_repeat_ngram_size": -1},
    ],
)
def test_options_that_make_no_sense_are_refused_in_one_line(model, windows, bad):
    with pytest.raises(OptionError) as caught:
        decode(model, windows[0], **bad)
    assert "\n" not in str(caught.value)


def test_samples_in_the_place_of_frames_are_refused(model):
    for samples in (np.zeros(0, np.float32), np.zeros(16_000, np.float32), [0.0, 0.1]):
        for function in (decode, detect_language):
            with pytest.raises(OptionError, match="mel must be a tensor of log-Mel frames"):
                function(model, samples)


def test_english_models_detect_no_language(model, windows):
    with pytest.raises(OptionError, match="multilingual models only"):
        detect_language(model, windows[0])


# filters, against upstream's own

TOKENIZER = get_tokenizer(False)
BEGIN, EOT = TOKENIZER.timestamp_begin, TOKENIZER.eot
TOKEN = st.one_of(st.integers(0, 300), st.just(EOT), st.integers(BEGIN, BEGIN + 1500))


@given(st.integers(0, 2**31), st.lists(TOKEN, max_size=6), st.lists(TOKEN, max_size=6))
@settings(max_examples=40, deadline=None)
def test_filters_equal_upstream(seed, first, second):
    module = upstream.whisper().decoding
    tokenizer = module.get_tokenizer(False)
    n = min(len(first), len(second))
    texts = [first[:n], second[:n]]
    logits = torch.randn(2, 51_864, generator=torch.Generator().manual_seed(seed)) * 5
    tokens = torch.tensor([[TOKENIZER.sot, *text] for text in texts])
    listed = [5, 6, 50_000]
    blank = [TOKENIZER.blank, EOT]
    pairs = [
        (SuppressTokens(blank, logits.device, n_before=0), module.SuppressBlank(tokenizer, 1)),
        (SuppressTokens(listed, logits.device), module.SuppressTokens(listed)),
        (TimestampRules(TOKENIZER, 50), module.ApplyTimestampRules(tokenizer, 1, 50)),
        (TimestampRules(TOKENIZER, None), module.ApplyTimestampRules(tokenizer, 1, None)),
    ]
    for ours, theirs in pairs:
        a, b = logits.clone(), logits.clone()
        ours(a, texts)
        theirs.apply(b, tokens)
        assert torch.equal(a, b)


def test_a_repetition_penalty_lowers_each_token_of_the_text_once():
    logits = torch.tensor([[2.0, -2.0, 0.0, 4.0, -torch.inf], [2.0, -2.0, 0.0, 4.0, 1.0]])
    RepetitionPenalty(2.0)(logits, [[0, 1, 0, 4], [3, 3, 3, 3]])
    expected = [[1.0, -4.0, 0.0, 4.0, -torch.inf], [2.0, -2.0, 0.0, 2.0, 1.0]]
    assert logits.tolist() == expected
    RepetitionPenalty(2.0)(logits, [[], []])
    assert logits.tolist() == expected


@pytest.mark.parametrize(
    ("size", "text", "banned"),
    [
        (1, [3, 1], {1, 3}),
        (2, [3, 1, 2, 3], {1}),
        (2, [3, 1, 3, 2, 3], {1, 2}),
        (2, [3, 3], {3}),
        (2, [3], set()),
        (3, [1, 2, 4, 1, 2], {4}),
        (3, [1, 2, 4, 2, 1], set()),
        (3, [2], set()),
        (3, [], set()),
    ],
)
def test_what_would_repeat_an_ngram_never_comes(size, text, banned):
    logits = torch.zeros(1, 6)
    NoRepeatNgram(size)(logits, [text])
    assert {i for i in range(6) if logits[0, i] == -torch.inf} == banned


@pytest.mark.parametrize("choices", [{}, {"beam_size": 2}])
def test_texts_without_repeated_tokens(model, windows, choices):
    usual = decode(model, windows[0], language="en", **choices).tokens
    assert len(set(usual)) < len(usual)
    once = decode(model, windows[0], language="en", no_repeat_ngram_size=1, **choices).tokens
    assert len(set(once)) == len(once)
    penalised = decode(model, windows[0], language="en", repetition_penalty=50.0, **choices).tokens
    assert len(set(penalised)) > len(set(usual)) or len(penalised) < len(usual)


# the strategies, on logits small enough to work out by hand


def log(*probabilities):
    return torch.tensor([probabilities]).log()


def test_greedy_sums_log_probabilities_up_to_the_end():
    strategy, clip = Greedy(eot=2), SearchState()
    strategy.choose([clip], log(0.5, 0.3, 0.2))
    strategy.choose([clip], log(0.1, 0.2, 0.7))
    assert clip.done
    (found,) = strategy.candidates(clip)
    assert found.tokens == [0]
    assert found.ended
    assert found.sum_logprob == pytest.approx(torch.tensor(0.5 * 0.7).log().item())


def test_beam_keeps_the_best_of_all_continuations():
    strategy, clip = Beam(eot=3, beam_size=2), SearchState()
    assert strategy.choose([clip], log(0.5, 0.4, 0.06, 0.04)) == [[0, 0]]
    assert clip.texts == [[0], [1]]
    # from [0]: nothing likely; from [1]: token 2 at 0.9 → 0.36, the best of all
    rows = torch.cat([log(0.3, 0.3, 0.3, 0.1), log(0.04, 0.03, 0.9, 0.03)])
    (sources,) = strategy.choose([clip], rows)
    assert clip.texts[0] == [1, 2]
    assert sources[0] == 1
    rows = torch.cat([log(0.02, 0.01, 0.01, 0.96), log(0.05, 0.03, 0.02, 0.9)])
    strategy.choose([clip], rows)
    assert clip.done
    assert strategy.candidates(clip)[0].tokens == [1, 2]


def test_a_beam_out_of_room_gives_its_unfinished_texts_best_first():
    clip = SearchState(
        texts=[[1], [2], [3]], sums=[-3.0, -1.0, -2.0], finished=[Candidate([9], -5, True)]
    )
    found = Beam(eot=0, beam_size=3).candidates(clip)
    assert [candidate.tokens for candidate in found] == [[9], [2], [3]]
    assert [candidate.ended for candidate in found] == [True, False, False]
