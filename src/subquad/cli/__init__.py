"""The commands of `subquad`: each parses its arguments, calls the library and prints what comes back."""

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from subquad.keeping_memory import keep_memory
from subquad.starting import is_command, open_what_is_closed, quiet_torchao

if TYPE_CHECKING:
    from subquad.cli.parser import Parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    All commands end here: a user's mistake, a broken file or a full disk is one line on stderr and exit status 2, a
    fault of ours one line and status 1, an interruption status 130, or 143 by SIGTERM. --debug, or the variable
    SUBQUAD_DEBUG=1, shows the trace in front of that line.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    from subquad.cli.boundary import complain, ended_by_signals, wants_trace, warnings_in_a_line

    open_what_is_closed()
    # names of files may have characters that a terminal has not
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        arguments = make_parser(argv).parse(argv)
        if is_command():
            keep_memory()
            quiet_torchao()
        with ended_by_signals(), first_process_speaks(), warnings_in_a_line():
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


def make_parser(argv: Sequence[str] | None = None) -> "Parser":
    """The parser of all commands; given the arguments, that of the command they ask for, beside the others' names.

    What it takes to describe a command can take seconds to import.
    """
    # imports that take time are made here, where an interruption is one line
    from subquad import __version__
    from subquad.cli.parser import Commands, Parser
    from subquad.command_table import COMMANDS

    parser = Parser(prog="subquad", description="Sub-quadratic attention for vision: train, compare, look inside.")
    parser.add_argument("--version", action="version", version=f"subquad {__version__}")
    commands = Commands(parser)
    files = list(dict.fromkeys(file for file, _ in COMMANDS.values()))
    needed = files if argv is None else _files_for(argv, files)
    for file in files:
        if file in needed:
            importlib.import_module(f"subquad.cli.{file}").add_commands(commands)
        else:
            for name in (name for name, (place, _) in COMMANDS.items() if place == file):
                commands.name_only(name)
    return parser


def _files_for(argv: Sequence[str], files: Sequence[str]) -> Sequence[str]:
    """The files whose commands have to be there for these arguments."""
    from subquad.command_table import COMMANDS
    from subquad.plugins import installed

    asked = next((word for word in argv if not word.startswith("-")), None)
    if asked in COMMANDS:
        return [COMMANDS[asked][0]]
    # a name that is not in the table, or all names, may be a plug-in's
    return files if asked is not None or installed("subquad.tasks") else []
