"""What can be trained: a folder a task, one protocol for all of them, and the table of those that there are."""

from subquad.tasks import released_networks as released_networks  # which enters its makers
from subquad.tasks.common_recipe import CommonRecipe
from subquad.tasks.held_out import HeldOut, Tally
from subquad.tasks.image_recipe import ImageRecipe
from subquad.tasks.recipe_fields import Field, fields_of, option, parse_settings
from subquad.tasks.recipe_files import load_recipe, recipe_names
from subquad.tasks.task import Column, Gallery, Judgement, KnownResult, Row, Task
from subquad.tasks.task_table import ENTRY_POINTS, TASKS, make_task, register_task, task_named
from subquad.tasks.trained import ImageNetwork, Trained

__all__ = [
    "ENTRY_POINTS",
    "TASKS",
    "Column",
    "CommonRecipe",
    "Field",
    "Gallery",
    "HeldOut",
    "ImageNetwork",
    "ImageRecipe",
    "Judgement",
    "KnownResult",
    "Row",
    "Tally",
    "Task",
    "Trained",
    "fields_of",
    "load_recipe",
    "make_task",
    "option",
    "parse_settings",
    "recipe_names",
    "register_task",
    "task_named",
]
