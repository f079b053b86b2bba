"""The table of accuracy and cost, sortable by its headers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup

from subquad.pages.comparisons import measure_of
from subquad.pages.page_parts import Cell, sortable_table
from subquad.runs.run_records import Group
from subquad.text import clock, si, speed_text


@dataclass(frozen=True)
class Column:
    """A column: its title, how it is read off a group, how it is printed, and whether more is better."""

    title: str
    value: Callable[[Group], float]
    text: Callable[[Group], str]
    more_is_better: bool


def columns_of(groups: Sequence[Group]) -> list[Column]:
    """The columns for these runs."""
    entries = measure_of(groups).entries

    def accuracy(metric: str) -> Callable[[Group], str]:
        def text(group: Group) -> str:
            spread = group.spread(metric)
            return f"{group.mean(metric):.2f}" + (f" ± {spread:.2f}" if spread is not None else "")

        return text

    return [
        *(Column(title, partial(Group.mean, metric=entry), accuracy(entry), True) for entry, title in entries),
        Column("parameters", lambda g: g.first.facts["params"], lambda g: si(g.first.facts["params"]), False),
        Column("MACs", lambda g: g.first.facts["macs"], lambda g: si(g.first.facts["macs"]), False),
        Column("images/s", _speed, lambda g: speed_text(_speed(g)), True),
        Column("time", lambda g: g.seconds, lambda g: clock(g.seconds), False),
        Column("peak MB", lambda g: g.cost("peak_memory_mb"), lambda g: f"{g.cost('peak_memory_mb'):.0f}", False),
    ]


def _speed(group: Group) -> float:
    return group.cost("images_per_second")


def accuracy_table(groups: Sequence[Group], colours: dict[str, str]) -> Markup:
    """Markup of the table; the best value of a column is marked, and so are those printed the same."""
    columns = columns_of(groups)
    best = []
    for column in columns:
        choose = max if column.more_is_better else min
        best.append(column.text(choose(groups, key=column.value)).split(" ")[0])
    seeds = any(len(group.runs) > 1 for group in groups)
    titles = ["mechanism", *([] if not seeds else ["seeds"]), *(column.title for column in columns)]
    rows = []
    for group in groups:
        cells = [Cell(group.label, swatch=colours[group.label])]
        if seeds:
            cells.append(Cell(str(len(group.runs)), str(len(group.runs))))
        for column, mark in zip(columns, best, strict=True):
            text = column.text(group)
            is_best = len(groups) > 1 and text.split(" ")[0] == mark
            cells.append(Cell(text, f"{column.value(group):.6g}", is_best))
        rows.append(cells)
    return sortable_table(titles, rows)
