"""The parser of the commands: one-line complaints, groups of commands, and what several commands share."""

import argparse
import difflib
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from subquad.command_table import COMMANDS
from subquad.errors import SubquadError, shown, unknown_name
from subquad.flags import pixels, to_read

LONGEST_NAME = 200
"""Bytes of the name of a folder that a run is kept in: file systems take 255."""

FREE_TEXTS = ("prompt", "negative_prompt")
"""Arguments that may be empty, as they say something in words."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows what a flag is where it is left out, where that says something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # 0 is a number that says something
        if action.required or action.default is False or action.default in (None, "", []):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line, with the nearest flag suggested."""

    refusal = ""
    """Why the command can't be had; its arguments are not looked at then."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **settings)
        text = "show the trace of what goes wrong, as SUBQUAD_DEBUG=1 does"
        self.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=text)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        arguments, unknown = self.parse_known_args(argv)
        if unknown and arguments.parser.refusal:
            raise SubquadError(arguments.parser.refusal)
        if unknown:
            known = [flag for action in arguments.parser._actions for flag in action.option_strings]
            sized = [action for action in arguments.parser._actions if action.type is pixels and action.nargs is None]
            height = getattr(arguments, sized[0].dest) if sized else None
            if isinstance(height, int) and unknown[0].isdecimal():
                # which a recipe's flag takes
                flag = f"{sized[0].option_strings[-1]} {height},{unknown[0]}"
                raise SubquadError(f"unknown argument '{unknown[0]}': height and width are one word, {flag}")
            near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {arguments.parser.prog} --help"
            raise SubquadError(f"unknown argument '{unknown[0]}': {hint}")
        return arguments

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        # as a variable of a script that is not set: it was taken as left out, which may mean other data or weights.
        # Of a recipe's fields, which have no default here, an empty one may mean something
        may_be_empty = action.default in (argparse.SUPPRESS, "") or action.dest in FREE_TEXTS
        may_be_empty |= action.nargs == argparse.PARSER
        if not text.strip() and action.type is None and not may_be_empty:
            raise argparse.ArgumentError(action, "is empty: leave it out" if action.option_strings else "is empty")
        return super()._get_value(action, text)

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
        return Commands(self._new(name, text))

    def name_only(self, name: str) -> None:
        """A command of the table that is not asked for now."""
        self._new(name, COMMANDS[name][1])

    def add(self, name: str, run: Callable[[argparse.Namespace], None], text: str | None = None) -> Parser:
        """A command of this name, which `run` carries out; the table says what it does if no text does."""
        parser = self._new(name, COMMANDS[name][1] if text is None else text)
        parser.set_defaults(run=run, parser=parser)
        return parser

    def _new(self, name: str, text: str) -> Any:
        if name in self.parsers.choices:
            raise SubquadError(f"two commands are called {name}: an installed task must take another name for its own")
        return self.parsers.add_parser(name, help=text, description=text)


_NAMED_BY = {"networks": "--model", "U-Nets": "--unet"}
"""The flags that say that something else than layers is asked about."""


def flags_of(arguments: argparse.Namespace, kind: str, usual: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The values of the flags of one kind of thing, where a command can be asked about several kinds.

    Args:
        arguments: with None or False for what was left out.
        kind: what was asked about, a key of `usual`: layers, networks, U-Nets.
        usual: what the flags of each kind are where they are left out.

    Raises:
        SubquadError: a flag of other kinds alone was given, which would change nothing.
    """
    own = usual[kind]
    for key in dict.fromkeys(key for flags in usual.values() for key in flags if key not in own):
        # 0 is a number that was given
        if getattr(arguments, key) is None or getattr(arguments, key) is False:
            continue
        flag = next(action.option_strings[-1] for action in arguments.parser._actions if action.dest == key)
        others = [other for other, flags in usual.items() if key in flags]
        if kind in _NAMED_BY:
            hint = f"leave it out beside {_NAMED_BY[kind]}"
        else:
            hint = f"name them with {' or '.join(_NAMED_BY[other] for other in others)}"
        raise SubquadError(f"{flag} is of {' and '.join(others)}: {hint}")
    values = vars(arguments)
    return {key: usually if values[key] is None else values[key] for key, usually in own.items()}


def run_name(text: str) -> str:
    """The name of a folder within the folder of runs, and of no other place."""
    if text in ("", ".", "..") or not text.isprintable() or {"/", "\\"} & set(text):
        raise argparse.ArgumentTypeError(
            f"is the name of a folder within --output, without / and \\, got {shown(text)}"
        )
    if len(os.fsencode(text)) > LONGEST_NAME:
        raise argparse.ArgumentTypeError(f"has more than {LONGEST_NAME} bytes: {shown(text)}")
    return text


def add_checkpoint(parser: Parser) -> None:
    """The argument that names trained weights."""
    parser.add_argument("checkpoint", type=to_read, help="folder of a run or conversion, or a file of it")
