"""A watch over what reading a file may not do: write, import, execute, start, change, grow or take long."""

import builtins
import collections
import operator
import os
import random
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from subquad.errors import SubquadError
from subquad.models import read_weights, restore_model
from subquad.weights import files, pickles, stand_ins, stored, torch_files

HARMLESS = (
    "object.__getattr__",
    "object.__setattr__",
    "object.__delattr__",
    "sys._getframe",
    "cpython.",
    "gc.",
    "os.listdir",
    "os.scandir",
    "builtins.id",
)
"""Events that change nothing outside: what is changed inside is compared. All others, but opening to read, are not."""


LONGEST = 5.0
"""Seconds that a file may take, on a machine that has other work."""


class Watch:
    """Calls functions and says what they did that they should not have.

    Args:
        folder: stays empty; the process works in it.
        growth: bytes that memory may grow by, since the first call of `settled`.
    """

    def __init__(self, folder: Path, growth: int = 2**26) -> None:
        self.folder, self.growth, self.highest = folder, growth, 0
        self.events: list[str] = []
        self.watched: list[tuple[Any, dict[str, Any]]] = []
        self.constants: list[tuple[Any, tuple[Any, ...]]] = []
        self.active, self.allowed = False, ""
        self.slowest = 0.0
        sys.addaudithook(self._hear)

    def settled(self) -> None:
        """From now on nothing may change: what is loaded when it is first needed is there."""
        self.watched = [(thing, dict(vars(thing))) for thing in _things()]
        self.constants = [(function, _facts(function)) for function in _functions()]
        self.highest = _most_memory()

    def call(self, function: Callable[[Path], Any], path: Path) -> Any:
        """What a function makes of a file, or the SubquadError that it raised."""
        self.allowed, self.active, start = str(path), True, time.process_time()
        try:
            return function(path)
        except SubquadError as error:
            return error
        finally:
            self.active = False
            self.slowest = max(self.slowest, time.process_time() - start)

    def complaints(self) -> list[str]:
        """What has happened since it was last asked."""
        said, self.events = self.events, []
        if left := [path.name for path in self.folder.iterdir()]:
            said.append(f"files were written: {left}")
        if (grown := _most_memory() - self.highest) > self.growth:
            said.append(f"memory grew by {grown >> 20} MB")
        return said

    def changes(self) -> list[str]:
        """Attributes that are not as they were when all was settled."""
        said = []
        for thing, before in self.watched:
            now = vars(thing)
            if len(now) != len(before) or not all(map(operator.is_, now.values(), before.values())):
                changed = [key for key in now.keys() | before.keys() if now.get(key) is not before.get(key)]
                said.append(f"{thing} has other attributes: {changed}")
        said += [f"{function} is another" for function, facts in self.constants if _facts(function) != facts]
        return said

    def grown(self) -> int:
        """Bytes that memory grew by."""
        return _most_memory() - self.highest

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active or event.startswith(HARMLESS):
            return
        if (
            event == "open"
            and str(arguments[0]) == self.allowed
            and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        ):
            return
        # a descriptor of the file that is open already
        if event == "open" and isinstance(arguments[0], int) and arguments[1] in ("r", "rb"):
            return
        self.events.append(f"{event} {str(arguments)[:200]}")


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _functions() -> list[Any]:
    modules = torch._utils, torch._tensor, files, pickles, stand_ins, stored, torch_files
    return [value for module in modules for value in vars(module).values() if isinstance(value, types.FunctionType)]


def _things() -> list[Any]:
    """Modules, classes and functions that a file could name."""
    modules = [builtins, torch, torch._utils, torch._tensor, torch.storage, torch.serialization, collections]
    modules += [
        torch.nn,
        torch.nn.parameter,
        torch.nn.modules.module,
        os,
        sys,
        files,
        pickles,
        stand_ins,
        stored,
        torch_files,
    ]
    classes = [torch.UntypedStorage, torch.storage.TypedStorage, torch.FloatStorage, torch.Tensor, torch.nn.Parameter]
    classes += [torch.nn.Module, stand_ins.Unread, stand_ins.Name, pickles.Machine, stored.StoredTensor, stored.Storage]
    return [*modules, *classes, *_functions()]


def _facts(function: Any) -> tuple[Any, ...]:
    return function.__name__, function.__code__, function.__defaults__, function.__doc__, function.__module__


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """In another folder for a while."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def try_file(maker: Any, watch: Watch, folder: Path, seed: str) -> tuple[str, str, list[str]]:
    """Kind of a file, whether it was read or refused, and what is wrong with that."""
    kind, ending, content = maker.make(random.Random(seed))
    path = folder / f"file.{ending}"
    path.write_bytes(content)
    start = time.process_time()
    try:
        answer = watch.call(restore_model if kind == "note" else read_weights, path)
    except Exception as error:
        return kind, "broken", [f"{type(error).__name__}: {error}"]
    complaints = watch.complaints()
    if (seconds := time.process_time() - start) > LONGEST:
        complaints.append(f"it took {seconds:.1f} s")
    if isinstance(answer, SubquadError):
        if not str(answer).isprintable() or len(str(answer)) > 1000:
            complaints.append(f"not one line: {answer!r}")
        return kind, "refused", complaints
    if kind != "note":
        complaints += wrong_in(answer[0], maker.original if kind == "zip mutated" else None)
    return kind, "read", complaints


def wrong_in(state: dict[str, Any], original: dict[str, torch.Tensor] | None) -> list[str]:
    """What is wrong with a state dict that was read; every number of it is looked at."""
    copies = {name: tensor.clone() for name, tensor in state.items()}
    if original is None or (
        copies.keys() == original.keys() and all(torch.equal(copies[name], original[name]) for name in original)
    ):
        return []
    return [f"other weights than were saved: {copies}"]
