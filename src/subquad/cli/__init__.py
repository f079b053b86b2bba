"""The commands of `subquad`: each parses its arguments, calls the library and prints what comes back."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subquad.cli.parser import Parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    All commands end here: a user's mistake, a broken file or a full disk is one line on stderr and exit status 2, a
    fault of ours one line and status 1, an interruption status 130, or 143 by SIGTERM. --debug, or the variable
    SUBQUAD_DEBUG=1, shows the trace in front of that line.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    from subquad.cli.boundary import complain, ended_by_signals, wants_trace

    # names of files may have characters that a terminal has not
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        arguments = make_parser().parse(argv)
        with ended_by_signals(), first_process_speaks():
            arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # whoever read the output has gone, as `head` does
        _speak_to_nobody()
    except (Exception, KeyboardInterrupt) as error:
        with contextlib.suppress(OSError):
            return complain(error, wants_trace(argv))
        return 2
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            # said above; Python would say it again at its end
            _speak_to_nobody()
    return 0


def _speak_to_nobody() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def first_process_speaks() -> Iterator[None]:
    """Of several processes only the first one prints its results; errors are for all of them to say."""
    if os.environ.get("RANK", "0") == "0":
        yield
    else:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield


def make_parser() -> "Parser":
    """The parser of all commands."""
    # imports that take time are made here, where an interruption is one line
    from importlib.metadata import version

    from subquad.cli import (
        analyze,
        bench,
        diffuse,
        exporting_commands,
        library_commands,
        released_weights,
        task_commands,
    )
    from subquad.cli.parser import Commands, Parser

    parser = Parser(prog="subquad", description="Sub-quadratic attention for vision: train, compare, look inside.")
    parser.add_argument("--version", action="version", version=f"subquad {version('subquad')}")
    commands = Commands(parser)
    for room in (
        task_commands,
        diffuse,
        analyze,
        bench,
        exporting_commands,
        library_commands,
        released_weights,
    ):
        room.add_commands(commands)
    return parser
