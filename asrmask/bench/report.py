"""The page of a benchmark, or of several beside each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asrmask.bench.plots import plots, render
from asrmask.bench.run import read
from asrmask.bench.summary import (
    HEADINGS,
    against,
    cells,
    markdown,
    reference_of,
    rounds_told,
    tables,
)
from asrmask.files import replacing
from asrmask.pages import SVG, embedded, rendered


def write(folders: Sequence[Path], out: Path) -> list[Path]:
    """bench.html, bench.md and the plots of one benchmark, or of several: the first is the oldest.

    folders: with a bench.json each, or that file
    """
    results = [read(folder) for folder in folders]
    out.mkdir(parents=True, exist_ok=True)
    written = []

    def save(name: str, content: str | bytes) -> None:
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, binary=isinstance(content, bytes)) as file:
            file.write(content)
        written.append(path)

    for i, result in enumerate(results):
        prefix = f"{i + 1}-" if len(results) > 1 else ""
        for plot in plots(result):
            for form in ("svg", "png"):
                save(f"plots/{prefix}{plot.name}.{form}", render(plot, form))
    save("bench.md", "\n".join(map(markdown, results)))
    save("bench.html", page(results))
    return written


def page(results: Sequence[dict[str, Any]]) -> str:
    """The whole report as one page that needs nothing else."""
    sections = []
    for i, result in enumerate(results):
        sections.append(
            {
                "about": result["about"],
                "machine": result.get("machine", {}),
                "reference": reference_of(result),
                "tables": [(title, [cells(x) for x in lines]) for title, lines in tables(result)],
                "plots": [(plot, embedded(render(plot, "svg"), SVG)) for plot in plots(result)],
                "against": against(result, results[0]) if i else [],
            }
        )
    template = Path(__file__).parent / "bench.html.j2"
    return rendered(template, sections=sections, headings=HEADINGS, rounds_told=rounds_told)
