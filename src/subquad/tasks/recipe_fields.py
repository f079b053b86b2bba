"""Fields of a recipe: each says what it is, in a line of help, and which values it may have.

They take what YAML or a command line make of a value, and what Python gives them, and refuse the same ones.
"""

import dataclasses
import functools
import numbers
import os
import types
import typing
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from subquad.errors import SubquadError, shown, unknown_name
from subquad.ranges import Range
from subquad.reading import parse_settings

LARGEST, LARGEST_FLOAT = 2**63 - 1, 1e38
"""Of whole numbers, what 64 bits hold; of others what 32 bits do, in which parameters are."""


@dataclass(frozen=True)
class Declared:
    """What is said of a field where it stands.

    Attributes:
        text: a line of help.
        range: of a number, and of each of several.
        choices: the texts that there are; None where they are not to be counted.
        rising: of several numbers each is larger than the one before, or as large.
        free: why a text can be any: who says that it is wrong.
    """

    text: str
    range: Range | None = None
    choices: tuple[str, ...] | None = None
    rising: bool = False
    free: str = ""


@dataclass(frozen=True)
class Field:
    """A field of a recipe's class: its name, its type, and what is said of it."""

    name: str
    kind: Any
    declared: Declared

    @property
    def text(self) -> str:
        """Say in a line what it is, for --help."""
        return self.declared.text

    @property
    def is_optional(self) -> bool:
        """Whether it can be None."""
        return isinstance(self.kind, types.UnionType)

    @property
    def inner(self) -> Any:
        """Give its type, that of values other than None."""
        if not self.is_optional:
            return self.kind
        return next(kind for kind in typing.get_args(self.kind) if kind is not types.NoneType)

    @property
    def number(self) -> type | None:
        """What it is a number of, or several numbers: int or float; None for others."""
        kind = typing.get_args(self.inner)[0] if typing.get_origin(self.inner) is tuple else self.inner
        return kind if kind in (int, float) else None


def option(
    default: Any,
    text: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Iterable[str] | None = None,
    rising: bool = False,
    free: str = "",
) -> Any:
    """A field with its line of help and the values that it may have, see `Declared`."""
    ends = (at_least, above, at_most, below)
    declared = Declared(
        text,
        range=None if all(end is None for end in ends) else Range(*ends),
        choices=None if choices is None else tuple(choices),
        rising=rising,
        free=free,
    )
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"declared": declared})
    return field(default=default, metadata={"declared": declared})


def fields_of(kind: Any) -> Mapping[str, Field]:
    """The fields of a recipe's class by name."""
    return _fields_of(kind)


@functools.cache
def _fields_of(kind: Any) -> Mapping[str, Field]:
    hints = typing.get_type_hints(kind)
    return {f.name: Field(f.name, hints[f.name], f.metadata["declared"]) for f in dataclasses.fields(kind)}


def checked(values: Mapping[str, Any], kind: type, origin: str = "") -> dict[str, Any]:
    """`values` as the fields of `kind` that they are named for have them.

    Raises:
        SubquadError: where one is no field, or not what it is declared to be; the line says it of `origin`, if there
            is one.
    """
    fields = fields_of(kind)
    for name in values:
        if name not in fields:
            raise unknown_name(f"field in {origin}:" if origin else "field of a recipe:", str(name), fields)
    try:
        return {name: _taken(fields[name], value) for name, value in values.items()}
    except SubquadError as error:
        raise SubquadError(f"{origin}: {error}" if origin else str(error)) from None


def _taken(field: Field, value: Any) -> Any:
    """A value as a field has it, from what YAML or the command line make of it ("5e-4" is text in YAML)."""
    if field.is_optional and (value is None or (isinstance(value, str) and value in ("none", "None", "null"))):
        return None
    kind = field.inner
    try:
        if typing.get_origin(kind) is tuple:
            return _in_range(field, _several(value, typing.get_args(kind)))
        if kind is str:
            return _chosen(field, _text(value))
        if kind is bool:
            return _truth(value)
        if kind in (int, float):
            return _in_range(field, (_number(value, kind),))[0]
        return _settings(field.name, value)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, SubquadError):
            raise
        raise SubquadError(f"{field.name} must be {_describe(kind)}, got {shown(value)}") from None


def _in_range(field: Field, values: tuple[Any, ...]) -> tuple[Any, ...]:
    rule = field.declared.range or Range()
    for value in values:
        if not rule.allows(value):
            raise SubquadError(f"{field.name} must be {rule.words}, got {shown(value)}")
    if field.declared.rising and list(values) != sorted(values):
        raise SubquadError(f"{field.name} goes from the smallest to the largest, got {', '.join(map(str, values))}")
    return values


def _chosen(field: Field, text: str) -> str:
    choices = field.declared.choices
    if choices and "" in choices and text == "none":
        return ""
    if choices is not None and text not in choices:
        raise unknown_name(field.name, text, filter(None, choices))
    if choices is None and not text:
        raise SubquadError(f"{field.name} is empty: leave it out")
    return text


def _several(value: Any, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    parts = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else [value]
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(parts)
    if len(parts) == 1:
        parts = parts * len(kinds)
    if len(parts) != len(kinds) or not parts:
        raise ValueError
    return tuple(_number(part, kind) for part, kind in zip(parts, kinds, strict=True))


def _text(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError
    text = os.fspath(value)
    if not isinstance(text, str) or not _is_writable(text):
        raise ValueError
    return text


def _is_writable(text: str) -> bool:
    """Whether names of files and lines of a recipe can hold a text: no control characters, no halves of characters."""
    return not any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def _truth(value: Any) -> bool:
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower(), value)
    if not isinstance(value, bool):
        raise TypeError
    return value


def _number(value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        raise TypeError
    if kind is int and not isinstance(value, (str, numbers.Integral)) and not float(value).is_integer():
        raise TypeError
    number = kind(value)
    # infinite numbers are told by the range
    if abs(number) > (LARGEST if kind is int else LARGEST_FLOAT) and abs(number) != float("inf"):
        raise OverflowError
    return number


def _settings(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, (str, Mapping)):
        raise TypeError
    try:
        settings = parse_settings(value) if isinstance(value, str) else dict(value)
    except SubquadError as error:
        raise SubquadError(f"{name}: {error}") from None
    for key, entry in settings.items():
        if not isinstance(key, str):
            raise TypeError
        if not _is_plain(entry):
            raise SubquadError(
                f"{name}: {key} must be a finite number, text, true, false or a list, got {shown(entry)}"
            )
    return settings


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, (int, float)):
        return Range().allows(value) and (isinstance(value, float) or abs(value) <= LARGEST)
    return value is None or (isinstance(value, str) and _is_writable(value))


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        count = "" if kinds[-1] is Ellipsis else f"{len(kinds)} "
        return f"{count}{'whole ' if kinds[0] is int else ''}numbers"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind, "a table of name: value")
