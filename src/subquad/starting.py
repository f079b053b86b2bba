"""The first seconds of the command `subquad`, in which libraries are imported.

Some of them catch whatever is raised meanwhile, and are half there afterwards. So a signal ends the process at once: in
one line, and nothing has begun yet.
"""

import logging
import os
import signal
import sys
from types import FrameType


def is_command() -> bool:
    """Whether this process is the command, as a program or as `python -m subquad`; not whoever imports the library."""
    program = sys.argv[0] if sys.argv else ""
    name = os.path.basename(program)  # noqa: PTH119 (pathlib takes a while to import)
    if name == "__main__.py":
        # as `python -m` calls it once it was found
        name = os.path.basename(os.path.dirname(program))  # noqa: PTH119, PTH120
    if name == "-m":
        # while a package is looked for; which one only the interpreter's own arguments say
        asked = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
        return asked[:1] == ["subquad"]
    return name in ("subquad", "subquad.exe")


def command_line() -> str:
    """What this process was called with, as it can be typed again: our command by its name, not by where it lies."""
    import shlex

    return shlex.join(["subquad", *sys.argv[1:]] if is_command() else sys.argv)


def open_what_is_closed() -> None:
    """Give a process that was started without stdin, stdout or stderr (`>&-`, some daemons) ones that lead nowhere.

    Where they stay closed, the next files that are opened have their numbers, and what a library prints lands in those.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # the lowest number that is free, which is this one
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 (as above; it stays open)


def quiet_torchao() -> None:
    """Let torchao, which transformers imports where it is there, not warn of its own code and of how it was built."""
    for name in ("torch.utils._pytree", "torchao"):
        # a filter, since PyTorch sets the levels of its own when it is imported
        logging.getLogger(name).addFilter(_is_an_error)


def _is_an_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def end_by_signals() -> None:
    """Let SIGINT and SIGTERM end the process in one line, until the command itself sees to them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    word = "terminated" if number == signal.SIGTERM else "interrupted"
    if not _was_started_by_a_command():
        os.write(2, f"subquad: {word}\n".encode())
    os._exit(128 + number)


def _was_started_by_a_command() -> bool:
    """Whether this process computes for another one of ours, which got the signal as well and says so."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None
