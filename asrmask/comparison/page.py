"""compare.html: a comparison as one page that needs nothing else, from its JSON alone."""

from pathlib import Path
from typing import Any

from asrmask.alignment import as_html
from asrmask.pages import rendered
from asrmask.upstream import normalizer

MOST_TEXTS = 200  # files whose texts are shown: those that differ first


def render(data: dict[str, Any]) -> str:
    """The page."""
    files = sorted(data["files"], key=lambda file: file["equal"])
    return rendered(
        Path(__file__).parent / "compare.html.j2",
        data=data,
        texts=[(file, _texts(file)) for file in files[:MOST_TEXTS]],
        percent=lambda wer: "" if wer is None else f"{100 * wer:.2f}",
    )


def _texts(file: dict[str, Any]) -> list[tuple[str, str]]:
    """Each system's name and text, as HTML: theirs plain, ours with what differs from it marked."""
    normalise = normalizer(file["language"])
    ours = normalise(file["asrmask"]["text"])
    rows = []
    if file["reference"] is not None:
        said = normalise(file["reference"])
        rows.append(("reference, and what asrmask heard", as_html(said, ours)))
    for name, found in file["against"].items():
        rows.append((f"{name}, and what asrmask heard", as_html(normalise(found["text"]), ours)))
    return rows
