"""The Long Range Arena on the page: the runs on the test set, beside what guessing reaches and what is published."""

import statistics
from collections.abc import Sequence
from html import escape

from subquad.tasks.sequences.lra_judging import guesses, kept_accuracy
from subquad.tasks.sequences.lra_published import PUBLISHED
from subquad.report.page_parts import section
from subquad.report.run_records import Group

_LEAD = (
    "Accuracy on the test set of the weights that were best on the held-out part. What is published comes from several "
    "code bases, with other networks and lengths; guessing looks at no whole sequence."
)


def arena_table(groups: Sequence[Group]) -> str:
    """Markup of the section, nothing for other tasks."""
    first = groups[0].first
    if first.task != "lra":
        return ""
    task = str(first.facts["data"])
    rows = []
    for group in groups:
        found = [kept for run in group.runs if (kept := kept_accuracy(run.path)) is not None]
        if found:
            spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
            rows.append((group.label, f"{statistics.fmean(found):.2f}{spread}", "ours"))
    rows += [(name, f"{value:.2f}", "guess") for name, value in guesses(task, first.facts["data_settings"]).items()]
    rows += [(row.name, f"{row.on(task):.2f}", f"as {row.source} print it") for row in PUBLISHED]
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td data-value="{value.split()[0]}">{escape(value)}</td>'
        f"<td>{escape(whose)}</td></tr>"
        for name, value, whose in rows
    )
    titles = ("attention", "accuracy %", "whose")
    head = "".join(f'<th scope="col"><button type="button">{title}</button></th>' for title in titles)
    table = (
        f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
    return section("Beside what is known", _LEAD, table)
