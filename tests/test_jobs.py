"""Many files: what becomes of each, what is left when the work is cut off, and what is shown."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from media import at_rate, encode, read_flac, unreadable, wav

from asrmask import cli, console
from asrmask.audio.recording import Recording
from asrmask.cli import transcribe as command
from asrmask.decoding.options import DecodingOptions
from asrmask.errors import AudioError, OptionError
from asrmask.transcription import jobs, scheduler, stream
from asrmask.transcription.api import transcribe_all
from asrmask.transcription.settings import Settings
from asrmask.transcription.window_loop import Callbacks, DecodeRequest, WindowLoop

QUICK = ["--beam_size", "None", "--temperature_increment_on_fallback", "None", "--threads", "1"]
DEADLINE_S = 120


@pytest.fixture(scope="module", autouse=True)
def _threads_again():
    """The commands here set PyTorch's threads."""
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


def touch(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return [str(folder / name) for name in names]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def written(planned):
    return [path.name for job in planned for path in job.outputs.values()]


# --- the plan


def test_a_folder_stands_for_the_media_files_in_it(tmp_path):
    touch(tmp_path / "in", "b.wav", "a.MP3", "c.webm", "notes.txt", "d.srt", "wav", ".hidden")
    (tmp_path / "in" / "folder.wav").mkdir()
    touch(tmp_path / "in" / "deeper", "e.wav")
    (tmp_path / "in" / "link.wav").symlink_to("nowhere.wav")
    planned = jobs.plan([str(tmp_path / "in")], str(tmp_path), ["txt"])
    assert [Path(job.source).name for job in planned] == ["a.MP3", "b.wav", "c.webm", "link.wav"]


def test_a_named_file_is_taken_whatever_its_ending_and_once(tmp_path):
    (odd,) = touch(tmp_path / "in", "a.dat")
    (usual,) = touch(tmp_path / "in", "b.wav")
    planned = jobs.plan([odd, str(tmp_path / "in"), usual, odd], str(tmp_path), ["txt"])
    assert [job.source for job in planned] == [odd, usual]


def test_a_folder_of_nothing_to_hear_stays_for_the_work_to_report(tmp_path):
    touch(tmp_path / "in", "notes.txt")
    (job,) = jobs.plan([str(tmp_path / "in")], str(tmp_path), ["txt"])
    assert job.source == str(tmp_path / "in")


def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(OptionError, match="Permission denied, expected a folder to read"):
        jobs.plan([str(tmp_path)], str(tmp_path), ["txt"])


def test_a_name_too_long_for_a_file_is_still_a_job(tmp_path):
    (job,) = jobs.plan(["x" * 300 + ".wav"], str(tmp_path), ["txt"])
    assert not job.is_done()


def test_outputs_are_named_after_the_file_and_keep_its_ending_where_two_would_meet(tmp_path):
    sources = ["a/x.wav", "b/x.mp3", "a/y.tar.wav", "-"]
    planned = jobs.plan(sources, str(tmp_path), ["txt", "srt"])
    assert written(planned) == [
        *("x.wav.txt", "x.wav.srt", "x.mp3.txt", "x.mp3.srt"),
        *("y.tar.txt", "y.tar.srt", "stdin.txt", "stdin.srt"),
    ]


@pytest.mark.parametrize(
    "sources", [["a/x.wav", "b/x.wav"], ["x.wav", "x.mp3", "x.wav.ogg"], ["x.wav", "./x.wav"]]
)
def test_two_files_that_would_write_the_same_are_refused(tmp_path, sources):
    target = tmp_path / "out"
    with pytest.raises(OptionError, match=r"^.*x\.wav.* and .*x.* would both write .*x\.wav\.txt"):
        jobs.plan(sources, str(target), ["txt"])
    assert not target.exists()


def test_the_folder_of_outputs_is_made_only_where_there_are_any(tmp_path):
    target = tmp_path / "not" / "yet"
    jobs.plan(["a.wav"], str(target), [])
    assert not target.exists()
    jobs.plan(["a.wav"], str(target), ["txt"])
    assert target.is_dir()


def test_a_folder_that_cannot_be_made_or_written_is_refused(tmp_path, monkeypatch):
    touch(tmp_path, "file")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OptionError, match=r"--output_dir must be a folder, got .*file"):
            jobs.plan(["a.wav"], str(target), ["txt"])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OptionError, match="--output_dir must be a folder to write in, got"):
        jobs.plan(["a.wav"], str(tmp_path), ["txt"])


# --- what is done already


@pytest.fixture
def todo(monkeypatch):
    """Runs the command up to the work, of which it only says what it would be."""
    model = SimpleNamespace(is_multilingual=False)
    monkeypatch.setattr(command, "load", lambda args, options: (model, options))
    asked = []
    monkeypatch.setattr(jobs.JobRunner, "run", lambda self, n: asked.append(self.jobs) or 0)

    def call(*arguments):
        asked.clear()
        assert cli.main(["transcribe", *map(str, arguments)]) == 0
        return [Path(job.source).name for todo in asked for job in todo]

    return call


def test_existing_outputs_are_skipped_only_when_all_are_there(todo, tmp_path, capsys):
    sources = touch(tmp_path / "in", "a.wav", "b.wav", "c.wav")
    target = tmp_path / "out"
    touch(target, *(f"a.{form}" for form in command.WRITERS), "b.txt", "b.json", "c.txt")
    (target / "c.srt").mkdir()
    assert todo(*sources, "-o", target, "--skip_existing") == ["b.wav", "c.wav"]
    assert "outputs are there already: 1 of 3 files" in capsys.readouterr().err
    assert todo(*sources, "-o", target, "-f", "srt", "--skip_existing") == ["b.wav", "c.wav"]
    assert todo(*sources, "-o", target, "-f", "txt", "--skip_existing") == []
    assert todo(*sources, "-o", target) == ["a.wav", "b.wav", "c.wav"]
    assert todo(*sources, "-f", "none", "--skip_existing") == ["a.wav", "b.wav", "c.wav"]


# --- cut off


def start(*arguments, **options):
    """The command in a process of its own, which can be interrupted whatever this one ignores."""
    line = [sys.executable, "-m", "asrmask", "transcribe", *map(str, arguments), *QUICK]
    return subprocess.Popen(
        line, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options
    )


@pytest.fixture(scope="module")
def undisturbed(samples, tmp_path_factory):
    """What the samples become if nothing happens: name → text."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert cli.main(["transcribe", *map(str, samples), "-o", str(folder), *QUICK]) == 0
    return texts(folder)


def texts(folder):
    """name → text; of a json file without its numbers, which threads change in the last digit."""

    def text(path):
        return json.loads(path.read_text())["text"] if path.suffix == ".json" else path.read_text()

    return {path.name: text(path) for path in folder.iterdir() if path.name[0] != "."}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_what_is_cut_off_leaves_whole_files_and_can_be_finished(
    samples, undisturbed, tmp_path, how
):
    running = start(*samples, "-o", tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + DEADLINE_S
    while not any(tmp_path.glob("*.txt")) and time.monotonic() < deadline:
        time.sleep(0.01)
    running.send_signal(how)
    _, said = running.communicate(timeout=DEADLINE_S)
    found = texts(tmp_path)
    assert 1 <= len(found) < len(undisturbed)
    assert found.items() <= undisturbed.items()
    done = [p for p in samples if all(f"{p.stem}.{form}" in found for form in command.WRITERS)]
    left = [str(path) for path in samples if path not in done]
    if how == signal.SIGINT:
        assert running.returncode == 130
        assert set(names(tmp_path)) == set(found)  # no temporary files
        assert said.decode().splitlines()[-1] == (
            f"asrmask: interrupted: {len(done)} of 5 files done, left: {' '.join(left)}"
        )
    kept = {path: path.stat().st_mtime_ns for p in done for path in tmp_path.glob(f"{p.stem}.*")}

    again = start(*samples, "-o", tmp_path, "--skip_existing", stderr=subprocess.PIPE)
    _, said = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 0
    assert f"[1/{len(left)}] {left[0]}" in said.decode()
    assert texts(tmp_path) == undisturbed
    assert kept == {path: path.stat().st_mtime_ns for path in kept}


def test_an_interruption_waits_for_the_outputs_of_a_file():
    done = []

    def write():
        with jobs.delayed_interrupt():
            signal.raise_signal(signal.SIGINT)
            done.append("written")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            write()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["written"]


def test_interrupted_between_files_says_what_is_left(monkeypatch, tmp_path, capsys):
    def cut_off(*arguments):
        raise AudioError("a.wav: truncated")

    def interrupted(text):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs.JobRunner, "_open", cut_off)
    monkeypatch.setattr(jobs, "progress", lambda title: monkeypatch.context())
    monkeypatch.setattr(jobs, "say", interrupted)
    planned = jobs.plan(["a.wav", "b.wav", "c.wav"], str(tmp_path), [])
    assert jobs.JobRunner(planned, None, None, None, None, None).run() == 130
    assert capsys.readouterr().err == (
        "asrmask: interrupted: 0 of 3 files done, left: b.wav c.wav\n"
    )


def test_lines_are_for_whole_parts_or_seconds_apart(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    advance = console.ProgressLines()
    advance(40, 100)  # an earlier run did 40
    for seconds, done, is_whole in ((1, 41, False), (2, 50, True), (3, 51, False), (30, 70, False)):
        now = float(seconds)
        advance(done, 100, f"part {done}", is_whole)
    assert capsys.readouterr().err == (
        "asrmask: part 50; 50 of 100 in all, 10 s left\n"
        "asrmask: part 70; 70 of 100 in all, 30 s left\n"
    )


def test_a_reader_that_has_gone_ends_the_work_without_a_word(samples, tmp_path):
    running = start(*samples, "-f", "txt", "-o", tmp_path, stdout=subprocess.PIPE, stderr=-1)
    running.stdout.close()
    said = running.stderr.read().decode()
    running.stderr.close()
    assert running.wait(timeout=DEADLINE_S) == 1
    assert said == f"asrmask: [1/5] {next(iter(samples))}\n"


# --- failures


def test_a_folder_of_all_sorts_is_done_but_for_what_is_no_audio(samples, tmp_path, capfd):
    folder, target = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    clip = read_flac(list(samples)[1])
    for name, codec in {"a.mp3": "libmp3lame", "b.m4a": "aac", "c.webm": "libopus"}.items():
        rate = 48_000 if codec == "libopus" else 16_000
        encode(folder / name, at_rate(clip, rate), codec, rate=rate)
    (folder / "bad.wav").write_text("not a sound\n")
    (folder / "notes.txt").write_text("not asked for\n")
    assert cli.main(["transcribe", str(folder), "-o", str(target), "-f", "json", *QUICK]) == 1
    out, err = capfd.readouterr()
    assert names(target) == ["a.json", "b.json", "c.json"]
    texts = [json.loads((target / name).read_text())["text"] for name in names(target)]
    assert all("young man" in text for text in texts)
    assert out.count("young man") == 3
    lines = err.splitlines()
    assert [line for line in lines if line.startswith("asrmask: error: ")] == [
        f"asrmask: error: {folder / 'bad.wav'}: expected audio that FFmpeg can read, "
        "got: Invalid data found when processing input"
    ]
    assert lines[-1] == f"asrmask: 1 of 4 files failed: {folder / 'bad.wav'}"


MODES = pytest.mark.parametrize("mode", [QUICK, ["--fast", "--threads", "1"]], ids=["one", "fast"])


@pytest.fixture(scope="module")
def short(samples, tmp_path_factory):
    """A folder of ten clips, of different lengths from 1.5 to 2.4 s."""
    folder = tmp_path_factory.mktemp("short")
    for i, path in enumerate(list(samples) * 2):
        clip = read_flac(path)[: 24_000 + 1_600 * i]
        encode(folder / f"good{i}.wav", clip, "pcm_s16le")
    return folder


def errors(lines):
    return [line for line in lines if line.startswith("asrmask: error: ")]


@MODES
def test_one_bad_file_of_each_kind_leaves_the_others_alone(short, samples, tmp_path, capfd, mode):
    folder, target = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    lost = unreadable(folder, read_flac(list(samples)[1]))
    if os.geteuid() != 0:
        (folder / "secret.wav").write_bytes(wav(bytes(32_000)))
        (folder / "secret.wav").chmod(0)
        lost[folder / "secret.wav"] = "Permission denied"
    (folder / "link.wav").symlink_to("nowhere.wav")
    lost[folder / "link.wav"] = "No such file or directory"
    lost[folder / "folder.wav"] = "expected a folder with audio or video files, got an empty folder"
    good = sorted(short.iterdir())
    files = [str(path) for path in [*list(lost)[:9], *good, *list(lost)[9:]]]
    assert cli.main(["transcribe", *files, "-f", "txt", "-o", str(target), *mode]) == 1
    out, err = capfd.readouterr()
    assert names(target) == [f"{path.stem}.txt" for path in good]
    texts = [(target / name).read_text() for name in names(target)]
    assert all(texts)
    assert out == "".join(texts)
    lines = err.splitlines()
    assert all(line.startswith("asrmask: ") for line in lines)
    assert len(errors(lines)) == len(lost)
    for path, problem in lost.items():
        (said,) = [line for line in errors(lines) if f" {path}: " in line]
        assert problem in said
    assert lines[-1].startswith(f"asrmask: {len(lost)} of {len(files)} files failed: ")


@MODES
def test_silence_is_an_empty_transcript(short, tmp_path, capfd, mode):
    silence = tmp_path / "silence.wav"
    silence.write_bytes(wav(bytes(32_000)))
    sources = [str(short / "good0.wav"), str(silence), str(short / "good1.wav")]
    call = ["transcribe", *sources, "-o", str(tmp_path), "--skip_existing", *mode]
    assert cli.main(call) == 0
    out, err = capfd.readouterr()
    assert err.count(f"asrmask: {silence}: only silence, its transcript is empty\n") == 1
    assert errors(err.splitlines()) == []
    assert out == "".join((tmp_path / f"good{i}.txt").read_text() for i in range(2))
    empty = {"txt": "", "vtt": "WEBVTT\n\n", "srt": "", "tsv": "start\tend\ttext\n"}
    for form, text in empty.items():
        assert (tmp_path / f"silence.{form}").read_text() == text
    found = json.loads((tmp_path / "silence.json").read_text())
    assert (found["text"], found["segments"]) == ("", [])
    assert cli.main(call) == 0
    assert "outputs are there already: 3 of 3 files" in capfd.readouterr().err


def fail_at(monkeypatch, place, name, n_frames):
    """Let a function fail where it has to do with a window of that many frames."""
    function = getattr(place, name)

    def failing(*arguments):
        windows = [
            loop.request.window
            for loop in arguments
            if isinstance(loop, WindowLoop) and loop.request
        ]
        windows += [
            one.window for several in arguments if isinstance(several, list) for one in several
        ]
        windows += [one.window for one in arguments if isinstance(one, DecodeRequest)]
        windows += [one for one in arguments if isinstance(one, stream.TranscriptionStream)]
        if any(window.n_frames == n_frames for window in windows):
            raise RuntimeError("nobody\nthought of it")
        return function(*arguments)

    monkeypatch.setattr(place, name, failing)


@pytest.mark.parametrize(
    ("place", "name", "mode"),
    [
        (WindowLoop, "send", QUICK),
        (stream, "decode_request", QUICK),
        (WindowLoop, "send", ["--fast", "--threads", "1"]),
        (stream.TranscriptionStream, "transcription", ["--fast", "--threads", "1"]),
        (scheduler, "decode_batch", ["--fast", "--threads", "1"]),
    ],
)
def test_an_exception_that_nobody_thought_of_ends_one_file(
    short, tmp_path, capfd, monkeypatch, place, name, mode
):
    fail_at(monkeypatch, place, name, 180)  # good3.wav
    files = sorted(map(str, short.iterdir()))[:5]
    assert cli.main(["transcribe", *files, "-f", "txt", "-o", str(tmp_path), *mode]) == 1
    out, err = capfd.readouterr()
    done = [f"good{i}.txt" for i in range(5) if i != 3]
    assert names(tmp_path) == done
    assert out == "".join((tmp_path / name).read_text() for name in done)
    lines = err.splitlines()
    assert all(line.startswith("asrmask: ") for line in lines)
    assert errors(lines) == [
        f"asrmask: error: {short / 'good3.wav'}: unexpected RuntimeError (nobody thought of it), "
        "please report it with what ASRMASK_DEBUG=1 shows"
    ]
    assert lines[-1] == f"asrmask: 1 of 5 files failed: {short / 'good3.wav'}"


def test_the_traceback_of_a_defect_is_shown_if_asked_for(short, capfd, monkeypatch):
    fail_at(monkeypatch, stream, "decode_request", 150)
    monkeypatch.setenv("ASRMASK_DEBUG", "1")
    assert cli.main(["transcribe", str(short / "good0.wav"), "-f", "none", *QUICK]) == 1
    assert "Traceback (most recent call last)" in capfd.readouterr().err


def test_a_window_that_fails_among_others_ends_the_call_for_all_in_python(
    model, short, monkeypatch
):
    fail_at(monkeypatch, scheduler, "decode_batch", 180)
    with pytest.raises(RuntimeError, match="nobody"):
        transcribe_all(model, sorted(short.iterdir())[:4], batch_size=4, temperature=0.0)


# --- what is shown


@pytest.fixture(scope="module")
def long(samples, tmp_path_factory):
    """The samples in a row, twice: two windows."""
    path = tmp_path_factory.mktemp("long") / "long.wav"
    return encode(path, np.concatenate([read_flac(path) for path in samples] * 2), "pcm_s16le")


def on_a_terminal(*arguments, out, columns=120):
    """What the command writes to a terminal: standard error, and standard output if out is None."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": str(columns)}
    running = start(*arguments, stdout=out or theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    try:
        while block := os.read(ours, 4096):
            seen += block
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(ours)
    assert running.wait(timeout=DEADLINE_S) == 0
    return seen.decode()


@pytest.mark.parametrize("mode", [[], ["--fast", "--batch_size", "2"]], ids=["one", "fast"])
def test_a_terminal_shows_a_bar_and_standard_output_stays_plain(long, tmp_path, mode):
    with (tmp_path / "out").open("wb") as out:
        seen = on_a_terminal(long, "-f", "txt", "-o", tmp_path, *mode, out=out)
    percentages = {int(n) for n in re.findall(r"━.*?(\d+) %", seen)}
    assert any(0 < n < 100 for n in percentages)
    assert ("1 file " if mode else f"[1/1] {long}"[:60]) in seen
    assert "49.5 s of audio in" in seen
    plain = (tmp_path / "out").read_text()
    assert "young man" in plain
    assert plain == (tmp_path / "long.txt").read_text()


def test_text_on_the_terminal_is_not_mixed_with_the_bar(samples):
    seen = on_a_terminal(list(samples)[1], "-f", "none", "--verbose", "True", out=None)
    plain = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", seen)
    assert re.search(r"(^|[\r\n])\[00:00\.000 --> 00:0\d\.\d+\]  He was [^━]* man\.\r\n", plain)


@pytest.mark.parametrize("mode", [[], ["--fast"]], ids=["one", "fast"])
def test_no_line_is_wrapped_on_a_narrow_terminal(sample, mode):
    seen = on_a_terminal(sample, "-f", "none", *mode, out=None, columns=40)
    plain = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", seen)
    assert re.search(r"(^|[\r\n])And Mr\. [^\r\n]{60,} for them\.\r\n", plain)
    assert not mode or f"[1/1] {sample}\r\n" in plain


def test_progress_follows_windows_that_have_no_text(model, capsys):
    """Silence gives no segments, but it is done."""
    silence = Recording.of(np.full(16_000 * 70, 1e-5, np.float32))
    seen = []
    progress = jobs.FileProgress(lambda done, total: seen.append((done, total)), 1)
    callbacks = Callbacks(on_progress=partial(progress.add, "a.wav"))
    settings = Settings(temperature=0.0, no_speech_threshold=0.0, logprob_threshold=None)
    running = stream.TranscriptionStream(model, silence, settings, DecodingOptions(), callbacks)
    assert list(running) == []
    assert seen == [(pytest.approx(share), 1) for share in (3 / 7, 6 / 7, 1)]


def test_a_batch_tells_the_time_of_all_and_each_language(base_model, short, tmp_path, capfd):
    files = [str(short / f"good{i}.wav") for i in range(3)]
    weights = str(ROOT / ".venv" / "weights" / "base")
    call = ["transcribe", *files, "--model", weights, "--fast", "--threads", "1", "-f", "none"]
    assert cli.main([*call, "--padding", "full"]) == 0
    lines = [line.removeprefix("asrmask: ") for line in capfd.readouterr().err.splitlines()]
    assert lines[0] == "3 files"
    assert {line[6:] for line in lines[1:-1] if line[0] == "["} == set(files)
    assert lines.count("language: en") == 3
    assert [line for line in lines if "of audio" in line] == lines[-1:]
    assert re.fullmatch(r"4\.8 s of audio in \d+\.\d s", lines[-1])


def test_without_a_terminal_there_are_plain_lines(samples, tmp_path, capfd):
    clip = list(samples)[1]
    assert cli.main(["transcribe", str(clip), "-f", "txt", "-o", str(tmp_path), *QUICK]) == 0
    out, err = capfd.readouterr()
    first, second = err.splitlines()
    assert first == f"asrmask: [1/1] {clip}"
    assert re.fullmatch(r"asrmask: 3\.0 s of audio in \d+\.\d s", second)
    assert out == (tmp_path / f"{clip.stem}.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "utf8", "shown"),
    [
        (["transcribe", b"caf\xc3\xa9.wav", b"n\xff.wav"], "0", ["caf\\xe9.wav", "n\\xff.wav"]),
        (["transcribe", b"caf\xc3\xa9.wav", b"n\xff.wav"], "1", ["café.wav", "n\\xff.wav"]),
        (["masks", b"n\xff.wav"], "0", ["n\\xff.wav", "n\\xff.masks.png"]),
        (["inspect", b"n\xff.wav", "--out", b"n\xff"], "0", ["n\\xff/inspect.html"]),
    ],
)
def test_names_are_shown_in_every_locale(short, tmp_path, arguments, utf8, shown):
    for name in (b"caf\xc3\xa9.wav", b"n\xff.wav"):
        clip = (short / "good0.wav").read_bytes()
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).write_bytes(clip)
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": utf8}
    environment.pop("PYTHONIOENCODING", None)
    line = [sys.executable, "-m", "asrmask", *arguments]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    said = (done.stdout + done.stderr).decode()
    assert all(name in said for name in shown)
    assert "udc" not in said


def test_text_that_the_output_cannot_show_does_not_stop_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "asrmask", "transcribe", "--help"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert (done.stderr, b"\\u2026" in done.stdout) == (b"", True)  # FILE…
