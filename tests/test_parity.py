"""The comparison with openai-whisper: it sees every difference, and finds none."""

from pathlib import Path

import pytest
import torch

from asrmask import Recording, Spectrogram, detect_language, parity, upstream
from asrmask.audio import N_FRAMES
from asrmask.corpus import Clip, from_manifest
from asrmask.parity import compare_languages, compare_long, first_difference
from asrmask.tokenizer import get_tokenizer
from asrmask.transcription import Segment, Transcription, Word

pytestmark = pytest.mark.usefixtures("one_thread")


# --- differences


def made():
    """A transcription of two segments, the first with word times."""
    words = [Word(" So", 0.0, 0.4, 0.9), Word(" it", 0.4, 0.6, 0.8)]
    return Transcription(
        " So it is.",
        [
            Segment(0, 0, 0.0, 1.0, " So it", [1, 2], 0.0, -0.2, 1.1, 0.01, words),
            Segment(1, 0, 1.0, 2.0, " is.", [3], 0.0, -0.2, 1.1, 0.01),
        ],
    )


CHANGES = {
    "language": (lambda t: t.update(language="de"), "language: ours en, theirs de"),
    "seek": (lambda t: t["segments"][1].update(seek=9), "segment 1, seek: ours 0, theirs 9"),
    "start": (lambda t: t["segments"][0].update(start=0.02), "segment 0, start: ours 0.0, theirs"),
    "end": (lambda t: t["segments"][1].update(end=2.02), "segment 1, end: ours 2.0, theirs 2.02"),
    "text": (lambda t: t["segments"][1].update(text=""), "segment 1, text: ours ' is.', theirs ''"),
    "tokens": (lambda t: t["segments"][1]["tokens"].append(4), "segment 1, tokens: ours [3], "),
    "temperature": (lambda t: t["segments"][0].update(temperature=0.2), "segment 0, temperature: "),
    "word": (
        lambda t: t["segments"][0]["words"][1].update(word=" is"),
        "segment 0, word 1, word: ours  it, theirs  is",
    ),
    "word's start": (
        lambda t: t["segments"][0]["words"][1].update(start=0.5),
        "segment 0, word 1, start: ours 0.4, theirs 0.5",
    ),
    "word's end": (
        lambda t: t["segments"][0]["words"][0].update(end=0.5),
        "segment 0, word 0, end: ours 0.4, theirs 0.5",
    ),
    "fewer words": (lambda t: t["segments"][0]["words"].pop(), "segment 0: other words"),
    "no words": (lambda t: t["segments"][0].pop("words"), "segment 0: other words"),
    "fewer segments": (lambda t: t["segments"].pop(), "ours 2 segments, theirs 1"),
    "more segments": (
        lambda t: t["segments"].append(t["segments"][0]),
        "ours 2 segments, theirs 3",
    ),
    "whole text": (lambda t: t.update(text=" So it is"), "text"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_difference_is_named(name):
    change, expected = CHANGES[name]
    theirs = made().as_dict()
    change(theirs)
    assert first_difference(made(), theirs).startswith(expected)


def test_no_difference_is_none():
    theirs = made().as_dict()
    assert first_difference(made(), theirs) is None
    # how sure the model was may differ in the last digits
    theirs["segments"][0].update(avg_logprob=-0.3, no_speech_prob=0.02, compression_ratio=1.2)
    theirs["segments"][0]["words"][0]["probability"] = 0.5
    assert first_difference(made(), theirs) is None


def test_the_first_difference_is_the_one_named():
    theirs = made().as_dict()
    theirs["segments"][1]["end"] = theirs["segments"][0]["end"] = 9.0
    assert first_difference(made(), theirs).startswith("segment 0, end")


def test_one_difference_anywhere_is_the_verdict(monkeypatch, capsys):
    other = made().as_dict()
    other["segments"][1]["end"] = 9.0
    results = {"a": made().as_dict(), "b": other}
    monkeypatch.setattr(
        parity, "_both", lambda *given, **choices: (made(), results[given[2].path.name])
    )
    same, different = [Clip(Path(name)) for name in "ab"]
    for compare in (compare_long, compare_languages):
        assert compare([same], None, None)
        assert not compare([different, same], None, None)
        said = capsys.readouterr().out
        assert "segment 1, end: ours 2.0, theirs 9.0" in said
        assert "equal" in said


# --- manifests


# --- the same as openai-whisper


@pytest.fixture(scope="module")
def base_twin(base_model):
    return upstream.twin(base_model)


@pytest.fixture(scope="module")
def spoken(shared):
    """A German and a French clip."""
    names = ("fleurs-de-004.ogg", "fleurs-fr-000.ogg")
    return [clip for clip in from_manifest(shared / "fleurs") if clip.path.name in names]


def test_languages_are_transcribed_and_translated_as_upstream_does(
    base_model, base_twin, spoken, capsys
):
    assert compare_languages(spoken, base_model, base_twin)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        f"transcribe: equal ({clip.language}); translate: equal ({clip.language})"
        for clip in spoken
    ]


def test_languages_of_a_batch_are_those_of_each_clip_and_upstream_s(base_model, base_twin, spoken):
    windows = []
    for clip in spoken:
        spectrogram = Spectrogram(Recording.open(clip.path), base_model.dims.n_mels)
        n_frames = min(spectrogram.n_frames, N_FRAMES)
        windows.append(spectrogram.window(0, n_frames, fill="silence"))
    mel = torch.stack([window.mel for window in windows])
    tokens, probs = detect_language(base_model, mel)
    their_tokens, their_probs = upstream.whisper().detect_language(base_twin, mel)
    known = get_tokenizer(multilingual=True, num_languages=99).language_tokens
    assert tokens.tolist() == their_tokens.tolist() == [known[clip.language] for clip in spoken]
    for ours, theirs, clip in zip(probs, their_probs, spoken, strict=True):
        assert max(ours, key=ours.get) == clip.language
        assert ours == pytest.approx(theirs, abs=1e-5)
        assert sum(ours.values()) == pytest.approx(1)
    token, single = detect_language(base_model, windows[1])
    assert token == tokens[1]
    assert single == pytest.approx(probs[1], abs=1e-5)


def test_words_of_a_long_recording_are_timed_as_upstream_does(model, upstream_model, shared):
    clip = Clip(shared / "longform" / "sonnet2.mp3")
    ours, theirs = parity._both(model, upstream_model, clip, word_timestamps=True)
    assert len(ours.segments) > 5
    assert all(segment.words for segment in ours.segments)
    assert first_difference(ours, theirs) is None
