"""The page of a training run: curves and settings, from its history alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from asrmask.errors import OptionError
from asrmask.reporting.pages import ReportFolder, render_template, style_figure

HISTORY = "history.json"  # written by trainer.py
SMOOTHED = 10  # steps that the line of the training loss averages
WIDTH, HEIGHT = 5.8, 3.6  # inches
LEAST_LOSS = 1e-3  # that the plot of losses shows
PERCENT = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
Entries = Sequence[dict[str, Any]]


def write(folder: Path) -> list[Path]:
    """Write train.html and its plots, as SVG and PNG; return the paths."""
    path = folder / HISTORY
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        history, spec = about["progress"]["history"], about["spec"]
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}, expected a training run") from None
    except (ValueError, LookupError, TypeError):
        raise OptionError(f"{path}: damaged, expected the history of a training run") from None
    files = ReportFolder(folder)
    steps = [entry for entry in history if entry["kind"] == "train"]
    validations = [entry for entry in history if entry["kind"] == "validation"]
    images = []
    for name, title, caption, figure in (
        ("loss", "Loss", LOSS_CAPTION, loss_figure(steps, validations)),
        ("wer", "Word error rate of held-out clips", WER_CAPTION, wer_figure(validations)),
    ):
        if figure is not None:
            style_figure(figure, title)
            url = files.save_figure(f"plots/{name}", figure)
            images.append({"title": title, "caption": caption, "url": url})
    page = render_template(
        Path(__file__).parent / "train.html.j2",
        spec=spec,
        command=about["command"],
        progress=about["progress"],
        n_clips=about["identity"]["n_clips"],
        base=about["identity"]["weights"],
        images=images,
        settings=_settings(spec),
        validations=[_row(entry) for entry in validations],
        timing=_timing(steps),
    )
    files.save("train.html", page)
    return files.written


LOSS_CAPTION = (
    "Thin: every step. Thick: its mean over 10 steps. Dots: held-out clips, whole and unchanged. "
    "A model that learns from itself begins at 0 under full: losses below 0.001 are drawn there."
)
WER_CAPTION = (
    "Against the transcripts, or where there are none, against what the padded model wrote before "
    "training. Greedy, without fallback."
)


def loss_figure(steps: Entries, validations: Entries) -> Figure | None:
    """The loss of every step, and of held-out clips under each policy."""
    if not steps:
        return None
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    numbers = [entry["step"] for entry in steps]
    values = np.array([entry["loss"] for entry in steps])
    axes.plot(numbers, values, color="#bbbbbb", linewidth=0.7)
    n = min(SMOOTHED, len(values))
    means = np.convolve(values, np.ones(n) / n, mode="valid")
    axes.plot(numbers[n - 1 :], means, color="#333333", label="training")
    for policy, entries in _by_policy(validations).items():
        axes.plot(
            [entry["step"] for entry in entries],
            [max(entry["loss"], LEAST_LOSS) for entry in entries],
            marker="o",
            markersize=3,
            label=policy,
        )
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    return figure


def wer_figure(validations: Entries) -> Figure | None:
    """The word error rate of held-out clips under each policy."""
    if not validations:
        return None
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    for policy, entries in _by_policy(validations).items():
        rates = [100 * entry["wer"] for entry in entries]
        axes.plot(
            [entry["step"] for entry in entries], rates, marker="o", markersize=3, label=policy
        )
    highest = max(100 * entry["wer"] for entry in validations)
    axes.set(xlabel="step", ylabel="WER %")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_yticks([x for x in PERCENT if x <= 2 * highest], minor=False)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    return figure


def _by_policy(validations: Entries) -> dict[str, list[dict[str, Any]]]:
    names = dict.fromkeys(entry["policy"] for entry in validations)
    return {name: [e for e in validations if e["policy"] == name] for name in names}


def _row(entry: dict[str, Any]) -> list[str]:
    """A validation, as a row of the table."""
    return [
        *(str(entry["step"]), entry["policy"], f"{entry['loss']:.4f}"),
        *(f"{100 * entry['wer']:.2f}", str(entry["n_endless"])),
    ]


def _settings(spec: dict[str, Any]) -> list[tuple[str, str]]:
    """Every setting and its value; those of tables as "table.name"."""
    found: list[tuple[str, str]] = []
    for name, value in spec.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for key, one in inner:
            text = ", ".join(map(str, one)) if isinstance(one, list) else str(one)
            found.append((f"{name}.{key}" if key else name, text or "none"))
    return found


def _timing(steps: Entries) -> str:
    """How long steps took, in words."""
    if not steps:
        return "no step yet"
    seconds = float(np.median([entry["seconds"] for entry in steps]))
    waited = sum(entry["waited_s"] for entry in steps) / sum(entry["seconds"] for entry in steps)
    return (
        f"{seconds:.2f} s a step (median), {100 * waited:.0f} % of it for audio and the padded "
        f"model's output"
    )
