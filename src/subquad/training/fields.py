"""Fields of a recipe: each has a line of help, and takes what YAML or a command line make of its value."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import yaml

from subquad.errors import SubquadError, unknown_name


def option(default: Any, text: str) -> Any:
    """A field with its line of help."""
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


def fields_of(kind: type) -> dict[str, tuple[Any, str]]:
    """Name of each field of a recipe's class → (its type, its line of help)."""
    hints = typing.get_type_hints(kind)
    return {f.name: (hints[f.name], f.metadata["help"]) for f in dataclasses.fields(kind)}


def parse_settings(text: str) -> dict[str, Any]:
    """`num_agents=16,local=false` as a dict."""
    settings = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise SubquadError(f"settings are written name=value,name=value, got '{text}'")
        settings[name.strip()] = yaml.safe_load(value)
    return settings


def checked(values: Mapping[str, Any], kind: type, origin: str) -> dict[str, Any]:
    """`values` with the types of the fields of `kind` that they are named for."""
    fields = fields_of(kind)
    for name in values:
        if name not in fields:
            raise unknown_name(f"field in {origin}:", str(name), fields)
    return {name: _coerce(name, value, fields[name][0], origin) for name, value in values.items()}


def _coerce(name: str, value: Any, kind: Any, origin: str) -> Any:
    """`value` as a `kind`, from what YAML or the command line make of it ("5e-4" is text in YAML)."""
    optional = isinstance(kind, types.UnionType)
    if optional:
        if value is None or value in ("none", "None", "null"):
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    try:
        if typing.get_origin(kind) is tuple:
            return _tuple(value, typing.get_args(kind))
        if kind is str:
            return _text(value)
        if kind in (int, float, bool):
            return _number(value, kind)
        return parse_settings(value) if isinstance(value, str) else dict(value)
    except SubquadError:
        raise
    except (TypeError, ValueError):
        raise SubquadError(f"{origin}: {name} must be {_describe(kind)}, got {value!r}") from None


def _tuple(value: Any, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    parts = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else [value]
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(parts)
    if len(parts) == 1:
        parts = parts * len(kinds)
    if len(parts) != len(kinds):
        raise ValueError
    return tuple(_number(part, kind) for part, kind in zip(parts, kinds, strict=True))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _number(value: Any, kind: type) -> Any:
    if kind is bool:
        value = {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
        if not isinstance(value, bool):
            raise TypeError
        return value
    if isinstance(value, bool) or (kind is int and isinstance(value, float) and not value.is_integer()):
        raise TypeError
    return kind(value)


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        count = "" if kinds[-1] is Ellipsis else f"{len(kinds)} "
        return f"{count}{'whole ' if kinds[0] is int else ''}numbers"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind, "a table of name: value")
