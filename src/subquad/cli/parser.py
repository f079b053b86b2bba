"""Arguments of the commands: one-line complaints, and what several commands share."""

import argparse
import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from subquad.errors import SubquadError


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line, with the nearest flag suggested."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **settings)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            known = [flag for action in arguments.parser._actions for flag in action.option_strings]
            near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {arguments.parser.prog} --help"
            raise SubquadError(f"unknown argument '{unknown[0]}': {hint}")
        return arguments

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


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def add_checkpoint(parser: Parser) -> None:
    """The argument that names trained weights."""
    parser.add_argument("checkpoint", type=Path, help="run folder, or a weight file of one")
