"""The note in a weight file: which network it holds, and what that was trained on.

Anyone can write one, so it is checked where it is read, and numbers in it are bounded before anything is made of them.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from subquad.errors import SubquadError
from subquad.ranges import Positive, fits
from subquad.text import one_line
from subquad.writing import json_text

KINDS: dict[str, tuple[type, str]] = {
    "creation": (dict, "arguments by name"),
    "task": (str, "text"),
    "classes": (list, "a list of names"),
    "input": (dict, "settings by name"),
    "data": (str, "text"),
    "data_settings": (dict, "settings by name"),
    "slide": (bool, "true or false"),
    "labels_from_zero": (bool, "true or false"),
}
"""What is read from a note, its type, and that in words."""

MOST_TEXT = 2**22
"""Characters of a note."""

MOST_ARGUMENTS = 2**16
"""Characters of the arguments that made a network."""

MOST_NUMBER = 2**20
"""Of the numbers in an argument, together."""

MOST_SIDE = 8192
"""Pixels a side of the images that a file can ask for."""

SIDES = frozenset({"img_size", "built_for", "short_side", "long_side", "crop", "size"})
"""Arguments and settings that are pixels."""

DEPTHS = frozenset({"depth", "depths"})
"""Arguments that count blocks."""

NEVER_WRITTEN = frozenset({"device", "dtype", "checkpoint", "grad_checkpointing", "chunk_tokens", "pretrained"})
"""Arguments that a note does not have, as they are of the machine or of a training."""

Settings = TypeVar("Settings")


def parse_note(text: str) -> dict[str, Any]:
    """Read a note; None where it says nothing.

    Raises:
        SubquadError: if it is none that `save_weights` writes.
    """
    if len(text) > MOST_TEXT:
        raise SubquadError(f"its note has {len(text)} characters, more than {MOST_TEXT}")
    try:
        note = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SubquadError(f"its note is no JSON: {one_line(error)}") from None
    if not isinstance(note, dict):
        raise SubquadError(f"its note is no JSON object, but {one_line(text, 40)}")
    for name, (kind, words) in KINDS.items():
        value = note.get(name)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise SubquadError(f"its note says {name} = {_shown(value)}, which is not {words}")
        if not all(math.isfinite(number) for number in _numbers(value)):
            raise SubquadError(f"its note has a number in {name} that is not finite")
    for name in note.get("classes") or ():
        if not isinstance(name, str) or any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in name):
            raise SubquadError(f"its note says that {_shown(name)} is a class, which is no name")
    return note


def oblong_size(note: Mapping[str, Any]) -> tuple[int, int] | None:
    """(height, width) of the images that the network of a note is for, where it says so and they are no squares.

    Of a dense network it is the size that its backbone was made for.
    """
    size: Any = _of_images(note).get("img_size")
    if not fits(size, tuple[Positive, Positive]) or max(size) > MOST_SIDE or size[0] == size[1]:
        return None
    return size[0], size[1]


def size_built_for(note: Mapping[str, Any]) -> tuple[int, int]:
    """(height, width) of the images that a network was made for first; a square where its note does not say."""
    made = _of_images(note)
    size: Any = made.get("built_for", made.get("img_size"))
    return (size[0], size[1]) if fits(size, tuple[Positive, Positive]) and max(size) <= MOST_SIDE else (224, 224)


def _of_images(note: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the network that sees the images: of a dense one, of its backbone."""
    creation = note.get("creation") or {}
    inner = creation.get("backbone")
    return inner if isinstance(inner, dict) else creation


def task_in(note: Mapping[str, Any]) -> str | None:
    """What the network of a note is for; None where it does not say which network it holds."""
    creation = note.get("creation") or {}
    written = creation.get("task", "classify" if "name" in creation else None)
    return None if written is None else str(written)


def _asked_by(task: str) -> str:
    """Whose a network is, in words that are commands: the first task's are none of its name."""
    return "a classifier (`subquad eval`, `subquad predict`)" if task == "classify" else f"for `subquad {task}`"


def check_task(written: str, task: str) -> None:
    """Raise where what a network is for, as is `written` of it, is not the task that it is wanted for."""
    if written != task:
        raise SubquadError(f"it is {_asked_by(one_line(written, 40))}, not {_asked_by(task)}")


def creation_of(note: Mapping[str, Any], task: str, entries: int) -> dict[str, Any]:
    """The arguments that make the network of a note.

    Args:
        note: of `parse_note`.
        task: what the network is wanted for.
        entries: of the weights that lie beside the note, of which every block has one at least.

    Raises:
        SubquadError: if it is for another task, or for a network far larger than the weights.
    """
    creation, written = dict(note.get("creation") or {}), task_in(note)
    creation.pop("task", None)
    if written is None:
        raise SubquadError(
            "it does not say which network it holds: create the model and use load_checkpoint, or name timm's network "
            "in its place, timm/NAME --weights FILE"
        )
    check_task(written, task)
    if len(json_text(creation)) > MOST_ARGUMENTS:
        raise SubquadError(f"its note has more than {MOST_ARGUMENTS} characters of arguments")
    inner = creation.get("backbone")
    for name, value in [*creation.items(), *(inner.items() if isinstance(inner, dict) else ())]:
        if name in NEVER_WRITTEN:
            raise SubquadError(f"its note has an argument {name}, which no network is made with")
        if value is not inner:
            _check_size(name, value, entries)
    return creation


def as_built(creation: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a network before it was moved to another size, see `create_model`."""
    made = {key: as_built(value) if isinstance(value, dict) else value for key, value in creation.items()}
    first = made.pop("built_for", None)
    return made if first is None else made | {"img_size": first}


def _check_size(name: str, value: Any, entries: int) -> None:
    """Raise for an argument that asks for more than its file can hold, or than is computed here."""
    numbers = [abs(number) for number in _numbers(value)]
    if name in DEPTHS and sum(numbers) > entries:
        raise SubquadError(f"its note says {name} = {_shown(value)}, and the file has {entries} entries")
    if name in SIDES and max(numbers, default=0) > MOST_SIDE:
        raise SubquadError(f"its note says {name} = {_shown(value)}: at most {MOST_SIDE} px a side are taken")
    if sum(numbers) > MOST_NUMBER:
        raise SubquadError(f"its note says {name} = {_shown(value)}: at most {MOST_NUMBER} are taken")


def settings_of(kind: type[Settings], values: Mapping[str, Any], **more: Any) -> Settings:
    """A dataclass made of JSON, each field of its declared type; lists become tuples.

    Args:
        kind: the dataclass.
        values: by field, all that have no default.
        more: fields that are given, not read.

    Raises:
        SubquadError: for a field that is missing, unknown or of another type.
    """
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in more}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if strange := sorted(values.keys() - fields.keys()):
        raise SubquadError(f"its note has a setting {one_line(strange[0], 40)} of the input, which nothing takes")
    if missing := sorted(required - values.keys()):
        raise SubquadError(f"its note does not say the {', '.join(missing)} of the input")
    for name, value in values.items():
        said = f"its note says {name} = {_shown(value)} of the input"
        if not _is_a(value, hints[name]):
            raise SubquadError(f"{said}, which is not {_words(hints[name])}")
        if name in SIDES and any(not 1 <= side <= MOST_SIDE for side in _numbers(value)):
            raise SubquadError(f"{said}: sides are 1 to {MOST_SIDE} px")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}, **more)


def required(note: Mapping[str, Any], *names: str) -> list[Any]:
    """Entries of a note.

    Raises:
        SubquadError: where one is missing.
    """
    if missing := [name for name in names if note.get(name) is None]:
        raise SubquadError(f"it does not say its {' and '.join(missing)}: only files written by training do")
    return [note[name] for name in names]


def _numbers(value: Any) -> Iterator[float]:
    """All numbers in a piece of JSON."""
    waiting = [value]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, dict):
            waiting += entry.values()
        elif isinstance(entry, list):
            waiting += entry
        elif isinstance(entry, int | float) and not isinstance(entry, bool):
            yield entry


def _is_a(value: Any, hint: Any) -> bool:
    """Whether JSON is of a declared type: a number, text, a tuple of them, or an alternative."""
    if isinstance(hint, types.UnionType):
        return any(_is_a(value, choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        if not isinstance(value, list):
            return False
        kinds = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        return len(value) == len(kinds) and all(map(_is_a, value, kinds))
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _shown(value: Any) -> str:
    return one_line(json_text(value), 60)
