"""Several mechanisms and seeds on the test set of their task, beside what guessing reaches and what is published."""

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from subquad.holding import holding, is_first_process
from subquad.runs import RunFolder, open_trained
from subquad.tasks import CommonRecipe, KnownResult, task_named
from subquad.text import clock, columns, si
from subquad.training.compare import check_comparison, compare
from subquad.training.journal import Log, silent
from subquad.writing import write_json, write_text


@dataclass(frozen=True)
class BenchmarkRow:
    """A mechanism: accuracy in percent on the test set of the weights that were best on the held-out part, by seed."""

    mechanism: str
    accuracies: tuple[float, ...]
    held_out: float
    params: int
    seconds: float

    @property
    def mean(self) -> float:
        """Take the mean over the seeds, in percent."""
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float | None:
        """Take the standard deviation over the seeds; None for a single one."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None

    @property
    def text(self) -> str:
        """Write mean and deviation."""
        return f"{self.mean:.2f}" + (f" ± {self.spread:.2f}" if self.spread is not None else "")


@dataclass(frozen=True)
class BenchmarkTable:
    """What was found on a task's data, what guessing reaches, what is published, and why that does not compare."""

    data: str
    rows: tuple[BenchmarkRow, ...]
    guesses: dict[str, float]
    published: tuple[KnownResult, ...]
    note: str = ""


def compare_tested(
    recipe: CommonRecipe, mechanisms: Sequence[str], seeds: Sequence[int], folder: Path, log: Log = silent
) -> BenchmarkTable:
    """Train a recipe with every mechanism and seed in `folder`, as `compare` does, and judge all on the test set.

    Runs that have finished, and judgements of them, are kept; broken-off runs go on. Writes a table, <task>.json and
    <task>.md, beside what `compare` writes.
    """
    task = task_named(recipe.task)
    entry = task.columns[0].entry
    check_comparison(recipe, mechanisms, seeds)
    with holding(folder):
        rows = []
        for row in compare(recipe, mechanisms, seeds, folder, log):
            accuracies = tuple(_tested(RunFolder(folder / name), recipe) for name in row["runs"])
            held_out = row[f"{entry}_mean"]
            rows.append(BenchmarkRow(row["mechanism"], accuracies, held_out, row["params"], row["train_seconds"]))
        facts = recipe.to_dict()
        note = task.unlike_published(facts)
        table = BenchmarkTable(recipe.data, tuple(rows), task.guesses(facts), tuple(task.published(facts)), note)
        if is_first_process():
            _write(table, folder, task.name)
    return table


def _tested(run: RunFolder, recipe: CommonRecipe) -> float:
    """What the test set says of a finished run, in its first column; it is kept in its folder."""
    task = task_named(recipe.task)
    entry = task.columns[0].entry
    if (kept := run.tested(entry)) is not None:
        return kept
    row = task.test(open_trained(run.path, task=task.name), data_dir=recipe.data_dir, batch_size=recipe.batch_size)
    if is_first_process():
        run.keep_tested(row)
    return row[entry]


def benchmark_text(table: BenchmarkTable) -> str:
    """The table for a terminal of 80 columns, with lines for guessing; what is published stands in its file."""
    lines = [("mechanism", "test %", "held out %", "params", "time")]
    lines += [(r.mechanism[:30], r.text, f"{r.held_out:.2f}", si(r.params), clock(r.seconds)) for r in table.rows]
    lines += [(name, f"{value:.2f}", "", "", "") for name, value in table.guesses.items()]
    note = f"\n\n{textwrap.fill(table.note, 80)}" if table.note else ""
    return columns(lines) + note


def _write(table: BenchmarkTable, folder: Path, name: str) -> None:
    content = {
        "task": table.data,
        "rows": [
            {"mechanism": r.mechanism, "test": r.accuracies, "mean": r.mean, "std": r.spread, "held_out": r.held_out}
            for r in table.rows
        ],
        "guesses": table.guesses,
        "published": [{"name": p.name, "source": p.source, "accuracy": p.value} for p in table.published],
        "note": table.note,
    }
    write_json(folder / f"{name}.json", content, indent=2)
    lines = ["| | test % | held out % | params | time |", "| --- | ---: | ---: | ---: | ---: |"]
    lines += [
        f"| {r.mechanism} | {r.text} | {r.held_out:.2f} | {si(r.params)} | {clock(r.seconds)} |" for r in table.rows
    ]
    lines += [f"| *{guess}* | {value:.2f} | | | |" for guess, value in table.guesses.items()]
    lines += [f"| {p.name} ({p.source}) | {p.value:.2f} | | | |" for p in table.published]
    lines += ["", table.note] if table.note else []
    write_text(folder / f"{name}.md", "\n".join(lines) + "\n")
