"""Transcriptions as files: to the byte as openai-whisper writes them, and whole or not at all."""

import io
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whisper.utils import format_timestamp, get_writer

from asrmask.errors import OptionError
from asrmask.transcription import writers
from asrmask.transcription.result import Segment, Transcription, Word
from asrmask.transcription.writers import SubtitleLayout, save

FORMS = ["txt", "vtt", "srt", "tsv", "json"]


def transcription(*segments):
    """A transcription of (start, end, text, words) with words (text, start, end), or None."""
    made = [
        Segment(
            id=i,
            seek=0,
            start=start,
            end=end,
            text=text,
            tokens=[50_363, 314],
            temperature=0.0,
            avg_logprob=-0.25,
            compression_ratio=1.5,
            no_speech_prob=0.01,
            words=None if words is None else [Word(*word, probability=0.5) for word in words],
        )
        for i, (start, end, text, words) in enumerate(segments)
    ]
    return Transcription("".join(segment.text for segment in made), made, "en")


def ours(result, layout=None):
    """What we write: format → text."""
    files = {form: io.StringIO() for form in FORMS}
    for form, file in files.items():
        writers.WRITERS[form](result, file, layout or SubtitleLayout())
    return {form: file.getvalue() for form, file in files.items()}


def theirs(result, layout=None):
    """What openai-whisper writes: format → text."""
    files = {form: io.StringIO() for form in FORMS}
    for form, file in files.items():
        options = vars(layout or SubtitleLayout())
        get_writer(form, "").write_result(result.to_dict(), file=file, options=options)
    return {form: file.getvalue() for form, file in files.items()}


SPOKEN = [
    (0.0, 2.5, " He was not", [(" He", 0.0, 0.4), (" was", 0.4, 1.1), (" not", 1.3, 2.5)]),
    (2.5, 2.5, "", []),
    (7.0, 3_700.0, " an --> ill\tman.", [(" an", 7.0, 7.2), (" ill", 7.2, 9), (" man.", 9, 3_700)]),
]
SPEECH = transcription(*SPOKEN)
WORDLESS = transcription(*((a, b, text, None) for a, b, text, _ in SPOKEN))

characters = st.sampled_from("aé語 \t\n-<>&'\\♪😀.,")
texts = st.text(characters, max_size=12)
gaps = st.sampled_from([0.0, 0.001, 0.0004, 0.02, 0.5, 3.0, 3.02, 59.9996, 3_600.0])


@st.composite
def transcriptions(draw):
    now, segments = draw(gaps), []
    for _ in range(draw(st.integers(0, 4))):
        words, start = [], now
        for text in draw(st.lists(texts, max_size=8)):
            word_start = now + draw(gaps)
            now = word_start + draw(gaps)
            words.append((text, word_start, now))
        segments.append((start, now, "".join(word[0] for word in words) or draw(texts), words))
        now += draw(gaps)
    return segments


limits = st.none() | st.integers(1, 30)
layouts = st.builds(SubtitleLayout, st.booleans(), limits, st.none() | st.integers(1, 4), limits)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(transcriptions(), layouts)
def test_text_is_upstreams(segments, layout):
    for words in (True, False):
        result = transcription(*((*s[:3], s[3] if words else None) for s in segments))
        assert ours(result, layout) == theirs(result, layout)


@pytest.mark.parametrize("highlight", [False, True])
@pytest.mark.parametrize("width", [None, 7])
@pytest.mark.parametrize("count", [None, 1, 2])
@pytest.mark.parametrize("per_line", [None, 2])
def test_files_are_upstreams_to_the_byte(tmp_path, highlight, width, count, per_line):
    layout = SubtitleLayout(highlight, width, count, per_line)
    get_writer("all", str(tmp_path))(SPEECH.to_dict(), "theirs.wav", vars(layout))
    for form in FORMS:
        save(SPEECH, tmp_path / f"ours.{form}", form, layout)
        written = (tmp_path / f"ours.{form}").read_bytes()
        assert written == (tmp_path / f"theirs.{form}").read_bytes()


def test_files_look_like_this():
    written = ours(WORDLESS)
    assert written["txt"] == "He was not\n\nan --> ill\tman.\n"
    assert written["tsv"].splitlines()[-1] == "7000\t3700000\tan --> ill man."
    assert written["vtt"].startswith("WEBVTT\n\n00:00.000 --> 00:02.500\nHe was not\n\n")
    assert written["srt"].endswith("3\n00:00:07,000 --> 01:01:40,000\nan -> ill\tman.\n\n")
    assert '"language": "en"' in written["json"]
    assert "words" not in written["json"]
    underlined = ours(SPEECH, SubtitleLayout(highlight_words=True))["srt"]
    assert underlined.startswith("1\n00:00:00,000 --> 00:00:00,400\n<u>He</u> was not\n\n")


def test_no_segments_and_segments_without_words_are_written():
    assert ours(transcription()) == theirs(transcription())
    mixed = transcription(SPOKEN[0], (3.0, 4.0, " Yes.", None))
    with pytest.raises(KeyError):  # so ours is better here
        theirs(mixed)
    assert ours(mixed)["vtt"].count("-->") == 2
    mixed = transcription((3.0, 4.0, " Yes.", None), SPOKEN[2])
    assert ours(mixed) == theirs(mixed)


@given(st.floats(0, 400_000), st.booleans(), st.sampled_from(".,"))
@settings(derandomize=True)
def test_timestamps_are_upstreams(seconds, hours, mark):
    assert writers.timestamp(seconds, hours=hours, mark=mark) == format_timestamp(
        seconds, hours, mark
    )


def test_a_line_for_the_terminal():
    assert writers.format_segment(SPEECH.segments[0]) == "[00:00.000 --> 00:02.500]  He was not"


@pytest.mark.parametrize("name", ["max_line_width", "max_line_count", "max_words_per_line"])
@pytest.mark.parametrize("limit", [0, -3])
def test_limits_below_one_are_refused(name, limit):
    with pytest.raises(OptionError, match=f"{name} must be 1 or more, got {limit}"):
        SubtitleLayout(**{name: limit})


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(result, file, layout):
        file.write("half")
        file.flush()
        raise KeyboardInterrupt

    monkeypatch.setitem(writers.WRITERS, "txt", fail)
    for target in (path, tmp_path / "new.txt"):
        with pytest.raises(KeyboardInterrupt):
            save(SPEECH, target, "txt")
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "old"


def test_files_get_the_usual_permissions_and_the_longest_names(tmp_path):
    path = tmp_path / ("x" * 251 + ".txt")
    before = os.umask(0o027)
    try:
        save(SPEECH, path, "txt")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
