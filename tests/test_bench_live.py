"""The benchmark of live transcription: its clock, what events amount to, and its report."""

import time

import numpy as np
import pytest

from asrmask.audio.recording import as_wav
from asrmask.benchmark import live, live_report, live_summary, live_worker
from asrmask.benchmark.run import ClipSet
from asrmask.evaluation.corpus import Clip
from asrmask.live.replay import read_wav, replay


class Echo:
    """Commits the number of samples of each push, after some computing."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.late = []

    def push(self, samples, late):
        self.late.append(late)
        time.sleep(self.seconds)
        return [("committed", f" {len(samples)}")]

    def finish(self):
        return [("endpoint", "")]


def test_audio_arrives_at_the_speed_of_speech():
    found = replay(np.zeros(16_000, np.float32), Echo(), 0.25, 1.0)
    times = [at for *_, at in found["events"]]
    assert times == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0], abs=0.02)
    assert [text for _, text, _ in found["events"]] == [" 4000"] * 4 + [""]
    assert found["seconds"] == 1.0


def test_what_arrives_while_it_computes_is_pushed_at_once():
    echo = Echo(seconds=0.2)
    found = replay(np.zeros(16_000, np.float32), echo, 0.1, 0.05)
    sizes = [int(text) for kind, text, _ in found["events"] if kind == "committed"]
    assert sum(sizes) == 16_000
    assert sizes[0] == 1600
    assert all(3000 < size < 5000 for size in sizes[1:-1])
    assert echo.late[1:-1] == [True] * (len(sizes) - 2)


EVENTS = [
    ["partial", " the cart", 1.0],
    ["committed", " the", 2.0],
    ["partial", " cat sits", 2.0],
    ["committed", " cat", 3.0],
    ["committed", " sat", 4.0],
    ["endpoint", "", 4.0],
]


def test_flicker_counts_shown_words_that_changed():
    changed, final = live_summary.flicker(EVENTS, str)
    # cart → cat, then "sits" is gone when only "cat" is committed
    assert (changed, final) == (2, 3)
    assert live_summary.flicker([["committed", " a b", 1.0]], str) == (0, 2)


def test_scores_are_delays_of_words_that_both_have():
    file = {"events": EVENTS, "pushes": [[4.0, 3.9, 0.1]], "cpu_s": 1.0, "seconds": 4.0}
    words = [[["The", 0.5], [" dog", 1.0], [" cat", 1.5], [" sat.", 3.0]]]
    scored = live_summary.score([file], ["the cat sat"], words, lambda t: t.lower().strip(". "))
    assert scored["errors"] == [{"substitutions": 0, "deletions": 0, "insertions": 0, "n_words": 3}]
    assert scored["delays"] == [[0, 0.5, 1.5], [0, 1.5, 1.5], [0, 3.0, 1.0]]
    assert scored["final_s"] == [0.1]
    assert scored["cpu"] == 0.25
    assert scored["changed"] == pytest.approx(2 / 3)


def test_short_clips_are_joined_with_pauses(samples, tmp_path):
    clips = [Clip(path, text) for path, text in samples.items()]
    (talk,) = live.talks_of(ClipSet("some", clips), tmp_path)
    seconds = len(read_wav(talk.path)) / 16_000
    spoken_s = sum(clip.recording().duration_s for clip in clips)
    assert spoken_s + 0.3 * len(clips) < seconds < spoken_s + 3 * len(clips)
    assert talk.text == " ".join(samples.values())
    long = tmp_path / "long.wav"
    long.write_bytes(as_wav(np.zeros(31 * 16_000, np.float32)))
    (talk,) = live.talks_of(ClipSet("long", [Clip(long, "a")]), tmp_path)
    assert len(read_wav(talk.path)) == 31 * 16_000


def test_the_worker_measures_a_clip(sample, tmp_path, one_thread):
    path = tmp_path / "clip.wav"
    samples = Clip(sample).recording().read(0, 4 * 16_000)
    path.write_bytes(as_wav(samples))
    job = {"weights": "tiny.en", "model_dir": None, "threads": 1, "files": [str(path)]}
    result = live_worker.measure({**job, "kind": "live", "options": {"step": 1.0}})
    (file,) = result["files"]
    text = "".join(text for kind, text, _ in file["events"] if kind == "committed")
    assert "Dashwood" in text
    assert file["events"][-1][0] == "endpoint"
    assert 0 < file["cpu_s"] < 60
    updates = live_worker.measure({**job, "kind": "updates", "lengths": [2.0]})["updates"]
    assert [row["padding"] for row in updates] == ["virtual", "full"]
    assert updates[0]["ms"] < updates[1]["ms"]
    cuts = live_worker.measure({**job, "kind": "cuts", "clips": [str(sample)]})["cuts"]
    assert len(cuts) == 2
    assert all(len(row["texts"]) == 2 for row in cuts)


def test_a_report_is_written_from_the_records(tmp_path):
    counts = [{"substitutions": 1, "deletions": 0, "insertions": 0, "n_words": 10}]
    measured = {
        "errors": counts,
        "delays": [[0, 1.0, 0.5], [0, 2.0, 1.5]],
        "final_s": [0.05],
        "cpu": 0.1,
        "changed": 0.2,
    }
    names = {"model": "tiny.en", "work": "talks"}
    runs = [
        {**names, "system": "asrmask", "options": {"step": 0.3}, **measured},
        {**names, "system": "asrmask", "options": {"step": 1.0}, **measured},
        {**names, "system": "moonshine", "options": {"step": 0.3}, "error": "no weights"},
    ]
    result = {
        "about": {
            "command": "asrmask bench --live",
            "date": "2026-01-01",
            "asrmask": "0",
            "models": ["tiny.en"],
            "threads": 2,
            "step": 0.3,
            "processor": "a processor",
        },
        "runs": runs,
        "offline": [{**names, "errors": counts, "texts": ["a"]}],
        "streams": [{"model": "tiny.en", "streams": 6, "lag_p95": 0.2, "late": 0}],
        "updates": [
            {"model": "tiny.en", "seconds": s, "padding": p, "ms": 10 * s}
            for p in ("virtual", "full")
            for s in (1.0, 2.0)
        ],
        "cuts": [
            {"model": "tiny.en", "texts": ["a", "a"], "runaways": [None, None]},
            {"model": "tiny.en", "texts": ["a", "b"], "runaways": [None, "no end"]},
        ],
    }
    live.save(result, tmp_path)
    written = {path.name for path in live_report.write(tmp_path)}
    assert {"live.md", "live.html", "steps-tiny.en.svg", "updates-tiny.en.png"} <= written
    text = (tmp_path / "live.md").read_text()
    row = "| asrmask (step 0.3) | 10.00 | 10.00 | 1.00 | 1.45 | 0.050 | 0.050 | 0.100 | 20 |"
    assert row in text
    assert "failed: no weights" in text
    assert "| tiny.en | 2 | 50 | 0 | 1 |" in text
    assert live_summary.step_points(result, "tiny.en") == [(0.3, 1.0, 10.0), (1.0, 1.0, 10.0)]
