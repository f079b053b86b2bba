"""The one exception that our own checks raise, so that the command line can print it as one line."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class SubquadError(ValueError):
    """A user's mistake: the message is one line that names the numbers and says what to do."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM."""


class InterruptedRunError(SubquadError):
    """Work was broken off from outside, and the message says how it goes on; by SIGTERM where it was `terminated`."""

    def __init__(self, message: str, stop: KeyboardInterrupt) -> None:
        super().__init__(message)
        self.terminated = isinstance(stop, Terminated)


class UnknownSettingError(SubquadError, TypeError):
    """An argument that nothing takes: also the TypeError that callers of a constructor expect."""


def network_within(thing: object) -> str:
    """What to say of something that is no network and has one: a pipeline of diffusers, what `open_trained` gives."""
    names = (name for name in ("model", "transformer", "unet", "network") if hasattr(thing, name))
    found = next((name for name in names if hasattr(getattr(thing, name), "named_parameters")), None)
    return "" if found is None else f": give its .{found}"


def unknown_name(kind: str, name: str, known: Iterable[str], error: type[SubquadError] = SubquadError) -> SubquadError:
    """Error for a `name` that is not among the `known` ones, with the nearest of them suggested."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    names = ", ".join(known)
    if not known:
        hint = "there are none"
    elif near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = f"known: {names if len(names) <= 300 else names[:299] + '…'}"
    return error(f"unknown {kind} {shown(name)}: {hint}")


def check_suffix(path: Path, what: str, *suffixes: str) -> None:
    """Raise where a file to write is not named as one that can be written."""
    if path.suffix not in suffixes:
        raise SubquadError(f"{what} written as {' or '.join(suffixes)}, got {path.name}")


def shown(value: object) -> str:
    """A value as it stands in a message: on one line, and not endless."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:
        # whole numbers of thousands of digits, which Python does not write
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= 80 else f"{text[:79]}…"


def reason_of(error: BaseException) -> str:
    """Why a library gave up, on one line: what its exception says, or what kind it is where it says nothing."""
    reason = reason_without_path(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        name = str(error.filename)
        return f"{name[:199]}{'…' if len(name) > 199 else ''}: {reason}"
    return reason


def named_reason(error: BaseException) -> str:
    """`reason_of` with the kind of the error in front, which many a reason means little without ("KeyError: 'x'")."""
    kind, reason = type(error).__name__, reason_of(error)
    return reason if reason == kind else f"{kind}: {reason}"


def reason_without_path(error: BaseException) -> str:
    """`reason_of` for a line that names the file itself."""
    text = " ".join((getattr(error, "strerror", None) or str(error)).split())
    return (text if len(text) <= 300 else f"{text[:299]}…") or type(error).__name__


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors in the block name the file."""
    try:
        yield
    except SubquadError as error:
        raise SubquadError(f"cannot open {path}: {error}") from None
