"""Runs on the test set of their task, beside what guessing reaches and what is published."""

import statistics
from collections.abc import Sequence

from markupsafe import Markup

from subquad.pages.page_parts import NOTHING, Cell, section, sortable_table
from subquad.runs import RunFolder
from subquad.runs.run_records import Group
from subquad.tasks import task_named

_LEAD = (
    "Accuracy on the test set of the weights that were best on the held-out part. What is published comes from several "
    "code bases, with other networks and lengths; guessing looks at no whole example."
)


def known_results(groups: Sequence[Group]) -> Markup:
    """Markup of the section, nothing for a task without a test set of its own."""
    first = groups[0].first
    task = task_named(first.task)
    if "benchmark" not in task.commands:
        return NOTHING
    rows = []
    for group in groups:
        tested = [RunFolder(run.path).tested(task.columns[0].entry) for run in group.runs]
        if measured := [value for value in tested if value is not None]:
            spread = f" ± {statistics.stdev(measured):.2f}" if len(measured) > 1 else ""
            rows.append((group.label, f"{statistics.fmean(measured):.2f}{spread}", "ours"))
    rows += [(name, f"{value:.2f}", "guess") for name, value in task.guesses(first.facts).items()]
    published = task.published(first.facts)
    rows += [(row.name, f"{row.value:.2f}", f"as {row.source} print it") for row in published]
    titles = ("attention", task.columns[0].title, "whose")
    cells = [(Cell(name), Cell(value, value.split()[0]), Cell(whose)) for name, value, whose in rows]
    lead = f"{_LEAD} {task.unlike_published(first.facts) if published else ''}".rstrip()
    return section("Beside what is known", lead, sortable_table(titles, cells))
