"""asrmask inspect and transcribe --diagnose: files, page, what is missing, what is wrong."""

import csv
import json
import math
import re
from itertools import pairwise

import numpy as np
import pytest
import soundfile
from media import read_flac

from asrmask import cli
from asrmask.audio.recording import Recording
from asrmask.errors import OptionError
from asrmask.inspection import inspection, page, pictures
from asrmask.inspection.diagnosis import Diagnose
from asrmask.inspection.inspection import N_BINS, Inspection, in_bins, word_spans
from asrmask.inspection.quantities import QUANTITIES, expected
from asrmask.model.policy import Policy
from asrmask.reporting.tables import Table
from asrmask.tokenizer.tokenizer import get_tokenizer
from asrmask.transcription.api import stream
from asrmask.transcription.result import Segment, Word
from asrmask.transcription.settings import Settings
from asrmask.transcription.window_loop import Callbacks

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = ["--beam_size", "None", "--temperature_increment_on_fallback", "None"]


@pytest.fixture(scope="module")
def clips(samples):
    return list(samples)[1:3]


@pytest.fixture(scope="module")
def out(clips, tmp_path_factory):
    """Two clips under two policies."""
    folder = tmp_path_factory.mktemp("inspection")
    code = cli.main(["inspect", *map(str, clips), "--against", "trim", "--out", str(folder)])
    assert code == 0
    return folder


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_pictures_numbers_and_a_page_are_written(out):
    tables = ["heads", "segments", "summary", "windows", "words"]
    expected = {f"{name}.{ending}" for name in tables for ending in ("csv", "parquet")}
    assert {path.name for path in out.iterdir()} == {"inspect.html", "pictures", *expected}
    drawn = {path.name for path in (out / "pictures").iterdir()}
    wanted = {f"{kind}-{name}.png" for name in QUANTITIES for kind in ("heads", "comparison")}
    clips = {
        f"{kind}-austen-{n}-1.png" for n in ("0880", "0890") for kind in ("cross", "spectrogram")
    }
    assert drawn == wanted | clips | {"padding-by-position.png"}
    for path in (out / "pictures").iterdir():
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_page_needs_nothing_else_and_has_the_text_under_the_spectrogram(out):
    text = (out / "inspect.html").read_text()
    assert not re.search(r"(src|href)=.(?!data:)", text)
    assert "young" in text
    assert text.index("spectrogram with its padding") < text.index(">young</span>")
    assert text.index(">young</span>") < text.index("cross-attention over time")
    assert "trim minus full, head by head" in text
    assert "Bands: 95 % intervals over windows." in text
    assert "no data under trim" in text
    assert "encoder.2.self padding" in text
    assert "attention on padding: decoder 0." in text


def test_csv_and_parquet_have_the_same_numbers(out):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow reads Parquet")
    for path in out.glob("*.csv"):
        there = parquet.read_table(path.with_suffix(".parquet")).to_pylist()
        here = rows(path)
        assert len(here) == len(there) > 0
        for a, b in zip(here, there, strict=True):
            for name, cell in a.items():
                assert cell == ("" if b[name] is None else str(b[name]))


def test_a_row_for_every_head_of_every_window_and_policy(out, model):
    found = rows(out / "heads.csv")
    assert len(found) == 2 * 2 * 3 * 4 * 6
    cross = [r for r in found if r["attention"] == "decoder.cross"]
    for row in cross:
        full = row["policy"] == "full"
        assert bool(row["padding"]) == full  # trim shows no padding: no data, and not 0
        assert bool(row["end_padding"]) == full
        assert 0 <= float(row["speech"]) <= 1
    text = [r for r in found if r["attention"] == "decoder.self"]
    assert {r["padding"] for r in text} == {""}
    assert {r["policy"] for r in rows(out / "summary.csv")} == {"full", "trim", "trim minus full"}
    n_expected = len(expected(model.dims)) * 6
    assert sum(r["policy"] == "full" for r in rows(out / "summary.csv")) == n_expected


def test_words_have_their_own_attention(out):
    found = rows(out / "words.csv")
    assert [row["word"] for row in found[:3]] == ["He", "was", "not"]
    assert all(0 < float(row["cross_on_padding"]) < 1 for row in found)
    assert all(0 < float(row["encoder_on_padding"]) < 1 for row in found)


def test_differences_are_of_the_same_windows(out):
    heads, summary = rows(out / "heads.csv"), rows(out / "summary.csv")
    key = {"attention": "decoder.cross", "layer": "1", "head": "3"}
    mine = [r for r in heads if all(r[k] == v for k, v in key.items())]
    by = {p: [float(r["entropy"]) for r in mine if r["policy"] == p] for p in ("full", "trim")}
    differences = np.subtract(by["trim"], by["full"])
    (row,) = [
        r
        for r in summary
        if all(r[k] == v for k, v in key.items())
        and (r["policy"], r["quantity"]) == ("trim minus full", "entropy")
    ]
    assert float(row["mean"]) == pytest.approx(differences.mean())
    half = 12.7062047 * differences.std(ddof=1) / math.sqrt(2)  # t of 1 degree of freedom
    assert float(row["high"]) - float(row["mean"]) == pytest.approx(half, rel=1e-6)


# --- what is missing


def test_a_layer_that_recorded_nothing_is_named_and_hatched(model, clips, tmp_path, monkeypatch):
    """A recorder that never hears layer 1 of the encoder."""
    from asrmask.inspection.quantities import Meter

    heard = Meter.__call__
    monkeypatch.setattr(
        Meter,
        "__call__",
        lambda self, place, *rest: None if place == "encoder.1.self" else heard(self, place, *rest),
    )
    found = Inspection(model, Policy())
    found.add(str(clips[0]))
    assert page.missing(found) == ["no data under full: encoder.1.self"]
    cells = []
    monkeypatch.setattr(pictures, "hatched", lambda axes, x, y, *size: cells.append((x, y)))
    pictures.heat_maps(found.tallies["full"], "entropy", "Entropy")
    assert cells == [(head - 0.5, 0.5) for head in range(6)]
    table = page.summary(found)
    assert not [r for r in table.rows if (r["attention"], r["layer"]) == ("encoder.self", 1)]
    absent = [
        r for r in found.tables["heads"].rows if (r["attention"], r["layer"]) == ("encoder.self", 1)
    ]
    assert len(absent) == 6
    assert all(row[name] is None for row in absent for name in QUANTITIES)
    page.write(found, tmp_path, "tiny.en", "asrmask inspect")
    assert "encoder.1.self" in (tmp_path / "inspect.html").read_text()


def test_half_a_minute_of_audio_has_no_padding_to_look_at(model, samples, tmp_path):
    whole = np.concatenate([read_flac(path) for path in samples] * 2)[: 30 * 16_000]
    file = tmp_path / "whole.wav"
    soundfile.write(file, whole, 16_000)
    found = Inspection(model, Policy())
    found.add(str(file))
    first = [row for row in found.tables["heads"].rows if row["window"] == 1]
    assert {row["padding"] for row in first} == {None}
    assert None not in {row["entropy"] for row in first}


def test_a_policy_that_hides_the_padding_has_no_data_on_it(run, clips, tmp_path):
    code, text, err = run("inspect", clips[0], "--padding", "trim", "--out", tmp_path)
    assert code == 0
    assert text.count("no data, there is no padding to look at") == 2
    assert "no data under trim: encoder.0.self padding" in err
    assert (tmp_path / "pictures" / "padding-by-position.png").is_file()


def test_a_long_recording_is_inspected_window_by_window(model, samples, tmp_path):
    whole = np.concatenate([read_flac(path) for path in samples] * 2)  # 49 s
    file = tmp_path / "long.wav"
    soundfile.write(file, whole, 16_000)
    found = Inspection(model, Policy("virtual"), Policy(fill="silence"))
    found.add(str(file))
    assert found.n_windows >= 2
    assert [shown.number for shown in found.plotted] == list(range(1, found.n_windows + 1))
    starts = {row["start_s"] for row in found.tables["windows"].rows}
    assert len(starts) == found.n_windows
    last = found.plotted[-1]
    assert all(seen.word.start >= last.start_s - 0.5 for seen in last.words)
    written = page.write(found, tmp_path, "tiny.en", "asrmask inspect")
    assert written[-1].name == "inspect.html"
    text = written[-1].read_text()
    n_padded = sum(shown.features.n_frames < 3000 for shown in found.plotted)
    assert 0 < n_padded < found.n_windows
    assert page.verdict(found)[0].startswith(
        f"Padding can be seen in {n_padded} of {found.n_windows} windows"
    )
    assert text.count("No padding can be seen here.") == found.n_windows - n_padded
    assert text.count("below with\nthe head that looks at padding most") == n_padded
    assert "Hatched" not in text


# --- what is wrong


def test_a_bad_file_gets_one_line_and_the_others_are_done(run, clips, tmp_path):
    bad = tmp_path / "bad.wav"
    bad.write_bytes(b"nothing")
    silent = tmp_path / "silent.wav"
    soundfile.write(silent, np.zeros(16_000), 16_000)
    code, out, err = run("inspect", bad, clips[0], silent, "--out", tmp_path / "out")
    assert code == 1
    assert "Cross-attention" in out
    errors = [line for line in err.splitlines() if "error:" in line]
    assert len(errors) == 2
    assert f"{bad}: expected audio" in errors[0]
    assert f"{silent}: pure silence" in errors[1]
    assert f"2 of 3 files failed: {bad} {silent}" in err
    assert "Bands" not in (tmp_path / "out" / "inspect.html").read_text()  # of one window: none


def test_nothing_good_writes_nothing(run, tmp_path):
    code, out, err = run("inspect", tmp_path / "none.wav", "--out", tmp_path / "out")
    assert (code, out) == (1, "")
    assert "none.wav: No such file" in err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--padding", "half"], "padding must be one of full"),
        (["--against", "trim,margin=99"], "margin must be 0..30 seconds, got 99"),
        (["--against", "full"], "--against must be another policy than --padding, got full"),
        (["--out", __file__], "--out must be a folder, got"),
        (["--threads", "-1"], "--threads must be 0 or more, got -1"),
    ],
)
def test_a_bad_option_is_one_line(run, clips, arguments, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run("inspect", clips[0], *arguments)
    assert code == 2
    assert err.count("\n") == 1
    assert told in err


# --- parts


def test_bins_by_hand():
    profile = np.full((5, 2), math.nan)
    assert np.isnan(in_bins(profile)).all()
    profile[1] = 0.2, 0.4
    profile[2] = 0.5, 0.7
    binned = in_bins(profile)
    assert binned[0] == pytest.approx(0.3)
    assert binned[N_BINS // 2] == pytest.approx(0.6)
    assert np.isnan(np.delete(binned, [0, N_BINS // 2])).all()


def test_words_are_found_among_tokens_and_times():
    tokenizer = get_tokenizer(False)
    tokens = [50363, *tokenizer.encode(" Mr. Dashwood, then"), 50400]
    texts = (" Mr.", " Dashwood,", " then")
    words = [Word(text, 0.0, 1.0, 1.0) for text in texts]
    segment = Segment(0, 0, 0, 1, "".join(texts), tokens, 0, 0, 0, 0, words)
    found = word_spans(segment, (10, 10 + len(tokens)), tokenizer)
    assert [word.word for word, _ in found] == list(texts)
    spans = [span for _, span in found]
    assert spans[0][0] == 11  # after the time
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    for (first, end), text in zip(spans, texts, strict=True):
        assert tokenizer.decode(tokens[first - 10 : end - 10]) == text


def test_a_table_has_no_nan():
    table = Table({"a": str, "b": float})
    table.add(a="x", b=math.nan)
    table.add(a='say "so"', b=0.5)
    assert table.csv() == 'a,b\nx,\n"say ""so""",0.5\n'


# --- transcribe --diagnose


def test_diagnose_is_in_the_json_and_changes_nothing_else(run, clips, tmp_path):
    plain, told = tmp_path / "plain", tmp_path / "told"
    assert run("transcribe", clips[0], "-f", "json", "-o", plain, *GREEDY)[0] == 0
    assert run("transcribe", clips[0], "-f", "json", "-o", told, "--diagnose", *GREEDY)[0] == 0
    name = f"{clips[0].stem}.json"
    one, other = (json.loads((folder / name).read_text()) for folder in (plain, told))
    for segment in other["segments"]:
        diagnosis = segment.pop("diagnosis")
        assert diagnosis["padding_s"] == 27.0
        assert 0 < diagnosis["attention_on_padding"] < 1
        assert np.mean(diagnosis["by_layer"]) == pytest.approx(
            diagnosis["attention_on_padding"], abs=1e-4
        )
    assert one == other


def test_diagnose_needs_json(run, clips):
    code, _, err = run("transcribe", clips[0], "-f", "txt", "--diagnose")
    assert code == 2
    assert "--diagnose is for --output_format json or all, got txt" in err


def test_the_diagnosis_is_what_inspect_says(model, clips, out):
    running = stream(
        model,
        clips[0],
        Settings(temperature=0.0, word_timestamps=True),
        callbacks=Callbacks(on_window=Diagnose(model)),
    )
    (segment,) = running
    told = next(row for row in rows(out / "segments.csv") if clips[0].name in row["file"])
    assert float(told["attention_on_padding"]) == pytest.approx(
        segment.diagnosis.attention_on_padding, abs=1e-4
    )


def test_where_no_padding_is_seen_there_is_nothing_to_diagnose(model, clips):
    settings = Settings(temperature=0.0, padding="trim", policy_fallback=False)
    for segment in stream(
        model, clips[1], settings, callbacks=Callbacks(on_window=Diagnose(model))
    ):
        assert segment.diagnosis.to_dict() == {"padding_s": 0.0}
    settings = Settings(temperature=0.0, padding="virtual")
    for segment in stream(
        model, clips[1], settings, callbacks=Callbacks(on_window=Diagnose(model))
    ):
        assert segment.diagnosis.padding_s == pytest.approx(24.7)


def test_a_watcher_hears_every_window_with_its_options(model, samples):
    whole = np.concatenate([read_flac(path) for path in samples] * 2) / np.float32(32768)
    heard = []
    running = stream(
        model,
        Recording.of(whole),
        Settings(temperature=0.0),
        callbacks=Callbacks(on_window=heard.append),
    )
    text = running.result().text
    assert len(heard) >= 2
    assert "".join(s.text for h in heard for s in h.segments) == text
    assert heard[0].options.prompt == []
    assert heard[1].options.prompt  # what was said before
    assert heard[1].seek > 0


def test_inspection_refuses_one_policy_twice(model):
    with pytest.raises(OptionError, match="--against must be another policy"):
        Inspection(model, Policy(), Policy())
    assert inspection.N_PLOTTED > 0
