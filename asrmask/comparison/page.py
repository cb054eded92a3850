"""compare.html: a comparison as one self-contained page, made from its JSON."""

from pathlib import Path
from typing import Any

from asrmask.evaluation.alignment import as_html
from asrmask.reporting.pages import render_template
from asrmask.systems.upstream import normalizer

MOST_TEXTS = 200  # files whose texts are shown; files that differ come first


def render(data: dict[str, Any]) -> str:
    """Return the page as HTML."""
    files = sorted(data["files"], key=lambda file: file["equal"])
    return render_template(
        Path(__file__).parent / "compare.html.j2",
        data=data,
        texts=[(file, _texts(file)) for file in files[:MOST_TEXTS]],
        scored=any(file["reference"] is not None for file in files),
        notes=_notes,
        percent=lambda wer: "" if wer is None else f"{100 * wer:.2f}",
    )


def _notes(found: dict[str, Any]) -> list[str]:
    """Return notes on the comparison of a file with one system, one sentence each."""
    told = {
        "first difference: ": found["first_difference"],
        "then: ": found["then"],
        "near: ": found["near_tie"],
        "": found["times"] and found["times"]["told"],
    }
    return [word + text for word, text in told.items() if text is not None]


def _texts(file: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows of a title "first → second" and the second's text as HTML, differences marked."""
    normalise = normalizer(file["language"])
    ours = normalise(file["asrmask"]["text"])
    theirs = {name: normalise(found["text"]) for name, found in file["against"].items()}
    rows = []
    if file["reference"] is not None:
        said = normalise(file["reference"])
        rows.append(("reference → asrmask", as_html(said, ours, both=True)))
        for name, text in theirs.items():
            if text != ours:
                rows.append((f"reference → {name}", as_html(said, text, both=True)))
    for name, text in theirs.items():
        rows.append((f"{name} → asrmask", as_html(text, ours, both=True)))
    return rows
