"""Arguments of the commands: one-line complaints, numbers with their ranges, and what several commands share."""

import argparse
import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from subquad.errors import SubquadError, shown, unknown_name
from subquad.ranges import LARGEST, Range

LONGEST_NAME = 200
"""Bytes of the name of a folder that a run is kept in: file systems take 255."""


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line, with the nearest flag suggested."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **settings)
        text = "show the trace of what goes wrong, as SUBQUAD_DEBUG=1 does"
        self.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=text)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            known = [flag for action in arguments.parser._actions for flag in action.option_strings]
            near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {arguments.parser.prog} --help"
            raise SubquadError(f"unknown argument '{unknown[0]}': {hint}")
        return arguments

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # argparse would list all choices, however many there are
        if action.choices is not None and value not in action.choices:
            kind = action.option_strings[-1] if action.option_strings else str(action.metavar)
            raise unknown_name(kind, str(value), map(str, action.choices))

    def error(self, message: str) -> NoReturn:
        raise SubquadError(f"{message}: see {self.prog} --help")


class Commands:
    """The commands, to which each file of this folder adds its own."""

    def __init__(self, parser: Parser) -> None:
        self.parsers = parser.add_subparsers(required=True, metavar="command", parser_class=Parser)

    def group(self, name: str, text: str) -> "Commands":
        """Commands of commands: `subquad <name> <one of them>`."""
        return Commands(self.parsers.add_parser(name, help=text, description=text))

    def add(self, name: str, run: Callable[[argparse.Namespace], None], text: str) -> Parser:
        """A command of this name, which `run` carries out."""
        parser = self.parsers.add_parser(name, help=text, description=text)
        parser.set_defaults(run=run, parser=parser)
        return parser


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
        if not self.range.allows(number) or (self.kind is int and abs(number) > LARGEST):
            what = "a whole number" if self.kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {what}, {self.range.words}, got {shown(text)}")
        return number


positive = Number(int, at_least=1)
whole = Number(int, at_least=0)
share = Number(float, at_least=0, at_most=1)
number = Number(float)
not_negative = Number(float, at_least=0)


def run_name(text: str) -> str:
    """The name of a folder within the folder of runs, and of no other place."""
    if text in ("", ".", "..") or not text.isprintable() or {"/", "\\"} & set(text):
        raise argparse.ArgumentTypeError(
            f"is the name of a folder within --output, without / and \\, got {shown(text)}"
        )
    if len(os.fsencode(text)) > LONGEST_NAME:
        raise argparse.ArgumentTypeError(f"has more than {LONGEST_NAME} bytes: {shown(text)}")
    return text


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
    if any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise argparse.ArgumentTypeError(f"has a name of more than 255 bytes: {shown(str(path))}")
    try:
        while not folder.exists():
            folder = folder.parent
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{shown(str(path))} can't be written: {error.strerror}") from None
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{folder} is no folder: {path} can't be written")


def add_checkpoint(parser: Parser) -> None:
    """The argument that names trained weights."""
    parser.add_argument("checkpoint", type=to_read, help="run folder, or a weight file of one")
