"""Pages that need nothing else: one style for all, pictures inside."""

import base64
import textwrap
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG = "image/svg+xml"


def rendered(template: Path, **values: Any) -> str:
    """The page that a template makes of these values; `style` is given to all."""
    import jinja2
    import markupsafe

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    made = environment.from_string(template.read_text(encoding="utf-8"))
    return made.render(style=markupsafe.Markup(style), **values)


def embedded(content: bytes, kind: str) -> str:
    """A file's content as an address within the page.

    kind: "image/png", …
    """
    return f"data:{kind};base64," + base64.b64encode(content).decode()


def finish(figure: "Figure", title: str) -> None:
    """One look for all plots: letters of a size that a phone shows, and the legend below the axes,
    where it covers nothing.
    """
    (axes,) = figure.axes
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=max(1, min(3, 80 // (8 + max(map(len, labels))))),
            frameon=False,
            fontsize=8,
        )
    figure.suptitle(textwrap.fill(title, 64), x=0.01, ha="left", fontsize=10)


def drawn(figure: "Figure", form: str) -> bytes:
    """A figure as "svg" or "png"."""
    out = BytesIO()
    metadata: dict[str, Any] = {"Date": None} if form == "svg" else {}
    figure.savefig(out, format=form, dpi=130, metadata=metadata)
    return out.getvalue()
