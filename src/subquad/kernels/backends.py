"""Who computes an operator: the backends there are, and which one is asked for.

`auto` takes kernels wherever they can do what is asked and PyTorch otherwise. A backend that was asked for by name, at
a call or with `use_backend`, and cannot do it is an error, never a silent fallback; only what it has no kernel for at
all (`subquad list --backends` says what it has) is computed by PyTorch. $SUBQUAD_BACKEND is what holds where nothing
was said. Inside torch.compile kernels stay what they are; what is exported has the eager form.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

from subquad.errors import SubquadError, shown, unknown_name
from subquad.plugins import Table
from subquad.ranges import checks_arguments
from subquad.substituting import Standing

BACKENDS = {
    "auto": "kernels where they can, PyTorch otherwise",
    "eager": "PyTorch on any device: the specification",
}
"""What can be asked for, with a line on each; backends add themselves."""


@dataclass(frozen=True)
class Backend:
    """Kernels for some devices.

    Args:
        name: what it is asked for by.
        summary: a line for people.
        devices: types of devices that it computes on, "cpu" or "cuda".
        dtypes: of the tensors that it takes.
        missing: says why it cannot work on this machine, in one line; None where it can.
        most_channels: says how many channels of a head it takes; None stands for any number.
        only_by_name: those of its devices on which `auto` leaves it alone.
        raises_half: whether half-precision tensors are handed to it as fp32, where an operator sums in fp32 anyway.
    """

    name: str
    summary: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    missing: Callable[[], str | None]
    most_channels: Callable[[], int] | None = None
    only_by_name: tuple[str, ...] = ()
    raises_half: bool = False


KERNELS: dict[str, Backend] = {}
"""The backends by name, in the order in which `auto` asks those of one device."""


def check_backend(name: str, backend: Any) -> None:
    """Raise a SubquadError where an object is no backend of this name."""
    if not isinstance(backend, Backend) or backend.name != name:
        which = f"the backend '{name}' is to be a subquad.kernels.Backend of this name"
        raise SubquadError(f"{which if name else 'a backend is a subquad.kernels.Backend'}, got {shown(backend)}")


PLUGGED_IN: Table[Backend] = Table("a backend", "subquad.backends", check_backend)
"""Backends of installed plug-ins, whose modules also say what they compute; `auto` takes them once they were named."""


def register_backend(backend: Backend) -> None:
    """Add a backend; what it computes is said by `implements`. Raises SubquadError where there is one of its name."""
    check_backend(getattr(backend, "name", ""), backend)
    if backend.name in BACKENDS:
        raise SubquadError(f'there is a backend "{backend.name}" already: give this one another name')
    KERNELS[backend.name] = backend
    BACKENDS[backend.name] = backend.summary


_entered = Standing(os.environ.get("SUBQUAD_BACKEND") or "auto")
_lock = Lock()

# a plain variable of the process: torch.compile guards on it, and its oldest version here can't trace anything better
_asked: str = _entered.first


@checks_arguments
@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Compute operations with the backend `name` of BACKENDS inside this context, in all threads."""
    global _asked
    known = _known(name)
    with _lock:
        token = _entered.enter(known)
        _asked = known
    try:
        yield
    finally:
        with _lock:
            _entered.leave(token)
            _asked = _entered.last


def asked(backend: str | None) -> str:
    """What is asked for: at a call, else around it. Raises SubquadError where nothing has that name."""
    return _known(backend or _asked)


def unavailable(name: str) -> str | None:
    """Why the backend `name` cannot work on this machine, in one line; None where it can."""
    return missing(name) if _known(name) in KERNELS else None


@torch.compiler.assume_constant_result
def missing(name: str) -> str | None:
    """Why the kernels of the backend `name` can't run here; None where they can."""
    return KERNELS[name].missing()


@torch.compiler.assume_constant_result
def most_channels(name: str) -> int | None:
    """How many channels of a head the backend `name` takes here; None for any number."""
    most = KERNELS[name].most_channels
    return None if most is None else most()


def _known(name: str) -> str:
    if name not in BACKENDS:
        if name not in PLUGGED_IN:
            raise unknown_name("backend", name, [*BACKENDS, *PLUGGED_IN])
        backend = PLUGGED_IN[name]
        # its module has to do so before it says what it computes
        if name not in BACKENDS:
            register_backend(backend)
    return name
