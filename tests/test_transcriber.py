"""The window loop: equal to openai-whisper's, and defined at every edge."""

import csv
import io
import json
import re

import numpy as np
import pytest
import torch

from asrmask import (
    DecodingOptions,
    Recording,
    Whisper,
    decode,
    load_audio,
    load_model,
    log_mel_spectrogram,
    pad_or_trim,
    transcribe_all,
)
from asrmask.audio.constants import SAMPLE_RATE
from asrmask.decoding import task
from asrmask.errors import AudioError, OptionError
from asrmask.model.dimensions import ModelDimensions
from asrmask.systems import upstream
from asrmask.tokenizer.tokenizer import get_tokenizer
from asrmask.transcription.api import stream, transcribe
from asrmask.transcription.settings import Settings, split_options
from asrmask.transcription.window_loop import Callbacks, Prompt

SAME = ("id", "seek", "start", "end", "text", "tokens", "temperature")


def both(model, upstream_model, samples, **options):
    torch.manual_seed(0)
    ours = transcribe(model, samples, **options)
    torch.manual_seed(0)
    theirs = upstream.whisper().transcribe(upstream_model, samples, fp16=False, **options)
    return ours, theirs


def assert_equal(ours, theirs):
    assert ours["text"] == theirs["text"]
    assert ours["language"] == theirs["language"]
    assert len(ours["segments"]) == len(theirs["segments"])
    for a, b in zip(ours["segments"], theirs["segments"], strict=True):
        assert list(a) == list(b)
        assert [a[name] for name in SAME] == [b[name] for name in SAME]
        for name in ("avg_logprob", "no_speech_prob", "compression_ratio"):
            assert a[name] == pytest.approx(b[name], abs=1e-4)
        for word, other in zip(a.get("words", []), b.get("words", []), strict=True):
            assert [word[k] for k in ("word", "start", "end")] == [
                other[k] for k in ("word", "start", "end")
            ]
            assert word["probability"] == pytest.approx(other["probability"], abs=1e-3)


@pytest.fixture(scope="module")
def speech(samples):
    """Sample clips in a row: 35 s, two windows."""
    clips = [load_audio(path) for path in samples]
    return np.concatenate(clips * 2)[: 35 * SAMPLE_RATE]


OPTIONS = {
    "defaults": {},
    "beam, no conditioning": {"beam_size": 2, "condition_on_previous_text": False},
    "words": {"word_timestamps": True},
    "prompt": {"initial_prompt": "Sense and Sensibility.", "carry_initial_prompt": True},
    "clips": {"clip_timestamps": "3,9.5,20,28"},
    "clips, words": {"clip_timestamps": [0, 8, 12], "word_timestamps": True},
    "no times": {"without_timestamps": True, "temperature": 0.0},
    "fallback": {
        "logprob_threshold": -0.15,
        "temperature": (0.0, 0.4, 0.8),
        "best_of": 2,
        "clip_timestamps": "0,8,24.5,34",
    },
    "silence skipped": {"word_timestamps": True, "hallucination_silence_threshold": 0.3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_loop_equals_upstream(model, upstream_model, speech, name):
    ours, theirs = both(model, upstream_model, speech, **OPTIONS[name])
    assert_equal(ours, theirs)
    assert len({segment.seek for segment in ours.segments}) >= 2
    assert (max(segment.temperature for segment in ours.segments) == 0.8) == (name == "fallback")


def silence(seconds):
    return np.zeros(int(seconds * SAMPLE_RATE), dtype=np.float32)


def noise(seconds):
    rng = np.random.default_rng(0)
    return rng.normal(0, 0.05, int(seconds * SAMPLE_RATE)).astype(np.float32)


EDGES = {
    "silence": lambda speech: silence(5),
    "noise": lambda speech: noise(5),
    "0.1 s": lambda speech: speech[:1600],
    "exactly 30 s": lambda speech: speech[: 30 * SAMPLE_RATE],
    "30 s and one sample": lambda speech: speech[: 30 * SAMPLE_RATE + 1],
    "30 s and one frame": lambda speech: speech[: 30 * SAMPLE_RATE + 160],
    "speech from 29.9 s": lambda speech: np.concatenate([silence(29.9), speech[: 7 * SAMPLE_RATE]]),
    "silence within": lambda speech: np.concatenate(
        [speech[:112_000], silence(8), speech[:48_000]]
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges_equal_upstream(model, upstream_model, speech, name):
    samples = EDGES[name](speech)
    assert_equal(*both(model, upstream_model, samples, temperature=0.0, word_timestamps=True))


@pytest.mark.parametrize("n_samples", [0, 1, 159])
def test_less_than_a_frame_is_an_empty_transcription(model, n_samples):
    result = transcribe(model, np.zeros(n_samples, dtype=np.float32))
    assert result.text == ""
    assert result.segments == []
    assert result.language == "en"


def test_segments_come_one_by_one(model, speech):
    running = stream(model, speech, Settings(temperature=0.0))
    first = next(iter(running))
    assert first.id == 0
    assert first.text
    assert 0 < running.seek < running.n_frames  # the rest is still to do
    rest = list(running)
    result = running.result()
    assert [first, *rest] == result.segments
    assert running.seek == running.n_frames


def test_result_reads_as_a_dictionary(model, sample):
    result = transcribe(model, sample, temperature=0.0)
    assert dict(result) == {name: result[name] for name in ("text", "segments", "language")}
    assert result["segments"][0]["text"] == result.segments[0].text
    assert "words" not in result.segments[0]
    with pytest.raises(KeyError):
        result["words"]
    plain = result.to_dict()
    assert type(plain["segments"][0]) is dict


@pytest.mark.parametrize(
    "bad",
    [
        {"clip_timestamps": "a,b"},
        {"clip_timestamps": "-1,2"},
        {"clip_timestamps": [{"start": 0.0, "end": 1.0}]},
        {"temperature": ()},
        {"language": "xx"},
    ],
)
def test_bad_options_are_refused(model, sample, bad):
    with pytest.raises(OptionError):
        transcribe(model, sample, **bad)


@pytest.mark.parametrize("error", [TypeError, OptionError])
def test_unknown_options_are_refused_with_the_one_that_is_meant(model, sample, error):
    with pytest.raises(error, match=r"option beamsize: did you mean beam_size\?"):
        transcribe(model, sample, beamsize=5)
    with pytest.raises(error, match=r"option word_timestamp: did you mean word_timestamps\?"):
        transcribe_all(model, [sample], word_timestamp=True)
    with pytest.raises(error, match=r"option langauge: did you mean language\?"):
        model.decode(torch.zeros(80, 3000), langauge="en")
    with pytest.raises(error, match=r"option xyz$"):
        transcribe(model, sample, xyz=5)


def test_a_loaded_model_has_upstream_s_methods(model, sample):
    result = model.transcribe(str(sample), temperature=0.0)
    assert result.text == transcribe(model, sample, temperature=0.0).text
    mel = log_mel_spectrogram(pad_or_trim(load_audio(sample)))
    assert model.decode(mel, DecodingOptions()).tokens == decode(model, mel).tokens
    with pytest.raises(OptionError, match="multilingual"):
        model.detect_language(mel)


def test_results_tell_their_length_and_language_and_become_json(model, sample):
    result = transcribe(model, sample, temperature=0.0)
    assert result.duration == len(load_audio(sample)) / SAMPLE_RATE
    assert (result.language, result.language_probability) == ("en", 1.0)
    assert list(json.loads(json.dumps(result.to_dict()))) == ["text", "segments", "language"]


def test_a_detected_language_has_its_probability(base_model, sample):
    result = transcribe(base_model, sample, temperature=0.0)
    mel = log_mel_spectrogram(pad_or_trim(load_audio(sample)))
    _, probabilities = base_model.detect_language(mel)
    assert result.language == "en"
    assert result.language_probability == pytest.approx(probabilities["en"], abs=1e-4)


def test_audio_may_be_a_path_bytes_an_open_file_or_a_pipe(model, sample):
    expected = load_audio(sample)

    class Pipe(io.RawIOBase):
        """Gives bytes, and cannot seek."""

        def __init__(self):
            self.left = sample.read_bytes()

        def readable(self):
            return True

        def readinto(self, buffer):
            part, self.left = self.left[: len(buffer)], self.left[len(buffer) :]
            buffer[: len(part)] = part
            return len(part)

    with sample.open("rb") as file:
        for source in (sample, str(sample), sample.read_bytes(), file, Pipe()):
            assert np.array_equal(load_audio(source), expected)
        assert not file.closed
    text = transcribe(model, sample, temperature=0.0).text
    assert transcribe(model, io.BytesIO(sample.read_bytes()), temperature=0.0).text == text
    with pytest.raises(AudioError, match=r"audio \(StringIO\): it gives text, expected"):
        load_audio(io.StringIO("words"))
    with pytest.raises(AudioError, match=r"audio \(bytes\): empty, got 0 bytes"):
        load_audio(b"")


def test_cpu_threads_are_pytorch_s():
    n_threads = torch.get_num_threads()
    try:
        load_model("tiny.en", cpu_threads=n_threads + 1)
        assert torch.get_num_threads() == n_threads + 1
    finally:
        torch.set_num_threads(n_threads)
    with pytest.raises(OptionError, match="cpu_threads must be 0 or more, got -1"):
        load_model("tiny.en", cpu_threads=-1)


@pytest.mark.parametrize("dtype", ["int16", "int32", "float64"])
@pytest.mark.parametrize("layout", ["mono", "channels first", "channels last"])
def test_samples_may_be_integers_and_have_channels(sample, dtype, layout):
    expected = load_audio(sample)
    scale = {"int16": 2**15, "int32": 2**31}.get(dtype, 1)
    samples = (expected.astype(np.float64) * scale).astype(dtype)
    if layout != "mono":
        samples = np.stack([samples, np.zeros_like(samples)], axis=layout == "channels last")
        expected = expected / 2
    for given in (samples, torch.from_numpy(samples)):
        assert np.array_equal(Recording.of(given).read(0, len(expected)), expected)


@pytest.mark.parametrize(
    "samples",
    [
        np.array([np.nan] * 1600),
        np.zeros((20, 1600)),
        np.zeros((0, 1600)),
        np.zeros((2, 2, 1600)),
        np.zeros(1600, np.uint8),
        np.zeros(1600, bool),
        np.array(["a"]),
    ],
)
def test_bad_samples_are_refused(model, samples):
    with pytest.raises(AudioError, match="samples must be"):
        transcribe(model, samples)


def test_a_multilingual_recording_has_its_language_window_by_window(monkeypatch, speech):
    """Weights do not matter here: the languages are given, and so is what is done with them."""
    torch.manual_seed(0)
    model = Whisper(ModelDimensions(80, 1500, 32, 2, 1, 51_865, 448, 32, 2, 1)).eval()
    languages = iter(["de", "ja", "fr"])
    prompts_seen = []

    def language_of(model, encoded, tokenizer):
        return [(next(languages), {})]

    def spy(model, encoded, prompts, *rest, **options):
        prompts_seen.append(prompts[0].tolist())
        return search(model, encoded, prompts, *rest, **options)

    search = task.search
    monkeypatch.setattr(task, "language_of", language_of)
    monkeypatch.setattr(task, "search", spy)
    options = {
        "language": "en",
        "temperature": 0.0,
        "max_new_tokens": 4,
        "chunk_length": 10,
        "without_timestamps": True,
        "condition_on_previous_text": False,
        "no_speech_threshold": None,
    }
    samples = speech[: 30 * SAMPLE_RATE]
    result = transcribe(model, samples, multilingual=True, **options)
    assert [segment.language for segment in result.segments] == ["de", "ja", "fr"]
    assert [segment.seek for segment in result.segments] == [0, 1000, 2000]
    known = get_tokenizer(True).language_tokens
    assert [prompt[1] for prompt in prompts_seen] == [known["de"], known["ja"], known["fr"]]
    assert result.language == "en"
    prompts_seen.clear()
    result = transcribe(model, samples, **options)
    assert {prompt[1] for prompt in prompts_seen} == {known["en"]}
    assert all("language" not in segment for segment in result.segments)
    assert all(len(segment.tokens) <= 4 for segment in result.segments)


def test_languages_by_window(base_model, shared):
    clips = {}
    with (shared / "fleurs" / "manifest.tsv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            clips.setdefault(row["lang"], shared / "fleurs" / row["path"])
    two = dict(list(clips.items())[:2])
    parts = [pad_or_trim(load_audio(path)) for path in two.values()]
    options = {"multilingual": True, "temperature": 0.0, "word_timestamps": True}
    result = transcribe(base_model, np.concatenate(parts), **options)
    found = {(segment.start >= 30, segment.language) for segment in result.segments}
    assert found == {(i > 0, language) for i, language in enumerate(two)}


@pytest.mark.parametrize("cut_at_pauses", [False, True])
def test_windows_are_no_longer_than_chunk_length(model, speech, cut_at_pauses):
    sizes = []
    watch = Callbacks(on_attempt=lambda window, *rest: sizes.append(window.n_frames))
    settings = Settings(temperature=0.0, chunk_length=8, cut_at_pauses=cut_at_pauses)
    samples = speech[: 20 * SAMPLE_RATE]
    result = stream(model, samples, settings, DecodingOptions(sample_len=4), watch).result()
    assert 2 <= len(sizes) == len({segment.seek for segment in result.segments})
    assert max(sizes) <= 800


@pytest.mark.parametrize("length", [0, 0.5, -1, 31, float("nan"), float("inf")])
def test_chunk_lengths_that_cannot_be_are_refused_in_one_line(length):
    message = re.escape(f"chunk_length must be in 1..30 seconds, got {length}")
    with pytest.raises(OptionError, match=f"^{message}$"):
        Settings(chunk_length=length).check()


def test_options_have_faster_whisper_s_names_too():
    settings, options = split_options({"log_prob_threshold": -0.5, "max_new_tokens": 7})
    assert (settings.logprob_threshold, options.sample_len) == (-0.5, 7)
    assert (settings, options) == split_options({"logprob_threshold": -0.5, "sample_len": 7})
    message = "^log_prob_threshold is another name of logprob_threshold, got both$"
    with pytest.raises(OptionError, match=message):
        split_options({"log_prob_threshold": -0.5, "logprob_threshold": -0.5})


def test_prompt_keeps_the_initial_text_in_front_when_asked():
    plain = Prompt([1, 2], carry=False, max_tokens=7)
    plain.previous += [3, 4]
    assert plain.tokens == [1, 2, 3, 4]
    plain.reset()
    assert plain.tokens == []
    carried = Prompt([1, 2], carry=True, max_tokens=7)
    carried.previous += [3, 4, 5, 6, 7, 8, 9]
    assert carried.tokens == [1, 2, 5, 6, 7, 8, 9]
    carried.reset()
    assert carried.tokens == [1, 2]
