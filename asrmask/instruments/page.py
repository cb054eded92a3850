"""An inspection as files: pictures, numbers and one page that opens offline."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from asrmask.audio import FRAMES_PER_SECOND
from asrmask.files import replacing
from asrmask.instruments import pictures
from asrmask.instruments.inspection import Inspection, Shown
from asrmask.instruments.online import Tally
from asrmask.instruments.quantities import DEFINED, KINDS, QUANTITIES
from asrmask.instruments.tables import Table, save
from asrmask.pages import embedded, rendered

N_ROWS = 12  # heads in the table
SUMMARY = {
    "policy": str,
    "attention": str,
    "layer": int,
    "head": int,
    "quantity": str,
    "windows": int,
    "mean": float,
    "low": float,
    "high": float,
}


def write(inspection: Inspection, out: Path, model: str, command: str) -> list[Path]:
    """Pictures, tables and inspect.html in a folder; the files written, the page last."""
    written: list[Path] = []
    drawn: dict[str, str] = {}  # picture → its address in the page

    def keep(name: str, content: bytes) -> str:
        path = out / "pictures" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, binary=True) as file:
            file.write(content)
        written.append(path)
        drawn[name] = embedded(content, "image/png")
        return drawn[name]

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
    written += numbers
    header, rows = most_on_padding(tally)
    page = rendered(
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
    with replacing(out / "inspect.html") as file:
        file.write(page)
    return [*written, out / "inspect.html"]


def _window(inspection: Inspection, shown: Shown, keep: Any) -> dict[str, Any]:
    """What the page says of a window."""
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
    """The head of cross-attention that looks at padding most; None: there is no padding to see."""
    found = {
        (int(place.split(".")[1]), head): share
        for (place, quantity), values in shown.measurement.values.items()
        if quantity == "padding" and place.endswith(".cross")
        for head, share in enumerate(values[0])
        if not math.isnan(share)
    }
    return max(found, key=lambda pair: found[pair], default=None)


def missing(inspection: Inspection) -> list[str]:
    """What has no data under a policy, by name: a line for each policy with any."""
    return [
        f"no data under {policy}: {', '.join(tally.missing)}"
        for policy, tally in inspection.tallies.items()
        if tally.missing
    ]


def summary(inspection: Inspection) -> Table:
    """Means with their intervals, policy by policy, and the differences."""
    table = Table(dict(SUMMARY))
    parts = dict(inspection.tallies)
    if inspection.differences is not None:
        parts[f"{inspection.against} minus {inspection.policy}"] = inspection.differences
    for policy, tally in parts.items():
        for (place, quantity), moments in tally.moments.items():
            part, layer, what = place.split(".")
            low, high = moments.interval()
            for head, mean in enumerate(moments.means()):
                table.add(
                    policy=policy,
                    attention=f"{part}.{what}",
                    layer=int(layer),
                    head=head,
                    quantity=quantity,
                    windows=int(moments.n[head]),
                    mean=float(mean),
                    low=float(low[head]),
                    high=float(high[head]),
                )
    return table


def ranked(tally: Tally, kind: str) -> list[tuple[str, int, float]]:
    """Every head of a kind with data, by its mass on padding: place, head, mean."""
    places = [p for p in pictures.places_of(tally, kind) if tally.has((p, "padding"))]
    found = [
        (place, head, float(mean))
        for place in places
        for head, mean in enumerate(tally.moments[place, "padding"].means())
        if not math.isnan(mean)
    ]
    return sorted(found, key=lambda row: -row[2])


def most_on_padding(tally: Tally) -> tuple[list[str], list[list[str | None]]]:
    """The heads that look at padding most, with all that was measured of them."""
    header = ["head", *QUANTITIES.values()]
    rows: list[list[str | None]] = []
    found = [row for kind in KINDS for row in ranked(tally, kind)]
    for place, head, _ in sorted(found, key=lambda row: -row[2])[:N_ROWS]:
        cells: list[str | None] = [f"{place} {head}"]
        for quantity in QUANTITIES:
            value = math.nan
            if tally.has((place, quantity)):
                value = float(tally.moments[place, quantity].means()[head])
            cells.append(None if math.isnan(value) else f"{value:.3f}")
        rows.append(cells)
    return header, rows


def verdict(inspection: Inspection) -> list[str]:
    """What was found, in words and numbers."""
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
        found = ranked(tally, kind)
        if not found:
            told.append(f"{name.capitalize()}: no data, there is no padding to look at.")
            continue
        average = sum(mean for _, _, mean in found) / len(found)
        place, head, most = found[0]
        n_half = sum(mean > 0.5 for _, _, mean in found)
        told.append(
            f"{name.capitalize()}: {100 * average:.0f} % of the attention is on padding, mean over "
            f"{len(found)} heads; most in {place} head {head}, {100 * most:.0f} %. In {n_half} of "
            f"the heads it is more than half."
        )
    if known:
        names = ("end_logit_padding", "end_logit_audio")
        parts = [np.mean([row[name] for row in known]) for name in names]
        told.append(
            f"Where the text is complete, cross-attention on padding adds {parts[0]:+.2f} to the "
            f"end token's logit along the direct path, and attention on the audio {parts[1]:+.2f}."
        )
    return told
