"""What all pages are made of: one HTML file with everything in it, which opens from a disk without a network.

Markup stands in `templates/` and escapes what is put into it, wherever it comes from. Only what was rendered there, our
own SVG and our own style and scripts are `Markup`, which is put in as it is.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from subquad.errors import SubquadError
from subquad.pages.colours import style_of
from subquad.writing import check_place, json_text, write_text

NOTHING = Markup()
"""What a section is that has nothing to show."""


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("subquad.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # as every reader takes it, and the filter escapes what would end a script
    templates.policies |= {"json.dumps_function": json_text, "json.dumps_kwargs": {}}
    return templates


def render(template: str, /, **values: Any) -> Markup:
    """What a file of `templates/` makes of these values; text among them is escaped."""
    return Markup(_templates().get_template(template).render(values))


def own_file(name: str) -> Markup:
    """A style or a script of this package, which no text from outside gets into."""
    return Markup((files("subquad.pages") / name).read_text(encoding="utf-8"))


MARK = b'<div id="tip" role="status"></div>'
"""What each of our pages has, those of earlier versions too."""


def check_page(path: Path) -> None:
    """Raise where a page is not named as one, can't be written, or would be written over a file of somebody else."""
    if path.suffix != ".html":
        raise SubquadError(f"the report is an HTML page: name it like {path.with_suffix('.html')}")
    check_place(path)
    if path.is_file() and path.stat().st_size and MARK not in path.read_bytes():
        # as of a test runner, which calls its page so, too
        raise SubquadError(f"{path} is there already and is no page of subquad: remove it, or name another")


def write_page(path: Path, title: str, sections: Sequence[Markup]) -> None:
    """Write the page to `path`, whole or not at all."""
    sections = [each for each in sections if each]
    style = own_file("page.css") + Markup(style_of("".join(sections)))
    write_text(path, render("page.html", title=title, style=style, script=own_file("page.js"), sections=sections))


def header(kicker: str, title: str, facts: str, *, lead: str = "", cards: Sequence[tuple[str, str]] = ()) -> Markup:
    """The top of a page; `cards` are the numbers one asks for first, each with what it is."""
    return render("header.html", kicker=kicker, title=title, facts=facts, lead=lead, cards=cards)


def section(title: str, lead: str, content: Markup = NOTHING) -> Markup:
    """A part of the page, under a heading and a sentence or two."""
    return render("section.html", title=title, lead=lead, content=content)


def footer(commands: Sequence[str], note: str = "") -> Markup:
    """The commands that made a page; nothing where there are none."""
    commands = [_short_command(command) for command in commands if command]
    return render("footer.html", commands=commands, note=note) if commands else NOTHING


def _short_command(command: str) -> str:
    """A command without the folder that its program lies in."""
    program, _, rest = command.partition(" ")
    name = Path(program).name
    return f"{'subquad' if name == '__main__.py' else name} {rest}".strip()


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what it says.
        value: what its column is sorted by; the text if empty.
        best: whether it is marked as the best of its column.
        swatch: the class of the colour in front of it.
    """

    text: str
    value: str = ""
    best: bool = False
    swatch: str = ""

    @property
    def order(self) -> str:
        """What the page sorts by, nothing for the text: of numbers that are not there, "–", below all others."""
        return self.value or ("-Infinity" if self.text == "–" else "")


def sortable_table(titles: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Markup:
    """A table that is sorted by its headers; the first cell of a row heads it."""
    return render("sortable.html", titles=titles, rows=rows)


def charts(*drawn: Markup, caption: str = "") -> Markup:
    """A chart of `line_chart` or `point_chart`, with its caption, or two side by side."""
    return render("charts.html", charts=drawn, caption=caption)


def figure(image: Image.Image, text: str, *, colours: int | None = None) -> Markup:
    """A picture with its caption."""
    return render("figure.html", source=data_uri(image, colours=colours), text=text)


def size_within(side: int, picture: Image.Image) -> tuple[int, int]:
    """Width and height of a picture whose longer side is made `side` long."""
    longer = max(picture.size)
    width, height = (max(1, round(each * side / longer)) for each in picture.size)
    return width, height


def data_uri(image: Image.Image, *, colours: int | None = 64) -> str:
    """A picture in the page itself; with as many colours as it has where `colours` is None."""
    file = io.BytesIO()
    (image if colours is None else image.quantize(colours)).save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
