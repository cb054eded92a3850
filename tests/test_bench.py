"""Benchmarks: what is measured, how it is summed up, and what is written."""

import itertools
import json
import statistics
import time
import wave
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import torch

from asrmask.audio.constants import SAMPLE_RATE
from asrmask.benchmark import limits, report, run, shapes, summary, worker
from asrmask.benchmark import parts as parts_module
from asrmask.checkpoints import read, registry
from asrmask.cli import main
from asrmask.errors import AsrmaskError, OptionError
from asrmask.evaluation.corpus import Clip
from asrmask.systems import DecodingSettings, Named


def entry(system, number, seconds, work="short", **more):
    """One measurement, made up."""
    wrong = {"substitutions": 1, "deletions": 0, "insertions": 1, "n_words": 8}
    return {
        "model": "tiny.en",
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


def part_entry(library, number, window_s, clip_s=None, model="tiny.en", compute_type="int8"):
    """One measurement of parts, made up."""
    parts = {parts_module.ENCODER: window_s, parts_module.token_part(1): 0.01}
    parts |= {"encoder, 15 s, virtual padding": clip_s} if clip_s else {}
    names = {"model": model, "library": library, "compute_type": compute_type, "round": number}
    return {**names, "parts": parts, "peak_mb": 200.0 + number, "own_mb": None}


@pytest.fixture
def result():
    """A benchmark of three rounds in which one system fails once, made up."""
    ours, theirs = [2.0, 4.0, 2.0], [8.0, 12.0, 6.0]
    runs = []
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        runs += [entry("asrmask", number, a), entry("openai-whisper", number, b)]
    failed = entry("whisper.cpp:q8_0", 1, 1.0)
    kept = ("model", "system", "decoding", "work", "round")
    runs.append({**{name: failed[name] for name in kept}, "error": "no such file"})
    scaling = [
        {
            "axis": "clip",
            "model": "tiny.en",
            "system": "asrmask",
            "size": x,
            "seconds": 1 + 2 * x,
            "peak_mb": 1,
        }
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
        "machine": {"tiny.en": {"limits": limits, "shares": shares}},
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
    assert row["alone"] == row["memory"] == row["cold"] == 1.0


def test_word_error_rates_are_set_beside_the_exact_ones(result):
    better = [{"substitutions": 0, "deletions": 0, "insertions": 1, "n_words": 8}] * 2
    result["runs"] += [entry("asrmask:preset=fast", 1, 1.0, errors=better)]
    strict = [{**errors, "insertions": 2} for errors in better]
    result["runs"] += [entry(summary.STRICT, 1, 1.0, errors=strict)]
    result["works"]["short"]["speakers"] = ["one", "two"]
    told = summary.markdown(result)
    fast = "| short, greedy | asrmask:preset=fast |"
    for other in ("asrmask", summary.STRICT):
        assert f"{fast} 12.50 | {other} | 25.00 | -12.50 (-12.50 … -12.50) |" in told
    assert f"{fast} openai-whisper | 8.00 | 1.00 | 1.00 | 1.00 |" in told


def test_other_clips_are_not_compared(result):
    old = json.loads(json.dumps(result))
    old["works"]["short"]["clips"] = 1
    assert summary.compare_benchmarks(result, old)[2].endswith(": other clips")


def test_other_models_are_not_compared(result):
    old = json.loads(json.dumps(result))
    for one in old["runs"]:
        one["model"] = "base.en"
    assert summary.compare_benchmarks(result, old)[2].startswith("  nothing to compare")


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
    assert lines[0] == "model,work,decoding,system,other,throughput,alone,memory,cold"
    assert lines[1:] == ["tiny.en,short,greedy,asrmask,openai-whisper,3.0,1.0,1.0,1.0"]


def add_model(result):
    """Add a slower model to a benchmark: the same systems, twice the seconds of asrmask."""
    base = [{**one, "model": "base.en.bin"} for one in result["runs"]]
    for one in base:
        if one["system"] == "asrmask":
            one["seconds"] *= 2
    result["runs"] += base
    result["machine"]["base.en.bin"] = {"error": "too slow"}
    result["scaling"] += [{**one, "model": "base.en.bin"} for one in result["scaling"]]


def test_several_models_are_told_apart(result):
    assert "tiny.en, short" not in summary.markdown(result)
    add_model(result)
    told = summary.markdown(result)
    assert "## asrmask compared with the other systems" in told
    for model in ("tiny.en", "base.en.bin"):
        assert f"## {model}, short: 2 files, 40.0 s, greedy" in told
        assert f"## {model}, Limits of the machine" in told
        assert f"| asrmask of {model} | 1: 3.00" in told
    assert "| tiny.en, short, greedy | asrmask | openai-whisper | 3.00 |" in told
    assert "| base.en.bin, short, greedy | asrmask | openai-whisper | 1.50 |" in told
    assert [row["throughput"] for row in summary.ratios(result)] == [3.0, 1.5]
    titles = [plot.title for plot in report.plots(result)]
    assert "base.en.bin, short: 2 files, 40.0 s, greedy" in titles
    # each with the same model in an older benchmark
    told = "\n".join(summary.compare_benchmarks(result, result))
    assert "  base.en.bin, short, greedy, asrmask: 1.00 times as fast" in told


def test_files_of_one_model_from_before_there_were_several_are_read(result, tmp_path):
    new = json.dumps(result)
    for one in (*result["runs"], *result["scaling"]):
        del one["model"]
    result["machine"] = result["machine"]["tiny.en"]
    run.save(result, tmp_path)
    assert run.read(tmp_path) == json.loads(new)


def test_clips_that_are_timed_alone_are_told(result):
    result["alone"] = {"short": [{"path": "a", "seconds": 7.5}, {"path": "b", "seconds": 7.0}]}
    told = summary.markdown(result)
    assert "One clip: 2 clips of 7.0 to 7.5 s, one at a time." in told
    assert "to the text of one clip of 7.5 s." in told


def test_parts_are_compared_within_rounds(result):
    result["parts"] = [
        *(part_entry("asrmask", 1, 0.1, 0.05), part_entry("CTranslate2", 1, 0.2)),
        *(part_entry("asrmask", 2, 0.1, 0.05), part_entry("CTranslate2", 2, 0.3)),
    ]
    found = {one.part: one for one in summary.part_results(result)}
    assert found[parts_module.ENCODER].ratios == pytest.approx([2.0, 3.0])
    # CTranslate2 has no shorter window
    assert found["encoder, 15 s, virtual padding"].ratios == pytest.approx([4.0, 6.0])
    assert found[summary.MEMORY].ratios == [1.0, 1.0]
    told = summary.markdown(result)
    assert "| int8 | encoder, 30 s window | 100.00 | 250.00 | 2.50 (2.00 … 3.00) |" in told
    assert "| int8 | 202 | 202 | 1.00 |" in told
    assert "Parts of a model" in " ".join(plot.title for plot in report.plots(result))
    old = json.loads(json.dumps(result))
    for one in old["parts"]:
        if one["library"] == "asrmask":
            one["parts"][parts_module.ENCODER] *= 2
    told = summary.compare_benchmarks(result, old)
    assert (
        f"  int8, {parts_module.ENCODER}: 2.00 times as fast, 2.00 relative to CTranslate2" in told
    )


def test_parts_without_the_other_library_or_that_failed_are_told(result):
    failed = {**part_entry("CTranslate2", 1, 0.1), "error": "no memory"}
    del failed["parts"]
    result["parts"] = [part_entry("asrmask", 1, 0.1), failed]
    told = summary.markdown(result)
    assert "| int8 | encoder, 30 s window | 100.00 | no data | no data |" in told
    assert "int8, CTranslate2: no memory." in told


# ------------------------------------------------------------------ measuring


def test_systems_take_turns_within_every_round():
    clip_sets = [run.ClipSet("a", []), run.ClipSet("b", [])]
    systems = [Named("asrmask", {}), Named("openai-whisper", {})]
    spec = spec_of(clip_sets=clip_sets, systems=systems)
    order = [(n, clip_set.name, system.name) for n, _, clip_set, _, system in spec.schedule()]
    assert order[:2] == [(1, "a", "asrmask"), (1, "a", "openai-whisper")]
    assert order[2:4] == [(1, "b", "asrmask"), (1, "b", "openai-whisper")]
    assert len(order) == 8


def spec_of(**values):
    default = {"models": ["tiny.en"], "clip_sets": [], "systems": [], "rounds": 2, "threads": 1}
    default["decodings"] = [DecodingSettings()]
    return run.BenchmarkSpec(**{**default, "command": "", **values})


def test_models_and_libraries_take_turns_within_every_round():
    spec = spec_of(models=["a/tiny", "b"], shapes=["turbo"], parts=True)
    order = list(spec.schedule_parts())
    assert [(n, name) for n, name, _, _ in order[::4]] == [
        *((1, "tiny"), (1, "b"), (1, "turbo shape")),
        *((2, "tiny"), (2, "b"), (2, "turbo shape")),
    ]
    assert [(kind, library) for _, _, kind, library in order[:4]] == [
        *(("float32", "asrmask"), ("float32", "CTranslate2")),
        *(("int8", "asrmask"), ("int8", "CTranslate2")),
    ]
    assert list(spec_of().schedule_parts()) == []


def test_clips_alone_are_the_first_or_those_of_a_length(samples):
    clips = [Clip(path) for path in samples]
    seconds = [clip.recording().duration_s for clip in clips]
    clip_set = run.ClipSet("short", clips)
    assert [one["seconds"] for one in run.clips_alone(clip_set, None)] == seconds[: run.N_ALONE]
    longest = max(seconds)
    found = run.clips_alone(clip_set, longest)
    assert found[0]["seconds"] == longest
    assert len(found) == min(run.N_ALONE, len(clips))


def product_of(seconds):
    """A product that takes that long."""
    return lambda rows, weights: lambda: time.sleep(seconds)


def test_a_limit_is_the_best_rate_of_all_products(monkeypatch):
    fast, slow = product_of(0.001), product_of(0.02)
    for products in ((fast, slow), (slow, fast)):
        rate = limits.operation_rate(products, 2)
        assert 2 * limits.WIDTH**3 / 1e9 / 0.02 < rate <= 2 * limits.WIDTH**3 / 1e9 / 0.001
        monkeypatch.setattr(limits, "INT8_PRODUCTS", products)
        monkeypatch.setattr(limits, "FLOAT32_READS", (slow,))
        assert 8.192e6 / 1e9 / 0.02 < limits.read_rate(8_192_000, 2) <= 8.192e6 / 1e9 / 0.001


def test_int8_products_give_the_same_numbers():
    torch.manual_seed(0)
    rows, weights = torch.rand(32, 64) - 0.5, torch.rand(48, 64) - 0.5
    expected = rows @ weights.T
    assert torch.equal(limits.multiply_float32(rows, weights)(), expected)
    fbgemm, onednn = (product(rows, weights)() for product in limits.INT8_PRODUCTS)
    assert (fbgemm - expected).abs().max() < 0.05
    assert (onednn / 127**2 - expected).abs().max() < 0.2


@pytest.fixture(scope="module")
def small_shape(tmp_path_factory):
    """A folder of random weights, in a size that is smaller than any official model."""
    sizes = registry.dimensions("tiny") | {"n_audio_layer": 1, "n_text_layer": 2}
    sizes |= {"n_audio_state": 64, "n_text_state": 64, "n_audio_head": 2, "n_text_head": 2}
    folder = tmp_path_factory.mktemp("shape")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "dimensions", lambda name: sizes)
        shapes.write("tiny", folder)
    return folder


def test_random_weights_load_everywhere_and_are_always_the_same(small_shape, tmp_path, monkeypatch):
    _, checkpoint = read(str(small_shape))
    sizes = checkpoint.dims.as_dict()
    monkeypatch.setattr(registry, "dimensions", lambda name: sizes)
    shapes.write("tiny", tmp_path)
    content = (small_shape / "model.bin").read_bytes()
    assert content == (tmp_path / "model.bin").read_bytes()
    assert float(checkpoint.weights["encoder.ln_post.weight"].min()) == 1.0
    assert float(checkpoint.weights["decoder.token_embedding.weight"].std()) == pytest.approx(
        0.02, 0.1
    )


@pytest.mark.parametrize("library", parts_module.LIBRARIES)
def test_every_library_decodes_as_many_tokens_as_asked_for(library, small_shape):
    if library != "asrmask":
        pytest.importorskip(library.lower())
    engine_class = resolve_name(parts_module.LIBRARIES[library])
    engine = engine_class(str(small_shape), "int8", 1, None)
    assert (engine.n_mels, engine.width) == (80, 64)
    features = engine.load_features(np.zeros((2, 1500, 64), np.float32))
    for n_tokens in (1, 2, 9):
        assert engine.decode(features, n_tokens) == [n_tokens] * 2


def test_a_text_of_another_length_is_not_timed():
    class Shorter(parts_module.Engine):
        width, encode, encode_virtual = 4, staticmethod(lambda: None), {}

        def load_features(self, features):
            return features

        def decode(self, features, n_tokens):
            return [n_tokens - 1] * len(features)

    with pytest.raises(AsrmaskError, match=r"must have 1 tokens to be timed, got \[0\]"):
        parts_module.time_parts(Shorter(), 1)


def test_parts_of_random_weights_are_measured(small_shape, tmp_path, monkeypatch):
    pytest.importorskip("ctranslate2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "out"
    command = ["bench", "--parts", "--model", str(small_shape), "--rounds", "1"]
    assert main([*command, "--threads", "1", "--out", str(out)]) == 0
    found = run.read(out)
    assert found["runs"] == []
    several = {(one["library"], one["compute_type"]) for one in found["parts"]}
    assert several == set(itertools.product(parts_module.LIBRARIES, parts_module.COMPUTE_TYPES))
    for one in found["parts"]:
        assert one["parts"][parts_module.ENCODER] > 0
        assert one["peak_mb"] > 50
    for share in found["machine"][small_shape.name]["shares"]:
        assert share["taken_s"] > 0
    assert "encoder, 7.5 s, virtual padding" in (out / "bench.md").read_text()


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
    assert len(one["alone_s"]) == len(found["alone"]["one"]) == 1
    assert found["alone"]["one"][0]["path"] == str(path)
    assert one["model"] == "tiny.en"
    assert sum(e["substitutions"] for e in one["errors"]) <= 3
    assert found["machine"]["tiny.en"]["limits"]["float32_operations"] > 0
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
        (["--shape", "huge"], "--shape must be of tiny.en, tiny, "),
        (["--shape", "tiny", "--scaling", "clip"], "--parts and --shape measure no clips, got"),
        (["--model", "a/tiny", "b/tiny"], "models must have different names, got tiny, tiny"),
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
