"""The report of one benchmark, or of several side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asrmask.benchmark.plots import BenchmarkPlot, plots, render
from asrmask.benchmark.run import read
from asrmask.benchmark.summary import (
    HEADINGS,
    against,
    cells,
    format_rounds,
    markdown,
    ratios,
    reference_of,
    tables,
)
from asrmask.reporting.pages import SVG, ReportFolder, data_url, render_template
from asrmask.reporting.tables import Table


def write(folders: Sequence[Path], out: Path) -> list[Path]:
    """Write bench.html, bench.md, ratios.csv and plots of one or more benchmarks, oldest first.

    folders: each a folder with a bench.json, or that file
    """
    results = [read(folder) for folder in folders]
    files = ReportFolder(out)
    drawings: list[list[tuple[BenchmarkPlot, str]]] = []  # one list for each benchmark
    for i, result in enumerate(results):
        prefix = f"{i + 1}-" if len(results) > 1 else ""
        drawings.append([])
        for plot in plots(result):
            svg, png = render(plot)
            files.save(f"plots/{prefix}{plot.name}.svg", svg)
            files.save(f"plots/{prefix}{plot.name}.png", png)
            drawings[-1].append((plot, data_url(svg, SVG)))
        files.save(f"{prefix}ratios.csv", ratio_table(result).csv())
    files.save("bench.md", "\n".join(map(markdown, results)))
    files.save("bench.html", page(results, drawings))
    return files.written


def ratio_table(result: dict[str, Any]) -> Table:
    """Compare each setting of asrmask with the other systems, as a table."""
    texts: dict[str, type] = dict.fromkeys(("work", "decoding", "system", "other"), str)
    table = Table({**texts, **dict.fromkeys(("throughput", "alone", "memory"), float)})
    for system in dict.fromkeys(run["system"] for run in result["runs"]):
        if system.startswith("asrmask"):
            for (work, decoding, other), found in ratios(result, system).items():
                named = {"work": work, "decoding": decoding, "system": system, "other": other}
                table.add(**named, **{name: round(x, 4) for name, x in found.items()})
    return table


def page(
    results: Sequence[dict[str, Any]], drawings: Sequence[Sequence[tuple[BenchmarkPlot, str]]]
) -> str:
    """Return the report as one self-contained HTML page."""
    sections = []
    for i, result in enumerate(results):
        sections.append(
            {
                "about": result["about"],
                "machine": result.get("machine", {}),
                "reference": reference_of(result),
                "tables": [(title, [cells(x) for x in lines]) for title, lines in tables(result)],
                "plots": drawings[i],
                "against": against(result, results[0]) if i else [],
            }
        )
    template = Path(__file__).parent / "bench.html.j2"
    return render_template(
        template, sections=sections, headings=HEADINGS, format_rounds=format_rounds
    )
