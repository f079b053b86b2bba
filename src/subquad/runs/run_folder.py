"""The folder of one run: recipe, facts, one row of metrics an epoch, weights, and the summary once it has finished.

Everything is written aside and moved into place, so that a killed run leaves whole files only. The recipe comes last
of what a run begins with: a folder without one holds no run.
"""

import csv
import io
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from subquad.data.opening import is_named
from subquad.data.walking import find_path
from subquad.errors import SubquadError
from subquad.holding import LOCK
from subquad.reading import read_yaml
from subquad.tasks.common_recipe import CommonRecipe
from subquad.tasks.recipe_files import load_recipe
from subquad.tasks.task import Row
from subquad.weights.files import BEST, STATE
from subquad.writing import is_aside, json_text, write_json, write_text

# may differ between a run and its continuation: they do not change what is learned
_FREE_FIELDS = ("data_dir", "workers", "log_interval", "grad_checkpointing", "chunk_tokens", "compile")


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.facts = path / "run.json"
        self.state = path / STATE
        self.last_weights = path / "last.safetensors"
        self.last_ema_weights = path / "last_ema.safetensors"
        self.best_weights = path / BEST
        self.tensorboard = path / "tensorboard"
        self._rows = path / "metrics.jsonl"
        self._table = path / "metrics.csv"
        self._summary = path / "summary.json"
        self._tested = path / "test.json"

    @property
    def _files(self) -> list[Path]:
        """All that a run writes, but for TensorBoard's folder."""
        weights = [self.last_weights, self.last_ema_weights, self.best_weights]
        return [self.facts, self.recipe, *weights, self._rows, self._table, self.state, self._summary]

    def check_new(self) -> None:
        """Raise if something is here already, other than what a run left that was killed before it had its recipe."""
        if not self.path.exists():
            return
        rest = sorted(set(self._names()) - {self.facts.name}) if self.path.is_dir() else []
        if self.recipe.is_file():
            hint = f"go on with --resume {shlex.quote(str(self.path))}, or take another --experiment"
            raise SubquadError(f"{self.path} exists already: {hint}")
        if rest or not self.path.is_dir():
            what = f"and has no run but {rest[0]}" if rest else "and is no folder"
            raise SubquadError(f"{self.path} exists already, {what}: take another --experiment")

    def check_resumable(self, recipe: CommonRecipe) -> None:
        """Raise if there is no run of this recipe here."""
        if not self.recipe.is_file():
            raise SubquadError(f"no run in {self.path} to resume: leave out --resume to start it")
        old, new = load_recipe(self.recipe, type(recipe)).to_dict(), recipe.to_dict()
        changed = [f"{name} {old[name]} → {new[name]}" for name in old if old[name] != new[name]]
        changed = [change for change in changed if change.split()[0] not in _FREE_FIELDS]
        if changed:
            raise SubquadError(f"{self.path} was begun with another recipe ({', '.join(changed)}): take its own")

    def check_there(self) -> None:
        """Raise where the folder that was begun is no longer at its place: what is written there would be no run."""
        if not self.recipe.is_file():
            raise SubquadError(
                f"{self.path} is gone, moved or removed while it was written: where it is now, it holds its last whole "
                "epoch, and --resume goes on with it"
            )

    def moved_data(self, recipe: CommonRecipe) -> str | None:
        """In a line, where the data lay when the run was begun, if they are said to lie elsewhere now."""
        before = load_recipe(self.recipe, type(recipe)).data_dir
        if before == recipe.data_dir:
            return None
        return (
            f"{self.path} was begun on the data in {before or recipe.data}, and is taken to be of those in "
            f"{recipe.data_dir or recipe.data} now: for other data name another folder"
        )

    def check_classes(self, classes: Sequence[str] | None) -> None:
        """Raise if the data has other classes, or another order of them, than when the run was begun."""
        facts = _read_json(self.facts)
        old = facts.get("classes") if isinstance(facts, dict) else None
        if old is None or classes is None or list(old) == list(classes):
            return
        gone, new = ([name for name in some if name not in others] for some, others in ((old, classes), (classes, old)))
        changes = [f"{what} {', '.join(names)}" for what, names in {"without": gone, "now with": new}.items() if names]
        how = " and ".join(changes) or "in another order"
        raise SubquadError(
            f"the data has other classes than when {self.path} was begun ({how}): put them back, or begin another run"
        )

    def other_images(self, counts: Sequence[int]) -> str | None:
        """In a line, that there were others to train on and to judge by when the run was begun, by their numbers."""
        facts = _read_json(self.facts)
        before = facts.get("images") if isinstance(facts, dict) else None
        if not isinstance(before, list) or before == list(counts):
            return None
        first, now = ("+".join(map(str, some)) for some in (before, counts))
        return (
            f"the data are others: {first} when {self.path} was begun, {now} now; "
            "what is held out may have been trained on"
        )

    def create(self, recipe: CommonRecipe, facts: Mapping[str, Any]) -> None:
        """Make the folder with the recipe and the facts of this run."""
        self.write_facts(facts)
        write_text(self.recipe, recipe.to_yaml())

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Write how and where this run is made."""
        write_json(self.facts, facts, indent=2)

    def has_facts(self) -> bool:
        """Whether the facts are there and can be read."""
        return isinstance(_read_json(self.facts), dict)

    def sweep(self) -> None:
        """Remove what killed processes left aside of a run's files; for the process that holds the folder."""
        names = "|".join(re.escape(file.name) for file in self._files)
        aside = re.compile(rf"\.({names})\.\d+(-[0-9a-f]+\.unfinished)?")
        with suppress(OSError):
            for entry in self.path.iterdir():
                if aside.fullmatch(entry.name):
                    entry.unlink()

    def discard(self) -> None:
        """Remove all that a run writes; for one that has no whole epoch to go on from."""
        self.sweep()
        # the recipe first: without it, what a second interruption leaves here is no run
        for file in (self.recipe, *self._files):
            with suppress(OSError):
                file.unlink(missing_ok=True)
        shutil.rmtree(self.tensorboard, ignore_errors=True)

    def rows(self) -> list[Row]:
        """The metrics so far, a row an epoch."""
        if not self._rows.exists():
            return []
        try:
            return [json.loads(line) for line in self._rows.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise SubquadError(f"{self._rows} can't be read: {error}") from None

    def write_rows(self, rows: list[Row]) -> None:
        """Replace the metrics by `rows`."""
        write_text(self._rows, "".join(json_text(row) + "\n" for row in rows))
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self._table, text.getvalue())

    def summary(self, needed: Iterable[str] = ()) -> dict[str, Any] | None:
        """The summary; None while the run has not finished, or where it is damaged and lacks a number `needed`."""
        summary = _read_json(self._summary)
        if not isinstance(summary, dict) or not all(isinstance(summary.get(name), (int, float)) for name in needed):
            return None
        return summary

    def finish(self, summary: Mapping[str, Any]) -> None:
        write_json(self._summary, summary, indent=2)

    def tested(self, entry: str) -> float | None:
        """What the test set said of a finished run; None where it was not asked yet, or what is kept is damaged."""
        results = _read_json(self._tested)
        value = results.get(entry) if isinstance(results, dict) else None
        return float(value) if isinstance(value, (int, float)) else None

    def keep_tested(self, row: Row) -> None:
        """Write what the test set says of the run."""
        write_json(self._tested, row)

    def way_here(self) -> str:
        """The folder that relative paths of data start from, as seen from this one: both may move together."""
        return os.path.relpath(Path.cwd(), self.path.resolve())

    def _names(self) -> list[str]:
        """What is in the folder, without what writing leaves for a moment."""
        return [name for entry in self.path.iterdir() if (name := entry.name) != LOCK and not is_aside(name)]


def recipe_beside(folder: Path) -> dict[str, Any]:
    """What the recipe of a run folder says, nothing where there is none.

    Raises:
        SubquadError: it is damaged.
    """
    file = RunFolder(folder).recipe
    if not file.is_file():
        return {}
    content = read_yaml(file)
    if not isinstance(content, dict):
        raise SubquadError(f"{file} is damaged: it must hold lines of `field: value`")
    return content


def place_of_data(folder: Path, data: str | None) -> str | None:
    """Where the data of a run folder lie: a relative path is one from where training was begun, else from here.

    Args:
        folder: of the run, which says in which folder its command was given.
        data: a name or path of its recipe; it stays as it is where nothing is there from where training was begun.
    """
    facts = _read_json(RunFolder(folder).facts)
    begun = facts.get("paths_from") if isinstance(facts, dict) else None
    if not isinstance(data, str) or not isinstance(begun, str) or is_named(data):
        return data
    # what can be no path is refused where it is read
    with suppress(SubquadError):
        # first: the current folder may hold other data of that name, and always has a "."
        there, here = find_path(folder.resolve() / begun / data), find_path(data)
        if there.exists() and not (here.exists() and there.samefile(here)):
            return os.path.normpath(there)
    return data


def _read_json(file: Path) -> Any:
    """What a file holds, None where it is not there or damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
