"""The command live: sources, what it prints and writes, and one line for each thing wrong."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
import wave

import numpy as np
import pytest
from media import at_rate, encode, read_flac

from asrmask.audio.media import decode_pipe, resample_blocks
from asrmask.cli import live as command
from asrmask.errors import AudioError
from asrmask.live import sources
from asrmask.live.events import Committed, Endpoint, Partial
from asrmask.transcription.result import Word

QUICK = ["--step", "1", "--threads", "1"]


@pytest.fixture(scope="module")
def speech(samples):
    """A clip of three seconds, "… young man"."""
    return list(samples)[1]


@pytest.fixture(scope="module")
def pcm(speech):
    """The same as raw samples."""
    return read_flac(speech).astype("<i2").tobytes()


@pytest.fixture
def stdin(monkeypatch):
    """Puts bytes on standard input."""

    def put(data):
        monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(data)))

    return put


def test_a_file_is_printed_by_utterance_and_written(run, speech, tmp_path):
    saved = tmp_path / "talk.wav"
    flags = ["--simulate", "--fastest", "-f", "srt,txt", "-o", tmp_path, "--save", saved]
    code, out, err = run("live", speech, *flags, *QUICK)
    assert code == 0
    assert re.search("young man", out)
    assert all(line.startswith("asrmask: ") for line in err.splitlines())
    assert (tmp_path / f"{speech.stem}.txt").read_text() == out
    assert "00:00:00,000 -->" in (tmp_path / f"{speech.stem}.srt").read_text()
    with wave.open(str(saved)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        assert file.getnframes() == len(read_flac(speech))


def test_events_are_json_lines(run, speech):
    code, out, _ = run("live", speech, "--simulate", "--fastest", "--json", "--threads", "1")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {event["event"] for event in events} == {"partial", "committed", "endpoint"}
    assert "young man" in "".join(e["text"] for e in events if e["event"] == "committed")


def test_a_file_is_read_at_the_speed_of_speech(run, speech):
    start = time.monotonic()
    code, out, _ = run("live", speech, "--simulate", *QUICK)
    assert (code, "young man" in out) == (0, True)
    assert time.monotonic() - start > 2.9


def test_raw_samples_are_read_from_a_pipe(run, pcm, stdin):
    stdin(pcm)
    code, out, err = run("live", "-", "--rate", "16000", *QUICK)
    assert (code, "young man" in out) == (0, True), err


def test_a_pipe_that_ends_within_a_sample_is_an_error_after_all_text(run, pcm, stdin, tmp_path):
    stdin(pcm + b"x")
    code, out, err = run("live", "-", "--rate", "16000", "-f", "txt", "-o", tmp_path, *QUICK)
    assert code == 1
    assert err.splitlines()[-1] == (
        "asrmask: error: standard input: ends within a sample, got 1 byte, expected 2"
    )
    assert "young man" in (tmp_path / "stdin.txt").read_text() == out


def test_a_container_is_read_from_a_pipe(run, speech, stdin):
    stdin(speech.read_bytes())
    code, out, err = run("live", "-", *QUICK)
    assert (code, "young man" in out) == (0, True), err


def test_garbage_in_a_pipe_is_one_line(run, stdin):
    stdin(b"nothing that is audio" * 100)
    code, out, err = run("live", "-", *QUICK)
    assert (code, out) == (1, "")
    assert "error: standard input: expected audio that FFmpeg can read from a pipe" in err


def test_a_pipe_is_decoded_while_it_arrives(samples, tmp_path):
    """The first samples come before the pipe ends."""
    reader, writer = os.pipe()
    path = tmp_path / "clip.ogg"
    encode(path, at_rate(read_flac(next(iter(samples))), 48_000), "libopus", rate=48_000)
    data = path.read_bytes()
    with open(writer, "wb") as out, open(reader, "rb") as pipe:
        out.write(data[: len(data) // 2])
        out.flush()
        blocks = decode_pipe(pipe, [])
        assert len(next(blocks)) > 0
        out.write(data[len(data) // 2 :])
        out.close()
        assert sum(map(len, blocks)) > 16_000


def test_blocks_are_resampled():
    tone = np.sin(2 * np.pi * 440 * np.arange(48_000) / 48_000)
    blocks = np.split((tone * 20_000).astype(np.int16), 10)
    found = np.concatenate(list(resample_blocks(blocks, 48_000)))
    assert abs(len(found) - 16_000) < 50
    spectrum = np.abs(np.fft.rfft(found[:16_000]))
    assert spectrum.argmax() == pytest.approx(440, abs=1)
    assert list(resample_blocks(blocks, 16_000)) == blocks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["talk.wav"], "a file needs --simulate, got talk.wav without"),
        (["--simulate"], "--simulate needs a file, got none"),
        (["-", "--fastest"], "--fastest needs --simulate"),
        (["talk.wav", "--simulate", "--rate", "8000"], "--rate needs the source -, got talk.wav"),
        (["-", "--rate", "10"], "--rate must be in 1000..768000, got 10"),
        (["-", "--microphone", "1"], "--microphone excludes a source, got -"),
        (["-", "--save", "talk.mp3"], "--save must be a .wav file, got talk.mp3"),
        (["-", "--step", "0"], "step must be in 0.05..10, got 0.0"),
        (["-", "--commit", "hope"], "commit must be one of agreement, attention, got 'hope'"),
    ],
)
def test_wrong_flags_are_refused(run, stdin, arguments, message):
    stdin(b"")
    code, out, err = run("live", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


# the microphone


class Microphone:
    """A stand-in for the package sounddevice: one device, which plays given bytes."""

    PortAudioError = type("PortAudioError", (Exception,), {})

    def __init__(self, data, rate=16_000):
        self.data, self.rate, self.active = data, rate, True

    def query_devices(self, device=None, kind=None):
        one = {"name": "desk", "max_input_channels": 1, "default_samplerate": float(self.rate)}
        if kind is None:
            return [one, {**one, "name": "loudspeaker", "max_input_channels": 0}]
        if device not in {None, 0, "desk"}:
            raise ValueError(f"No input device matching {device!r}")
        return one

    def RawInputStream(self, *, callback, blocksize, **options):
        self.callback, self.size = callback, 2 * blocksize
        return self

    def __enter__(self):
        for i in range(0, len(self.data), self.size):
            self.callback(self.data[i : i + self.size], 0, None, None)
        self.active = False  # it vanishes

    def __exit__(self, *_):
        pass


def test_a_microphone_that_vanishes_is_one_line_after_all_text(run, pcm, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sounddevice", Microphone(pcm))
    code, out, err = run("live", "-f", "txt", "-o", tmp_path, *QUICK)
    assert code == 1
    assert err.splitlines()[-1] == ("asrmask: error: the microphone stopped, expected more audio")
    assert "young man" in (tmp_path / "live.txt").read_text() == out


def test_microphones_are_listed_and_checked(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", Microphone(b""))
    assert run("live", "--list_devices")[:2] == (0, "0  desk\n")
    code, _, err = run("live", "--microphone", "roof")
    assert code == 1
    assert "microphone roof: No input device matching 'roof', expected one of" in err


def test_a_missing_microphone_package_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    code, out, err = run("live")
    assert (code, out, err) == (
        *(2, ""),
        "asrmask live needs sounddevice: pip install 'asrmask[live]'\n",
    )


def test_ctrl_c_ends_it_with_everything_written(pcm, tmp_path):
    line = [sys.executable, "-m", "asrmask", "live", "-", "--rate", "16000", *QUICK]
    line += ["-f", "txt", "-o", str(tmp_path), "--save", str(tmp_path / "talk.wav")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, **pipes) as process:
        process.stdin.write(pcm + b"\0" * 64_000)  # silence: the text is final
        process.stdin.flush()
        assert b"young man" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    assert "young man" in (tmp_path / "stdin.txt").read_text()
    with wave.open(str(tmp_path / "talk.wav")) as file:
        assert file.getnframes() == len(pcm) // 2 + 32_000


# arrivals


def test_what_arrived_comes_at_once_and_is_late_if_it_is_more_than_a_step():
    stop = threading.Event()
    ready = threading.Event()

    def blocks():
        yield np.zeros(1600, np.int16)
        ready.wait(5)
        for _ in range(9):
            yield np.zeros(1600, np.int16)

    found = sources.arrivals(blocks(), 0.3, stop)
    first, late = next(found)
    assert (len(first), late) == (1600, False)
    ready.set()
    time.sleep(0.2)
    rest, late = next(found)
    assert (len(rest), late) == (9 * 1600, True)
    assert list(found) == []


def test_an_error_of_a_source_comes_after_its_audio():
    def blocks():
        yield np.zeros(1600, np.int16)
        raise AudioError("gone")

    found = sources.arrivals(blocks(), 0.3, threading.Event())
    assert len(next(found)[0]) == 1600
    with pytest.raises(AudioError, match="gone"):
        next(found)


# the terminal


def committed(time, *words):
    found = [Word(f" {word}", time, time, 0.9) for word in words]
    return Committed(time, "".join(word.word for word in found), found, "en")


def screen(text):
    """The lines that a terminal shows."""
    lines = []
    for line in text.split("\n"):
        last = line.split("\r")[-1]
        lines.append(re.sub(r"\x1b\[\d*[a-zA-Z]", "", last).rstrip())
    return lines


def test_a_terminal_shows_committed_words_and_redraws_the_rest(capsys):
    printer = command.TerminalPrinter(width=20)
    printer.show([Partial(1, " But what")])
    assert screen(capsys.readouterr().out) == ["But what"]
    printer.show([committed(2, "But", "that's"), Partial(2, " my question")])
    out = capsys.readouterr().out
    assert screen(out) == ["But that's my questi"]
    assert command.DIM + " my questi" in out
    printer.show([committed(3, "my", "question")])
    assert screen(capsys.readouterr().out) == ["But that's my", "question"]
    printer.show([Endpoint(4, 0, 3), Partial(5, " And")])
    assert screen(capsys.readouterr().out) == ["question", "And"]
    assert [segment.text for segment in printer.transcript.segments] == [" But that's my question"]
