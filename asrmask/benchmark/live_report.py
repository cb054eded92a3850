"""The report of a benchmark of live transcription: live.md, live.html and plots."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asrmask.benchmark import live_summary
from asrmask.benchmark.live import read
from asrmask.benchmark.plots import COLOURS
from asrmask.reporting.pages import ReportFolder, render_template, style_figure

OTHERS = {"whisper-streaming": COLOURS["faster-whisper"], "moonshine": "#e08a00"}
PADDINGS = {"virtual": COLOURS["asrmask"], "full": COLOURS["faster-whisper"]}


def write(folder: Path) -> list[Path]:
    """Write the report of the live.json in a folder."""
    result = read(folder)
    files = ReportFolder(folder)
    files.save("live.md", live_summary.markdown(result))
    images = []
    for name, title, caption, figure in plots(result):
        style_figure(figure, title)
        url = files.save_figure(f"plots/{name}", figure)
        images.append({"title": title, "caption": caption, "url": url})
    template = Path(__file__).parent / "live.html.j2"
    page = render_template(
        template, about=result["about"], tables=live_summary.tables(result), images=images
    )
    files.save("live.html", page)
    return files.written


def plots(result: dict[str, Any]) -> list[tuple[str, str, str, Figure]]:
    """Return name, title, caption and figure of every plot that there is data for."""
    drawn = []

    def axes_for(name: str, title: str, caption: str) -> Axes:
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        drawn.append((name, title, caption, figure))
        return figure.subplots()

    for model in dict.fromkeys(run["model"] for run in result["runs"]):
        caption = "From the end of a word to its commitment, in the first recording."
        draw_delays(axes_for(f"delay-{model}", f"Delay over time, {model}", caption), result, model)
        caption = "The first data set, for several steps. The dashed line is the whole file."
        axes = axes_for(f"steps-{model}", f"Delay against word error rate, {model}", caption)
        draw_steps(axes, result, model)
        if rows := [row for row in result["updates"] if row["model"] == model and "ms" in row]:
            caption = "Encoding, decoding three new words, and their times."
            title = f"Cost of an update against its audio, {model}"
            draw_updates(axes_for(f"updates-{model}", title, caption), rows)
    return drawn


def draw_delays(axes: Axes, result: dict[str, Any], model: str) -> None:
    runs = [run for run in result["runs"] if run["model"] == model and "error" not in run]
    first: dict[str, dict[str, Any]] = {}
    for run in runs:
        if run["work"] == runs[0]["work"]:
            first.setdefault(run["system"], run)
    for system, run in first.items():
        times, delays = live_summary.running_means(run["delays"], 0)
        colour = OTHERS.get(system, COLOURS["asrmask"])
        axes.plot(times, delays, color=colour, lw=1, label=live_summary.label_of(run))
    axes.set(xlabel="time in the recording, s", ylabel="delay, s", ylim=(0, None))


def draw_steps(axes: Axes, result: dict[str, Any], model: str) -> None:
    points = live_summary.step_points(result, model)
    axes.plot([x for _, x, _ in points], [y for *_, y in points], "o-", color=COLOURS["asrmask"])
    for step, delay, wer in points:
        axes.annotate(f"{step:g} s", (delay, wer), (4, 4), textcoords="offset points", size=8)
    first = next(run for run in result["runs"] if run["model"] == model)
    axes.axhline(100 * live_summary.offline_wer(first, result), color="#999999", lw=0.8, ls="--")
    axes.set(xlabel="mean delay, s", ylabel="WER, %")


def draw_updates(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for padding, colour in PADDINGS.items():
        mine = [row for row in rows if row["padding"] == padding]
        x, y = [row["seconds"] for row in mine], [row["ms"] for row in mine]
        axes.plot(x, y, "o-", color=colour, lw=1, ms=3, label=f"{padding} padding")
    axes.set(xlabel="audio of the update, s", ylabel="ms", ylim=(0, None))
