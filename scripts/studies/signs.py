"""Signs of hallucination: does attention on padding show that a segment's text was never said?

Recordings are made from clips of speech, with long silences and noise added, and from noise alone.
They are transcribed greedily, window by window, without thresholds: nothing is dropped that a sign
should find.

A segment is *hallucinated* if at least half of its words are insertions: the recording's whole text
is aligned with the reference (both in Whisper's normal form), and an insertion is a word that
stands beside no word of the reference. A segment is *wrong* if at least half of its words are
insertions or substitutions. Segments without a word are left out.

A sign is as good as its AUROC: the probability that a hallucinated segment, drawn at random, has
more of it than one that is not. no_speech_prob, avg_logprob and compression_ratio are the window's,
as in openai-whisper; attention on padding is the segment's own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asrmask.audio.constants import CHUNK_LENGTH, SAMPLE_RATE
from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import white_noise
from asrmask.evaluation.alignment import align
from asrmask.evaluation.corpus import Clip
from asrmask.inspection.diagnosis import Diagnose
from asrmask.model.whisper import Whisper
from asrmask.reporting.tables import Table, markdown
from asrmask.systems.upstream import normalizer
from asrmask.transcription.api import stream
from asrmask.transcription.result import Segment
from asrmask.transcription.settings import Settings
from asrmask.transcription.window_loop import Callbacks

LONG_S = 8.0  # of silence or noise on either side of the speech
NOISE_DB = -35.0  # of full scale
N_NOTHING = 30  # recordings in which nobody speaks
NOTHING_S = (1.0, 25.0)  # between which their lengths are
N_DRAWS = 2000
N_FOLDS = 5
SETTINGS = Settings(
    temperature=0.0,
    compression_ratio_threshold=None,
    logprob_threshold=None,
    no_speech_threshold=None,
    condition_on_previous_text=False,
)
CLEAN = "as it is"
AS_LOUD = "white noise over it, as loud"
NOTHING = "nothing but silence or noise"
SIGNS = {  # from a row to a number: more of it is a stronger sign
    "attention on padding": lambda row: row["attention_on_padding"],
    "attention on padding ÷ padding's share of the window": lambda row: (
        row["attention_on_padding"] * CHUNK_LENGTH / row["padding_s"]
    ),
    "seconds of padding (control)": lambda row: row["padding_s"],
    "no_speech_prob": lambda row: row["no_speech_prob"],
    "−avg_logprob": lambda row: -row["avg_logprob"],
    "compression_ratio": lambda row: row["compression_ratio"],
}
OURS, THEIRS = "attention on padding", ("no_speech_prob", "−avg_logprob")
USUAL = "no_speech_prob and avg_logprob"  # both in a regression
COLUMNS = {
    "recording": str,
    "condition": str,
    "block": str,
    "start": float,
    "end": float,
    "words": int,
    "inserted": int,
    "substituted": int,
    "attention_on_padding": float,
    "padding_s": float,
    "no_speech_prob": float,
    "avg_logprob": float,
    "compression_ratio": float,
    "text": str,
}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """A recording with what is said in it.

    block: what the bootstrap draws together: all that was made from one clip
    """

    name: str
    condition: str
    block: str
    samples: np.ndarray
    text: str


def brown_noise(rng: np.random.Generator, n: int, level_db: float) -> np.ndarray:
    """n samples of brown noise with a root mean square of level_db decibels of full scale."""
    x = np.cumsum(white_noise(rng, n, 0).astype(float))
    x -= np.linspace(x[0], x[-1], n)
    x *= 10 ** (level_db / 20) / (np.sqrt(np.mean(x**2)) or 1.0)
    return x.astype(np.float32)


def level_db(samples: np.ndarray) -> float:
    return float(10 * np.log10(np.mean(samples.astype(float) ** 2)))


def cases(clips: Sequence[Clip], seed: int = 0) -> Iterator[Case]:
    """Each clip in every condition, then recordings of nothing."""
    n, long = round(LONG_S * SAMPLE_RATE), f"{LONG_S:.0f} s of"
    silence = np.zeros(n, np.float32)
    for i, clip in enumerate(clips):
        rng = np.random.default_rng([seed, i])
        recording = clip.recording()
        speech = recording.read(0, recording.n_samples)
        before, after = white_noise(rng, n, NOISE_DB), white_noise(rng, n, NOISE_DB)
        loud = white_noise(rng, len(speech), level_db(speech))
        louder = white_noise(rng, len(speech), level_db(speech) + 5)
        made = {
            CLEAN: speech,
            f"{long} silence on either side": np.concatenate([silence, speech, silence]),
            f"{long} white noise on either side": np.concatenate([before, speech, after]),
            AS_LOUD: speech + loud,
            "white noise over it, 5 dB louder": speech + louder,
        }
        for condition, samples in made.items():
            yield Case(clip.id, condition, clip.id, np.clip(samples, -1, 1), clip.text or "")
    for i in range(N_NOTHING):
        rng = np.random.default_rng([seed, len(clips) + i])
        n = round(rng.uniform(*NOTHING_S) * SAMPLE_RATE)
        level = rng.uniform(-60, -20) if i % 3 else -85.0  # a third is silence, but for dither
        samples = (brown_noise if i % 3 == 2 else white_noise)(rng, n, level)
        yield Case(f"nothing {i}", NOTHING, f"nothing {i}", np.clip(samples, -1, 1), "")


def judged(segments: Sequence[Sequence[str]], said: str) -> list[tuple[int, int]]:
    """How many words of each segment are insertions, and how many substitutions.

    segments: words, in order
    said:     the reference

    >>> judged([["a", "x"], ["c", "d", "d"]], "a b c")
    [(0, 1), (2, 0)]
    """
    kinds: list[str] = []
    heard = " ".join(word for words in segments for word in words)
    for chunk in align(said, heard):
        kinds += [chunk.kind] * len(chunk.hypothesis.split())
    found, first = [], 0
    for words in segments:
        mine = kinds[first : first + len(words)]
        found.append((mine.count("insert"), mine.count("substitute")))
        first += len(words)
    return found


def rows_of(case: Case, segments: Sequence[Segment]) -> Iterator[dict[str, object]]:
    """A row for each segment that has words."""
    normal = normalizer("en")
    words = [normal(segment.text).split() for segment in segments]
    counts = judged(words, normal(case.text))
    for segment, mine, (inserted, substituted) in zip(segments, words, counts, strict=True):
        if mine:
            yield {
                "recording": case.name,
                "condition": case.condition,
                "block": case.block,
                "start": round(segment.start, 2),
                "end": round(segment.end, 2),
                "words": len(mine),
                "inserted": inserted,
                "substituted": substituted,
                "attention_on_padding": segment.diagnosis.attention_on_padding,
                "padding_s": segment.diagnosis.padding_s,
                "no_speech_prob": round(segment.no_speech_prob, 6),
                "avg_logprob": round(segment.avg_logprob, 5),
                "compression_ratio": round(segment.compression_ratio, 4),
                "text": segment.text.strip()[:80],
            }


def hallucinated(row: Row) -> bool:
    """Whether at least half of a segment's words were never said.

    >>> hallucinated({"words": 4, "inserted": 2}), hallucinated({"words": 5, "inserted": 2})
    (True, False)
    """
    return 2 * row["inserted"] >= row["words"]


def wrong(row: Row) -> bool:
    """Whether at least half of a segment's words are not those that were said."""
    return 2 * (row["inserted"] + row["substituted"]) >= row["words"]


def auroc(scores: np.ndarray, labels: np.ndarray) -> float:
    """The probability that a positive has the higher score; ties count half. NaN: no such pair.

    >>> auroc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True]))
    0.875
    """
    from scipy.stats import rankdata

    n_yes, n_no = int(labels.sum()), int((~labels).sum())
    if not n_yes or not n_no:
        return float("nan")
    ranks = rankdata(scores)[labels].sum()
    return float((ranks - n_yes * (n_yes + 1) / 2) / (n_yes * n_no))


def drawn(blocks: Sequence[str], n_draws: int = N_DRAWS, seed: int = 0) -> list[np.ndarray]:
    """Rows of each draw of a bootstrap over blocks."""
    members: dict[str, list[int]] = {}
    for i, block in enumerate(blocks):
        members.setdefault(block, []).append(i)
    parts = [np.array(rows) for rows in members.values()]
    rng = np.random.default_rng(seed)
    return [
        np.concatenate([parts[i] for i in rng.integers(len(parts), size=len(parts))])
        for _ in range(n_draws)
    ]


def predicted(features: np.ndarray, labels: np.ndarray, blocks: Sequence[str]) -> np.ndarray:
    """Log-odds by a logistic regression on other blocks: each fold is predicted from the rest.

    features: (rows, signs)
    """
    names = list(dict.fromkeys(blocks))
    order = np.random.default_rng(0).permutation(len(names))
    fold_of = {names[j]: i % N_FOLDS for i, j in enumerate(order)}
    folds = np.array([fold_of[block] for block in blocks])
    out = np.zeros(len(labels))
    for fold in range(N_FOLDS):
        train = folds != fold
        mean, spread = features[train].mean(axis=0), features[train].std(axis=0)
        scaled = (features - mean) / np.where(spread > 0, spread, 1)
        x = np.column_stack([np.ones(len(scaled)), scaled])
        out[~train] = x[~train] @ _logistic(x[train], labels[train].astype(float))
    return out


def _logistic(x: np.ndarray, y: np.ndarray, ridge: float = 1.0, n_steps: int = 30) -> np.ndarray:
    """Weights of a logistic regression, by Newton's method; the first, a constant, is free."""
    weights = np.zeros(x.shape[1])
    penalty = ridge * np.eye(x.shape[1])
    penalty[0, 0] = 1e-9
    for _ in range(n_steps):
        p = 1 / (1 + np.exp(-np.clip(x @ weights, -30, 30)))
        gradient = x.T @ (y - p) - penalty @ weights
        curvature = (x * (p * (1 - p))[:, None]).T @ x + penalty
        weights = weights + np.linalg.solve(curvature, gradient)
    return weights


def scores_of(rows: Sequence[Row], labels: np.ndarray) -> dict[str, np.ndarray]:
    """Every sign of each row, and combinations by regression."""
    found = {name: np.array([of(row) for row in rows], float) for name, of in SIGNS.items()}
    silent = np.clip(found["no_speech_prob"], 1e-6, 1 - 1e-6)
    usual = [np.log(silent / (1 - silent)), found["−avg_logprob"]]
    combined = {
        USUAL: usual,
        "the same and attention on padding": [*usual, found[OURS]],
        "the same, attention and seconds of padding": [
            *(*usual, found[OURS], found["seconds of padding (control)"])
        ],
    }
    if labels.any() and not labels.all():
        blocks = [row["block"] for row in rows]
        for name, signs in combined.items():
            found[name] = predicted(np.column_stack(signs), labels, blocks)
    return found


def told(value: float, draws: np.ndarray, sign: str = "") -> str:
    """A number with the middle 95 % of its draws."""
    if np.isnan(value):
        return "no data"
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return f"{value:{sign}.3f} ({low:{sign}.3f} … {high:{sign}.3f})"


def conditions(rows: Sequence[Row]) -> str:
    """What there is to be found, condition by condition."""
    header = ["condition", "recordings", "segments", "hallucinated", "wrong", "without padding"]
    lines: list[list[object]] = []
    totals = np.zeros(5, int)
    for condition in dict.fromkeys(row["condition"] for row in rows):
        here = [row for row in rows if row["condition"] == condition]
        mine = [row for row in here if row["words"]]
        counts = [
            len({row["recording"] for row in here}),
            len(mine),
            sum(map(hallucinated, mine)),
            sum(map(wrong, mine)),
            sum(not row["padding_s"] for row in mine),
        ]
        totals += counts
        lines.append([condition, *counts])
    return markdown(header, [*lines, ["all", *totals]])


def comparison(rows: Sequence[Row]) -> str:
    """AUROC of every sign on several selections, with what separates ours from the usual ones."""
    rows = [row for row in rows if row["words"] and row["padding_s"]]
    spoken = [row for row in rows if row["condition"] != NOTHING]
    added = [row for row in spoken if row["condition"] != CLEAN]
    alike = [row for row in spoken if row["condition"] == AS_LOUD]
    selections = {
        "hallucinated, all": (rows, hallucinated),
        "wrong, recordings with speech": (spoken, wrong),
        "wrong, silence or noise added to speech": (added, wrong),
        f"wrong, {AS_LOUD} alone": (alike, wrong),  # conditions differ in padding too
    }
    columns = [_column(mine, of) for mine, of in selections.values()]
    names = dict.fromkeys(name for cells in columns for name in cells)
    lines = [[name, *(cells.get(name, "no data") for cells in columns)] for name in names]
    return markdown(["AUROC (95 % interval)", *selections], lines)


def _column(rows: Sequence[Row], is_positive: Callable[[Row], bool]) -> dict[str, str]:
    """AUROC of every sign on some rows, and the differences that matter."""
    labels = np.array([is_positive(row) for row in rows])
    scores = scores_of(rows, labels)
    draws = drawn([row["block"] for row in rows])
    at = {name: auroc(values, labels) for name, values in scores.items()}
    by_draw = {
        name: np.array([auroc(values[some], labels[some]) for some in draws])
        for name, values in scores.items()
    }
    cells = {"segments": f"{labels.sum()} of {len(labels)}"}
    cells |= {name: told(at[name], by_draw[name]) for name in scores}
    pairs = [(OURS, other) for other in THEIRS]
    pairs += [(name, USUAL) for name in scores if name.startswith("the same")]
    for one, other in pairs:
        name = f"{one}, minus {other.removeprefix('−')}'s"
        cells[name] = told(at[one] - at[other], by_draw[one] - by_draw[other], "+")
    return cells


def run(model: Whisper, clips: Sequence[Clip], told: Callable[[str], None]) -> Table:
    """A row for every segment with words; a recording without any has a row without words."""
    table = Table(dict(COLUMNS))
    callbacks = Callbacks(on_window=Diagnose(model))
    for i, case in enumerate(cases(clips), start=1):
        segments = list(stream(model, Recording.of(case.samples), SETTINGS, callbacks=callbacks))
        silent = {"recording": case.name, "condition": case.condition, "block": case.block}
        none = {**dict.fromkeys(COLUMNS), **silent, "words": 0}
        for row in list(rows_of(case, segments)) or [none]:
            table.add(**row)
        told(f"{i} recordings, {len(table.rows)} segments")
    return table
