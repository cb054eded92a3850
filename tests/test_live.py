"""Live transcription: the same events for any pieces, no cost in silence, bounded texts."""

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import asrmask
from asrmask.audio.recording import Recording, load_audio
from asrmask.audio.spectrogram import LiveSpectrogram, Spectrogram
from asrmask.audio.vad import FRAME, LiveDetector, probabilities
from asrmask.errors import AudioError, OptionError
from asrmask.evaluation.alignment import n_different
from asrmask.live import (
    AttentionGuided,
    LiveTranscriber,
    LocalAgreement,
    Transcript,
    commitment,
    push_all,
)
from asrmask.live.commitment import LiveWord, candidates
from asrmask.live.loop import SpeechTracker, after_tokens
from asrmask.live.settings import LiveSettings
from asrmask.transcription import scheduler
from asrmask.transcription.word_timing import WordTiming

RATE = 16_000
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def fast(model):
    return asrmask.load_model("tiny.en", device="cpu", compute_type="int8")


@pytest.fixture(scope="module")
def talk(samples):
    """The two shortest clips with pauses: the samples, and the transcript."""
    clips = sorted(samples.items(), key=lambda clip: len(clip[1]))[:2]
    pause = np.zeros(3 * RATE // 2, np.float32)
    audio = [part for path, _ in clips for part in (pause, load_audio(path))]
    return np.concatenate([*audio, pause]), " ".join(text for _, text in clips)


def pieces_of(audio, sizes):
    start = 0
    for size in sizes:
        if start >= len(audio):
            return
        yield audio[start : start + size]
        start += size


def forever(size):
    while True:
        yield size


def run_live(model, pieces, **options):
    """Every event, as a dictionary."""
    events = asrmask.listen(model, pieces, **options)
    return [event.to_dict() for event in events]


def text_of(events):
    return "".join(event["text"] for event in events if event["event"] == "committed")


def normal(text):
    return re.sub(r"[^a-z ]", "", text.lower().replace("-", " ")).split()


def n_wrong(text, transcript):
    return n_different(" ".join(normal(transcript)), " ".join(normal(text)))


# the spectrogram, and speech


def test_the_spectrogram_of_arriving_audio_is_that_of_the_recording(sample):
    audio = load_audio(sample)
    live = LiveSpectrogram(80)
    rng = random.Random(1)
    for piece in pieces_of(audio, iter(lambda: rng.randint(1, 3000), None)):
        live.add(piece)
    n = live.n_frames
    assert n == (len(audio) - 200) // 160 + 1
    whole = Spectrogram(Recording.of(audio), 80).window(0, n - 2, fill="zero")
    mine = live.window(0, n - 2)
    assert mine.n_frames == whole.n_frames
    torch.testing.assert_close(mine.frames, whole.frames, atol=1e-4, rtol=0)
    live.drop(100)
    part = live.window(100, 150)
    peak = live.window(100, n).frames.max()
    assert part.frames.shape == (80, 50)
    assert peak >= part.frames.max()
    for start, stop in [(99, 150), (100, n + 1), (120, 120)]:
        with pytest.raises(OptionError, match=re.escape(f"got {start}..{stop}")):
            live.window(start, stop)


def test_speech_is_detected_as_in_a_recording(sample):
    audio = load_audio(sample)
    detector = LiveDetector()
    n = len(audio) // FRAME
    live = [detector.probability(audio[i * FRAME : (i + 1) * FRAME]) for i in range(n)]
    np.testing.assert_allclose(live, probabilities(Recording.of(audio))[:n], atol=1e-6)


def test_speech_begins_and_goes_on_at_different_thresholds():
    pause = SpeechTracker(0.5)
    assert [pause.add(p, i) for i, p in enumerate([0.4, 0.6, 0.4, 0.6, 0.3])] == [
        *(False, True, False, False, False)
    ]
    assert pause.last_speech_s == 3
    assert pause.speech == [1, 2, 3]
    assert pause.speech_after(2.5) == pytest.approx((3 - 0.032, 0.032))
    assert pause.speech_after(4) == (4, 0)


# commitment


def words(text, **values):
    """Candidates of a text, a word a second."""
    return [
        LiveWord(WordTiming(f" {word}", [i], i, i + 1.0, 0.9, i + 0.5), **values)
        for i, word in enumerate(text.split())
    ]


def test_age_counts_updates_that_agree_up_to_a_word():
    timings = [word.timing for word in words("the cat sat")]
    previous = words("The cat, sits", age=2)
    assert [word.age for word in candidates(timings, previous)] == [3, 3, 1]
    assert [word.age for word in candidates(timings, [])] == [1, 1, 1]


def test_local_agreement_needs_age_and_distance():
    ready = LocalAgreement(n=2, margin=0.5, last=0.5, doubt=0.3, patience=1).n_ready
    assert ready(words("a b c", age=2), 10) == 3
    assert ready(words("a b c", age=1), 10) == 0
    assert ready(words("a b c", age=2), 3.4) == 2
    doubtful = words("a b c", age=2)
    doubtful[1].timing.probability = 0.2
    assert ready(doubtful, 2.9) == 1
    assert ready(doubtful, 10) == 3, "it ended long ago"
    doubtful[1].age = 3
    assert ready(doubtful, 2.9) == 2
    ready = LocalAgreement(n=2, margin=0.5, last=2.5).n_ready
    assert ready(words("a b c", age=2), 5) == 2, "the last word may go on"
    assert ready(words("a b c", age=2), 6) == 3


def test_attention_guided_stops_at_a_word_that_attends_to_the_newest_audio():
    ready = AttentionGuided(margin=0.5).n_ready
    assert ready(words("a b c"), 10) == 3
    assert ready(words("a b c"), 2.9) == 2
    late_first = words("a b c")
    late_first[0].timing.focus = 2.8
    assert ready(late_first, 3) == 0


def test_policies_are_parsed():
    assert commitment.parse("agreement,n=3,margin=0.2") == LocalAgreement(3, 0.2)
    assert commitment.parse("attention,margin=1") == AttentionGuided(1.0)
    for text in ("agree", "agreement,m=3", "agreement,n=x", "attention,0.3"):
        with pytest.raises(OptionError, match="got"):
            commitment.parse(text)


def test_words_after_a_prefix():
    class Tokens:
        def decode(self, tokens):
            return "".join(f"<{token}>" for token in tokens)

    timings = [
        WordTiming(" one", [1], 0, 1, 0.9),
        WordTiming(" two", [2, 3], 1, 2, 0.9),
        WordTiming(" three", [4], 2, 3, 0.9),
    ]
    texts = [[word.word for word in after_tokens(timings, n, Tokens())] for n in range(5)]
    assert texts == [
        [" one", " two", " three"],
        [" two", " three"],
        ["<3>", " three"],
        [" three"],
        [],
    ]


# the loop


def test_the_text_is_that_of_the_clips(fast, talk):
    audio, transcript = talk
    events = run_live(fast, [audio])
    assert n_wrong(text_of(events), transcript) <= 2
    ends = [event for event in events if event["event"] == "endpoint"]
    assert len(ends) >= 2
    found = [word for event in events if event["event"] == "committed" for word in event["words"]]
    times = [time for word in found for time in (word["start"], word["end"])]
    assert times == sorted(times)
    for event in events:
        if event["event"] == "committed":
            assert event["words"][-1]["end"] <= event["time"]
            assert event["text"] == "".join(word["word"] for word in event["words"])


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(lambda: forever(320), id="20 ms"),
        pytest.param(lambda: forever(10 * RATE), id="10 s"),
        pytest.param(lambda: iter(lambda: random.randint(0, 20_000), None), id="random"),
    ],
)
def test_events_do_not_depend_on_the_pieces(fast, talk, sizes):
    audio = talk[0]
    assert run_live(fast, pieces_of(audio, sizes())) == run_live(fast, [audio])


def test_pieces_of_one_sample_give_the_same(fast, talk):
    audio = talk[0][: 3 * RATE]
    assert run_live(fast, pieces_of(audio, forever(1))) == run_live(fast, [audio])


def test_integers_and_tensors_give_the_same(fast, talk):
    audio = talk[0]
    exact = (audio * 32768).round().astype(np.int16)
    events = run_live(fast, [exact])
    assert run_live(fast, [torch.from_numpy(exact / np.float32(32768))]) == events
    assert len(events) > 5


@pytest.mark.parametrize("policy", ["attention", "agreement,n=1,margin=1"])
def test_other_policies_transcribe_too(fast, talk, policy):
    audio, transcript = talk
    found, expected = normal(text_of(run_live(fast, [audio], commit=policy))), normal(transcript)
    assert abs(len(found) - len(expected)) <= 2
    assert len(set(found) & set(expected)) > 0.8 * len(set(expected))


def test_streams_in_batches_give_what_they_give_alone(fast, talk):
    audio = talk[0]
    others = [audio, audio[RATE // 2 :], audio[::-1].copy()]
    transcribers = [LiveTranscriber(fast) for _ in others]
    together = [[], [], []]
    for i in range(0, len(audio), 8000):
        pushed = push_all(transcribers, [other[i : i + 8000] for other in others])
        for events, new in zip(together, pushed, strict=True):
            events += new
    for events, one, other in zip(together, transcribers, others, strict=True):
        events += one.finish()
        assert [event.to_dict() for event in events] == run_live(fast, [other])


def test_a_late_stream_leaves_out_updates_and_commits_the_same_words(fast, talk):
    audio, transcript = talk
    live = LiveTranscriber(fast)
    events = [
        e for i in range(0, len(audio), 512) for e in live.push(audio[i : i + 512], late=True)
    ]
    events = [event.to_dict() for event in events + live.finish()]
    assert not [event for event in events if event["event"] == "partial"]
    assert n_wrong(text_of(events), transcript) <= 2


def test_speech_without_a_pause_stays_within_the_buffer(fast, samples, monkeypatch):
    """Speech that never pauses: windows are limited, and the text goes on."""
    clips = [load_audio(path) for path in samples]
    audio = np.concatenate([*clips, *clips])[: 40 * RATE]
    live = LiveTranscriber(fast, buffer=4.0, endpoint=10.0, step=1.0)
    monkeypatch.setattr(live.loop._detector, "probability", lambda piece: 1.0)
    longest, events = 0, []
    for i in range(0, len(audio), 8000):
        events += live.push(audio[i : i + 8000])
        longest = max(longest, live.loop._spectrogram.n_frames - live.loop._start)
    events += live.finish()
    assert longest < 3000
    text = normal("".join(e.text for e in events if e.kind == "committed"))
    expected = normal(" ".join(2 * list(samples.values())))[: len(text)]
    assert len(text) > 60
    assert len(set(text) & set(expected)) > 0.7 * len(set(expected))


def test_no_update_is_longer_than_its_audio_allows(fast, talk, monkeypatch):
    """A model that never ends its text: nothing runs away, and nothing of it is committed."""
    lengths = []

    def endless(model, requests):
        replies = []
        for request in requests:
            ((encoded, result),) = scheduler.decode_batch(model, [request])
            seconds = request.window.n_frames / 100
            lengths.append((request.options.sample_len, seconds))
            n = request.options.sample_len
            looping = [*(request.options.prefix or []), *([262] * n)]
            replies.append((encoded, replace(result, tokens=looping, ended=False)))
        return replies

    monkeypatch.setattr("asrmask.live.api.decode_batch", endless)
    events = run_live(fast, [talk[0]])
    assert lengths
    assert all(n <= 13 + 12 * seconds for n, seconds in lengths)
    assert text_of(events) == ""


def test_ten_minutes_without_speech_commit_nothing(fast, monkeypatch):
    """Silence, noise and music: the model is hardly asked."""
    n_asked = []

    def counted(model, requests):
        n_asked.append(len(requests))
        return scheduler.decode_batch(model, requests)

    monkeypatch.setattr("asrmask.live.api.decode_batch", counted)
    rng = np.random.default_rng(0)
    t = np.arange(20 * RATE) / RATE
    chord = sum(np.sin(2 * np.pi * f * t) for f in (220, 277.2, 329.6)) * (
        0.6 + 0.4 * np.sin(8 * t)
    )
    sounds = [
        np.zeros(20 * RATE),
        0.02 * rng.standard_normal(20 * RATE),
        0.1 * chord,
    ]
    events = run_live(fast, [sounds[i % 3].astype(np.float32) for i in range(30)])
    assert events == []
    assert sum(n_asked) < 10


def test_memory_does_not_grow(fast, talk):
    """What a stream holds is the same after each repetition of a talk."""
    live = LiveTranscriber(fast, step=2.0)
    sizes = []
    for _ in range(6):
        live.push(talk[0])
        held = live.loop
        sizes.append(held._spectrogram._frames.numel() + len(held._samples))
        assert len(held._committed) == len(held._prompt.previous) == 0
    assert max(sizes) < 80 * 300
    assert live.loop.take_events() == []


def test_earlier_utterances_may_be_the_prompt(fast, talk):
    prompts = []
    live = LiveTranscriber(fast, condition_on_previous_text=True, hotwords="Elinor", step=2.0)
    send = live.loop.send

    def watched(encoded, result):
        prompts.append(live.loop.asked.options.prompt)
        send(encoded, result)

    live.loop.send = watched
    live.push(talk[0])
    assert prompts[0] == live.loop._prompt.hotwords
    assert len(prompts[-1]) > len(prompts[0])


def test_bad_audio_and_options_are_refused(fast, talk):
    live = LiveTranscriber(fast)
    with pytest.raises(AudioError, match="finite numbers, got NaN"):
        live.push(np.array([0.0, np.nan], np.float32))
    events = live.push(talk[0]) + live.finish()
    assert len(events) > 5, "a bad piece changes nothing"
    with pytest.raises(OptionError, match=r"step must be in 0.05\.\.10, got 0"):
        LiveTranscriber(fast, step=0)
    with pytest.raises(OptionError, match="unknown option stepp: did you mean step"):
        LiveTranscriber(fast, stepp=1)
    with pytest.raises(OptionError, match="fill zero"):
        LiveSettings(padding="full,fill=silence").check()


def test_a_multilingual_model_keeps_the_language_it_detects(base_model, shared):
    path = sorted((shared / "fleurs").glob("fleurs-de-*"))[0]
    audio = load_audio(path)[: 6 * RATE]
    live = LiveTranscriber(base_model, step=4.0, padding="full")
    live.push(audio)
    live.finish()
    assert live.loop.language == "de"


# the transcript


def test_a_transcript_has_a_segment_for_each_utterance(fast, talk):
    transcript = Transcript()
    for event in asrmask.listen(fast, [talk[0]]):
        transcript.add(event)
    result = transcript.result(len(talk[0]) / RATE)
    assert n_wrong(result.text, talk[1]) <= 2
    assert len(result.segments) >= 2
    for segment in result.segments:
        assert segment.text == "".join(word.word for word in segment.words)
        assert segment.start == segment.words[0].start <= segment.end
    assert result.duration == len(talk[0]) / RATE
