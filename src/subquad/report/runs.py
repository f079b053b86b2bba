"""What run folders say, read into dataclasses, and runs that differ by their seed taken together."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subquad.attention import ATTENTION
from subquad.errors import SubquadError
from subquad.models import attention_label
from subquad.reading import read_yaml


@dataclass(frozen=True)
class Run:
    """One run folder: its recipe, the facts it wrote down, and its metrics, a row an epoch."""

    path: Path
    recipe: dict[str, Any]
    facts: dict[str, Any]
    rows: list[dict[str, float]]

    @property
    def task(self) -> str:
        """What was trained for."""
        return str(self.facts.get("task", "classify"))

    @property
    def attention(self) -> str:
        """The mechanism with its settings, as on the command line."""
        return self.attention_with(self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """Those of its network and mechanism."""
        return self.recipe.get("settings") or {}

    def attention_with(self, settings: dict[str, Any]) -> str:
        """The mechanism with these settings."""
        name = attention_label(str(self.recipe.get("model")), self.recipe.get("attention"))
        given = ",".join(f"{key}={value}" for key, value in settings.items())
        return f"{name}:{given}" if given and ":" not in name else name

    def best(self, metric: str) -> float:
        """The highest value of a metric over the epochs, of the weights or of their average."""
        averaged = metric.replace("eval_", "ema_")
        return max(max(row[metric], row.get(averaged, row[metric])) for row in self.rows)


@dataclass(frozen=True)
class Group:
    """Runs of the same recipe with different seeds."""

    label: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """The run that stands for the group where only one can be shown."""
        return self.runs[0]

    def mean(self, metric: str) -> float:
        """Mean over the seeds of the best value of a metric."""
        return statistics.fmean(run.best(metric) for run in self.runs)

    def spread(self, metric: str) -> float | None:
        """Standard deviation over the seeds; None for a single one."""
        return statistics.stdev(run.best(metric) for run in self.runs) if len(self.runs) > 1 else None

    def curve(self, metric: str) -> list[tuple[float, float]]:
        """Mean over the seeds by epoch, counted from 1, as far as all of them have come."""
        length = min(len(run.rows) for run in self.runs)
        return [(k + 1, statistics.fmean(run.rows[k][metric] for run in self.runs)) for k in range(length)]

    def cost(self, metric: str) -> float:
        """Mean over the seeds of the median over the epochs."""
        return statistics.fmean(statistics.median(row[metric] for row in run.rows) for run in self.runs)

    @property
    def seconds(self) -> float:
        """Training and evaluation, mean over the seeds."""
        return statistics.fmean(sum(row["epoch_seconds"] for row in run.rows) for run in self.runs)


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in `paths`, each a run folder or a folder that holds some."""
    runs = []
    for path in paths:
        if not path.is_dir():
            raise SubquadError(f"there is no run folder {path}")
        folders = [path] if (path / "run.json").is_file() else sorted(file.parent for file in path.glob("*/run.json"))
        if not folders:
            raise SubquadError(f"{path} holds no run: a run folder has a run.json")
        runs += [read_run(folder) for folder in folders]
    return runs


def read_run(folder: Path) -> Run:
    """Read one run folder."""
    try:
        facts = json.loads((folder / "run.json").read_text())
        recipe = read_yaml(folder / "recipe.yaml")
        if not isinstance(recipe, dict):
            raise SubquadError(f"{folder / 'recipe.yaml'} must hold lines of `field: value`")
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError as error:
        raise SubquadError(f"{folder} has no whole epoch yet: {Path(str(error.filename)).name} is missing") from None
    except json.JSONDecodeError as error:
        raise SubquadError(f"{folder} can't be read: {' '.join(str(error).split())}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            raise SubquadError(f"line {number} of {folder / 'metrics.jsonl'} is broken: {line[:40]}") from None
    if not rows:
        raise SubquadError(f"{folder} has no whole epoch yet: metrics.jsonl is empty")
    return Run(folder, recipe, facts, rows)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs that differ by nothing but the seed and the place of the data, in the order of `ATTENTION`."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = {key: value for key, value in run.recipe.items() if key not in ("seed", "data_dir", "workers")}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(run)
    places = {name: place for place, name in enumerate(ATTENTION)}
    ordered = sorted(groups.values(), key=lambda group: places.get(group[0].attention.split(":")[0], len(places)))
    labels = [_label(group[0], runs) for group in ordered]
    # recipes that differ in something else than the mechanism are told apart by their folders
    names = [
        label if labels.count(label) == 1 else f"{label} ({group[0].path.name})"
        for label, group in zip(labels, ordered, strict=True)
    ]
    return [Group(name, tuple(group)) for name, group in zip(names, ordered, strict=True)]


def _label(run: Run, runs: Sequence[Run]) -> str:
    """The mechanism, behind the model and the data where those differ within the report; so do its settings."""
    parts = [str(run.recipe[key]) for key in ("model", "data") if len({str(r.recipe.get(key)) for r in runs}) > 1]
    several = len({str(r.recipe.get("attention")) for r in runs}) > 1
    own = {key: v for key, v in run.settings.items() if not several or any(r.settings.get(key) != v for r in runs)}
    return " ".join([*parts, run.attention_with(own)])
