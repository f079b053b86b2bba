"""Charts as files that stand alone; what a bench measured as one of them."""

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from subquad.bench import BlockRow, NetworkRow
from subquad.errors import check_suffix
from subquad.report.charts import Axis, Series, line_chart
from subquad.writing import write_text

COLOURS = 9
"""Of the page's style."""

PICTURES = "the picture is", ".svg"


def bench_picture(rows: Sequence[BlockRow] | Sequence[NetworkRow], path: Path) -> None:
    """Write lines of all mechanisms or networks, and of softmax, to `path`, an SVG that stands alone."""
    check_suffix(path, *PICTURES)
    several = len({(row.batch_size, row.dtype) for row in rows}) > 1
    lines: dict[str, dict[float, float]] = {}
    for row in rows:
        what = f" {row.batch_size} {row.dtype}" if several else ""
        for name, place, ms in _points(row):
            lines.setdefault(name + what, {})[place] = ms
    unit = "tokens" if isinstance(rows[0], BlockRow) else "px"
    series = [
        Series(name, f"c{k % COLOURS}", sorted(points.items()), [f"{name}: {ms:.3g} ms" for ms in points.values()])
        for k, (name, points) in enumerate(lines.items())
    ]
    save_lines(series, Axis(unit, log=True), Axis("milliseconds", log=True), path)


def save_lines(series: Sequence[Series], x: Axis, y: Axis, path: Path) -> None:
    """Write a chart of lines to `path`, an SVG that stands alone."""
    check_suffix(path, *PICTURES)
    width, height = 680, 420
    head, _, body = line_chart(series, x, y, width=width, height=height).partition(">")
    attributes = f'xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    background = '<rect width="100%" height="100%" fill="#fcfcfa"/>'
    write_text(path, f"{head} {attributes}><style>{_style()}</style>{background}{body}\n")


def _style() -> str:
    """The page's, without its variables: not all that shows SVG knows them."""
    page = (files("subquad.report") / "page.css").read_text(encoding="utf-8")
    lines = [
        "text { fill: #667080; font: 12px system-ui, sans-serif; }",
        ".name { font-weight: 600; }",
        ".grid { stroke: #e2e3de; } .axis { stroke: #667080; }",
        ".line, .leader { fill: none; stroke-width: 2; } .leader { stroke-width: 1; opacity: 0.45; }",
    ]
    for k, colour in re.findall(r"--c(\d): (#\w+)", page)[:COLOURS]:
        lines.append(
            f".c{k} .line, .c{k} .leader {{ stroke: {colour}; }} .c{k} circle, .c{k} .name {{ fill: {colour}; }}"
        )
    return "\n".join(lines)


def _points(row: BlockRow | NetworkRow) -> list[tuple[str, float, float]]:
    """A name, where and milliseconds: of the row's own, and of the softmax it is compared with."""
    if isinstance(row, NetworkRow):
        own, softmax, place = (row.network, row.ms), (row.reference, row.reference_ms), row.px
    elif row.block_ms is None:
        own, softmax, place = (row.mechanism, row.core_ms), ("softmax", row.softmax_ms), row.tokens
    else:
        own, softmax, place = (row.mechanism, row.block_ms), ("softmax", row.softmax_block_ms), row.tokens
    return [(name, place, ms) for name, ms in (softmax, own) if ms is not None]
