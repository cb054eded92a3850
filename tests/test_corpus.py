"""Data sets: the forms that are read, and what is found wrong with them."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from asrmask.errors import AudioError, OptionError
from asrmask.evaluation import corpus
from asrmask.evaluation.corpus import Clip


def test_a_manifest_of_tabs(tmp_path):
    text = 'path\ttext\tlang\tspeaker\na.wav\t"Yes, he said.\tde\tanna\nb/c.wav\tNo.\t\t\n'
    (tmp_path / "manifest.tsv").write_text(text, encoding="utf-8")
    expected = [
        Clip(tmp_path / "a.wav", '"Yes, he said.', "de", "anna", "a"),
        Clip(tmp_path / "b/c.wav", "No.", "en", None, "c"),
    ]
    assert corpus.read(tmp_path) == expected
    assert corpus.read(tmp_path / "manifest.tsv") == expected


def test_a_manifest_of_lines_of_json_under_other_names(tmp_path):
    rows = [
        {"audio_filepath": "1688-142285-0000.flac", "sentence": "One.", "locale": "fr"},
        {"file_name": "x.mp3", "transcription": "Two.", "speaker_id": 7, "id": "two"},
    ]
    path = tmp_path / "metadata.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    one, two = corpus.read(tmp_path)
    assert (one.id, one.text, one.language, one.speaker) == (
        "1688-142285-0000",
        "One.",
        "fr",
        "1688",
    )
    assert (two.id, two.speaker, two.path) == ("two", "7", tmp_path / "x.mp3")


def test_names_in_a_manifest_are_utf8_whatever_the_locale_is(tmp_path):
    (tmp_path / "café.wav").touch()
    (tmp_path / "manifest.tsv").write_text("path\ttext\ncafé.wav\tYes.\n", encoding="utf-8")
    code = (
        "from pathlib import Path; from asrmask.evaluation import corpus\n"
        f"(clip,) = corpus.read(Path({str(tmp_path)!r}))\n"
        "print(clip.path.is_file(), ascii(clip.id))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True 'caf\\xe9'\n"


def test_fields_of_a_tsv_may_be_long_and_lines_may_end_as_on_windows(tmp_path):
    text = "word " * 40_000
    rows = f"path\ttext\tspeaker\r\na.wav\t{text}\tanna\r\n\r\nb.wav\tNo.\r\n"
    (tmp_path / "manifest.tsv").write_bytes(rows.encode())
    assert corpus.read(tmp_path) == [
        Clip(tmp_path / "a.wav", text, speaker="anna"),
        Clip(tmp_path / "b.wav", "No."),
    ]


def test_what_a_csv_cannot_hold_is_one_line(tmp_path):
    path = tmp_path / "clips.csv"
    path.write_text(f"path,text\na.wav,{'word ' * 40_000}\n")
    told = r"clips\.csv: expected a manifest, got field larger than field limit \(131072\)$"
    with pytest.raises(AudioError, match=told):
        corpus.read(path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"_data_files": 1}', "[" * 100_000])
def test_a_damaged_data_set_of_hugging_face_is_one_line(tmp_path, content):
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(AudioError, match=r"expected a data set saved to disk, got .+$"):
        corpus.read(tmp_path)


def test_librispeech_as_published(tmp_path):
    folder = tmp_path / "test-other" / "1688" / "142285"
    folder.mkdir(parents=True)
    lines = "1688-142285-0000 THERE'S IRON\n1688-142285-0001 AND SO\n"
    (folder / "1688-142285.trans.txt").write_text(lines)
    clips = corpus.read(tmp_path)
    assert [clip.text for clip in clips] == ["THERE'S IRON", "AND SO"]
    assert clips[0].path == folder / "1688-142285-0000.flac"
    assert {clip.speaker for clip in clips} == {"1688"}


def test_a_data_set_of_hugging_face(tmp_path, sample):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow reads Hugging Face's data sets")
    audio = {"bytes": sample.read_bytes(), "path": "one.flac"}
    table = pyarrow.table({"audio": [audio], "text": ["And Mr."], "speaker_id": [3]})
    with pyarrow.ipc.new_stream(tmp_path / "data-0.arrow", table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    (clip,) = corpus.read(tmp_path)
    assert (clip.id, clip.text, clip.speaker) == ("one", "And Mr.", "3")
    assert clip.recording().duration_s == pytest.approx(7.1, abs=0.1)
    assert list(corpus.check([clip])[0]) == ["one"]


def test_what_is_no_data_set_is_one_line(tmp_path):
    with pytest.raises(AudioError, match="no such file or folder"):
        corpus.read(tmp_path / "nowhere")
    with pytest.raises(AudioError, match=r"expected manifest\.tsv"):
        corpus.read(tmp_path)
    for name, content, told in (
        ("manifest.tsv", "file\n", None),
        ("manifest.tsv", "text\nhello\n", "row 1: expected a column path, got text"),
        ("manifest.jsonl", "{", "expected a manifest, got"),
        ("manifest.jsonl", "[1]\n", "expected an object, got list"),
        ("manifest.jsonl", "[" * 100_000, "expected a manifest, got JSON nested too deeply"),
        ("manifest.jsonl", '{"path": ' + "[" * 100_000, "got JSON nested too deeply"),
    ):
        folder = tmp_path / str(abs(hash((name, content))))
        folder.mkdir()
        (folder / name).write_text(content)
        if told is None:
            assert corpus.read(folder) == []
        else:
            with pytest.raises(AudioError, match=told) as caught:
                corpus.read(folder)
            assert "\n" not in str(caught.value)
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(OptionError, match="a data set in parts"):
        corpus.read(tmp_path)


def test_bad_clips_are_found_and_named(tmp_path, sample):
    good = tmp_path / "good.flac"
    shutil.copy(sample, good)
    (tmp_path / "noise.wav").write_bytes(b"not audio")
    clips = [
        Clip(good, "Good."),
        Clip(tmp_path / "gone.wav", "Gone."),
        Clip(tmp_path / ("x" * 5_000), "Gone.", id="long"),
        Clip(tmp_path / "noise.wav", "Noise."),
        Clip(good, " ", id="silent"),
        Clip(good, "A.", id="twice"),
        Clip(good, "B.", id="twice"),
    ]
    seconds, bad = corpus.check(clips)
    assert list(seconds) == ["good"]
    assert bad["gone"] == f"no such file: {tmp_path / 'gone.wav'}"
    assert bad["long"].startswith("no such file: ")
    assert "expected audio" in bad["noise"]
    assert bad["silent"] == "no transcript"
    assert bad["twice"] == "2 clips have this id"
