"""The command: what it writes and says, one line for each thing wrong, and everything else done."""

import gc
import re
import subprocess
import sys

import pytest
from media import encode, read_flac, truncated, unreadable, wav

from asrmask.malloc import keep_all_objects

FORMS = ["txt", "vtt", "srt", "tsv", "json"]
QUICK = ["--beam_size", "None", "--temperature_increment_on_fallback", "None"]


@pytest.fixture(scope="module")
def speech(samples):
    """A clip of three seconds, "… young man"."""
    return list(samples)[1]


def spawn(*arguments, **options):
    """Runs the command in a process of its own."""
    command = [sys.executable, "-m", "asrmask", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=120, **options)


def test_garbage_is_collected_again_after_the_start():
    assert gc.isenabled()
    with keep_all_objects():
        assert not gc.isenabled()
    assert gc.isenabled()
    n_frozen = gc.get_freeze_count()
    with keep_all_objects():
        more = [[] for _ in range(1000)]
    assert more
    assert gc.get_freeze_count() <= n_frozen  # only the first time


def names(folder):
    return {path.name for path in folder.iterdir()}


# --- files


def test_a_file_becomes_text_and_five_files(run, speech, tmp_path):
    code, out, err = run("transcribe", speech, "-o", tmp_path, *QUICK)
    assert code == 0
    assert re.search("young man", out)
    assert all(line.startswith("asrmask: ") for line in err.splitlines())
    assert names(tmp_path) == {f"{speech.stem}.{form}" for form in FORMS}
    assert (tmp_path / f"{speech.stem}.txt").read_text() == out


def test_every_broken_file_gets_one_line_and_the_others_are_done(run, speech, tmp_path):
    folder, target = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    clip = read_flac(speech)
    (folder / "one_sample.wav").write_bytes(wav(clip[:1].tobytes()))
    lost = unreadable(folder, clip) | {
        folder / "one_sample.wav": "too short, got 1 samples, expected 160 or more",
        folder / "folder.wav": "expected a folder with audio or video files, got an empty folder",
    }
    cut = truncated(folder, clip)
    files = [*lost, speech, *cut]
    code, out, err = run("transcribe", *files, "-f", "srt", "-o", target, *QUICK)
    assert code == 1
    lines = err.splitlines()
    assert all(line.startswith("asrmask: ") for line in lines)
    for path, problem in (lost | dict.fromkeys(cut, "truncated, got 1.")).items():
        (said,) = [line for line in lines if line.startswith(f"asrmask: error: {path}: ")]
        assert problem in said
    assert sum("error" in line for line in lines) == len(lost) + len(cut)
    # of the cut ones there is text; files of the same name but for the ending keep it
    assert names(target) == {f"{speech.stem}.srt", "cut_front.srt"} | {
        f"{path.name}.srt" for path in cut if path.stem == "cut"
    }
    assert all("He was" in (target / name).read_text() for name in names(target))
    assert out.count("He was") == 1 + len(cut)


def test_standard_input_may_be_a_pipe_of_any_format(speech, tmp_path):
    m4a = encode(tmp_path / "a.m4a", read_flac(speech), "aac")
    feed = subprocess.Popen(["cat", m4a], stdout=subprocess.PIPE)
    done = spawn("transcribe", "-", "-f", "txt", "-o", tmp_path, *QUICK, stdin=feed.stdout)
    feed.stdout.close()
    assert feed.wait() == 0
    assert (done.returncode, (tmp_path / "stdin.txt").read_bytes()) == (0, done.stdout)
    assert b"young man" in done.stdout
    assert all(line.startswith(b"asrmask: ") for line in done.stderr.splitlines())


def test_a_process_says_one_line_about_a_bad_file_and_ends_with_1(tmp_path):
    (tmp_path / "bad.mp3").write_bytes(b"\xff\xfb\x90\x64" * 2_000)
    done = spawn("transcribe", tmp_path / "bad.mp3", "-", "-o", tmp_path, input=b"")
    assert (done.returncode, done.stdout) == (1, b"")
    lines = done.stderr.decode().splitlines()
    assert all(line.startswith("asrmask: ") for line in lines)
    assert [line.split(": ")[2] for line in lines if "error" in line] == [
        str(tmp_path / "bad.mp3"),
        "standard input",
    ]


def test_outputs_never_overwrite_each_other(run, speech, tmp_path):
    paths = [tmp_path / "a" / "x.flac", tmp_path / "b" / "x.flac", tmp_path / "a" / "x.wav"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(speech.read_bytes())
    target = tmp_path / "out"
    code, out, err = run("transcribe", *paths[:2], "-o", target)
    assert code != 0
    assert out == ""
    assert re.fullmatch(r"asrmask transcribe: error: .*x\.flac and .*x\.flac would both .*\n", err)
    code, out, _ = run(
        "transcribe", paths[0], paths[2], paths[0], "-f", "tsv", "-o", target, *QUICK
    )
    assert code == 0
    assert out.count("\n") == 2
    assert names(target) == {"x.flac.tsv", "x.wav.tsv"}


def test_several_formats_may_be_asked_for(run, speech, tmp_path):
    code, _, _ = run(
        "transcribe", "--skip_existing", speech, "-f", "srt,vtt", "-o", tmp_path, *QUICK
    )
    assert (code, names(tmp_path)) == (0, {f"{speech.stem}.srt", f"{speech.stem}.vtt"})


def test_words_may_be_underlined_and_flags_spelled_with_either_dash(run, speech, tmp_path):
    code, out, _ = run(
        *("transcribe", speech, "--output-dir", tmp_path, "--output_format=vtt", "--beam-size=1"),
        *("--word-timestamps", "True", "--highlight_words=True", "--max-line-width", "12"),
        *("--verbose", "True"),
    )
    assert code == 0
    assert re.match(r"\[00:0\d\.\d{3} --> 00:0\d\.\d{3}\]  He was", out)
    written = (tmp_path / f"{speech.stem}.vtt").read_text()
    assert "<u>He</u> was" in written
    cues = [line for line in written.splitlines()[2:] if "-->" not in line]
    assert all(len(re.sub("</?u>", "", line)) <= 12 for line in cues)


def test_text_and_files_may_both_be_left_out(run, speech, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("transcribe", speech, "-f", "none", "--verbose", "False", *QUICK)
    assert (code, out, names(tmp_path)) == (0, "", set())


# --- usage


def test_help_needs_neither_torch_nor_numpy():
    command = [sys.executable, "-X", "importtime", "-m", "asrmask", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "transcribe" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "asrmask.cli" in imported
    assert not {"torch", "numpy", "av", "tiktoken"} & imported


@pytest.mark.parametrize("command", ["transcribe", "models"])
def test_every_command_has_help(run, command):
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert f"asrmask {command}" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["sing"],
        ["--loud"],
        ["transcribe"],
        ["transcribe", "a.wav", "--no_such_flag"],
        ["transcribe", "a.wav", "--beam", "5"],
        ["transcribe", "a.wav", "--beam_size"],
        ["transcribe", "a.wav", "--beam-size", "many"],
        ["transcribe", "a.wav", "--temperature", "hot"],
        ["transcribe", "a.wav", "--no_speech_threshold", "x"],
        ["transcribe", "a.wav", "--fp16=maybe"],
        ["transcribe", "a.wav", "--task", "sing"],
        ["transcribe", "a.wav", "-f", "doc"],
        ["models", "tiny"],
    ],
)
def test_wrong_usage_is_one_line_and_ends_with_2(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"asrmask( \w+)?: error: .+\n", err)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("a.mp3", "a command is missing, did you mean: asrmask transcribe a.mp3"),
        ("-", "a command is missing, did you mean: asrmask transcribe -"),
        ("--fast a.mp3", "a command is missing, did you mean: asrmask transcribe --fast a.mp3"),
        ("trancribe a.mp3", "unknown command trancribe, did you mean transcribe?"),
        ("sing", "unknown command sing, expected one of transcribe, live, compare, "),
        ("transcribe a.mp3 --langauge de", "unknown flag --langauge, did you mean --language?"),
        ("transcribe --beam-sise=5", "unknown flag --beam-sise, did you mean --beam_size?"),
        ("transcribe a.mp3 --loud", "unknown flag --loud (see"),
        ("models --model-dri x", "unknown flag --model-dri, did you mean --model_dir?"),
        ("transcribe -o.mp3", "-o.mp3 is read as a flag, for the file write ./-o.mp3"),
        ("transcribe --o.mp3", "--o.mp3 is read as a flag, for the file write ./--o.mp3"),
    ],
)
def test_wrong_usage_says_what_may_be_meant(run, tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    for name in ("-o.mp3", "--o.mp3"):
        (tmp_path / name).touch()
    code, out, err = run(*arguments.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"error: {told}" in err


def test_what_an_english_model_cannot_do_is_said(run, speech):
    flags = ["--language", "de", "--task", "translate"]
    code, out, err = run("transcribe", speech, "-f", "none", *flags, *QUICK)
    assert code == 0
    assert "young man" in out
    ignored = [line for line in err.splitlines() if "ignored" in line]
    assert ignored == [
        "asrmask: tiny.en is English-only, --language de is ignored",
        "asrmask: tiny.en is English-only, --task translate is ignored",
    ]


@pytest.mark.parametrize(
    ("others", "got"),
    [([], "an empty folder"), (["a.txt"], "1 other file"), ("ab", "2 other files")],
)
@pytest.mark.parametrize("command", ["transcribe", "inspect"])
def test_a_folder_without_audio_is_told_as_such(run, tmp_path, monkeypatch, command, others, got):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "in"
    folder.mkdir()
    for name in others:
        (folder / name).touch()
    code, out, err = run(command, folder)
    assert (code, out) == (1, "")
    expected = f"{folder}: expected a folder with audio or video files, got {got}"
    assert f"asrmask: error: {expected}" in err.splitlines()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--beam-size 0", "beam_size must be 1 or more, got 0"),
        ("--beam_size=-1", "beam_size must be 1 or more, got -1"),
        ("--best_of 0", "best_of must be 1 or more, got 0"),
        ("--patience 0", "must be 1 or more, got 0"),
        ("--length_penalty 5", "length_penalty must be in 0..1, got 5"),
        ("--language klingon", "got klingon"),
        ("--clip_timestamps a,b", "clip_timestamps must be seconds, got 'a,b'"),
        ("--clip_timestamps nan", "clip_timestamps must be 0 or more, got 'nan'"),
        ("--temperature_increment_on_fallback 0", "must be above 0, got 0"),
        ("--max_line_width 40", "needs --word_timestamps True"),
        ("--word_timestamps True --max_line_count -2", "max_line_count must be 1 or more, got -2"),
        ("--model no-such-model", "got 'no-such-model'"),
        ("--output_dir /dev/null", "must be a folder, got /dev/null"),
    ],
)
def test_values_that_cannot_be_are_one_line(run, tmp_path, arguments, problem):
    code, out, err = run("transcribe", "a.wav", "-o", tmp_path, *arguments.split())
    assert code in {1, 2}
    assert out == ""
    assert re.fullmatch(r"asrmask transcribe: error: .+\n", err)
    assert problem in err


@pytest.mark.parametrize(
    "arguments",
    [
        "--temperature nan",
        "--temperature inf",
        "--temperature -1",
        "--temperature_increment_on_fallback nan",
        "--patience nan",
        "--patience inf",
        "--clip_timestamps inf",
        "--threads -1",
        "--device no-such-device",
    ],
)
def test_other_values_that_cannot_be_are_one_line_too(run, speech, tmp_path, arguments):
    code, out, err = run("transcribe", speech, "-o", tmp_path, *arguments.split())
    assert code in {1, 2}
    assert out == ""
    assert re.fullmatch(r"asrmask transcribe: error: .+\n", err)


def test_a_file_that_cannot_be_written_is_one_line_and_the_others_are_done(run, samples, tmp_path):
    first, second = list(samples)[1:3]
    (tmp_path / f"{first.stem}.txt").mkdir()
    code, _, err = run("transcribe", first, second, "-f", "txt", "-o", tmp_path, *QUICK)
    assert code == 1
    assert sum(line.startswith("asrmask: error: ") for line in err.splitlines()) == 1
    assert names(tmp_path) == {f"{first.stem}.txt", f"{second.stem}.txt"}


@pytest.mark.parametrize(
    "arguments",
    [
        "transcribe LONG",
        "transcribe SPEECH -o LONG",
        "transcribe SPEECH --model LONG",
        "transcribe SPEECH --model tiny --model_dir LONG",
        "compare LONG",
        "compare SPEECH --reference LONG",
        "compare SPEECH --json LONG",
        "compare SPEECH --out LONG",
        "inspect LONG",
        "inspect SPEECH --out LONG",
        "ablate LONG",
        "ablate --spec LONG",
        "ablate --out LONG",
        "bench LONG",
        "bench --out LONG",
        "bench --against LONG",
        "report LONG",
        "report LONG LONG",
        "masks LONG",
        "masks SPEECH --png LONG",
        "models --model_dir LONG",
    ],
)
def test_a_path_too_long_is_one_line(run, speech, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    words = {"LONG": "x" * 5_000, "SPEECH": speech}
    code, _, err = run(*(words.get(word, word) for word in arguments.split()))
    assert code in {1, 2}
    (said,) = [line for line in err.splitlines() if "error: " in line]
    assert "File name too long" in said
    assert all(line.startswith("asrmask") for line in err.splitlines())


def test_names_after_two_dashes_are_files_as_they_are(run, tmp_path):
    code, _, err = run("transcribe", "-o", tmp_path, "--", "--no-such-file.wav")
    assert code == 1
    assert "--no-such-file.wav: No such file" in err


def test_a_line_break_in_a_name_does_not_break_the_line(run, tmp_path):
    _, _, err = run("transcribe", "-o", tmp_path, "no\nfile.wav")
    assert all(line.startswith("asrmask: ") for line in err.splitlines())


def test_models_are_listed(run):
    code, out, err = run("models")
    assert (code, err) == (0, "")
    assert {"tiny.en", "large-v3", "turbo"} <= {line.split(" ")[0] for line in out.splitlines()}
