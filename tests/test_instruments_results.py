"""The experiments behind data/results/inspection.md: signs of hallucination, findings, cost."""

import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DATA

import asrmask
from asrmask import corpus
from asrmask.audio import N_FRAMES
from asrmask.encoding import encode
from asrmask.experiments import inside, overhead, signs
from asrmask.instruments.ground import Ground
from asrmask.transcription import Diagnosis, Segment

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def clips():
    return corpus.from_manifest(DATA)


# --- signs


def test_words_of_segments_are_judged_by_one_alignment():
    assert signs.judged([["a", "b"], ["x", "y", "c"]], "a b c") == [(0, 0), (2, 0)]
    assert signs.judged([["a"], [], ["q"]], "a b") == [(0, 0), (0, 0), (0, 1)]
    assert signs.judged([["thank", "you"]], "") == [(2, 0)]  # nothing was said
    assert signs.judged([[]], "a b") == [(0, 0)]


def test_half_of_the_words_make_a_hallucination():
    row = {"words": 4, "inserted": 1, "substituted": 1}
    assert not signs.hallucinated(row)
    assert signs.wrong(row)
    assert signs.hallucinated({**row, "inserted": 2})
    assert not signs.wrong({**row, "substituted": 0})


def test_auroc_by_hand():
    yes = np.array([True, True, False, False, False])
    assert signs.auroc(np.array([3.0, 1.0, 2.0, 0.0, 1.0]), yes) == pytest.approx(4.5 / 6)
    assert signs.auroc(np.arange(5.0), yes) == 0.0
    assert math.isnan(signs.auroc(np.arange(2.0), np.array([True, True])))


def test_a_draw_takes_whole_blocks():
    for rows in signs.drawn(["a", "b", "a", "c"], n_draws=50):
        counts = np.bincount(rows, minlength=4)
        assert counts[0] == counts[2]
        assert counts[[0, 1, 3]].sum() == 3


def test_a_combination_is_predicted_from_other_blocks():
    """A sign that is a block's own number cannot be learnt from other blocks."""
    rng = np.random.default_rng(0)
    labels = rng.random(200) < 0.5
    blocks = [str(i // 4) for i in range(200)]
    good = np.column_stack([labels + rng.normal(0, 0.3, 200), rng.normal(size=200)])
    assert signs.auroc(signs.predicted(good, labels, blocks), labels) > 0.95
    useless = rng.normal(size=(200, 30))
    assert signs.auroc(signs.predicted(useless, labels, blocks), labels) < 0.65


def test_recordings_have_every_condition_and_the_speech_inside(clips):
    made = list(signs.cases(clips[:1]))
    assert [case.condition for case in made[:5]] == list(
        dict.fromkeys(case.condition for case in made if case.condition != signs.NOTHING)
    )
    assert len(made) == 5 + signs.N_NOTHING
    assert {case.text for case in made[5:]} == {""}
    assert len({case.block for case in made[:5]}) == 1
    speech, quiet = made[0].samples, made[1].samples
    n = round(signs.LONG_S * 16_000)
    assert not quiet[:n].any()
    assert not quiet[-n:].any()
    assert np.array_equal(quiet[n:-n], speech)
    louder = made[4].samples - speech
    assert signs.level_db(louder) == pytest.approx(signs.level_db(speech) + 5, abs=0.5)
    again = list(signs.cases(clips[:1]))
    assert all(np.array_equal(a.samples, b.samples) for a, b in zip(made, again, strict=True))


def test_a_recording_without_words_counts_as_a_recording_only():
    silent = signs.Case("quiet", signs.NOTHING, "quiet", np.zeros(10, np.float32), "")
    spoken = signs.Case("clip", signs.CLEAN, "clip", np.zeros(10, np.float32), "a b c")
    segment = Segment(0, 0, 0, 1, " A b.", [1], 0, -0.1, 1, 0.2)
    other = Segment(1, 0, 1, 2, " Thank you.", [1], 0, -0.1, 1, 0.2)
    for found in (segment, other):
        found.diagnosis = Diagnosis(20.0, 0.3, [0.3])
    rows = [*signs.rows_of(spoken, [segment, other]), signs.empty(silent)]
    assert list(signs.rows_of(silent, [])) == []
    assert [(row["words"], row["inserted"], row["substituted"]) for row in rows[:2]] == [
        (2, 0, 0),
        (2, 1, 1),
    ]
    lines = signs.conditions(rows).splitlines()
    assert lines[2] == f"| {signs.CLEAN} | 1 | 2 | 1 | 1 | 0 |"
    assert lines[3] == f"| {signs.NOTHING} | 1 | 0 | 0 | 0 | 0 |"
    assert lines[4] == "| all | 2 | 2 | 1 | 1 | 0 |"


# --- findings


def test_regions_add_up():
    split = inside.regions(Ground.of([100], 1500))
    assert split.sum(dim=1).tolist() == [1.0] * 1500
    assert split.sum(dim=0).tolist() == [50, 50, 1300, 100]
    assert split[100:150, 0].all()
    assert split[1450:, 1].all()
    whole = inside.regions(Ground.of([1500], 1500))
    assert whole.sum(dim=0).tolist() == [0, 0, 0, 1500]
    nearly = inside.regions(Ground.of([1480], 1500))  # the last second comes first
    assert nearly.sum(dim=0).tolist() == [0, 20, 0, 1480]


def test_findings_of_two_clips(model, clips):
    found = inside.run(model, clips[1:3], lambda text: None)
    assert found.n_clips == 2
    values = {name: float(moments.mean) for name, moments in found.values.items()}
    for kind in ("encoder.self", "decoder.cross", "decoder.cross, end"):
        parts = [values[f"{kind}: {name}"] for name in inside.REGIONS]
        assert sum(parts) == pytest.approx(1, abs=1e-5)
        assert values[f"{kind}: padding"] == pytest.approx(1 - parts[-1], abs=1e-6)
    heads = inside.head_rows(found.heads, "padding", "encoder.self")
    assert len(heads) == 24
    assert np.mean([row[2] for row in heads]) == pytest.approx(
        values["encoder.self: padding"], abs=1e-5
    )
    # hiding the padding from the decoder alone leaves the encoder's features as they are
    assert values["mask:cross: features, all of the clip"] == 0
    assert values["mask:encoder: features, its last second"] > 0.1
    assert values["mask:both: end probability"] < values["full: end probability"]
    text = inside.report(found)
    assert "| full,fill=silence |" in text
    assert "nan" not in text
    assert len(inside.heads_table(found.heads).rows) == 24 * (6 + 3 + 8)


# --- cost


def test_another_copy_of_the_package_is_used_beside_this_one(model, clips, tmp_path):
    package = Path(asrmask.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, tmp_path / "asrmask", ignore=ignored)
    text = (package / "encoding.py").read_text()
    (tmp_path / "asrmask" / "encoding.py").write_text(text + "\nNEW = 7\n")
    before = dict(sys.modules)
    twin, encoding = overhead.copied(model, tmp_path)
    assert encoding.NEW == 7
    assert type(twin) is not type(model)
    assert sys.modules["asrmask.encoding"] is before["asrmask.encoding"]
    assert str(tmp_path) not in sys.path
    theirs, mine = dict(twin.named_parameters()), dict(model.named_parameters())
    assert all(theirs[name].data_ptr() == p.data_ptr() for name, p in mine.items())
    mel = overhead.half_minute(model, clips).mel[None]
    assert mel.shape[-1] == N_FRAMES
    one, other = encode(model, mel).features, encoding.encode(twin, mel).features
    assert torch.equal(one, other)
    told = overhead.operations(model, clips, tmp_path)
    assert told.endswith("the same, in the same order")
    (tmp_path / "asrmask" / "encoding.py").write_text(
        text.replace("mel = mel.to(model.device, model.dtype)", "mel = mel * 1")
    )
    assert overhead.operations(model, clips, tmp_path).endswith("not the same")


def test_works_take_turns_and_a_ratio_is_of_rounds():
    done = []
    times = overhead.in_turn([lambda: done.append("a"), lambda: done.append("b")], 3)
    assert "".join(done) == "ba" + "ab" + "ba" + "ab"
    assert times.shape == (2, 3)
    # a machine that is twice as slow in some rounds is so for both
    slow = np.array([1.0, 2.0, 1.0, 2.0])
    assert overhead.ratio(3 * slow, slow) == (3.0, 3.0, 3.0)
    at, low, high = overhead.ratio(np.array([2.0, 2.0, 9.0]), np.ones(3))
    assert (at, low, high) == (2.0, 2.0, 9.0)
