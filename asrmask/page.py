"""Pages and drawings: one file each, the same style, nothing loaded from elsewhere."""

import base64
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render(template: Path, **values: Any) -> str:
    """A page from a Jinja template, which puts {{ style }} where its style belongs."""
    import jinja2
    import markupsafe

    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    source = template.read_text(encoding="utf-8")
    return environment.from_string(source).render(style=markupsafe.Markup(style), **values)


def drawn(figure: "Figure", form: str) -> bytes:
    """A figure as "svg" or "png"."""
    out = BytesIO()
    metadata: dict[str, Any] = {"Date": None} if form == "svg" else {}
    figure.savefig(out, format=form, dpi=130, metadata=metadata)
    return out.getvalue()


def embedded(svg: bytes) -> str:
    """A drawing as the address of an <img>."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
