"""Rows of the table of steps that nobody has trained: what a conversion has to be better than to be worth its time.

They are judged on the images of the steps, and kept beside the plan while the conversion goes on, so that it measures
them once however often it is broken off.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from subquad.conversion.conversion_plan import Plan
from subquad.conversion.conversion_record import UNTRAINED, comparison_of
from subquad.conversion.judged_steps import Judged, JudgedSteps
from subquad.conversion.labelled_features import Readable
from subquad.conversion.replacing import conversion_of, convert
from subquad.conversion.training_free import convert_without_training
from subquad.errors import SubquadError
from subquad.models.attention_names import names_in
from subquad.writing import json_text, write_json

MOST_LANDMARKS = 7
"""On a side of the map. There are at most half as many as places, as softmax itself has a landmark at every place."""

Log = Callable[[str], None]
Students = Mapping[str, Callable[[], nn.Module]]
"""What makes the network of a row, by the row's name."""


def untrained_students(student: nn.Module, teacher: nn.Module, plan: Plan) -> dict[str, Callable[[], nn.Module]]:
    """The networks without any training that are comparable with a student, in the same blocks.

    Landmarks, and agents as they are swapped in, unless the student is that itself before it is trained.
    """
    height, width, _ = conversion_of(student).grid
    landmarks = _landmarks(height), _landmarks(width)
    where: dict[str, Any] = {"blocks": plan.blocks, "img_size": plan.img_size}
    make: dict[str, Callable[[], nn.Module]] = {
        f"{math.prod(landmarks)} landmarks, {UNTRAINED}": partial(convert_without_training, teacher, landmarks, **where)
    }
    if names_in(plan.attention) != ["agent"]:
        make[f"agents, {UNTRAINED}"] = partial(convert, teacher, "agent", **where)
    return make


def _landmarks(places: int) -> int:
    """How many landmarks stand on a side with so many places."""
    return min(MOST_LANDMARKS, max(places // 2, 1))


def judge_untrained(judged: JudgedSteps, students: Students, file: Path, about: Any, log: Log) -> None:
    """Put a row for each network in front of the steps; one that refuses the images or the layers is left out.

    Args:
        judged: the steps.
        students: what makes the networks.
        file: rows that are there already are read from it, and new ones are kept in it.
        about: what the rows depend on, as JSON can hold it: those of a file that says something else are not read.
        log: gets a line for each row, and one that says why it is left out.
    """
    about = json.loads(json_text(about))
    rows = {name: row for name, row in _read(file, about).items() if name in students}
    for name, make in students.items():
        if name in rows:
            log(f"{name}: {rows[name].comparison.text}, as measured before")
            continue
        try:
            row = judged.judge(make())
        except SubquadError as error:
            log(f"{name}: left out, {error}")
            continue
        if not math.isfinite(row.comparison.error):
            log(f"{name}: left out, its features are not finite")
            continue
        rows[name] = row
        write_json(file, {"about": about, "rows": {name: row.as_note() for name, row in rows.items()}})
        judged.tell(name, row)
    judged.put_in_front({name: rows[name] for name in students if name in rows})


def _read(file: Path, about: Any) -> dict[str, Judged]:
    """The rows of a file; none where it is not there, is damaged or is about something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["about"] != about:
            return {}
        return {
            name: Judged(comparison_of(row["comparison"]), None if row["told"] is None else Readable(**row["told"]))
            for name, row in content["rows"].items()
        }
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return {}
