"""Pages that need nothing else: one style for all, pictures inside."""

import base64
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


def drawn(figure: "Figure", form: str) -> bytes:
    """A figure as "svg" or "png"."""
    out = BytesIO()
    metadata: dict[str, Any] = {"Date": None} if form == "svg" else {}
    figure.savefig(out, format=form, dpi=130, metadata=metadata)
    return out.getvalue()
