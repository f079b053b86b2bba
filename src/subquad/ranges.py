"""Which values a setting may have: declared where the setting is, said in words, and checked in one place.

A constructor declares it in its annotations and wears `checks_arguments`; a recipe's field declares it in `option`, a
flag in its parser. NaN and infinite numbers are in no range.
"""

import functools
import inspect
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

from subquad.errors import SubquadError, shown

LARGEST = 2**31 - 1
"""Of whole numbers among arguments: sizes beyond it overflow where bytes are counted."""

LARGEST_FLOAT = 1e38
"""Of other numbers: what 32 bits hold."""


@dataclass(frozen=True)
class Range:
    """The finite numbers between two ends, each of which belongs to them (at_least, at_most) or not (above, below)."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def allows(self, number: float) -> bool:
        """Whether a number is one of them."""
        return (
            _is_finite(number)
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    @property
    def words(self) -> str:
        """What a number must be: "at least 0 and below 1"."""
        ends = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{word} {end}" for word, end in ends.items() if end is not None) or "finite"


# what the arguments of constructors are, most of the time
Positive = Annotated[int, Range(at_least=1)]
Count = Annotated[int, Range(at_least=0)]
AboveZero = Annotated[float, Range(above=0)]
Ratio = Annotated[float, Range(above=0, at_most=1000)]
NotNegative = Annotated[float, Range(at_least=0)]
Share = Annotated[float, Range(at_least=0, at_most=1)]
DropRate = Annotated[float, Range(at_least=0, below=1)]

Pixels = Positive | tuple[Positive, Positive]
"""Of an image: one number for both sides, or height and width."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def checks_arguments(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a function refuse, in one line, numbers and texts that the annotations of its arguments do not allow."""
    names = tuple(inspect.signature(function).parameters)

    @functools.cache
    def hints() -> dict[str, Any]:
        kinds = typing.get_type_hints(function, include_extras=True)
        # of what is given back as the class that it was, it is known what it has to be at least
        return {name: kind.__bound__ if isinstance(kind, TypeVar) else kind for name, kind in kinds.items()}

    @functools.wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            _check(name, value, hints().get(name, Any))
        return function(*args, **kwargs)

    return checked


def check_fields(instance: Any) -> None:
    """Refuse, in one line, an object of a dataclass whose fields' annotations do not allow what they hold."""
    for name, kind in typing.get_type_hints(type(instance), include_extras=True).items():
        _check(name, getattr(instance, name), kind)


def _check(name: str, value: Any, kind: Any) -> None:
    if not fits(value, kind):
        raise SubquadError(f"{name} must be {with_limit(describe(kind), value)}, got {shown(value)}")


def with_limit(words: str, value: Any) -> str:
    """What a number must be; up to what all can be, where this one is larger and nothing else is said."""
    if "at most" in words or "below" in words or isinstance(value, bool) or not isinstance(value, numbers.Real):
        return words
    limit = LARGEST if isinstance(value, numbers.Integral) else LARGEST_FLOAT
    too_large = _is_finite(value) and bool(value > limit)  # type: ignore[operator]
    return f"{words} and at most {limit}" if too_large else words


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated kind: numbers, texts, classes, lists of them, functions; others fit always."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        rules = [rule for rule in parts[1:] if isinstance(rule, Range)]
        return fits(value, parts[0]) and all(rule.allows(value) for rule in rules)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin in (Sequence, Iterable, list, tuple):
        return _fits_several(value, origin, parts)
    if origin in (Mapping, dict):
        return isinstance(value, Mapping)
    if origin is Callable:
        return callable(value)
    if kind is Path:
        # functions make paths of whatever names one
        return isinstance(value, os.PathLike)
    if kind is types.NoneType:
        return value is None
    if kind is bool:
        return isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool) and abs(int(value)) <= LARGEST
    if kind is float:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        return is_number and -LARGEST_FLOAT <= value <= LARGEST_FLOAT
    if kind is Any or not isinstance(kind, type) or origin is not None:
        return True
    return isinstance(value, kind)


def _fits_several(value: Any, origin: Any, parts: tuple[Any, ...]) -> bool:
    if origin is Iterable and not isinstance(value, Sequence):
        # what is read once, as a generator, can't be looked into
        return isinstance(value, Iterable)
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    if origin is tuple and parts[-1] is not Ellipsis:
        return len(value) == len(parts) and all(map(fits, value, parts))
    return all(fits(entry, parts[0]) for entry in value)


def height_and_width(pixels: Any, name: str = "img_size") -> tuple[int, int]:
    """Both sides of an image, of one number or two.

    Raises:
        SubquadError: they are no pixels.
    """
    if fits(pixels, Positive):
        return pixels, pixels
    if fits(pixels, tuple[Positive, Positive]):
        height, width = pixels
        return height, width
    raise SubquadError(f"{name} is pixels, one number or height and width, got {shown(pixels)}")


def sides_of_images(pixels: Any, name: str = "img_size") -> tuple[int, ...]:
    """All sides of an image or of a volume, of one number, two or three; one is height and width.

    Raises:
        SubquadError: they are no pixels.
    """
    if fits(pixels, tuple[Positive, Positive, Positive]):
        return tuple(pixels)
    return height_and_width(pixels, name)


def check_repeats(repeats: Any) -> None:
    """Raise SubquadError where something would be timed no times, of which there is no median."""
    check_positive(repeats=repeats)


def check_positive(**numbers: Any) -> None:
    """Raise SubquadError where one of the numbers is no whole number of at least 1."""
    for name, value in numbers.items():
        _check(name, value, Positive)


def describe(kind: Any, several: bool = False) -> str:
    """A kind in words: "a whole number of at least 1"; that it may be left out is not said."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        rules = " and ".join(rule.words for rule in parts[1:])
        return f"{describe(parts[0], several)} {'of ' if rules.startswith('at') else ''}{rules}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(part, several) for part in parts if part is not types.NoneType)
    if origin in (Sequence, Iterable, list, tuple):
        if parts[0] is Any:
            return "lists" if several else "a list"
        count = "" if origin is not tuple or parts[-1] is Ellipsis else f"{len(parts)} "
        return f"a list of {count}{describe(parts[0], several=True)}"
    if origin in (Mapping, dict):
        return "mappings" if several else "a mapping"
    if origin is Callable:
        return "functions" if several else "a function"
    names = {int: ("a whole number", "whole numbers"), float: ("a number", "numbers"), str: ("text", "texts")}
    names |= {Path: ("a path", "paths")}
    if kind is bool:
        return "true or false"
    return names[kind][several] if kind in names else f"of {getattr(kind, '__name__', kind)}"


def _is_finite(number: Any) -> bool:
    # a whole number may be too large for a float
    return isinstance(number, int) or math.isfinite(number)
