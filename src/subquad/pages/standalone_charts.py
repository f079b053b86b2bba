"""Charts as files that stand alone; what a bench measured as one of them."""

from collections.abc import Sequence
from pathlib import Path

from subquad.benchmarks import BlockRow, NetworkRow
from subquad.errors import check_suffix
from subquad.models import attention_label
from subquad.pages.charts import Axis, Series, line_chart
from subquad.pages.colours import classes_of, plain_style_of
from subquad.writing import write_text

PICTURES = "the picture is", ".svg"

_STYLE = """text { fill: #667080; font: 12px system-ui, sans-serif; }
.name { font-weight: 600; }
.grid { stroke: #e2e3de; } .axis { stroke: #667080; }
.line, .leader { fill: none; stroke-width: 2; } .leader { stroke-width: 1; opacity: 0.45; }
"""
"""The page's, without its variables: not all that shows SVG knows them."""


def bench_picture(rows: Sequence[BlockRow] | Sequence[NetworkRow], path: Path) -> None:
    """Write lines of all mechanisms or networks, and of softmax, to `path`, an SVG that stands alone."""
    check_suffix(path, *PICTURES)
    several = len({(row.batch_size, row.dtype) for row in rows}) > 1
    lines: dict[str, dict[float, float]] = {}
    mechanisms: dict[str, str] = {}
    for row in rows:
        what = f" {row.batch_size} {row.dtype}" if several else ""
        for name, place, ms in _points(row):
            lines.setdefault(name + what, {})[place] = ms
            mechanisms[name + what] = attention_label(name, None) if isinstance(row, NetworkRow) else name
    unit = "tokens" if isinstance(rows[0], BlockRow) else "px"
    colours = classes_of(mechanisms)
    series = [
        Series(name, colours[name], sorted(points.items()), [f"{name}: {ms:.3g} ms" for ms in points.values()])
        for name, points in lines.items()
    ]
    save_lines(series, Axis(unit, log=True), Axis("milliseconds", log=True), path)


def save_lines(series: Sequence[Series], x: Axis, y: Axis, path: Path) -> None:
    """Write a chart of lines to `path`, an SVG that stands alone."""
    check_suffix(path, *PICTURES)
    width, height = 680, 420
    head, _, body = line_chart(series, x, y, width=width, height=height).partition(">")
    attributes = f'xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    background = '<rect width="100%" height="100%" fill="#fcfcfa"/>'
    write_text(path, f"{head} {attributes}><style>{_STYLE}{plain_style_of(body)}</style>{background}{body}\n")


def _points(row: BlockRow | NetworkRow) -> list[tuple[str, float, float]]:
    """A name, where and milliseconds: of the row's own, and of the softmax it is compared with."""
    if isinstance(row, NetworkRow):
        own, softmax, place = (row.network, row.ms), (row.reference, row.reference_ms), row.px
    elif row.block_ms is None:
        own, softmax, place = (row.mechanism, row.core_ms), ("softmax", row.softmax_ms), row.tokens
    else:
        own, softmax, place = (row.mechanism, row.block_ms), ("softmax", row.softmax_block_ms), row.tokens
    return [(name, place, ms) for name, ms in (softmax, own) if ms is not None]
