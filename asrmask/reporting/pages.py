"""Self-contained HTML pages: one style for all, with embedded images."""

import base64
import textwrap
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asrmask.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG, PNG = "image/svg+xml", "image/png"


class ReportFolder:
    """The files of a report, each written atomically.

    written: paths of the files written so far, in order
    """

    def __init__(self, path: Path):
        self.path = path
        self.written: list[Path] = []

    def save(self, name: str, content: str | bytes) -> None:
        """Write a file. `name` may contain folders, which are created."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, binary=isinstance(content, bytes)) as file:
            file.write(content)
        self.written.append(path)

    def save_figure(self, name: str, figure: "Figure") -> str:
        """Write a figure to NAME.svg and NAME.png; return the SVG as a data URL."""
        svg = render_figure(figure, "svg")
        self.save(f"{name}.svg", svg)
        self.save(f"{name}.png", render_figure(figure, "png"))
        return data_url(svg, SVG)


def render_template(template: Path, **values: Any) -> str:
    """Render a Jinja template with these values and the shared `style`."""
    import jinja2
    import markupsafe

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    page = environment.from_string(template.read_text(encoding="utf-8"))
    return page.render(style=markupsafe.Markup(style), **values)


def data_url(content: bytes, media_type: str) -> str:
    """Return a file's content as a data URL."""
    return f"data:{media_type};base64," + base64.b64encode(content).decode()


def style_figure(figure: "Figure", title: str) -> None:
    """Apply the common plot style: text readable on a phone, legend below the axes."""
    (axes,) = figure.axes
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        n_columns = max(1, min(3, 80 // (8 + max(map(len, labels)))))
        style: dict[str, Any] = {"frameon": False, "fontsize": 8, "ncols": n_columns}
        figure.legend(handles, labels, loc="outside lower center", **style)
    figure.suptitle(textwrap.fill(title, 64), x=0.01, ha="left", fontsize=10)


def render_figure(figure: "Figure", form: str = "png") -> bytes:
    """Render a figure as "svg" or "png"."""
    out = BytesIO()
    metadata: dict[str, Any] = {"Date": None} if form == "svg" else {}
    figure.savefig(out, format=form, dpi=130, metadata=metadata)
    return out.getvalue()
