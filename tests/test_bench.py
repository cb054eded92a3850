"""Benchmarks: what is measured, how it is summed up, and what is written."""

import json
import statistics
import wave
from pathlib import Path

import numpy as np
import pytest

from asrmask.audio.constants import SAMPLE_RATE
from asrmask.benchmark import report, run, summary, worker
from asrmask.cli import main
from asrmask.errors import OptionError
from asrmask.evaluation.corpus import Clip
from asrmask.systems import DecodingSettings, Named


def entry(system, number, seconds, work="short", **more):
    """One measurement, made up."""
    wrong = {"substitutions": 1, "deletions": 0, "insertions": 1, "n_words": 8}
    return {
        "system": system,
        "decoding": "greedy",
        "work": work,
        "round": number,
        "seconds": seconds,
        "parts": {"audio": 0.1, "spectrogram": 0.1, "encoder": seconds / 2, "decoder": 0.2},
        "peak_mb": 400.0 + number,
        "own_mb": 300.0 - number,
        "first_text_s": 2.0,
        "alone_s": [0.5, 0.7],
        "errors": [wrong, wrong],
        "texts": ["a", "b"],
        **more,
    }


@pytest.fixture
def result():
    """A benchmark of three rounds in which one system fails once, made up."""
    ours, theirs = [2.0, 4.0, 2.0], [8.0, 12.0, 6.0]
    runs = []
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        runs += [entry("asrmask", number, a), entry("openai-whisper", number, b)]
    failed = {"system": "whisper.cpp:q8_0", "decoding": "greedy", "work": "short", "round": 1}
    runs.append({**failed, "error": "no such file"})
    scaling = [
        {"axis": "clip", "system": "asrmask", "size": x, "seconds": 1 + 2 * x, "peak_mb": 1}
        for x in (1, 2, 4, 8)
    ]
    shares = [{"part": "encoder", "least_s": 0.1, "taken_s": 0.2, "reached": 0.5}]
    names = ("float32_operations", "int8_operations", "float32_bytes", "int8_bytes")
    limits = dict.fromkeys(names, 100.0)
    return {
        "about": {
            "command": "asrmask bench",
            "date": "2026-01-01 00:00 UTC",
            "asrmask": "0",
            "model": "tiny.en",
            "threads": 2,
            "rounds": 3,
            "processor": "a processor",
            "packages": {"torch": "1"},
        },
        "works": {"short": {"clips": 2, "seconds": 40.0}},
        "machine": {"limits": limits, "shares": shares},
        "runs": runs,
        "scaling": scaling,
    }


# ------------------------------------------------------------------ summing up


def test_ratios_are_taken_within_rounds(result):
    line = summary.system_results(result)[0]
    assert line.system == "asrmask"
    assert line.ratios == [4.0, 3.0, 3.0]
    assert line.ratio == 3.0  # the ratio of the medians would be 4
    assert line.median_s == 2.0
    assert line.times_real_time == 20.0
    assert (line.peak_mb, line.own_mb) == (403.0, 299.0)
    assert line.alone_s == statistics.median([0.5, 0.7] * 3)
    assert line.errors.wer == 4 / 16


def test_one_round_has_no_range(result):
    assert summary.cells(summary.system_results(result)[0])[2] == "2.00 (2.00 … 4.00)"
    assert "3 rounds" in report.page([result], [[]])
    assert any("their range" in plot.caption for plot in report.plots(result))
    result["runs"] = [r for r in result["runs"] if r["round"] == 1]
    result["about"]["rounds"] = 1
    cells = summary.cells(summary.system_results(result)[0])
    assert (cells[2], cells[4]) == ("2.00", "4.00")
    for text in (report.page([result], [[]]), summary.markdown(result)):
        assert "1 round" in text
        assert "1 rounds" not in text
    assert not any("range" in plot.caption for plot in report.plots(result))


def test_a_failed_system_is_told_and_no_number_is_made_up(result):
    line = summary.system_results(result)[2]
    assert line.failed == "no such file"
    assert line.median_s is None
    assert summary.cells(line)[1:3] == ["failed: no such file", "no data"]


def test_own_memory_is_the_peak_without_shared_pages(tmp_path):
    rollup = tmp_path / "rollup"
    rollup.write_text("0-1 [rollup]\nRss: 900 kB\nShared_Clean: 2048 kB\nShared_Dirty: 1024 kB\n")
    assert worker.own_mb(rollup) == pytest.approx(worker.peak_mb() - 3, abs=1)


def test_without_own_memory_the_table_says_so(result, tmp_path):
    assert worker.own_mb(tmp_path / "none") is None  # as on other systems than Linux
    for one in result["runs"]:
        one.pop("own_mb", None)  # as in older files
    row = summary.cells(summary.system_results(result)[0])
    cells = dict(zip(summary.HEADINGS, row, strict=True))
    assert (cells["peak RSS MB"], cells["own MB"]) == ("403", "no data")
    assert "no data" in summary.markdown(result)
    unknown = {"seconds": 1.0, "peak_mb": 400.0, "own_mb": None}
    assert run.format_measurement(unknown) == ": 1.0 s, 400 MB"


def test_without_openai_whisper_ratios_are_to_the_first_system(result):
    result["runs"] = [r for r in result["runs"] if r["system"] != "openai-whisper"]
    assert summary.reference_of(result) == "asrmask"
    assert summary.system_results(result)[0].ratios == [1.0, 1.0, 1.0]


def test_a_system_is_set_beside_each_other_one(result):
    (row,) = summary.ratios(result)  # none for the system that failed
    assert (row["work"], row["decoding"]) == ("short", "greedy")
    assert (row["system"], row["other"]) == ("asrmask", "openai-whisper")
    assert row["throughput"] == 3.0  # of 4, 3 and 3, each within its round
    assert row["alone"] == row["memory"] == 1.0


def test_word_error_rates_are_set_beside_the_exact_ones(result):
    better = [{"substitutions": 0, "deletions": 0, "insertions": 1, "n_words": 8}] * 2
    result["runs"] += [entry("asrmask:preset=fast", 1, 1.0, errors=better)]
    result["works"]["short"]["speakers"] = ["one", "two"]
    told = summary.markdown(result)
    fast = "| short, greedy | asrmask:preset=fast |"
    assert f"{fast} 12.50 | 25.00 | -12.50 (-12.50 … -12.50) |" in told
    assert f"{fast} openai-whisper | 8.00 | 1.00 |" in told


def test_other_clips_are_not_compared(result):
    old = json.loads(json.dumps(result))
    old["works"]["short"]["clips"] = 1
    assert "other clips or another model" in summary.compare_benchmarks(result, old)[2]


def test_a_line_is_fitted_by_relative_errors():
    fixed, each, _ = summary.fit([1, 2, 4, 8], [3, 5, 9, 17])
    assert (fixed, each) == (1.0, 2.0)
    assert summary.fit([1, 10, 100], [2, 20, 200])[2] == 1.0
    assert summary.fit([1, 2], [1, 2]) is None


def test_an_older_benchmark_is_compared_line_by_line(result):
    old = json.loads(json.dumps(result))
    for one in old["runs"]:
        if one["system"] == "asrmask":
            one["seconds"] *= 3
    told = summary.compare_benchmarks(result, old)
    assert "asrmask: 3.00 times as fast, 3.00 relative to openai-whisper" in told[2]
    assert "openai-whisper: 1.00 times as fast" in told[3]


def test_markdown_has_every_system_and_the_limits(result):
    told = summary.markdown(result)
    assert "| asrmask | 25.00 | 2.00 (2.00 … 4.00) | 20.0 | 3.00 (3.00 … 4.00) |" in told
    assert "| encoder | 100.00 | 200.00 | 50 % |" in told
    assert "| asrmask | 1: 3.00, 2: 5.00, 4: 9.00, 8: 17.00 | 1.000 | 2.0000 |" in told


def test_pages_are_whole_and_need_nothing_else(result, tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        run.save(result, tmp_path / name)
    written = report.write([tmp_path / "old", tmp_path / "new" / "bench.json"], tmp_path / "both")
    page = (tmp_path / "both" / "bench.html").read_text()
    assert "http" not in page.replace("http://www.w3.org", "")
    assert page.count("Limits of the machine") == 2
    assert "against the benchmark of 2026-01-01" in page
    names = {path.name for path in written}
    assert {"bench.md", "1-speed-1.png", "2-growth-clip.svg", "2-ratios.csv"} <= names


def test_ratios_are_a_small_table(result):
    lines = report.ratio_table(result).csv().splitlines()
    assert lines[0] == "work,decoding,system,other,throughput,alone,memory"
    assert lines[1:] == ["short,greedy,asrmask,openai-whisper,3.0,1.0,1.0"]


# ------------------------------------------------------------------ measuring


def test_systems_take_turns_within_every_round():
    clip_sets = [run.ClipSet("a", []), run.ClipSet("b", [])]
    systems = [Named("asrmask", {}), Named("openai-whisper", {})]
    decodings = [DecodingSettings()]
    spec = run.BenchmarkSpec(clip_sets, systems, decodings, 2, "tiny.en", None, 2, [], 1, "")
    order = [(n, clip_set.name, system.name) for n, clip_set, _, system in spec.schedule()]
    assert order[:2] == [(1, "a", "asrmask"), (1, "a", "openai-whisper")]
    assert order[2:4] == [(1, "b", "asrmask"), (1, "b", "openai-whisper")]
    assert len(order) == 8


def test_clips_are_taken_from_all_over_the_list(tmp_path):
    clips = [Clip(tmp_path / f"{i}.wav") for i in range(10)]
    assert [clip.id for clip in run.sample(clips, 5)] == ["0", "2", "4", "6", "8"]
    assert run.sample(clips, None) == run.sample(clips, 99) == clips
    with pytest.raises(OptionError, match="clips of a data set must be 1 or more, got 0"):
        run.sample(clips, 0)


def test_speech_is_cut_to_the_length_asked_for(tmp_path):
    paths = run.cut(np.zeros(5 * SAMPLE_RATE, np.float32), 0.5, tmp_path)
    assert len(paths) == run.N_CUT
    with wave.open(str(paths[0])) as file:
        assert (file.getnframes(), file.getframerate()) == (SAMPLE_RATE // 2, SAMPLE_RATE)


def test_a_process_that_dies_is_a_failure_that_says_why():
    found = run.run_module("asrmask.benchmark.nothing", {}, 1)
    assert "No module named asrmask.benchmark.nothing" in found["error"]


def test_a_benchmark_is_measured_and_written(tmp_path, capsys, samples):
    path, text = min(samples.items(), key=lambda item: item[0].stat().st_size)
    manifest = tmp_path / "one.tsv"
    manifest.write_text(f"path\ttext\n{path}\t{text}\n")
    out = tmp_path / "out"
    command = ["bench", str(manifest), "--systems", "asrmask:virtual", "asrmask"]
    assert main([*command, "--rounds", "1", "--threads", "1", "--out", str(out)]) == 0
    found = run.read(out)
    assert [one["system"] for one in found["runs"]] == ["asrmask:virtual", "asrmask"]
    one = found["runs"][0]
    assert sum(one["parts"].values()) <= one["seconds"]
    assert one["parts"]["encoder"] > 0
    assert one["parts"]["decoder"] > 0
    assert 100 < one["peak_mb"] < 4000
    assert 50 < one["own_mb"] <= one["peak_mb"]
    assert one["loaded_s"] < one["first_text_s"]
    assert sum(e["substitutions"] for e in one["errors"]) <= 3
    assert found["machine"]["limits"]["float32_operations"] > 0
    assert (out / "bench.html").is_file()
    assert "| asrmask:virtual |" in capsys.readouterr().out


def test_a_mixed_work_takes_the_sets_in_turn():
    works = [
        run.ClipSet(name, [Clip(Path(f"{name}{i}.wav"), language=name) for i in range(n)])
        for name, n in (("en", 4), ("de", 1))
    ]
    found = run.mix(works, 2)
    assert [str(clip.path) for clip in found.clips] == ["en0.wav", "de0.wav", "en2.wav"]
    assert found.language is None
    with pytest.raises(OptionError, match="must be 1 or more, got 0"):
        run.mix(works, 0)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--systems", "nothing"], "a system must be one of"),
        (["--settings", "beam"], "--settings must be of greedy, beam5, …, got 'beam'"),
        (["--scaling", "depth"], "--scaling must be of clip, file, batch, got 'depth'"),
        (["--rounds", "0"], "--rounds must be positive, got 0"),
        (["nowhere"], "nowhere: no such file or folder"),
        (["--against", "nowhere.json"], "nowhere.json: No such file or directory"),
    ],
)
def test_wrong_flags_are_told_in_one_line(flags, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *flags]) in {1, 2}
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_reports_are_of_one_kind(result, tmp_path, capsys):
    run.save(result, tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert str(tmp_path / "bench.html") in capsys.readouterr().out
    assert main(["report", str(tmp_path), str(tmp_path / "other")]) == 2
