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
from subquad.tasks import task_named
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
    starts = {name: _started(recipe, name, pretrained) for name in mechanisms}
    folder, column = Path(folder), task_named(recipe.task).columns[0]
    rows = []
    with holding(folder):
        for mechanism in mechanisms:
            summaries = []
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
            rows.append(aggregate(mechanism, seeds, summaries, column.entry))
        if is_first_process():
            write_comparison(rows, folder, column.title)
    return rows


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


def comparison_table(rows: Sequence[dict[str, Any]], title: str) -> str:
    """The rows for a terminal of 80 columns; `title` is what the metric is called."""
    lines = [("mechanism", title, *_COLUMNS), *map(_cells, rows)]
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


def write_comparison(rows: Sequence[dict[str, Any]], folder: Path, title: str) -> None:
    """compare.json, compare.csv and compare.md."""
    write_json(folder / "compare.json", list(rows), indent=2)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "seeds": " ".join(map(str, row["seeds"])), "runs": " ".join(row["runs"])} for row in rows)
    write_text(folder / "compare.csv", text.getvalue())
    lines = [("mechanism", title, *_COLUMNS), ("---", *["---:"] * (1 + len(_COLUMNS))), *map(_cells, rows)]
    write_text(folder / "compare.md", "".join(f"| {' | '.join(cells)} |\n" for cells in lines))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    mean, deviation = row[f"{row['metric']}_mean"], row[f"{row['metric']}_std"]
    spread = f" ± {deviation:.2f}" if deviation is not None else ""
    minutes, seconds = divmod(round(row["train_seconds"]), 60)
    return (
        row["mechanism"],
        f"{mean:.2f}{spread}",
        si(row["params"]),
        si(row["macs"]),
        speed_text(row["images_per_second"]),
        f"{minutes}:{seconds:02}",
        f"{row['peak_memory_mb']:.0f}",
    )


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
