"""A task's protocol, held: what a class lacks to be a task, and what one gives that is none of what is asked for."""

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from subquad.errors import SubquadError, reason_of, shown
from subquad.flags import Flag
from subquad.tasks.common_recipe import CommonRecipe
from subquad.tasks.task import ACTIONS, Column, Row, Task
from subquad.tasks.trained import Trained
from subquad.weights.notes import task_in
from subquad.writing import json_text


def check_protocol(name: str, task: Any) -> None:
    """Raise a SubquadError that says all of what a class lacks to be the task `name`.

    What a command reads of a task is looked at here: commands are made of all tasks at once, and one that lacks
    something would take the others with it.
    """
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise SubquadError(f"a task is a class derived from subquad.tasks.Task, got {shown(task)}")
    if faults := list(_faults(task)):
        raise SubquadError(f"{task.__name__} can't be a task: {'; '.join(faults)} (docs/adding-a-task.md)")
    if task.name != name:
        raise SubquadError(f"the entry point of the task {task.name} is called {name}: they have one name")
    if task.name != task.recipe_class.task:
        raise SubquadError(f"the task {task.name} has recipes of the task {task.recipe_class.task}")
    if unknown := task.commands.keys() - set(ACTIONS):
        raise SubquadError(f"the task {task.name} has a command to {min(unknown)}, known are {', '.join(ACTIONS)}")


def check_made(task: Any) -> None:
    """Raise a SubquadError where a recipe was made into something that can't be trained, judged or opened again."""
    missing = [name for name in ("recipe", "model", "train_images", "eval_images") if not hasattr(task, name)]
    if missing:
        raise _unlike(task, f"__init__ calls that of Task, which sets {', '.join(missing)}")
    if not isinstance(task.model, nn.Module):
        raise _unlike(task, f"model is a torch.nn.Module, got {shown(task.model)}")
    creation = getattr(task.model, "creation", None)
    if not isinstance(creation, Mapping) or task_in({"creation": creation}) != task.name:
        # a file of it would be opened as a network of another task, if at all
        raise _unlike(
            task, f"model.creation has the task {task.name} and the arguments of build, got {shown(creation)}"
        )
    if not len(task.eval_images):
        raise SubquadError(f"there are no held-out {task.examples} to judge by: {task.describe()}")
    notes_of(task)


def notes_of(task: Any) -> dict[str, Any]:
    """What a weight file says beside the arguments of the model: what `metadata` gives, and whose it is.

    Raises:
        SubquadError: it can't be written; before an epoch is trained, if that is asked for by then.
    """
    given = task.metadata()
    try:
        json_text(notes := {"task": task.name, **given})
    except TypeError as error:
        raise _unlike(task, f"metadata gives what JSON holds, got {shown(given)}: {reason_of(error)}") from None
    return notes


def row_of(task: Any, judgement: Any) -> Row:
    """The figures of `judge` as numbers of Python's, in which they are written and compared.

    Raises:
        SubquadError: they are none, or lack that by which the best weights are chosen.
    """
    first = task.columns[0].entry
    try:
        row = {name: figure if isinstance(figure, int) else float(figure) for name, figure in judgement.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):
        row = {}
    if first not in row:
        raise _unlike(task, f"judge gives numbers by name, {first} among them, got {shown(judgement)}")
    return row


def check_loss(task: Any, loss: Any) -> None:
    """Raise a SubquadError where a loss is not one number that gradients come from."""
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        what = f"a tensor of {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
        bare = " without a gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        raise _unlike(task, f"loss gives one number with its gradient, a tensor without axes, got {what}{bare}")


def check_opened(task: Any, opened: Any) -> None:
    """Raise a SubquadError where `opened` gives no trained network."""
    if not isinstance(opened, Trained):
        raise _unlike(task, f"opened gives a subquad.tasks.Trained, got {shown(opened)}")


def text_of(task: Any, method: str, answer: Any) -> str:
    """What an answer of `evaluate` or `predict` says.

    Raises:
        SubquadError: it says nothing.
    """
    text = getattr(answer, "text", None)
    if not isinstance(text, str):
        raise _unlike(task, f"what {method} gives has a text, got {shown(answer)}")
    return text


def _unlike(task: Any, fault: str) -> SubquadError:
    return SubquadError(f"the task {task.name} is unlike what is asked for: {fault} (docs/adding-a-task.md)")


def _faults(task: Any) -> Iterator[str]:
    for name in ("name", "title", "noun", "counted"):
        if not (isinstance(text := getattr(task, name, None), str) and text):
            yield f"{name} is a text, got {shown(text)}"
    if fault := _fault_of_recipes(getattr(task, "recipe_class", None)):
        yield fault
    if fault := _fault_of_commands(getattr(task, "commands", None)):
        yield fault
    columns = getattr(task, "columns", None)
    if not columns or not _is_tuple_of(Column, columns):
        yield f"columns is a tuple of subquad.tasks.Column, one at least, got {shown(columns)}"
    for name in ("leading_flags", "evaluation_flags", "prediction_flags"):
        if not _is_tuple_of(Flag, flags := getattr(task, name)):
            yield f"{name} is a tuple of subquad.flags.Flag, got {shown(flags)}"
    if not _is_tuple_of(str, task.heads):
        yield f"heads is a tuple of names, got {shown(task.heads)}"
    if missing := sorted(task.__abstractmethods__):
        yield f"it has no method {', '.join(missing)}"
    elif not _is_made_of_a_recipe(task):
        yield f"__init__ takes (self, recipe), got {inspect.signature(task.__init__)}"


def _fault_of_recipes(recipes: Any) -> str | None:
    if not (isinstance(recipes, type) and issubclass(recipes, CommonRecipe)):
        return f"recipe_class is a class derived from subquad.tasks.CommonRecipe, got {shown(recipes)}"
    if not isinstance(getattr(recipes, "task", None), str):
        return f"{recipes.__name__}.task is the task's name"
    known = {field.name: field for field in dataclasses.fields(recipes)}
    # without the decorator they are no fields, and nobody would say so
    options = [name for name, value in vars(recipes).items() if isinstance(value, dataclasses.Field)]
    if options:
        fields = ", ".join(options)
        return f"{recipes.__name__} is no dataclass: {fields} is no field of it without @dataclass(frozen=True)"
    if bare := [name for name, field in known.items() if "declared" not in field.metadata]:
        return f"fields of {recipes.__name__} are said by subquad.tasks.option(…), which {', '.join(bare)} is not"
    return None


def _fault_of_commands(commands: Any) -> str | None:
    if not isinstance(commands, Mapping):
        return f"commands has words of a command for actions, got {shown(commands)}"
    for words in commands.values():
        if not (isinstance(words, str) and re.fullmatch("[a-z][a-z0-9-]*( [a-z][a-z0-9-]*)?", words)):
            return f"a command is a word, or two, of small letters, got {shown(words)}"
    if twice := [words for words in commands.values() if list(commands.values()).count(words) > 1]:
        return f"two of its commands are called {twice[0]}"
    return None


def _is_tuple_of(kind: type, values: Any) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, kind) for value in values)


def _is_made_of_a_recipe(task: Any) -> bool:
    try:
        inspect.signature(task).bind(None)
    except TypeError:
        return False
    return True
