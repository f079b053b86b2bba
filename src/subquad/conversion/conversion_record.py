"""What is known of a conversion when it is done, as `conversion.json` keeps it and its page shows it."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from subquad.conversion.hybrids import BlockDamage, HybridRow
from subquad.conversion.judging import Comparison
from subquad.conversion.labelled_features import LabelledComparison, Readable
from subquad.conversion.measured_costs import CostRow
from subquad.errors import SubquadError
from subquad.writing import write_json

REPORT = "conversion.json"
"""The file in the folder of a conversion."""

UNTRAINED = "untrained"
"""What names of rows end with that are no steps: of networks without any training, judged on the same images."""

History = Mapping[str, list[list[float]]]
"""Of a fit: by what was measured, pairs of the update's number and the figure."""


@dataclass(frozen=True)
class Record:
    """A conversion.

    Attributes:
        plan: fields of the `Plan`.
        conversion: what was done, `Conversion.as_note()`.
        steps: what the student was like behind each step, by its name; in front of them, by names that end with
            `UNTRAINED`, networks that nobody has trained, where they were asked for.
        seconds: that steps took.
        blocks: what each converted block costs alone; empty where it was not measured.
        hybrids: from no converted block to all; empty where they were not measured.
        broken: files that could not be read.
        on_held_out: whether the steps were judged on images that the student was not fitted to; None where a version
            before did not note it.
        before, after: errors of the blocks before and after alignment on the same images, by their numbers.
        history: of the fits "aligned" and "distilled".
        costs: time and memory at several sizes; empty where they were not measured.
        labelled: classifiers of the features; None where no data with labels were named.
        command: that made it.
        machine: what it was measured on.
        teacher_beside: the teacher's folder or file as seen from the conversion's; "" where it has neither.
    """

    plan: dict[str, Any]
    conversion: dict[str, Any]
    steps: dict[str, Comparison]
    seconds: dict[str, float]
    blocks: list[BlockDamage] = field(default_factory=list)
    hybrids: list[HybridRow] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    on_held_out: bool | None = None
    before: dict[int, float] = field(default_factory=dict)
    after: dict[int, float] = field(default_factory=dict)
    history: dict[str, History] = field(default_factory=dict)
    costs: list[CostRow] = field(default_factory=list)
    labelled: LabelledComparison | None = None
    command: str = ""
    machine: str = ""
    teacher_beside: str = ""

    def teacher(self, folder: Path) -> str:
        """What opens the teacher of the conversion in a folder: what was typed, or what lies now where that lay."""
        source = str(self.plan["source"])
        name, path = _named(source)
        beside = folder / self.teacher_beside
        moved = self.teacher_beside and not path.exists() and beside.exists()
        return f"{name}{beside}" if moved else source

    @property
    def converted(self) -> tuple[int, ...]:
        """Numbers of the converted blocks."""
        return tuple(sorted(map(int, self.conversion["paths"])))

    def save(self, folder: Path) -> None:
        """Write it into the folder of the conversion."""
        steps = {name: asdict(step) | {"kept": step.kept} for name, step in self.steps.items()}
        write_json(folder / REPORT, asdict(self) | {"steps": steps}, indent=1)


def beside(folder: Path, source: str) -> str:
    """Where the file or folder that a teacher was opened of lies, from a conversion's folder; "" for a name alone."""
    _, path = _named(source)
    return os.path.relpath(path, folder) if path.name and path.exists() else ""


def _named(source: str) -> tuple[str, Path]:
    """The name in front of a path, as of timm/NAME=FILE, and the path, which may be none."""
    name, equals, path = source.partition("=")
    return (f"{name}=", Path(path)) if equals and name.startswith("timm/") else ("", Path(source))


def read_record(folder: Path) -> Record:
    """The record in the folder of a conversion.

    Raises:
        SubquadError: there is none, or it is damaged.
    """
    path = folder / REPORT
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        labelled = content.get("labelled")
        return Record(
            **content
            | {
                "steps": {name: comparison_of(step) for name, step in content["steps"].items()},
                "blocks": blocks_of(content["blocks"]),
                "hybrids": hybrids_of(content["hybrids"]),
                "before": _by_number(content.get("before", {})),
                "after": _by_number(content.get("after", {})),
                "costs": [_cost(**row) for row in content.get("costs", [])],
                "labelled": None if labelled is None else _labelled(labelled, list(content["steps"])[-1]),
            }
        )
    except FileNotFoundError:
        raise SubquadError(f"{folder} holds no converted network: there is no {REPORT} in it") from None
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise SubquadError(f"{path} is damaged: {type(error).__name__}") from None


def blocks_of(rows: list[dict[str, Any]]) -> list[BlockDamage]:
    """What blocks cost alone, as JSON holds it."""
    return [BlockDamage(**_counted(row, "damage")) for row in rows]


def hybrids_of(rows: list[dict[str, Any]]) -> list[HybridRow]:
    """What they cost together, as JSON holds it."""
    return [HybridRow(**_counted(row, "damage") | {"converted": tuple(row["converted"])}) for row in rows]


EARLIER = {"student_top1": "student_score", "teacher_top1": "teacher_score"}
"""What versions called it that judged classifiers alone."""


def comparison_of(step: dict[str, Any]) -> Comparison:
    """What a student was like, as JSON holds it."""
    # what is kept follows from the others
    named = {EARLIER.get(name, name): value for name, value in step.items() if name != "kept"}
    return Comparison(**_counted(named, "cosine", "error"))


def _counted(row: dict[str, Any], *names: str) -> dict[str, Any]:
    """A row whose figures of these names are numbers: JSON has null for what is not finite."""
    return row | {name: math.nan for name in names if name in row and row[name] is None}


def _labelled(row: dict[str, Any], last_step: str) -> LabelledComparison:
    if "student" in row:
        # the student was judged behind the last step alone
        row = {name: value for name, value in row.items() if name != "student"} | {"steps": {last_step: row["student"]}}
    steps = {name: Readable(**step) for name, step in row["steps"].items()}
    return LabelledComparison(**row | {"teacher": Readable(**row["teacher"]), "steps": steps})


def _cost(px: int | list[int], **row: float) -> CostRow:
    return CostRow(px if isinstance(px, int) else (px[0], px[1]), **row)


def _by_number(figures: dict[str, float | None]) -> dict[int, float]:
    return {int(number): math.nan if figure is None else float(figure) for number, figure in figures.items()}
