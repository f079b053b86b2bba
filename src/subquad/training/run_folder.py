"""The folder of one run: recipe, facts, one row of metrics an epoch, weights, and the summary once it has finished.

Everything is written aside and moved into place, so that a killed run leaves whole files only.
"""

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subquad.errors import SubquadError
from subquad.training.common import CommonRecipe
from subquad.training.recipe import load_recipe
from subquad.training.task import Row
from subquad.writing import write_text

# may differ between a run and its continuation: they do not change what is learned
_FREE_FIELDS = ("data_dir", "workers", "log_interval", "grad_checkpointing", "compile")


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.facts = path / "run.json"
        self.state = path / "last.pt"
        self.last_weights = path / "last.safetensors"
        self.last_ema_weights = path / "last_ema.safetensors"
        self.best_weights = path / "best.safetensors"
        self.tensorboard = path / "tensorboard"
        self._rows = path / "metrics.jsonl"
        self._table = path / "metrics.csv"
        self._summary = path / "summary.json"

    def check_new(self) -> None:
        """Raise if something is here already."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            hint = f"go on with --resume {self.path}, or take another --experiment"
            raise SubquadError(f"{self.path} exists already: {hint}")

    def check_resumable(self, recipe: CommonRecipe) -> None:
        """Raise if there is no run of this recipe here."""
        if not self.recipe.is_file():
            raise SubquadError(f"no run in {self.path} to resume: leave out --resume to start it")
        old, new = load_recipe(self.recipe, type(recipe)).to_dict(), recipe.to_dict()
        changed = [f"{name} {old[name]} → {new[name]}" for name in old if old[name] != new[name]]
        changed = [change for change in changed if change.split()[0] not in _FREE_FIELDS]
        if changed:
            raise SubquadError(f"{self.path} was begun with another recipe ({', '.join(changed)}): take its own")

    def create(self, recipe: CommonRecipe, facts: Mapping[str, Any]) -> None:
        """Make the folder with the recipe and the facts of this run."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.facts, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        write_text(self.recipe, recipe.to_yaml())

    def rows(self) -> list[Row]:
        """The metrics so far, a row an epoch."""
        if not self._rows.is_file():
            return []
        return [json.loads(line) for line in self._rows.read_text().splitlines()]

    def write_rows(self, rows: list[Row]) -> None:
        """Replace the metrics by `rows`."""
        write_text(self._rows, "".join(json.dumps(row) + "\n" for row in rows))
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self._table, text.getvalue())

    def summary(self) -> dict[str, Any] | None:
        """The summary, None while the run has not finished."""
        return json.loads(self._summary.read_text()) if self._summary.is_file() else None

    def finish(self, summary: Mapping[str, Any]) -> None:
        write_text(self._summary, json.dumps(summary, indent=2) + "\n")
