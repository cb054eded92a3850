"""Ablations: the spec, records that survive being killed, statistics, and the page."""

import contextlib
import doctest
import json
import multiprocessing
import random
import re
import subprocess
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch

from asrmask.ablation import batch, plots, report, spec, statistics
from asrmask.ablation import run as ablation_run
from asrmask.ablation.clips import controls
from asrmask.ablation.records import Records, RecordsError, read
from asrmask.ablation.spec import Cell, Decoding, Grid, Spec, Trailing
from asrmask.cli import main
from asrmask.errors import OptionError
from asrmask.model.policy import Policy

SMALL = """
models = ["tiny.en"]
most_clips = 2
batch_size = 2
[[grid]]
policies = ["virtual"]
decoding = ["greedy", "greedy,fallback", "beam=2,timestamps"]
[[grid]]
policies = ["virtual"]
trailing = ["noise=1@-40"]
[[grid]]
policies = ["trim"]
margins = [0, 1.28]
"""


def test_the_factorial_and_the_controls_are_always_there():
    cells = Spec().cells()
    policies = {str(cell.policy) for cell in cells if cell.control == "none"}
    assert policies == {"full", "mask:encoder", "mask:cross", "mask:both", "trim"}
    assert {cell.control for cell in cells} == {"none", "random", "all-valid"}


def test_grids_are_crossed_and_impossible_combinations_left_out():
    grid = Grid(("full", "trim", "virtual"), (0.0, 1.28), ("zero", "silence"), ("first", "last"))
    cells = grid.cells("tiny.en")
    names = [str(cell.policy) for cell in dict.fromkeys(cells)]
    assert names.count("full") == 1
    assert sum(name.startswith("full") for name in names) == 4
    assert sum(name.startswith("trim") for name in names) == 8
    assert sum(name.startswith("virtual") for name in names) == 2
    grid = Grid(("full", "trim", "virtual"), positions=("first", "last"), sinks=(0.0, 0.5))
    names = {str(cell.policy) for cell in grid.cells("tiny.en")}
    assert names == {"full", "full,positions=last", "virtual"} | {
        *("trim", "trim,positions=last", "trim,sink=0.5")
    }


def test_every_cell_has_its_reference():
    for chosen in spec.PRESETS.values():
        cells = chosen.cells()
        assert len(cells) == len(set(cells)) == len({str(cell) for cell in cells})
        assert {cell.reference for cell in cells} <= set(cells)


def test_text_forms_are_read_back():
    for text in ("greedy", "beam=5", "beam=2,timestamps,fallback", "greedy,fallback"):
        assert str(Decoding.parse(text)) == text
    for text in ("none", "silence=5", "noise=2.5@-40"):
        assert str(Trailing.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models = 3", "models must be a list"),
        ('models = ["tiny.en"', "expected TOML"),
        ("seed = 'x'", "seed must be of type int"),
        ("unknown = 1", "spec must be of name, question"),
        ("seed = " + "[" * 100_000, "expected TOML, got a table or list nested too deeply"),
        ("seed = " + "[" * 300 + "]" * 300, r"seed must be of type int, got \[\[\["),
        ("preset = ['quick']", r"preset must be .*, got \['quick'\]"),
        ("preset = 'slow'", "preset must be one of quick, standard, full"),
        ("primary = ['trim']", "primary must be two policies"),
        ("primary = ['virtual', 'full']", "primary must be of the cells, got 'virtual'"),
        ("batch_size = 0", "batch_size must be 1 or more"),
        ("alpha = 1.0", "alpha must be between 0 and 1, got 1.0"),
        ("alpha = '5 %'", "alpha must be of type float, got '5 %'"),
        ("[[grid]]\npolicies = ['masked']", "policies must be of full"),
        ("[[grid]]\nmargins = ['1']", "margins must be a list of numbers, got '1'"),
        ("[[grid]]\npolicies = ['trim']\nmargins = [40]", r"margin must be 0\.\.30"),
        ("[[grid]]\nsinks = ['1']", "sinks must be a list of numbers, got '1'"),
        ("[[grid]]\npolicies = ['trim']\nsinks = [40]", r"sink must be 0\.\.30"),
        ("[[grid]]\ndecoding = ['beam']", "decoding must be greedy or beam="),
        ("[[grid]]\ntrailing = ['hum=3']", "trailing must be none"),
        ("[[grid]]\ncolour = ['red']", "grid must be of policies"),
        ("grid = 3", "grid must be tables"),
    ],
)
def test_a_bad_spec_is_one_line(tmp_path, text, told):
    path = tmp_path / "spec.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=told) as caught:
        spec.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_spec_may_start_from_a_preset():
    found = spec.of({"preset": "standard", "models": ["base"], "seed": 3})
    assert found.grid == spec.PRESETS["standard"].grid
    assert (found.models, found.seed) == (("base",), 3)


def test_a_half_written_line_is_taken_away(tmp_path):
    path = tmp_path / "records.jsonl"
    records = Records(path)
    records.append([{"cell": "a", "clip": "1"}, {"cell": "a", "clip": "2"}])
    records.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"cell": "a", "cl')
    assert [r["clip"] for r in read(path)] == ["1", "2"]
    again = Records(path)
    assert again.done == {("a", "1"), ("a", "2")}
    again.close()
    assert path.read_bytes() == whole
    path.write_bytes(b"no record\n" + whole)
    with pytest.raises(RecordsError, match="line 1: expected a record"):
        Records(path)


def test_holm_by_hand():
    assert statistics.holm({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}
    assert doctest.testmod(statistics).failed == 0


FULL, BOTH = Cell("tiny.en", Policy()), Cell("tiny.en", Policy("mask:both"))


def made(folder, errors, *, n_clips=5, chosen=None, n_available=None, speaker=None, n_missing=0):
    """A run with the errors of some cells, (sub, del, ins) a clip; of others (3, 0, 1).

    Clips have 20 words. Texts are the same where errors are.
    """
    chosen = chosen or Spec(grid=(Grid(("virtual",)),))
    clips = [f"clip {i}" for i in range(n_clips)]
    records = []
    for cell in chosen.cells():
        counts = errors.get(cell, [(3, 0, 1)] * n_clips)
        for clip, count in zip(clips, counts, strict=True):
            records.append(
                {
                    "cell": str(cell),
                    "clip": clip,
                    "model": cell.model,
                    "policy": str(cell.policy),
                    "decoding": str(cell.decoding),
                    "trailing": str(cell.trailing),
                    "control": cell.control,
                    "seconds": 9.0,
                    "text": "a",
                    "tokens": list(count),
                    "errors": [*count, 20],
                    "reference_logprobs": [-1.0],
                    "reference_end_logprob": -1.0,
                    "end_logprobs": [-1.0],
                    "runaway": None,
                    "ended": True,
                    "fallback": False,
                    "compression_ratio": 1.0,
                    "encoder_s": 0.1,
                    "decoder_s": 0.1,
                }
            )
    about = {
        "spec": asdict(chosen),
        "spec_hash": chosen.hash,
        "versions": {},
        "clips": {
            clip: {
                "seconds": 9.0,
                "text": "a",
                "language": "en",
                "speaker": None if speaker is None else speaker(i),
                "kind": "speech",
                "path": None,
            }
            for i, clip in enumerate(clips)
        },
        "left_out": {},
        "command": "",
        "n_records": len(records),
        "n_available": n_available or n_clips,
    }
    (folder / "run.json").write_text(json.dumps(about))
    kept = records[: len(records) - n_missing]
    (folder / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))
    return statistics.load(folder)


def test_five_clips_are_not_enough_to_tell_however_large_the_difference(tmp_path):
    results = made(tmp_path, {BOTH: [(2, 0, 60 + i) for i in range(5)]}, n_available=16)
    told = " ".join(report.verdict(results))
    assert results.differences[BOTH, FULL].low > 0  # the interval alone would say that it holds
    assert "not enough clips to tell" in told
    assert "it holds" not in told
    assert "p = 0.0625; alpha is 0.05. The smallest p that it can give is 0.0625: 6 clips" in told
    assert "The interval leaves 0 out, but" in told
    assert "on 5 of 16 clips." in told
    assert "5 of 16 clips" in report.page([results], [[]])


def test_the_verdict_is_the_tests(tmp_path):
    worse = [(3, 0, 2)] * 12
    told = " ".join(report.verdict(made(tmp_path, {BOTH: worse}, n_clips=12)))
    assert ": it holds. Sign-flip test over 12 clips: p = 0.000488; alpha" in told
    some = [(3, 0, 2)] * 5 + [(3, 0, 1)] * 7
    results = made(tmp_path, {BOTH: some}, n_clips=12)
    told = " ".join(report.verdict(results))
    assert results.differences[BOTH, FULL].low > 0
    assert "it may be chance" in told
    assert "The interval leaves 0 out, but" in told
    strict = Spec(alpha=0.0001)
    told = report.verdict(made(tmp_path, {BOTH: worse}, n_clips=12, chosen=strict))
    assert "not enough clips to tell" in told[1]
    told = report.verdict(made(tmp_path, {BOTH: worse}, n_clips=12, n_missing=1))
    assert "no verdict before the run is complete" in told[1]


def test_any_pair_may_be_the_primary_one(tmp_path):
    chosen = Spec(primary=("full", "mask:both"))
    results = made(tmp_path, {BOTH: [(9, 0, 1)] * 12}, n_clips=12, chosen=chosen)
    told = report.verdict(results)
    assert told[1].startswith("The difference is -30.0 points")
    assert told[1].endswith("it holds.")


def test_errors_are_told_in_whole_counts(tmp_path):
    # three substitutions fewer, 303 insertions more: 300 net
    results = made(tmp_path, {BOTH: [(0, 0, 304)], FULL: [(3, 0, 1)]}, n_clips=1)
    told = " ".join(report.verdict(results))
    assert "304 of the 304 errors with mask:both are insertions" in told
    assert "with full 1 of 4." in told
    for part, whole in re.findall(r"(\d+) of (?:the )?(\d+) ", told):
        assert int(part) <= int(whole)


def test_equal_texts_have_an_upper_bound_and_no_interval(tmp_path):
    results = made(tmp_path, {})
    told = report.verdict(results)[-1]
    assert "to full +0.0 points; tokens are equal on 5 of 5 clips, so at most 45 % of" in told
    assert "…" not in told
    virtual = results.summaries[Cell("tiny.en", Policy("virtual"))]
    names = ("difference", "low", "high", "p Holm")
    assert [report.format_column(virtual, name) for name in names] == ["+0.00", "", "", "1.0000"]


def test_speakers_are_named_only_where_they_are_known(tmp_path):
    page = report.page([made(tmp_path, {})], [[]])
    assert "bootstrap over clips" in page
    assert "over speakers" not in page
    results = made(tmp_path, {BOTH: [(9, 0, 1)] * 12}, n_clips=12, speaker=lambda i: str(i % 3))
    page = report.page([results], [[]])
    assert "bootstrap over speakers" in page
    assert "not enough speakers to tell" in page
    assert results.differences[BOTH, FULL].p == 0.25
    told = report.verdict(results)[-1]
    assert "equal on 12 of 12 clips of 3 speakers, so at most 63 % of them have" in told


def test_captions_name_only_the_marks_that_are_drawn(tmp_path):
    by_name = {plot.name: plot for plot in plots.PLOTS}
    results = made(tmp_path, {})
    for name in ("insertions_against_deletions", "time_against_wer"):
        _, told = by_name[name].render(results, "tiny.en")
        assert told.endswith(" Rings: policies at the same point.")
    more = Spec(grid=(Grid(("trim",), (1.28,), ("silence",), ("last",)),))
    _, told = by_name["insertions_against_deletions"].render(
        made(tmp_path, {cell: [(1, 2, 3)] * 5 for cell in more.cells()[7:]}, chosen=more), "tiny.en"
    )
    assert "Small: other settings. Hollow: padding not zero. Squares: last positions." in told
    figure, _ = by_name["end_over_steps"].render(made(tmp_path, {}, n_clips=2), "tiny.en")
    assert figure.axes[0].get_xlabel().endswith("(steps with 2 clips or more)")


def test_a_column_has_one_number_of_decimals(tmp_path):
    results = made(tmp_path, {BOTH: [(2, 0, 60)] * 5})
    for names in (report.MAIN_COLUMNS, report.more_columns(results)):
        for name in names[1:]:
            texts = [report.format_column(summary, name) for summary in results.summaries.values()]
            numbers = [text for text in texts if text not in ("", "no data")]
            assert len({len(text.partition(".")[2]) for text in numbers}) <= 1, name
    assert len(report.MAIN_COLUMNS) <= 11


@pytest.fixture(scope="module")
def spec_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("spec") / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def short_clips(samples):
    """The three shortest clips of the repository: path → transcript."""
    return dict(sorted(samples.items(), key=lambda item: item[0].stat().st_size)[:3])


@pytest.fixture(scope="module")
def data(short_clips, tmp_path_factory):
    """A data set of short clips."""
    folder = tmp_path_factory.mktemp("data")
    rows = [f"{path}\t{text}\n" for path, text in short_clips.items()]
    (folder / "manifest.tsv").write_text("path\ttext\n" + "".join(rows), encoding="utf-8")
    return str(folder)


def run_briefly(arguments):
    """`asrmask ablate` with at most 30 tokens a text: runaways would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "DecodingOptions", partial(batch.DecodingOptions, sample_len=30))
        return main(["ablate", *arguments])


@pytest.fixture(scope="module")
def run_folder(spec_file, data, one_thread, tmp_path_factory):
    """A small ablation, run to its end."""
    out = tmp_path_factory.mktemp("run") / "complete"
    with (out.parent / "stderr.txt").open("w") as file, contextlib.redirect_stderr(file):
        assert run_briefly([data, "--spec", str(spec_file), "--out", str(out)]) == 0
    return out


def stable(path):
    """The records without what time does to them."""
    kept = []
    for record in read(path / "records.jsonl"):
        kept.append({k: v for k, v in record.items() if k not in {"encoder_s", "decoder_s"}})
    return kept


def test_a_run_writes_all_its_files(run_folder):
    names = {str(p.relative_to(run_folder)) for p in run_folder.rglob("*") if p.is_file()}
    for name in ("report.html", "summary.csv", "summary.md", "records.jsonl", "run.json"):
        assert name in names
    for plot in ("wer_by_policy", "end_over_steps", "likelihood_by_position", "time_against_wer"):
        assert {f"plots/tiny.en-{plot}.svg", f"plots/tiny.en-{plot}.png"} <= names


def test_without_a_terminal_every_complete_cell_is_a_line(run_folder):
    results = statistics.load(run_folder)
    stderr = (run_folder.parent / "stderr.txt").read_text()
    n_cells, n_all = len(results.summaries), results.about["n_records"]
    for cell in results.summaries:
        assert re.search(
            rf"cell \d+ of {n_cells}, {re.escape(str(cell))}: (\d+) of \1 clips; ", stderr
        )
    assert {int(i) for i in re.findall(r"cell (\d+) of", stderr)} == set(range(1, n_cells + 1))
    assert f"; {n_all} of {n_all} in all, 0 s left\n" in stderr


def test_a_limit_is_reported_before_the_run_and_after(run_folder):
    stderr = (run_folder.parent / "stderr.txt").read_text()
    assert ": 2 of 3 clips, looking for bad ones\n" in stderr
    assert " on 2 of 3 clips." in (run_folder / "summary.md").read_text()
    assert " · 2 of 3 clips ·" in (run_folder / "report.html").read_text()


def test_a_record_has_everything(run_folder):
    records = stable(run_folder)
    speech = [r for r in records if not r["clip"].startswith("control")]
    wanted = {
        *("cell", "clip", "spec", "asrmask", "torch", "weights_sha256", "policy", "decoding"),
        *("trailing", "control", "text", "tokens", "errors", "avg_logprob", "no_speech_prob"),
        *("end_logprobs", "end_ranks", "reference_logprobs", "reference_end_logprob"),
        *("seconds", "runaway", "fallback", "ended", "compression_ratio"),
    }
    assert all(wanted <= set(record) for record in records)
    for record in speech:
        text = [t for t in record["tokens"] if t < 50256]
        assert len(record["end_logprobs"]) == len(record["end_ranks"]) == len(text) + 1
        assert sum(record["errors"][:2]) <= record["errors"][3]
    full = [r for r in speech if r["cell"] == "tiny.en full"]
    assert all(r["end_ranks"][-1] == 0 for r in full)  # greedy: it ended when that was likeliest
    assert all(r["end_ranks"][0] > 0 for r in full)


def test_the_teacher_forced_scores_are_those_of_the_model(run_folder, model, short_clips):
    from asrmask.audio.recording import Recording
    from asrmask.audio.spectrogram import Spectrogram
    from asrmask.tokenizer.tokenizer import get_tokenizer

    path, text = next(iter(short_clips.items()))
    spectrogram = Spectrogram(Recording.open(path), 80)
    mel = spectrogram.window(0, spectrogram.n_frames, fill="zero").mel[None]
    tokenizer = get_tokenizer(False)
    words = [*tokenizer.encode(" " + text), tokenizer.eot]
    row = torch.tensor([[50257, 50362, *words]])
    logprobs = model.logits(row, model.encode(mel))[0, 1:-1].log_softmax(dim=-1)
    expected = logprobs.gather(1, torch.tensor(words)[:, None])[:, 0].tolist()
    found = [
        r for r in stable(run_folder) if r["cell"] == "tiny.en full" and r["clip"] == path.stem
    ]
    assert found[0]["reference_logprobs"] == pytest.approx(expected[:-1], abs=1e-3)
    assert found[0]["reference_end_logprob"] == pytest.approx(expected[-1], abs=1e-3)


def test_controls_hold(run_folder):
    results = statistics.load(run_folder)
    assert results.is_complete
    found = {check.name.split(": ")[1]: check.holds for check in statistics.checks(results)}
    assert found["an all-valid mask changes nothing"] is True
    assert found["mask:both is trim"] is True
    assert found["without padding every policy is a no-op"] is True


def test_a_cell_without_records_is_no_data(run_folder, tmp_path):
    for name in ("run.json", "records.jsonl"):
        (tmp_path / name).write_bytes((run_folder / name).read_bytes())
    kept = [r for r in read(run_folder / "records.jsonl") if "mask:cross" not in r["cell"]]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))
    results = statistics.load(tmp_path)
    empty = results.summaries[Cell("tiny.en", Policy("mask:cross"))]
    assert empty.wer is None
    assert empty.difference is None
    report.write([tmp_path], tmp_path / "drawn")
    row = next(
        line
        for line in (tmp_path / "drawn" / "summary.csv").read_text().splitlines()
        if ",mask:cross," in line
    )
    assert "no data" in row
    assert "so far" in (tmp_path / "drawn" / "summary.md").read_text()


def test_the_report_is_drawn_again_from_records_and_for_several_runs(run_folder, tmp_path, capsys):
    assert main(["report", str(run_folder), str(run_folder), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("<h1>") == 2
    assert (tmp_path / "plots" / "2-tiny.en-wer_by_policy.svg").is_file()
    assert main(["report", str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_the_page_needs_nothing_from_outside(run_folder):
    page = (run_folder / "report.html").read_text()
    links = re.findall(r'(?:src|href)="([^"]{0,40})', page)
    assert links
    assert all(link.startswith("data:") for link in links)
    assert "url(" not in page
    assert page.count("<audio") == 2
    assert page.count("data:image/svg+xml") == len(report.PLOTS)


def covering(figure):
    """Pairs of texts of a figure that cover each other, and texts that its edge cuts off."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    unseen = set()  # ticks beyond the ends of an axis are not drawn
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        low, high = sorted(axis.get_view_interval())
        unseen |= {
            tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high
        }
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    texts = [t for t in texts if t not in unseen]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts]
    wrong = [name for name, box in boxes if not figure.bbox.padded(2).fully_contains(*box.min)]
    wrong += [name for name, box in boxes if not figure.bbox.padded(2).fully_contains(*box.max)]
    for i, (name, box) in enumerate(boxes):
        wrong += [(name, other) for other, its in boxes[:i] if box.padded(-1).overlaps(its)]
    return wrong


def test_no_text_of_a_plot_covers_another(run_folder):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    results = statistics.load(run_folder)
    for plot in plots.PLOTS:
        figure, _ = plot.render(results, "tiny.en")
        FigureCanvasAgg(figure)
        assert not covering(figure), plot.name


def test_equal_lines_have_one_label_and_equal_points_are_rings(run_folder):
    from matplotlib.figure import Figure

    results = statistics.load(run_folder)
    by_name = {plot.name: plot for plot in plots.PLOTS}
    for name in ("wer_against_length", "end_over_steps", "likelihood_by_position"):
        figure, _ = by_name[name].render(results, "tiny.en")
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert sum("mask:both = trim" in label for label in labels) == 1, name
        assert not {"mask:both", "trim"} & set(labels), name
    axes = Figure().subplots()
    cells = [Cell("tiny.en", Policy(kind)) for kind in ("mask:both", "trim", "virtual")]
    plots.draw_spots(axes, dict.fromkeys(cells, (1.0, 2.0)))
    sizes = [line.get_markersize() for line in axes.lines]
    assert sizes == sorted(set(sizes), reverse=True)  # the last is on top, and the smallest
    assert [line.get_color() for line in axes.lines] == [
        plots.COLOURS[c.policy.kind] for c in cells
    ]


def test_another_spec_or_a_second_run_is_refused(run_folder, spec_file, data, tmp_path, capsys):
    import filelock

    other = tmp_path / "other.toml"
    other.write_text(SMALL + "\n[[grid]]\npolicies = ['trim']\nmargins = [2]\n")
    assert main(["ablate", data, "--spec", str(other), "--out", str(run_folder)]) == 2
    assert "holds a run with other spec hash" in capsys.readouterr().err
    with filelock.FileLock(run_folder / ".lock"):
        assert main(["ablate", data, "--spec", str(spec_file), "--out", str(run_folder)]) == 2
    assert "another run is at work" in capsys.readouterr().err


def test_bad_clips_are_listed_before_anything_runs(samples, spec_file, tmp_path, capsys):
    good = next(iter(samples))
    lines = [f"{good}\tAnd Mr.", "gone.wav\tGone."]
    (tmp_path / "manifest.tsv").write_text("path\ttext\n" + "\n".join(lines) + "\n")
    arguments = ["ablate", str(tmp_path), "--spec", str(spec_file), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert "error: gone: no such file" in err
    assert not (tmp_path / "out" / "records.jsonl").exists()


def test_killed_at_twenty_points_the_records_are_the_same(run_folder, spec_file, data, tmp_path):
    out = tmp_path / "killed"
    arguments = [data, "--spec", str(spec_file), "--out", str(out), "--threads", "1"]
    # a server that has imported PyTorch and starts the processes to kill
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["asrmask.ablation.run", "asrmask.ablation.report"])
    rng = random.Random(0)
    n_all = json.loads((run_folder / "run.json").read_text())["n_records"]
    records = out / "records.jsonl"

    def size() -> int:
        return records.stat().st_size if records.exists() else 0

    n_kills = 0
    while n_kills < 20:
        before = size()
        running = processes.Process(target=run_briefly, args=(arguments,))
        running.start()
        # kill it at any time from its start to shortly after it has added to the records
        early = rng.random() < 0.25
        deadline = time.monotonic() + (rng.uniform(0, 1) if early else 60)
        while running.is_alive() and time.monotonic() < deadline and size() == before:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))
        if not running.is_alive():
            break  # it came to its end
        running.kill()
        running.join()
        n_kills += 1
    assert run_briefly(arguments) == 0
    assert n_kills >= 15
    assert len(stable(out)) == n_all
    assert stable(out) == stable(run_folder)


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_renders_in_a_browser(run_folder, tmp_path, width):
    from shutil import which

    browser = which("chromium") or which("chromium-browser") or which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine to look at the page with")
    picture = tmp_path / "page.png"
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--window-size={width},2400", f"--screenshot={picture}"),
            (run_folder / "report.html").as_uri(),
        ],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert Path(picture).stat().st_size > 20_000


def test_heads_are_measured_in_every_cell_if_inspect_is_set(
    data, tmp_path, run_folder, monkeypatch
):
    # of the controls only the clip of 30 s, to save time
    monkeypatch.setattr(ablation_run, "controls", lambda *args: controls(*args)[:1])
    path = tmp_path / "spec.toml"
    path.write_text("inspect = true\nmost_clips = 1\n[[grid]]\npolicies = ['virtual']\n")
    out = tmp_path / "out"
    assert run_briefly([data, "--spec", str(path), "--out", str(out)]) == 0
    cells = set()
    for record in read(out / "records.jsonl"):
        cells.add(record["cell"])
        heads = record["heads"]
        assert set(heads) == {"encoder.self", "decoder.self", "decoder.cross"}
        assert len(heads["encoder.self"]["padding"]) == 4
        assert len(heads["decoder.cross"]["end_audio"][3]) == 6
        padding = [x for layer in heads["decoder.cross"]["padding"] for x in layer]
        # where the decoder sees no padding there is no data on it, not 0
        hidden = record["policy"] in {"trim", "mask:cross", "mask:both"}
        if hidden and record["control"] == "none":
            assert set(padding) == {None}
        elif record["seconds"] < 30:
            assert None not in padding
    results = statistics.load(out)
    assert cells == {str(cell) for cell in results.summaries}
    full = results.summaries[Cell("tiny.en", Policy())]
    assert 10 < full.columns["cross on padding %"] < 90
    trim = results.summaries[Cell("tiny.en", Policy("trim"))]
    assert trim.columns["cross on padding %"] is None
    header = (out / "summary.csv").read_text().splitlines()[0]
    assert "cross on padding %" in header
    assert "cross on padding %" in (out / "report.html").read_text()
    assert "cross on padding %" not in (run_folder / "summary.csv").read_text()
    rows = (out / "heads.csv").read_text().splitlines()
    assert len(rows) > 1 + len(cells) * 24
    assert (out / "heads.parquet").is_file()


def test_inspect_must_be_true_or_false():
    with pytest.raises(OptionError, match="inspect must be of type bool, got 'yes'"):
        spec.of({"inspect": "yes"})
    with pytest.raises(OptionError, match="seed must be of type int, got True"):
        spec.of({"seed": True})
