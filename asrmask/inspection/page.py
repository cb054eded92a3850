"""Write an inspection as plots, tables and an HTML page that opens offline."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from asrmask.audio.constants import FRAMES_PER_SECOND
from asrmask.inspection import pictures
from asrmask.inspection.inspection import Inspection, PlottedWindow
from asrmask.inspection.online import Tally, heads_table
from asrmask.inspection.quantities import KINDS, QUANTITIES
from asrmask.reporting.pages import PNG, ReportFolder, data_url, render_template
from asrmask.reporting.tables import Table, save

N_ROWS = 12  # heads in the page's table
Save = Callable[[str, bytes], str]  # saves a plot; returns it as a data URL for the page


def write(inspection: Inspection, out: Path, model: str, command: str) -> list[Path]:
    """Write plots, tables and inspect.html to a folder; return the files, the page last."""
    files = ReportFolder(out)

    def save_plot(name: str, content: bytes) -> str:
        files.save(f"pictures/{name}.png", content)
        return data_url(content, PNG)

    n, policy = inspection.n_windows, inspection.policy
    tally, differences = inspection.tallies[str(policy)], inspection.differences
    windows = [_window(inspection, window, save_plot) for window in inspection.plotted]
    heat_maps, comparisons = {}, {}  # title → image
    for name, label in QUANTITIES.items():
        label = label[0].upper() + label[1:]
        title = f"{label}: {policy}, {'1 window' if n == 1 else f'mean of {n} windows'}"
        heat_maps[title] = save_plot(f"heads-{name}", pictures.heat_maps(tally, name, title))
        if differences is not None:
            title = f"{label}: {inspection.against} minus {policy}"
            image = pictures.comparison(differences, name, title)
            comparisons[title] = save_plot(f"comparison-{name}", image)
    profile = save_plot("padding-by-position", pictures.padding_by_position(inspection))
    tables = save({**inspection.tables, "summary": summary(inspection)}, out)
    files.written += tables
    page = render_template(
        Path(__file__).parent / "inspect.html.j2",
        model=model,
        inspection=inspection,
        verdict=verdict(inspection),
        missing=missing(inspection),
        windows=windows,
        heat_maps=heat_maps,
        profile=profile,
        comparisons=comparisons,
        header=["head", *QUANTITIES.values()],
        rows=most_on_padding(tally),
        files=[path.name for path in tables],
        command=command,
    )
    files.save("inspect.html", page)
    return files.written


def _window(inspection: Inspection, window: PlottedWindow, save_plot: Save) -> dict[str, Any]:
    """Return the page's template variables for a window."""
    panels: list[pictures.Panel] = [
        ("heads that follow the words", inspection.model.alignment_heads)
    ]
    tally = Tally()
    tally.add(window.measurement.values)
    ranked = tally.ranked("decoder.cross", "padding")
    if ranked:
        place, head = ranked[0].place, ranked[0].head
        title = f"{place}, head {head}, which looks at padding most"
        panels.append((title, [(int(place.split(".")[1]), head)]))
    return {
        "about": window,
        "end_s": window.start_s + window.features.n_frames / FRAMES_PER_SECOND,
        "spectrogram": save_plot(f"spectrogram-{window.name}", pictures.spectrogram(window)),
        "cross": save_plot(f"cross-{window.name}", pictures.cross_maps(window, panels)),
        "words": [
            {
                "space": " " if one.word.word.startswith(" ") else "",
                "text": one.word.word.strip(),
                "shade": f"{min(np.nan_to_num(one.cross), 1.0):.3f}",
                "title": f"{one.word.start:.2f} … {one.word.end:.2f} s; attention on padding: "
                f"decoder {_format(one.cross)}, encoder {_format(one.encoder)}",
            }
            for one in window.words
        ],
        "padding": bool(ranked),
        "end_probability": math.exp(window.measurement.end_logprob),
    }


def _format(value: float) -> str:
    return "no data" if math.isnan(value) else f"{value:.2f}"


def missing(inspection: Inspection) -> list[str]:
    """Return a line for each policy that lacks data, which names what is missing."""
    return [
        f"no data under {policy}: {', '.join(tally.missing)}"
        for policy, tally in inspection.tallies.items()
        if tally.missing
    ]


def summary(inspection: Inspection) -> Table:
    """Tabulate means and intervals for each policy and for the difference between policies."""
    tallies = dict(inspection.tallies)
    if inspection.differences is not None:
        tallies[f"{inspection.against} minus {inspection.policy}"] = inspection.differences
    return heads_table(tallies.items(), "policy", "windows")


def most_on_padding(tally: Tally) -> list[list[str | None]]:
    """Return all quantities of the heads with most mass on padding: name, then means as text."""
    means = {(row.place, row.head, row.quantity): row.mean for row in tally.heads() if row.n}
    ranked = [row for kind in KINDS for row in tally.ranked(kind, "padding")]
    rows: list[list[str | None]] = []
    for row in sorted(ranked, key=lambda row: -row.mean)[:N_ROWS]:
        values = [means.get((row.place, row.head, quantity)) for quantity in QUANTITIES]
        cells = [None if value is None else f"{value:.3f}" for value in values]
        rows.append([f"{row.place} {row.head}", *cells])
    return rows


def verdict(inspection: Inspection) -> list[str]:
    """Summarise the findings in sentences."""
    policy = str(inspection.policy)
    windows = [row for row in inspection.tables["windows"].rows if row["policy"] == policy]
    padded = [row for row in windows if row["end_logit_padding"] is not None]
    sentences = []
    if 0 < len(padded) < len(windows):
        sentences.append(
            f"Padding can be seen in {len(padded)} of {len(windows)} windows; this is about them."
        )
    for kind in ("encoder.self", "decoder.cross"):
        name = KINDS[kind].capitalize()
        heads = inspection.tallies[policy].ranked(kind, "padding")
        if not heads:
            sentences.append(f"{name}: no data, there is no padding to look at.")
            continue
        average = sum(row.mean for row in heads) / len(heads)
        n_half = sum(row.mean > 0.5 for row in heads)
        sentences.append(
            f"{name}: {100 * average:.0f} % of the attention is on padding, mean over "
            f"{len(heads)} heads; most in {heads[0].place} head {heads[0].head}, "
            f"{100 * heads[0].mean:.0f} %. In {n_half} of the heads it is more than half."
        )
    if padded:
        padding, audio = (
            np.mean([row[f"end_logit_{part}"] for row in padded]) for part in ("padding", "audio")
        )
        sentences.append(
            f"Where the text is complete, cross-attention on padding adds {padding:+.2f} to the "
            f"end token's logit along the direct path, and attention on the audio {audio:+.2f}."
        )
    return sentences
