"""Write an inspection as plots, tables and an HTML page that opens offline."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from asrmask.audio.constants import FRAMES_PER_SECOND
from asrmask.inspection import pictures
from asrmask.inspection.inspection import Inspection, Shown
from asrmask.inspection.online import Tally, heads_table
from asrmask.inspection.quantities import DEFINED, KINDS, QUANTITIES
from asrmask.reporting.pages import PNG, ReportFolder, data_url, render_template
from asrmask.reporting.tables import Table, save

N_ROWS = 12  # heads in the page's table


def write(inspection: Inspection, out: Path, model: str, command: str) -> list[Path]:
    """Write plots, tables and inspect.html to a folder; return the files, the page last."""
    files = ReportFolder(out)

    def keep(name: str, content: bytes) -> str:
        """Save a plot; return it as a data URL for the page."""
        files.save(f"pictures/{name}.png", content)
        return data_url(content, PNG)

    tally = inspection.tallies[str(inspection.policy)]
    windows = [_window(inspection, shown, keep) for shown in inspection.shown]
    heat_maps = [
        {"title": title, "image": keep(f"heads-{name}", pictures.heat_maps(tally, name, title))}
        for name, title in pictures.titles(inspection).items()
    ]
    profile = keep("padding-by-position", pictures.padding_by_position(inspection))
    comparisons = []
    if inspection.differences is not None:
        for name, text in QUANTITIES.items():
            title = f"{text[0].upper()}{text[1:]}: {inspection.against} minus {inspection.policy}"
            image = pictures.comparison(inspection.differences, name, title)
            comparisons.append({"title": title, "image": keep(f"comparison-{name}", image)})
    tables = {**inspection.tables, "summary": summary(inspection)}
    numbers = save(tables, out)
    files.written += numbers
    header, rows = most_on_padding(tally)
    page = render_template(
        Path(__file__).parent / "inspect.html.j2",
        model=model,
        policy=str(inspection.policy),
        against=None if inspection.against is None else str(inspection.against),
        n_files=len(inspection.files),
        n_windows=inspection.n_windows,
        verdict=verdict(inspection),
        missing=missing(inspection),
        windows=windows,
        heat_maps=heat_maps,
        profile=profile,
        comparisons=comparisons,
        header=header,
        rows=rows,
        files=[path.name for path in numbers],
        command=command,
    )
    files.save("inspect.html", page)
    return files.written


def _window(inspection: Inspection, shown: Shown, keep: Any) -> dict[str, Any]:
    """Return the page's template variables for a window."""
    model = inspection.model
    panels: list[pictures.Panel] = [("heads that follow the words", model.alignment_heads)]
    most = _most(shown)
    if most is not None:
        title = f"decoder.{most[0]}.cross, head {most[1]}, which looks at padding most"
        panels.append((title, [most]))
    return {
        "file": shown.file,
        "number": shown.number,
        "start_s": shown.start_s,
        "end_s": shown.start_s + shown.features.n_frames / FRAMES_PER_SECOND,
        "spectrogram": keep(f"spectrogram-{shown.name}", pictures.spectrogram(shown)),
        "cross": keep(f"cross-{shown.name}", pictures.cross_maps(shown, panels)),
        "words": [
            {
                "space": " " if seen.word.word.startswith(" ") else "",
                "text": seen.word.word.strip(),
                "shade": f"{min(seen.cross or 0.0, 1.0):.3f}",
                "title": f"{seen.word.start:.2f} … {seen.word.end:.2f} s; attention on padding: "
                f"decoder {_told(seen.cross)}, encoder {_told(seen.encoder)}",
            }
            for seen in shown.words
        ],
        "padding": most is not None,
        "hidden": shown.hides,
        "text": shown.text,
        "other_text": shown.other_text,
        "end_probability": math.exp(shown.measurement.end_logprob),
    }


def _told(value: float | None) -> str:
    return "no data" if value is None else f"{value:.2f}"


def _most(shown: Shown) -> tuple[int, int] | None:
    """The cross-attention head (layer, head) with most mass on padding; None: none is visible."""
    found = {
        (int(place.split(".")[1]), head): share
        for (place, quantity), values in shown.measurement.values.items()
        if quantity == "padding" and place.endswith(".cross")
        for head, share in enumerate(values[0])
        if not math.isnan(share)
    }
    return max(found, key=lambda pair: found[pair], default=None)


def missing(inspection: Inspection) -> list[str]:
    """Return a line for each policy that lacks data, which names what is missing."""
    return [
        f"no data under {policy}: {', '.join(tally.missing)}"
        for policy, tally in inspection.tallies.items()
        if tally.missing
    ]


def summary(inspection: Inspection) -> Table:
    """Tabulate means and intervals for each policy and for the difference between policies."""
    parts = dict(inspection.tallies)
    if inspection.differences is not None:
        parts[f"{inspection.against} minus {inspection.policy}"] = inspection.differences
    return heads_table(parts.items(), "policy", "windows")


def most_on_padding(tally: Tally) -> tuple[list[str], list[list[str | None]]]:
    """Return header and rows of a table: the heads with most mass on padding, all quantities."""
    header = ["head", *QUANTITIES.values()]
    rows: list[list[str | None]] = []
    known = {(row.place, row.head, row.quantity): row.mean for row in tally.heads()}
    found = [row for kind in KINDS for row in tally.ranked(kind, "padding")]
    for place, _, head, *_ in sorted(found, key=lambda row: -row.mean)[:N_ROWS]:
        means = [known.get((place, head, quantity), math.nan) for quantity in QUANTITIES]
        rows.append([f"{place} {head}", *(None if math.isnan(x) else f"{x:.3f}" for x in means)])
    return header, rows


def verdict(inspection: Inspection) -> list[str]:
    """Summarise the findings in sentences."""
    tally = inspection.tallies[str(inspection.policy)]
    rows = [
        row for row in inspection.tables["windows"].rows if row["policy"] == str(inspection.policy)
    ]
    known = [row for row in rows if row["end_logit_padding"] is not None]
    told = []
    if 0 < len(known) < len(rows):
        told.append(f"Padding can be seen in {len(known)} of {len(rows)} windows; this is of them.")
    for kind, name in KINDS.items():
        if "padding" not in DEFINED[kind]:
            continue
        found = tally.ranked(kind, "padding")
        if not found:
            told.append(f"{name.capitalize()}: no data, there is no padding to look at.")
            continue
        average = sum(row.mean for row in found) / len(found)
        most = found[0]
        n_half = sum(row.mean > 0.5 for row in found)
        told.append(
            f"{name.capitalize()}: {100 * average:.0f} % of the attention is on padding, mean over "
            f"{len(found)} heads; most in {most.place} head {most.head}, {100 * most.mean:.0f} %. "
            f"In {n_half} of the heads it is more than half."
        )
    if known:
        names = ("end_logit_padding", "end_logit_audio")
        parts = [np.mean([row[name] for row in known]) for name in names]
        told.append(
            f"Where the text is complete, cross-attention on padding adds {parts[0]:+.2f} to the "
            f"end token's logit along the direct path, and attention on the audio {parts[1]:+.2f}."
        )
    return told
