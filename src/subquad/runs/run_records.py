"""What run folders say, read into dataclasses, and runs that differ by their seed taken together."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from subquad.attention import ATTENTION
from subquad.errors import SubquadError
from subquad.models import attention_label, names_in
from subquad.reading import read_yaml
from subquad.tasks import TASKS, fields_of


def task_of(folder: Path) -> str | None:
    """What a run was trained for, as its facts say; None where they can't be read."""
    try:
        said = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(said.get("task", "classify")) if isinstance(said, dict) else None


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
    def network(self) -> str:
        """What its network is called."""
        return TASKS[self.task].network_name(self.recipe) if self.task in TASKS else str(self.recipe.get("model"))

    @property
    def attention(self) -> str:
        """The mechanism with its settings, as on the command line."""
        return self.attention_with(self.settings)

    @property
    def unfinished(self) -> str:
        """How far it has come, "3 of 10 epochs", where its recipe asks for more; else empty."""
        asked = self.recipe.get("epochs"), self.recipe.get("cooldown_epochs", 0)
        planned = sum(count for count in asked if isinstance(count, int))
        return f"{len(self.rows)} of {planned} epochs" if len(self.rows) < planned else ""

    @property
    def settings(self) -> dict[str, Any]:
        """Those of its network and mechanism."""
        return self.recipe.get("settings") or {}

    def attention_with(self, settings: dict[str, Any]) -> str:
        """The mechanism with these settings."""
        name = attention_label(self.network, self.recipe.get("attention"))
        written = ",".join(f"{key}={value}" for key, value in settings.items())
        return f"{name}:{written}" if written and ":" not in name else name

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


class NoEpochError(SubquadError):
    """A run that has no whole epoch yet."""


def find_runs(paths: Sequence[Path], log: Callable[[str], None] = lambda line: None) -> list[Run]:
    """The runs in `paths`, each a run folder or a folder that holds some; a run that is named twice is one.

    `log` hears of runs among others that have no whole epoch yet and are left out.
    """
    runs: dict[Path, Run] = {}
    left_out: list[NoEpochError] = []
    for path in paths:
        if not path.is_dir():
            raise SubquadError(f"there is no run folder {path}")
        folders = [path] if (path / "run.json").is_file() else sorted(file.parent for file in path.glob("*/run.json"))
        if not folders:
            raise SubquadError(f"{path} holds no run: a run folder has a run.json")
        for folder in folders:
            try:
                runs.setdefault(folder.resolve(), read_run(folder))
            except NoEpochError as error:
                if folder == path:
                    raise
                left_out.append(error)
    if left_out and not runs:
        raise left_out[0]
    for reason in left_out:
        log(f"left out: {reason}")
    return list(runs.values())


def read_run(folder: Path) -> Run:
    """Read one run folder.

    Raises:
        SubquadError: it has no whole epoch, or a file of it is missing or damaged, in one line that names it.
    """
    facts = _content(folder / "run.json", json.loads)
    recipe = _recipe(folder / "recipe.yaml")
    lines = _content(folder / "metrics.jsonl", str.splitlines)
    rows = [_row(folder / "metrics.jsonl", number, line) for number, line in enumerate(lines, start=1)]
    if not rows:
        raise NoEpochError(f"{folder} has no whole epoch yet: metrics.jsonl is empty")
    for name, content, needed in (
        ("run.json", [facts], _FACTS),
        ("recipe.yaml", [recipe], _FIELDS),
        ("metrics.jsonl", rows, _ENTRIES),
    ):
        for number, entries in enumerate(content, start=1):
            _check_entries(folder / name, number, entries, needed)
    task = str(facts.get("task", "classify"))
    known = {entry for row in rows for entry in row}
    for number, row in enumerate(rows, start=1):
        # a figure that one epoch has, all have: charts and means go through them
        _check_entries(folder / "metrics.jsonl", number, row, dict.fromkeys(known, (int, float)))
    _check_entries(folder / "run.json", 1, facts["versions"], {"torch": (str,)})
    try:
        datetime.fromisoformat(facts["created"])
    except ValueError as error:
        raise SubquadError(f"{folder / 'run.json'} is damaged: {error}") from None
    if task in TASKS:
        _check_entries(folder / "run.json", 1, facts, TASKS[task].facts)
        if "model" in fields_of(TASKS[task].recipe_class):
            _check_entries(folder / "recipe.yaml", 1, recipe, {"model": (str,)})
    return Run(folder, recipe, facts, rows)


Kinds = tuple[type, ...]
_NUMBER: Kinds = (int, float)
_FACTS: dict[str, Kinds] = {
    "created": (str,),
    "command": (str,),
    "device": (str,),
    "threads": _NUMBER,
    "versions": (dict,),
    "params": _NUMBER,
    "macs": _NUMBER,
}
_FIELDS: dict[str, Kinds] = {
    "data": (str,),
    "batch_size": _NUMBER,
    "settings": (dict, type(None)),
    "attention": (str, type(None)),
}
_COSTS = ("epoch_seconds", "images_per_second", "peak_memory_mb")
_ENTRIES = dict.fromkeys(("epoch", "train_loss", *_COSTS), _NUMBER)


def _recipe(file: Path) -> Any:
    if not file.exists():
        raise NoEpochError(f"{file.parent} has no whole epoch yet: {file.name} is missing")
    return read_yaml(file)


def _content(file: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NoEpochError(f"{file.parent} has no whole epoch yet: {file.name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SubquadError(f"{file} can't be read: {' '.join(str(error).split())}") from None


def _row(file: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise SubquadError(f"line {number} of {file} is broken: {line[:40]}") from None


def _check_entries(file: Path, line: int, entries: Any, needed: Mapping[str, Kinds]) -> None:
    """Raise where what a file holds in a line is not what a run writes."""
    where = f"line {line} of {file}" if file.suffix == ".jsonl" else str(file)
    if not isinstance(entries, dict):
        raise SubquadError(f"{where} is damaged: it must hold names and values")
    for name, kinds in needed.items():
        value = entries.get(name)
        # Python's JSON reads NaN and numbers that are too large, which no run writes and no chart can show
        if not isinstance(value, kinds) or (isinstance(value, float) and not math.isfinite(value)):
            raise SubquadError(f"{where} is damaged: its {name} is {entries.get(name, 'missing')}")


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs that differ by nothing but the seed and the place of the data, in the order of `ATTENTION`.

    Where a seed stands there twice, runs of each place of the data are of a group, and in it a seed counts once.
    """
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(_without_seed(run), []).append(run)
    groups = [group for same_recipe in alike.values() for group in _of_one_place(same_recipe)]
    places = {name: place for place, name in enumerate(ATTENTION)}
    ordered = sorted(groups, key=lambda group: _place(group[0].attention, places))
    labels = [_label(group[0], runs) for group in ordered]
    names = [_told_apart(label, place, labels, ordered) for place, label in enumerate(labels)]
    return [Group(name, tuple(group)) for name, group in zip(names, ordered, strict=True)]


def _told_apart(label: str, place: int, labels: Sequence[str], groups: Sequence[Sequence[Run]]) -> str:
    """A label and, where other groups have it too, as much of the first run's path as tells it from theirs."""
    if labels.count(label) == 1:
        return label
    own = groups[place][0].path.resolve().parts
    others = [groups[other][0].path.resolve().parts for other, name in enumerate(labels) if name == label]
    depths = range(1, len(own) + 1)
    depth = next((d for d in depths if [parts[-d:] for parts in others].count(own[-d:]) == 1), len(own))
    return f"{label} ({'/'.join(own[-depth:])})"


def _without_seed(run: Run) -> str:
    """What runs of a group have in common, but perhaps the place of the data."""
    same = {key: value for key, value in run.recipe.items() if key not in _ignored(run)}
    # of two places with other classes the data is not the same
    return json.dumps([same, run.facts.get("classes")], sort_keys=True)


def _of_one_place(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of one recipe in groups that have a seed once; where one stands twice, by the places of their data, too."""
    seeds = [run.recipe.get("seed") for run in runs]
    groups: list[tuple[Any, list[Run]]] = []
    for run, seed in zip(runs, seeds, strict=True):
        place = run.recipe.get("data_dir") if len(set(seeds)) < len(seeds) else None
        of_place = (group for at, group in groups if at == place)
        fitting = (group for group in of_place if all(one.recipe.get("seed") != seed for one in group))
        if (group := next(fitting, None)) is None:
            groups.append((place, [run]))
        else:
            group.append(run)
    return [group for _, group in groups]


def _place(attention: str, places: Mapping[str, int]) -> int:
    """Where a run stands among others: by the first of its mechanisms; networks of others, without one, last."""
    return places.get(next(iter(names_in(attention)), ""), len(places))


def differing_fields(groups: Sequence[Group]) -> list[str]:
    """Fields of recipes that differ from group to group, beside the mechanism and its settings; and the classes."""
    classes = [group.first.facts.get("classes") for group in groups]
    recipes = [group.first.recipe for group in groups]
    without = {"attention", "settings", *(name for group in groups for name in _ignored(group.first))}
    if len({_without_seed(group.first) for group in groups}) < len(groups):
        without.discard("data_dir")
    names = dict.fromkeys(name for recipe in recipes for name in recipe if name not in without)
    differing = [name for name in names if any(recipe.get(name) != recipes[0].get(name) for recipe in recipes)]
    return differing + (["classes"] if any(one != classes[0] for one in classes) else [])


def _ignored(run: Run) -> set[str]:
    """Fields of a recipe that make no difference: earlier versions wrote some that mean nothing to the task."""
    retired = TASKS[run.task].recipe_class.retired if run.task in TASKS else {}
    # of any folder of images nothing but its place is known
    place = () if run.recipe.get("data") == "folder" else ("data_dir",)
    return {"seed", "workers", *place, *retired}


def _label(run: Run, runs: Sequence[Run]) -> str:
    """The mechanism, behind the model and the data where those differ within the report; so do its settings."""
    parts = [run.network] if len({r.network for r in runs}) > 1 else []
    parts += [str(run.recipe["data"])] if len({str(r.recipe.get("data")) for r in runs}) > 1 else []
    several = len({str(r.recipe.get("attention")) for r in runs}) > 1
    own = {key: v for key, v in run.settings.items() if not several or any(r.settings.get(key) != v for r in runs)}
    return " ".join([*parts, run.attention_with(own)])
