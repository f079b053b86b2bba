"""Several mechanisms and seeds on a task of the Long Range Arena, judged on its test set, beside what is published."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from subquad.tasks.sequences.lra_judging import TESTED, guesses, judge_arena, kept_accuracy
from subquad.tasks.sequences.lra_published import PUBLISHED
from subquad.holding import holding, is_first_process
from subquad.text import clock, columns, si
from subquad.training.compare import check_comparison, compare
from subquad.training.journal import Log, silent
from subquad.tasks.sequences.lra_task import LraRecipe
from subquad.writing import write_json, write_text


@dataclass(frozen=True)
class ArenaRow:
    """A mechanism: accuracy in percent on the test set of the weights that were best on the held-out part, by seed."""

    mechanism: str
    accuracies: tuple[float, ...]
    held_out: float
    params: int
    seconds: float

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; None for a single one."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None

    @property
    def text(self) -> str:
        """Mean and spread."""
        return f"{self.mean:.2f}" + (f" ± {self.spread:.2f}" if self.spread is not None else "")


@dataclass(frozen=True)
class ArenaTable:
    """What was found on a task, and what guessing reaches."""

    task: str
    rows: tuple[ArenaRow, ...]
    guesses: dict[str, float]


def run_arena(
    recipe: LraRecipe, mechanisms: Sequence[str], seeds: Sequence[int], folder: Path, log: Log = silent
) -> ArenaTable:
    """Train a recipe with every mechanism and seed in `folder`, as `compare` does, and judge all on the test set.

    Runs that have finished, and judgements of them, are kept; broken-off runs go on. Writes lra.json and lra.md beside
    what `compare` writes.
    """
    check_comparison(recipe, mechanisms, seeds)
    with holding(folder):
        rows = []
        for row in compare(recipe, mechanisms, seeds, folder, log):
            accuracies = tuple(_tested(folder / name, recipe) for name in row["runs"])
            held_out = row[f"{recipe.metric}_mean"]
            rows.append(ArenaRow(row["mechanism"], accuracies, held_out, row["params"], row["train_seconds"]))
        table = ArenaTable(recipe.data, tuple(rows), guesses(recipe.data, recipe.data_settings))
        if is_first_process():
            _write(table, folder)
    return table


def _tested(run: Path, recipe: LraRecipe) -> float:
    """The test accuracy of a finished run, which is kept in its folder."""
    if (kept := kept_accuracy(run)) is not None:
        return kept
    result = judge_arena(run, data_dir=recipe.data_dir, batch_size=recipe.batch_size)
    if is_first_process():
        write_json(run / TESTED, {"top1": result.top1, "loss": result.loss, "count": result.count})
    return result.top1


def arena_text(table: ArenaTable) -> str:
    """The table for a terminal of 80 columns, with lines for guessing; what is published stands in lra.md."""
    lines = [("mechanism", "test %", "held out %", "params", "time")]
    lines += [(r.mechanism[:30], r.text, f"{r.held_out:.2f}", si(r.params), clock(r.seconds)) for r in table.rows]
    lines += [(name, f"{value:.2f}", "", "", "") for name, value in table.guesses.items()]
    return columns(lines)


def _write(table: ArenaTable, folder: Path) -> None:
    content = {
        "task": table.task,
        "rows": [
            {"mechanism": r.mechanism, "test": r.accuracies, "mean": r.mean, "std": r.spread, "held_out": r.held_out}
            for r in table.rows
        ],
        "guesses": table.guesses,
        "published": [{"name": p.name, "source": p.source, "accuracy": p.on(table.task)} for p in PUBLISHED],
    }
    write_json(folder / "lra.json", content, indent=2)
    lines = ["| | test % | held out % | params | time |", "| --- | ---: | ---: | ---: | ---: |"]
    lines += [
        f"| {r.mechanism} | {r.text} | {r.held_out:.2f} | {si(r.params)} | {clock(r.seconds)} |" for r in table.rows
    ]
    lines += [f"| *{name}* | {value:.2f} | | | |" for name, value in table.guesses.items()]
    lines += [f"| {p.name} ({p.source}) | {p.on(table.task):.2f} | | | |" for p in PUBLISHED]
    write_text(folder / "lra.md", "\n".join(lines) + "\n")
