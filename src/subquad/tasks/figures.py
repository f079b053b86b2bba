"""What all pictures of results share: matplotlib where there is one, files written whole or not at all."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from subquad.errors import SubquadError
from subquad.writing import check_place, replacing

INK, MUTED, WRONG = "#1f2933", "#7b8794", "#c81e1e"


def new_figure(width: float, height: float) -> Any:
    """A matplotlib Figure of so many inches, which needs no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SubquadError("pictures need matplotlib: pip install 'subquad[report]'") from None
    return Figure(figsize=(width, height), facecolor="white")


def check_picture(path: Path) -> None:
    """Raise SubquadError where no picture can be drawn to `path`: in front of the work that it is to show."""
    _format_of(new_figure(1, 1), path)
    check_place(path)


@contextmanager
def any_letters() -> Iterator[None]:
    """Letters that no font has are boxes in a picture, without matplotlib's lines about each of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        yield


def save_figure(figure: Any, path: Path, *, cropped: bool = False) -> None:
    """Write `figure` in the format that the ending of `path` names; `cropped` to what is drawn, or grown to hold it."""
    kind = _format_of(figure, path)
    from matplotlib import rc_context

    # text of an SVG stays text, and the same picture gives the same file
    date = {"svg": "Date", "pdf": "CreationDate"}.get(kind)
    undated = {"metadata": {date: None}} if date else {}
    with any_letters(), rc_context({"svg.fonttype": "none", "svg.hashsalt": "subquad"}), replacing(path) as aside:
        figure.savefig(aside, format=kind, dpi=150, bbox_inches="tight" if cropped else None, **undated)


def _format_of(figure: Any, path: Path) -> str:
    formats = figure.canvas.get_supported_filetypes()
    kind = path.suffix.removeprefix(".").lower()
    if kind not in formats:
        raise SubquadError(f"can't write a picture to {path}: its name must end in one of .{', .'.join(formats)}")
    return kind
