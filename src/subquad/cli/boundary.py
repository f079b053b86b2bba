"""How a command ends that could not do what it was asked: one line on stderr and an exit status, never a trace."""

import csv
import json
import lzma
import os
import pickle
import signal
import sys
import tarfile
import threading
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from subquad.errors import InterruptedRunError, SubquadError, Terminated, named_reason, reason_of
from subquad.text import escaped

MISTAKE, FAULT, INTERRUPTED, TERMINATED = 2, 1, 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit statuses: of what a user, a file or the machine causes; of what only we can have caused; of signals."""

CAUSED_OUTSIDE = (
    OSError,
    ImportError,
    UnicodeError,
    EOFError,
    json.JSONDecodeError,
    yaml.YAMLError,
    csv.Error,
    pickle.UnpicklingError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""What libraries raise over files, the system, and what is not installed."""

# PyTorch has a class of its own for GPUs only
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "Storage size calculation overflowed")


def wants_trace(argv: Sequence[str]) -> bool:
    """Whether --debug or SUBQUAD_DEBUG asks for traces; before the arguments are parsed, which can go wrong too."""
    return "--debug" in argv or os.environ.get("SUBQUAD_DEBUG", "") not in ("", "0")


def complain(error: BaseException, trace: bool) -> int:
    """Say on stderr, in one line, why a command ends, with the trace in front where it is asked for; the status."""
    if trace:
        traceback.print_exception(error)
    line, status = explain(error)
    # the names of files may hold line breaks, and what terminals obey
    print(f"subquad: {escaped(' '.join(line.splitlines()))}", file=sys.stderr)
    return status


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Let what this package warns of be one line on stderr, without the place in its code; others' are as they are."""
    ours, before = str(Path(__file__).parents[1]), warnings.formatwarning

    def in_a_line(message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        if category is not UserWarning or not filename.startswith(ours):
            return before(message, category, filename, lineno, line)
        return f"subquad: {escaped(' '.join(str(message).splitlines()))}\n"

    warnings.formatwarning = in_a_line
    try:
        yield
    finally:
        warnings.formatwarning = before


def say(line: str) -> None:
    """Print a line in which names of files may stand, whatever characters these have."""
    print(escaped(line))


def explain(error: BaseException) -> tuple[str, int]:
    """The line for an exception, and the exit status."""
    if isinstance(error, InterruptedRunError):
        return str(error), TERMINATED if error.terminated else INTERRUPTED
    if isinstance(error, SubquadError):
        return str(error), MISTAKE
    if isinstance(error, Terminated):
        return "terminated", TERMINATED
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
        return f"there is not enough memory: {reason_of(error)}: ask for less at a time", MISTAKE
    if isinstance(error, RecursionError):
        return f"something is nested too deeply: {reason_of(error)}", MISTAKE
    if isinstance(error, CAUSED_OUTSIDE):
        return reason_of(error), MISTAKE
    from subquad.plugins import at_fault

    plug_in = at_fault(error)
    whose, status = ("subquad", FAULT) if plug_in is None else (plug_in, MISTAKE)
    return f"{named_reason(error)}: this is a fault of {whose}; --debug shows where it happened", status


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt inside the block and SIGTERM `Terminated`, when no import is under way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and os.getpid() != owner:
            # a process that loads images ends as it would without us
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if _is_importing(frame):
            # many a library catches everything while it is imported, and is half there afterwards
            signal.signal(signal.SIGALRM, lambda _, later: stop(number, later))
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            return
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib._bootstrap"):
            return True
        frame = frame.f_back
    return False
