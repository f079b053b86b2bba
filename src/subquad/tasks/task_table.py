"""The tasks there are, by name; others are added by `register_task` or found where a plug-in is installed."""

from typing import Any

from subquad.errors import SubquadError, unknown_name
from subquad.plugins import Table
from subquad.tasks.classification.classification_task import Classification
from subquad.tasks.common_recipe import CommonRecipe
from subquad.tasks.detection.detection_task import Detection
from subquad.tasks.segmentation.segmentation_task import Segmentation
from subquad.tasks.sequences.lra_task import LongRange
from subquad.tasks.task import Task
from subquad.tasks.task_contract import check_made, check_protocol

ENTRY_POINTS = "subquad.tasks"
"""The group of entry points by which an installed package adds its tasks: `depth = "my_package.depth:Depth"`."""


def check_task(name: str, task: Any) -> None:
    """Raise a SubquadError that says why a class can't be the task `name`."""
    check_protocol(name, task)
    others = [other for other_name, other in TASKS.loaded.items() if other_name != name]
    known = {words for other in others for words in other.commands.values()}
    # "depth" is no command beside "depth train", and the other way round
    groups = {words.partition(" ")[0] for words in known if " " in words}
    if taken := [
        words for words in task.commands.values() if {words, words.partition(" ")[0]} & known or words in groups
    ]:
        raise SubquadError(f"the command {min(taken)} of the task {task.name} is another task's")


TASKS: Table[type[Task]] = Table(
    "a task",
    ENTRY_POINTS,
    check_task,
    {"classify": Classification, "segment": Segmentation, "detect": Detection, "lra": LongRange},
)
"""The tasks by their names in recipes, weight files and commands."""


def register_task(task: type[Task]) -> type[Task]:
    """Add a task of one's own; a class can be decorated with it.

    Raises:
        SubquadError: it is no task, another one has its name or one of its commands, or there is no such command.
    """
    TASKS.register(getattr(task, "name", ""), task)
    return task


def task_named(name: str) -> type[Task]:
    """The task of this name.

    Raises:
        SubquadError: there is none.
    """
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    return TASKS[name]


def make_task(recipe: CommonRecipe) -> Task:
    """Data and network of a recipe, checked."""
    task = task_named(recipe.task)(recipe)  # type: ignore[call-arg]
    check_made(task)
    return task
