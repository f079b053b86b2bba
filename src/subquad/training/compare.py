"""The same recipe with several mechanisms and seeds: one run each, one table of all."""

import csv
import io
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subquad.attention import ATTENTION, traits_of
from subquad.errors import InterruptedRunError, SubquadError
from subquad.holding import holding, is_first_process
from subquad.models import NETWORKS
from subquad.models.pretrained import PREFIX, pretrained_file
from subquad.runs.run_folder import RunFolder
from subquad.tasks import Column, task_named
from subquad.tasks.common_recipe import CommonRecipe
from subquad.text import si, speed_text
from subquad.training.journal import Log, silent
from subquad.training.running import train
from subquad.weights.links import LINKS
from subquad.writing import write_json, write_text

_COLUMNS = ("params", "MACs", "img/s", "time", "peak MB")


def compare(
    recipe: CommonRecipe,
    mechanisms: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    log: Log = silent,
    *,
    pretrained: bool = False,
) -> list[dict[str, Any]]:
    """Train `recipe` with every mechanism and seed in `folder` and return a row for each mechanism.

    Runs that have finished are kept, broken-off ones go on.

    Args:
        recipe: what to train; its attention and seed are replaced.
        mechanisms: as in a recipe: "agent", "linear:feature_map=elu".
        seeds: a run for each.
        folder: gets a folder `<mechanism>-s<seed>` a run, and compare.json, compare.csv and compare.md.
        log: gets a line an epoch.
        pretrained: whether to start each from the authors' weights of its mechanism in the recipe's host.
    """
    check_comparison(recipe, mechanisms, seeds)
    check_no_run(Path(folder))
    if pretrained:
        # before weights are fetched
        task_named(recipe.task).check_data(recipe.data, recipe.data_dir)
    starts = {name: _started(recipe, name, pretrained) for name in mechanisms}
    folder, (column, *further) = Path(folder), task_named(recipe.task).columns
    rows = []
    with holding(folder):
        for mechanism in mechanisms:
            summaries, figures = [], []
            for seed in seeds:
                run = RunFolder(folder / f"{slug(mechanism)}-s{seed}")
                log(f"— {mechanism}, seed {seed}")
                own = starts[mechanism].replace(seed=seed)
                try:
                    summaries.append(train(own, run.path, resume=run.recipe.is_file(), log=log))
                except InterruptedRunError as stopped:
                    # which says how this run goes on
                    stopped.args = (f"{stopped}; the same comparison, called again, goes on with all runs",)
                    raise
                figures.append(_of_best_epoch(run.rows(), summaries[-1], column, further))
            rows.append(aggregate(mechanism, seeds, summaries, column.entry) | _spread(figures))
        if is_first_process():
            write_comparison(rows, folder, (column, *further))
    return rows


def _of_best_epoch(
    epochs: Sequence[dict[str, Any]], summary: dict[str, Any], first: Column, further: Sequence[Column]
) -> dict[str, float]:
    """What else was found of the weights that a run keeps, those that are best by the first figure."""
    for epoch in epochs:
        if epoch["epoch"] != summary["best_epoch"]:
            continue
        kept = "ema" if epoch.get(f"ema_{first.entry}") == summary[f"best_{first.entry}"] else "eval"
        found = {one.entry: epoch.get(f"{kept}_{one.entry}") for one in further}
        return {entry: figure for entry, figure in found.items() if figure is not None}
    return {}


def _spread(figures: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """Mean and standard deviation over the seeds of each figure that all runs have."""
    spread: dict[str, float | None] = {}
    for entry in figures[0]:
        if all(entry in one for one in figures):
            values = [one[entry] for one in figures]
            spread[f"{entry}_mean"] = statistics.fmean(values)
            spread[f"{entry}_std"] = statistics.stdev(values) if len(values) > 1 else None
    return spread


def check_comparison(recipe: CommonRecipe, mechanisms: Sequence[str], seeds: Sequence[int]) -> None:
    """Raise for a wrong name now, not after the runs before it."""
    if not mechanisms or not seeds:
        raise SubquadError("compare needs at least one mechanism and one seed")
    for what, names in {"mechanism": mechanisms, "seed": seeds}.items():
        if len(set(names)) < len(names):
            raise SubquadError(f"each {what} is compared once, and {' '.join(map(str, names))} names one again")
    for mechanism in mechanisms:
        task_named(recipe.task).check_network(recipe.replace(attention=mechanism))


def check_no_run(folder: Path) -> None:
    """Raise where a comparison's folder is one run's: whoever reads it later, as `report`, finds that run alone."""
    if RunFolder(folder).facts.is_file():
        raise SubquadError(f"{folder} is the folder of a run and can't hold a comparison: take another --experiment")


def fitting_mechanisms(recipe: CommonRecipe, log: Log = silent) -> list[str]:
    """All mechanisms but those that refuse what a recipe's network or data have; `log` hears of each and why."""
    names = []
    for name in ATTENTION.usable_names(log):
        if traits_of(ATTENTION[name]).refuses:
            try:
                task_named(recipe.task).check_network(recipe.replace(attention=name))
            except SubquadError as refusal:
                log(f"{name} is left out: {refusal}")
                continue
        names.append(name)
    return names


def released_mechanisms(model: str) -> list[str]:
    """The mechanisms whose authors released weights of a network or size of the table."""
    ending = f"_{_size_of(model)}"
    return [row.removesuffix(ending) for row in LINKS if row.endswith(ending)]


def _size_of(model: str) -> str:
    network = NETWORKS.get(model)
    return network.variant if network else model


def _started(recipe: Any, mechanism: str, pretrained: bool) -> Any:
    """The recipe of a mechanism; with the authors' weights, which are there then, where they are asked for."""
    if not pretrained:
        return recipe.replace(attention=mechanism)
    if recipe.initial_checkpoint is not None:
        raise SubquadError(f"it starts from {recipe.initial_checkpoint} already: leave out --pretrained")
    row = f"{mechanism}_{_size_of(recipe.model)}"
    pretrained_file(row)
    # which may have other mechanisms in some stages
    return recipe.replace(model=row, attention=None, initial_checkpoint=f"{PREFIX}{row}")


def slug(mechanism: str) -> str:
    """A mechanism with its settings as the name of a folder."""
    return re.sub(r"[^\w.+=-]+", "_", mechanism)


def aggregate(mechanism: str, seeds: Sequence[int], summaries: Sequence[dict[str, Any]], metric: str) -> dict[str, Any]:
    """One row: the best values of the metric as mean and standard deviation over the seeds, costs as means."""
    best = [summary[f"best_{metric}"] for summary in summaries]
    mean = {
        name: statistics.fmean(summary[name] for summary in summaries)
        for name in (f"last_{metric}", "images_per_second", "train_seconds", "peak_memory_mb")
    }
    return {
        "mechanism": mechanism,
        "seeds": list(seeds),
        "runs": [f"{slug(mechanism)}-s{seed}" for seed in seeds],
        "metric": metric,
        f"{metric}_mean": statistics.fmean(best),
        f"{metric}_std": statistics.stdev(best) if len(best) > 1 else None,
        "params": summaries[0]["params"],
        "macs": summaries[0]["macs"],
        **mean,
    }


def comparison_table(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> str:
    """The rows for a terminal of 80 columns: the first of a task's figures, and a table of the others below."""
    parts = [_aligned([("mechanism", columns[0].title, *_COLUMNS), *map(_cells, rows)])]
    if further := _further(rows, columns[1:]):
        parts.append("In the same epochs:\n\n" + _aligned(further))
    return "\n\n".join(parts)


def _further(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> list[tuple[str, ...]]:
    """A table of the figures that any row has; nothing where none has one."""
    known = [one for one in columns if any(f"{one.entry}_mean" in row for row in rows)]
    if not known:
        return []
    lines = [(row["mechanism"], *(_mean_and_spread(row, one.entry) for one in known)) for row in rows]
    return [("mechanism", *(one.title for one in known)), *lines]


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    # a long name gives way: the numbers need 57 columns
    lines = [(_shorten(first, 23), *rest) for first, *rest in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def write_comparison(rows: Sequence[dict[str, Any]], folder: Path, columns: Sequence[Column]) -> None:
    """compare.json, compare.csv and compare.md."""
    write_json(folder / "compare.json", list(rows), indent=2)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "seeds": " ".join(map(str, row["seeds"])), "runs": " ".join(row["runs"])} for row in rows)
    write_text(folder / "compare.csv", text.getvalue())
    tables = [[("mechanism", columns[0].title, *_COLUMNS), *map(_cells, rows)], _further(rows, columns[1:])]
    write_text(folder / "compare.md", "\n".join(map(_as_markdown, filter(None, tables))))


def _as_markdown(lines: Sequence[tuple[str, ...]]) -> str:
    head, *rest = lines
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ("---", *["---:"] * (len(head) - 1)), *rest))


def _mean_and_spread(row: dict[str, Any], entry: str) -> str:
    if (mean := row.get(f"{entry}_mean")) is None:
        return "–"
    deviation = row[f"{entry}_std"]
    return f"{mean:.2f}" + (f" ± {deviation:.2f}" if deviation is not None else "")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    minutes, seconds = divmod(round(row["train_seconds"]), 60)
    return (
        row["mechanism"],
        _mean_and_spread(row, row["metric"]),
        si(row["params"]),
        si(row["macs"]),
        speed_text(row["images_per_second"]),
        f"{minutes}:{seconds:02}",
        f"{row['peak_memory_mb']:.0f}",
    )


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
