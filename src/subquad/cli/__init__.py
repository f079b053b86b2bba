"""The commands of `subquad`: each parses its arguments, calls the library and prints what comes back."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from subquad.cli import analyze, bench, detect, diffuse, library, lra, segment, trained, training
from subquad.cli.parser import Commands, Parser
from subquad.errors import SubquadError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake is one line on stderr and exit status 2, an interruption status 130."""
    try:
        arguments = make_parser().parse(list(sys.argv[1:] if argv is None else argv))
        with first_process_speaks():
            arguments.run(arguments)
    except SubquadError as error:
        print(f"subquad: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("subquad: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # whoever read the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


@contextlib.contextmanager
def first_process_speaks() -> Iterator[None]:
    """Of several processes only the first one prints its results; errors are for all of them to say."""
    if os.environ.get("RANK", "0") == "0":
        yield
    else:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield


def make_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(prog="subquad", description="Sub-quadratic attention for vision: train, compare, look inside.")
    parser.add_argument("--version", action="version", version=f"subquad {version('subquad')}")
    commands = Commands(parser)
    for room in (training, trained, detect, segment, diffuse, lra, analyze, bench, library):
        room.add_commands(commands)
    return parser
