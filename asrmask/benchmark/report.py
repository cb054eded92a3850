"""The report of one benchmark, or of several side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asrmask.benchmark import summary
from asrmask.benchmark.plots import plots
from asrmask.benchmark.run import read
from asrmask.errors import counted
from asrmask.reporting.pages import SVG, ReportFolder, data_url, render_figure, render_template
from asrmask.reporting.tables import Table


def write(folders: Sequence[Path], out: Path) -> list[Path]:
    """Write bench.html, bench.md, ratios.csv and plots of one or more benchmarks, oldest first.

    folders: each a folder with a bench.json, or that file
    """
    results = [read(folder) for folder in folders]
    files = ReportFolder(out)
    images: list[list[dict[str, str]]] = [[] for _ in results]
    for i, result in enumerate(results):
        prefix = f"{i + 1}-" if len(results) > 1 else ""
        for plot in plots(result):
            svg = render_figure(plot.figure, "svg")
            files.save(f"plots/{prefix}{plot.name}.svg", svg)
            files.save(f"plots/{prefix}{plot.name}.png", render_figure(plot.figure, "png"))
            url = data_url(svg, SVG)
            images[i].append({"title": plot.title, "caption": plot.caption, "url": url})
        files.save(f"{prefix}ratios.csv", ratio_table(result).csv())
    files.save("bench.md", "\n".join(map(summary.markdown, results)))
    files.save("bench.html", page(results, images))
    return files.written


def ratio_table(result: dict[str, Any]) -> Table:
    """Compare each setting of asrmask with the other systems, as a table."""
    names = ("model", "work", "decoding", "system", "other")
    texts: dict[str, type] = dict.fromkeys(names, str)
    table = Table({**texts, **dict.fromkeys(("throughput", "alone", "memory", "cold"), float)})
    for row in summary.ratios(result):
        table.add(**{name: round(x, 4) if isinstance(x, float) else x for name, x in row.items()})
    return table


def page(results: Sequence[dict[str, Any]], images: Sequence[Sequence[dict[str, str]]]) -> str:
    """Return the report as one self-contained HTML page."""
    sections = [
        {
            "about": result["about"],
            "has_runs": bool(result["runs"]),
            "reference": summary.reference_of(result),
            "tables": summary.report_tables(result),
            "images": images[i],
            "comparison": summary.compare_benchmarks(result, results[0]) if i else [],
        }
        for i, result in enumerate(results)
    ]
    template = Path(__file__).parent / "bench.html.j2"
    return render_template(template, sections=sections, counted=counted, no_data=summary.NO_DATA)
