"""Voice activity, and the prompt of a window: hotwords and the prefix."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asrmask import load_audio
from asrmask.audio.constants import N_SAMPLES, SAMPLE_RATE
from asrmask.audio.recording import Recording
from asrmask.audio.vad import FRAME, VadOptions, probabilities, speech_spans
from asrmask.errors import OptionError
from asrmask.tokenizer.tokenizer import get_tokenizer
from asrmask.transcription import stream as stream_module
from asrmask.transcription.api import stream, transcribe, transcribe_all
from asrmask.transcription.result import Segment, Word
from asrmask.transcription.settings import Settings
from asrmask.transcription.speech import Speech
from asrmask.transcription.window_loop import Prompt

SLACK_S = 0.3  # silence within the clips' own ends, and the width of a word's edge


pytestmark = pytest.mark.usefixtures("one_thread")


def silence(seconds):
    return np.zeros(int(seconds * SAMPLE_RATE), dtype=np.float32)


def noise(seconds):
    return np.random.default_rng(0).normal(0, 0.003, int(seconds * SAMPLE_RATE)).astype(np.float32)


@pytest.fixture(scope="module")
def clips(samples):
    return [load_audio(path) for path in samples]


@pytest.fixture(scope="module")
def gapped(clips):
    """Noise, speech, 8 s of silence, speech, noise: samples, and (start, end) of the speech."""
    first, second = clips[1], clips[2]
    parts = [noise(3), first, silence(8), second, noise(3)]
    ends = np.cumsum([len(part) for part in parts]) / SAMPLE_RATE
    return np.concatenate(parts), [(ends[0], ends[1]), (ends[2], ends[3])]


@pytest.fixture(scope="module")
def long(clips):
    """70 s of speech, silence and noise, over two borders of the pieces it is read in."""
    parts = [noise(2), *clips, silence(3), *clips[::-1], noise(4), *clips]
    return np.concatenate(parts)[: 70 * SAMPLE_RATE - 100]


@pytest.fixture(scope="module")
def silero():
    import silero_vad

    torch.set_num_threads(1)
    return silero_vad


@pytest.fixture
def detector(silero):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its own
        return silero.load_silero_vad()


def within(start, end, spans, slack=SLACK_S):
    return any(a - slack <= start and end <= b + slack for a, b in spans)


# --- where there is speech


def test_speech_is_found_and_silence_and_noise_are_not(gapped):
    samples, speech = gapped
    found = speech_spans(Recording.of(samples), VadOptions(speech_pad_ms=0))
    assert len(found) == len(speech)
    for (start, end), (a, b) in zip(found, speech, strict=True):
        assert (start, end) == (pytest.approx(a, abs=SLACK_S), pytest.approx(b, abs=SLACK_S))
    padded = speech_spans(Recording.of(samples), VadOptions())
    expected = [(start - 0.4, end + 0.4) for start, end in found]
    np.testing.assert_allclose(padded, expected, atol=1e-9)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"threshold": 0.8, "neg_threshold": 0.6, "speech_pad_ms": 30},
        {"min_silence_duration_ms": 100, "min_speech_duration_ms": 250, "speech_pad_ms": 30},
        {"min_silence_duration_ms": 300, "max_speech_duration_s": 5.0},
    ],
)
def test_spans_are_silero_s_of_the_whole_recording(long, silero, detector, choices):
    options = VadOptions(**choices)
    theirs = silero.get_speech_timestamps(torch.from_numpy(long), detector, **vars(options))
    assert len(theirs) > 1
    assert speech_spans(Recording.of(long), options) == [
        (span["start"] / SAMPLE_RATE, span["end"] / SAMPLE_RATE) for span in theirs
    ]


def test_probabilities_do_not_depend_on_the_pieces_that_are_read(long, detector):
    found = probabilities(Recording.of(long))
    assert len(long) > 2 * N_SAMPLES
    assert len(found) == -(-len(long) // FRAME)
    padded = np.pad(long, (0, len(found) * FRAME - len(long)))
    with torch.no_grad():
        whole = [detector(frame, 16_000).item() for frame in torch.from_numpy(padded).split(FRAME)]
    np.testing.assert_allclose(found, whole, atol=1e-6)


@pytest.mark.parametrize("n_samples", [0, 1, FRAME, FRAME + 1])
def test_recordings_of_any_length_have_probabilities(n_samples):
    recording = Recording.of(np.zeros(n_samples, dtype=np.float32))
    assert len(probabilities(recording)) == -(-n_samples // FRAME)
    assert speech_spans(recording, VadOptions()) == []


def test_the_number_of_threads_stays_as_it_was(gapped):
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        speech_spans(Recording.of(gapped[0][:16_000]), VadOptions())
        assert torch.get_num_threads() == n_threads
    broken = Recording(16_000, lambda start, stop: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        probabilities(broken)
    assert torch.get_num_threads() == n_threads
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("choices", "problem"),
    [
        ({"threshold": 1.5}, "threshold must be in 0..1, got 1.5"),
        ({"threshold": float("nan")}, "threshold must be in 0..1, got nan"),
        ({"neg_threshold": -0.1}, "neg_threshold must be in 0..1, got -0.1"),
        ({"min_speech_duration_ms": -1}, "min_speech_duration_ms must be 0 or more, got -1"),
        ({"min_silence_duration_ms": -1}, "min_silence_duration_ms must be 0 or more, got -1"),
        ({"speech_pad_ms": -1}, "speech_pad_ms must be 0 or more, got -1"),
        ({"max_speech_duration_s": 0}, "max_speech_duration_s must be above 0, got 0"),
        ({"max_speech_duration_s": float("nan")}, "max_speech_duration_s must be above 0, got nan"),
    ],
)
def test_values_that_cannot_be_are_refused_in_one_line(choices, problem):
    with pytest.raises(OptionError) as caught:
        VadOptions(**choices)
    assert str(caught.value) == problem
    with pytest.raises(OptionError):
        Settings(vad_filter=True, vad_parameters=choices).check()


def test_unknown_options_are_refused_in_one_line():
    with pytest.raises(
        OptionError, match=r"^vad_parameters must be of threshold, .*, got \['x'\]$"
    ):
        Settings(vad_filter=True, vad_parameters={"x": 1}).check()


# --- only where there is speech


def assert_in_order(result, duration_s):
    times = [time for segment in result.segments for time in (segment.start, segment.end)]
    assert times == sorted(times)
    assert not times or 0 <= times[0] <= times[-1] <= duration_s
    words = [word for segment in result.segments for word in segment.words or ()]
    times = [time for word in words for time in (word.start, word.end)]
    assert times == sorted(times)
    for segment in result.segments:
        if segment.words:
            assert (segment.start, segment.end) == (segment.words[0].start, segment.words[-1].end)


def test_neighbouring_speech_is_read_in_one_window(model, shared):
    choices = {"min_silence_duration_ms": 500}
    audio = str(shared / "jfk.flac")
    assert len(speech_spans(Recording.open(audio), VadOptions(**choices))) == 4
    result = transcribe(model, audio, vad_filter=True, vad_parameters=choices, temperature=0.0)
    first, second = result.segments  # as faster-whisper's: 0 … 7.58 and 7.58 … 10.58
    assert first.text.strip() == (
        "And so my fellow Americans ask not what your country can do for you"
    )
    assert second.text.strip() == "ask what you can do for your country."
    assert (first.start, second.start, second.seek) == (0, first.end, 0)
    assert (first.end, second.end) == (pytest.approx(7.58, abs=0.2), pytest.approx(10.58, abs=0.2))
    assert_in_order(result, 11.0)


MODES = {
    "default": {},
    "words": {"word_timestamps": True},
    "fast": {"padding": "virtual", "cut_at_pauses": True, "without_timestamps": True},
    "fast with words": {"padding": "virtual", "cut_at_pauses": True, "word_timestamps": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_only_speech_is_transcribed_and_times_are_those_of_the_recording(model, gapped, mode):
    samples, speech = gapped
    options = {"vad_filter": True, "temperature": 0.0, "language": "en", **MODES[mode]}
    result = transcribe(model, samples, **options)
    assert result.duration == len(samples) / SAMPLE_RATE
    assert_in_order(result, result.duration)
    for text in ("young man", "selfish is to be"):
        assert text in result.text
    padded = speech_spans(Recording.of(samples), VadOptions())
    assert {segment.seek for segment in result.segments} == {round(100 * padded[0][0])}
    if "word_timestamps" in options:
        words = [word for segment in result.segments for word in segment.words]
        assert all(within(word.start, word.end, padded, slack=0.01) for word in words)
        for (a, b), text in zip(speech, ("young man", "selfish is to be"), strict=True):
            assert text in "".join(word.word for word in words if a - 0.5 <= word.start <= b)
    (together,) = transcribe_all(model, [samples], batch_size=2, **options)
    assert together.to_dict() == result.to_dict()


def test_a_stream_has_the_times_of_the_recording_and_the_progress_of_its_speech(model, gapped):
    samples, _ = gapped
    running = stream(model, samples, Settings(vad_filter=True, temperature=0.0))
    kept_s = sum(b - a for a, b in speech_spans(Recording.of(samples), VadOptions()))
    assert running.n_frames == int(100 * kept_s)
    segments = list(running)
    assert segments == running.result().segments
    assert running.seek == running.n_frames
    assert segments[-1].end > 8 + kept_s


@pytest.mark.parametrize("nothing", [silence(40), noise(40)], ids=["silence", "noise"])
def test_a_recording_without_speech_has_no_segments(model, monkeypatch, nothing):
    monkeypatch.setattr(stream_module, "decode_encoded", lambda *given: pytest.fail("was decoded"))
    result = transcribe(model, nothing, vad_filter=True)
    assert (result.text, result.segments, result.language) == ("", [], "en")


def test_clips_and_speech_give_what_lies_in_both(model, gapped):
    samples, ((_, _), (c, d)) = gapped
    middle = (c + d) / 2
    asked = {"clip_timestamps": [c - 4, middle], "temperature": 0.0, "without_timestamps": True}
    result = transcribe(model, samples, vad_filter=True, **asked)
    (segment,) = result.segments
    assert segment.start == pytest.approx(c - 0.4, abs=SLACK_S)
    assert segment.end == pytest.approx(middle, abs=0.02)
    assert "cold" in segment.text
    assert transcribe(model, samples, vad_filter=True, clip_timestamps=[0, 2]).segments == []


# --- what was kept, and its times


SPANS = [(1.0, 3.0), (3.0, 4.0), (60.0, 61.5), (80.0, 90.0)]  # the first two without a silence


def test_what_is_kept_is_the_spans_one_after_the_other():
    whole = np.random.default_rng(0).normal(size=95 * SAMPLE_RATE).astype(np.float32)
    kept = Speech(Recording.of(whole), SPANS).recording
    parts = [whole[int(a * SAMPLE_RATE) : int(b * SAMPLE_RATE)] for a, b in SPANS]
    expected = np.concatenate(parts)
    assert kept.n_samples == len(expected)
    borders = [0, 1, 32_000, 47_999, 48_000, 48_001, 72_000, 100_000, len(expected)]
    for start in borders:
        for stop in [b for b in borders if b >= start]:
            assert np.array_equal(kept.read(start, stop), expected[start:stop])


def test_frames_of_the_recording_are_found_in_what_is_kept():
    speech = Speech(Recording.of(silence(95)), SPANS)
    frames = {0: 0, 100: 0, 150: 50, 400: 300, 3000: 300, 6000: 300, 6100: 400, 9500: 1450}
    assert {frame: speech.frame(frame) for frame in frames} == frames
    assert Speech(Recording.of(silence(9)), []).frame(900) == 0


def segment(start, end, words=None):
    return Segment(0, round(100 * start), start, end, "x", [], 0.0, 0.0, 1.0, 0.0, words)


def restored(start, end, slack_s=0.4, words=()):
    words = [Word("x", *times, 1.0) for times in words]
    found = segment(start, end, words or None)
    Speech(Recording.of(silence(95)), SPANS, slack_s).restore(found)
    return found


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ((0.0, 2.5), (1.0, 3.5)),
        ((1.0, 3.0), (2.0, 4.0)),  # an end at a cut is before the silence
        ((3.0, 4.0), (60.0, 61.0)),  # a start at a cut is behind it
        ((1.0, 3.3), (2.0, 4.0)),  # an end in the pause behind a cut
        ((2.8, 4.0), (60.0, 61.0)),  # a start in the pause before it
        ((1.0, 3.5), (2.0, 60.5)),  # speech on both sides
        ((2.7, 2.9), (3.7, 3.9)),
        ((3.0, 3.0), (60.0, 60.0)),
        ((14.0, 14.9), (89.5, 90.0)),  # past the end
    ],
)
def test_segments_are_brought_to_the_times_of_the_recording(kept, expected):
    found = restored(*kept)
    assert (found.start, found.end) == expected


def test_a_word_lies_on_one_side_of_a_silence_and_segments_follow_their_words():
    found = restored(2.0, 4.0, words=[(2.0, 2.6), (2.6, 3.1), (3.1, 3.2), (2.9, 4.0)])
    times = [(word.start, word.end) for word in found.words]
    assert times == [(3.0, 3.6), (3.6, 4.0), (60.1, 60.2), (60.0, 61.0)]
    assert (found.start, found.end, found.seek) == (3.0, 61.0, 300)


@given(st.lists(st.integers(0, 725), min_size=2, max_size=12), st.sampled_from([0, 0.4, 9.0]))
@settings(max_examples=200, deadline=None)
def test_times_stay_in_order_and_within_what_was_kept(steps, slack_s):
    points = sorted(steps)
    times = []
    for a, b in pairwise(points):
        found = restored(0.02 * a, 0.02 * b, slack_s)
        times += [found.start, found.end]
    assert times == sorted(times)
    assert all(within(time, time, SPANS, slack=0) for time in times)


# --- hotwords and prefix


def test_hotwords_come_before_all_else_and_leave_it_what_room_there_is():
    prompt = Prompt([1, 2], carry=False, max_tokens=8, hotwords=[7, 8, 9])
    assert prompt.tokens == [7, 8, 9, 1, 2]
    for n in range(3, 12):
        prompt.previous.append(n)
        said = list(range(1, n + 1))
        assert prompt.tokens == [7, 8, 9, *said[-5:]]
    prompt.reset()
    assert prompt.tokens == [7, 8, 9]


def test_hotwords_are_cut_to_the_room():
    prompt = Prompt([1, 2], carry=False, max_tokens=4, hotwords=[5, 6, 7, 8, 9])
    assert prompt.tokens == [5, 6, 7, 8]


def test_hotwords_go_with_a_carried_prompt():
    prompt = Prompt([1, 2], carry=True, max_tokens=8, hotwords=[9])
    for n in range(3, 12):
        prompt.previous.append(n)
        assert prompt.tokens == [9, 1, 2, *range(max(3, n - 4), n + 1)]


@pytest.fixture
def options_seen(monkeypatch):
    """The options that the decoder got in each window."""
    seen = []
    decode = stream_module.decode_encoded

    def spy(model, encoded, options):
        seen.append(options)
        return decode(model, encoded, options)

    monkeypatch.setattr(stream_module, "decode_encoded", spy)
    return seen


@pytest.fixture(scope="module")
def two_windows(clips):
    """31 s."""
    return np.concatenate([clips[0], clips[1], clips[2], clips[3], clips[4], clips[0]])


def test_hotwords_are_in_the_prompt_of_every_window_and_change_the_spelling(
    model, clips, options_seen
):
    hotwords = "Jon Dashwood"
    tokens = get_tokenizer(multilingual=False).encode(f" {hotwords}")
    samples = np.concatenate([clips[0], silence(23), clips[0]])
    result = transcribe(model, samples, hotwords=hotwords, temperature=0.0, language="en")
    assert len(options_seen) > 1
    assert all(options.prompt[: len(tokens)] == tokens for options in options_seen)
    assert result.text.count(hotwords) == 2


def test_prefix_begins_the_first_window_only_and_takes_the_place_of_hotwords(
    model, two_windows, options_seen
):
    result = transcribe(
        model, two_windows, prefix="And Mister", hotwords="Dashwood", temperature=0.0
    )
    assert result.text.startswith(" And Mister")
    assert result.segments[0].text.startswith(" And Mister")
    assert [options.prefix for options in options_seen] == [
        "And Mister",
        *[None] * (len(options_seen) - 1),
    ]
    assert len(options_seen) > 1
    assert options_seen[0].prompt == []


@pytest.mark.parametrize(
    "choices",
    [
        {"beam_size": 2, "word_timestamps": True},
        {"without_timestamps": True, "word_timestamps": True},
        {"temperature": (0.0, 0.2), "logprob_threshold": -0.01},
        {"without_timestamps": True, "padding": "virtual", "cut_at_pauses": True},
    ],
)
def test_the_text_goes_on_from_its_prefix(model, shared, choices):
    prefix = "And so my fellow Americans"
    asked = {"temperature": 0.0, **choices}
    audio = str(shared / "jfk.flac")
    torch.manual_seed(0)
    result = transcribe(model, audio, prefix=prefix, **asked)
    assert result.text.startswith(f" {prefix}")
    assert "ask what you can do for your country" in result.text.lower()
    first = result.segments[0]
    assert first.text.startswith(f" {prefix}")
    assert first.start == 0
    if "word_timestamps" in choices:
        spoken = [word.word.strip(",") for segment in result.segments for word in segment.words]
        assert spoken[:5] == [" And", " so", " my", " fellow", " Americans"]
        assert first.words[4].end == pytest.approx(2.2, abs=0.5)
    if "logprob_threshold" in choices:
        assert first.temperature == 0.2
    (other,) = transcribe_all(model, [audio], prefix=prefix, batch_size=2, **asked)
    assert other.text.startswith(f" {prefix}")
