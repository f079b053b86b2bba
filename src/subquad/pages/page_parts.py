"""What all pages are made of: one HTML file with everything in it, which opens from a disk without a network."""

import base64
import io
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from PIL import Image

from subquad.errors import SubquadError
from subquad.pages.colours import style_of
from subquad.writing import write_text


def check_page(path: Path) -> None:
    """Raise where a page is not named as one."""
    if path.suffix != ".html":
        raise SubquadError(f"the report is an HTML page: name it like {path.with_suffix('.html')}")


def write_page(path: Path, title: str, sections: Sequence[str]) -> None:
    """Write the page to `path`, whole or not at all."""
    page = files("subquad.pages")
    body = "".join(sections)
    style, script = ((page / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    write_text(
        path,
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}{style_of(body)}</style></head>"
        f'<body><main>{body}</main><div id="tip" role="status"></div>'
        f"<script>{script}</script></body></html>\n",
    )


def section(title: str, lead: str, content: str) -> str:
    """A part of the page, under a heading and a sentence or two."""
    return f"<section><h2>{escape(title)}</h2><p>{escape(lead)}</p>{content}</section>"


def short_command(command: str) -> str:
    """A command without the folder that its program lies in."""
    program, _, rest = command.partition(" ")
    name = Path(program).name
    return f"{'subquad' if name == '__main__.py' else name} {rest}".strip()


def figure(image: Image.Image, text: str, *, colours: int | None = None) -> str:
    """A picture with its caption."""
    source = data_uri(image, colours=colours)
    caption = f"<figcaption>{escape(text)}</figcaption>"
    return f'<figure><img src="{source}" alt="{escape(text, quote=True)}">{caption}</figure>'


def data_uri(image: Image.Image, *, colours: int | None = 64) -> str:
    """A picture in the page itself; with as many colours as it has where `colours` is None."""
    file = io.BytesIO()
    (image if colours is None else image.quantize(colours)).save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
