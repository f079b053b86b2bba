"""Flags of commands, declared where what they say is used: numbers with their ranges, files and folders.

A flag's type raises `argparse.ArgumentTypeError` for a text that says nothing of it; the command's line names the flag.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subquad.errors import shown
from subquad.ranges import LARGEST, Range, with_limit
from subquad.writing import WriteError, check_place


class Flag:
    """A flag of a command, as `argparse.ArgumentParser.add_argument` takes it.

    Attributes:
        names: "--data", or the name of an argument without dashes.
        settings: type, default, help, …
    """

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names, self.settings = names, settings

    @property
    def key(self) -> str:
        """The name of its value among the parsed arguments."""
        return str(self.settings.get("dest", self.names[-1].lstrip("-").replace("-", "_")))

    def add_to(self, parser: Any) -> None:
        """Declare it to a parser, or to a group of one."""
        parser.add_argument(*self.names, **self.settings)


def values_of(flags: tuple[Flag, ...], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The parsed values of some flags by their keys."""
    return {flag.key: arguments[flag.key] for flag in flags}


class Number:
    """The type of a flag: whole numbers, or all numbers, of a range."""

    def __init__(self, kind: type[int] | type[float], **ends: float) -> None:
        self.kind, self.range = kind, Range(**ends)

    def __call__(self, text: str) -> Any:
        """The number that a text says.

        Raises:
            argparse.ArgumentTypeError: it says none, or none of the range.
        """
        try:
            number = self.kind(text)
        except (ValueError, OverflowError):
            number = float("nan")
        largest = self.range.at_most or LARGEST
        if not self.range.allows(number) or (self.kind is int and abs(number) > largest):
            words = f"{'a whole number' if self.kind is int else 'a number'}, {self.range.words}"
            raise argparse.ArgumentTypeError(f"must be {with_limit(words, number)}, got {shown(text)}")
        return number


positive = Number(int, at_least=1)
whole = Number(int, at_least=0)
seed = Number(int, at_least=0, at_most=2**63 - 1)
share = Number(float, at_least=0, at_most=1)
number = Number(float)
not_negative = Number(float, at_least=0)


def pixels(text: str) -> int | tuple[int, int]:
    """Pixels of both sides of an image, "448", or of its height and width, "384,640", which may be "384x640", too.

    Raises:
        argparse.ArgumentTypeError: a text says none.
    """
    height, between, width = re.sub("[x×]", ",", text).partition(",")
    try:
        return (positive(height), positive(width)) if between else int(positive(text))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"must be pixels, one number or height and width as 384,640, got {shown(text)}"
        ) from None


def to_read(text: str) -> Path:
    """Something that is there to be read; the command itself says where it is not."""
    if not text:
        raise argparse.ArgumentTypeError("is empty: name a file or folder")
    return Path(text)


def folder_to_write(text: str) -> Path:
    """A folder that can be there: nothing on the way to it is a file."""
    path = to_read(text)
    _check_way(path, path)
    return path


def file_to_write(text: str) -> Path:
    """A file that can be there, in a folder that can be there."""
    path = to_read(text)
    _check_way(path, path.parent)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file")
    return path


def _check_way(path: Path, folder: Path) -> None:
    """Raise where a folder can't be made, in front of all work."""
    try:
        check_place(path, folder)
    except WriteError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
