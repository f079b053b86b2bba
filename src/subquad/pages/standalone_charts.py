"""Charts as files that stand alone, drawn by matplotlib; what a bench measured as one of them."""

from collections.abc import Sequence
from pathlib import Path

from subquad.benchmarks import BlockRow, NetworkRow
from subquad.errors import SubquadError, check_suffix
from subquad.models import attention_label
from subquad.pages.charts import Axis, Series, spread_apart, tick_texts, ticks_of
from subquad.pages.colours import classes_of, colour_of_class
from subquad.tasks.figures import MUTED, new_figure, save_figure
from subquad.writing import check_place

PICTURES = "the picture is", ".svg", ".png", ".pdf"

_SIZE = 7.1, 4.4
_RULE = "#e2e3de"
_NAME_GAP = 13.0
"""Between names at the ends of lines, in points."""


def check_picture(path: Path) -> None:
    """Raise where a picture can't be written: before what it shows is measured."""
    check_suffix(path, *PICTURES)
    check_place(path)
    new_figure(*_SIZE)


def bench_picture(rows: Sequence[BlockRow] | Sequence[NetworkRow], path: Path) -> None:
    """Write lines of all mechanisms or networks, and of softmax, to `path`: .svg, .png or .pdf.

    Raises:
        SubquadError: there are no rows, or the name of the file ends otherwise.
    """
    if not rows:
        raise SubquadError(f"nothing was measured that could be drawn to {path}")
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
    series = [Series(name, colours[name], sorted(points.items()), []) for name, points in lines.items()]
    save_lines(series, Axis(unit, log=True), Axis("milliseconds", log=True), path)


def save_lines(series: Sequence[Series], x: Axis, y: Axis, path: Path) -> None:
    """Write a chart of lines, their names at their right ends, to `path`: .svg, .png or .pdf."""
    check_picture(path)
    figure = new_figure(*_SIZE)
    axes = figure.add_axes((0.09, 0.13, 0.73, 0.83))
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(which="both", left=False, color=_RULE, labelcolor=MUTED)
    axes.grid(axis="y", color=_RULE)
    axes.set_axisbelow(True)
    for which, axis, k in (("x", x, 0), ("y", y, 1)):
        ticks, limits = ticks_of([point[k] for one in series for point in one.points], axis)
        # names come from outside, and a dollar in one of them is no formula
        settings = {f"{which}label": axis.title, f"{which}scale": "log" if axis.log else "linear"}
        axes.set(**settings, **{f"{which}lim": limits})
        own = getattr(axes, f"{which}axis")
        own.set_ticks(ticks, labels=tick_texts(ticks))
        own.set_ticks([], minor=True)
        own.label.set(color=MUTED, parse_math=False)
    for one in series:
        axes.plot(*zip(*one.points, strict=True), marker=".", linewidth=1.8, color=colour_of_class(one.colour))
    # where names stand is counted in points downwards, as on a page
    height = axes.get_position().height * _SIZE[1] * 72
    ends = [
        height * (1 - axes.transAxes.inverted().transform(axes.transData.transform(one.points[-1]))[1])
        for one in series
    ]
    for one, level in zip(series, spread_apart(ends, _NAME_GAP, 0, height), strict=True):
        colour = colour_of_class(one.colour)
        axes.annotate(
            one.label,
            one.points[-1],
            (1.02, 1 - level / height),
            textcoords="axes fraction",
            color=colour,
            weight="bold",
            verticalalignment="center",
            arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.45},
            annotation_clip=False,
        ).set_parse_math(False)
    save_figure(figure, path, cropped=True)


def _points(row: BlockRow | NetworkRow) -> list[tuple[str, float, float]]:
    """A name, where and milliseconds: of the row's own, and of the softmax it is compared with."""
    own: tuple[str, float | None]
    if isinstance(row, NetworkRow):
        own, softmax, place = (row.network, row.ms), (row.reference, row.reference_ms), row.px
    elif row.block_ms is None:
        own, softmax, place = (row.mechanism, row.core_ms), ("softmax", row.softmax_ms), row.tokens
    else:
        own, softmax, place = (row.mechanism, row.block_ms), ("softmax", row.softmax_block_ms), row.tokens
    return [(name, place, ms) for name, ms in (softmax, own) if ms is not None]
