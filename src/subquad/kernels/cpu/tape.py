"""Calls of the CPU kernels, written down once and made again by one call of the library.

A function of tokens whose whole work is done by kernels is run once while a `Recorder` listens: to the kernels, which
tell their arguments, and to PyTorch, which may make room and look at it in other ways, but compute nothing. What is
left of it is a `Tape`: the arguments as they lie in memory, and which of their pointers are another at each call.
Parameters are read where they lie.
"""

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from subquad.kernels.cpu.by_memory import PLAIN_NUMBERS
from subquad.kernels.cpu.library import heard_by, library
from subquad.kernels.declaring import OPERATORS

_LINE = 64
"""Bytes that what is read by vectors starts at a multiple of."""
_MOST_KEPT = 1 << 28
"""Bytes that a thread keeps of what is between; more is given back."""
_MAKES_ROOM = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
_MAY_LOOK = {"aten::flatten", "aten::reshape", "aten::contiguous", "aten::to", "aten::expand_as"}
"""What gives its tensor, looked at in another way, where that can be."""


class _Call(ctypes.Structure):
    """`Call` of source/replay.h."""

    _fields_ = [("kernel", ctypes.c_void_p), ("places", ctypes.c_void_p)]


class _Moving(ctypes.Structure):
    """`Moving` of source/replay.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("place", "which", "offset")]


class _Tape(ctypes.Structure):
    """`Tape` of source/replay.h."""

    _fields_ = [("arguments", ctypes.c_char_p), ("bytes", ctypes.c_int64), ("calls", ctypes.c_void_p)]
    _fields_ += [("call_count", ctypes.c_int64), ("moving", ctypes.c_void_p), ("moving_count", ctypes.c_int64)]


class _NotAllError(Exception):
    """Something is computed that is no kernel."""


class _Heard(NamedTuple):
    """A call of a kernel: its name, and of each argument its kind and its bytes."""

    name: str
    arguments: list[tuple[type, bytes]]


class _Room(NamedTuple):
    """Where memory lies that is another at each call, and where among `which` of what moves it will."""

    first: int
    behind: int
    which: int
    offset: int


class _Moved(NamedTuple):
    """Where in what moves."""

    which: int
    offset: int


class _Written(NamedTuple):
    """A call as it is written down: the kernel's name, and where its arguments lie in the tape's memory."""

    name: str
    places: list[int]


class _Content(NamedTuple):
    """What a tape has: arguments, calls, which pointers are others at each call, and of how many tokens."""

    memory: bytes
    calls: list[_Written]
    moving: list[_Moving]
    tokens: int


class Tape:
    """Calls of kernels for tokens that lie as those did which it was recorded with.

    Args:
        calls: what was heard.
        rooms: the memory of tokens (`which` from 1 on), of the result (0), and of what is between (behind all tokens).
        parameters: the memory that does not move.
        shape: of the result.
        between: bytes of what is between.
        tokens: how many tensors of them there are.

    Raises ValueError where a kernel read other memory.
    """

    def __init__(
        self,
        calls: list[_Heard],
        rooms: list[_Room],
        parameters: list[tuple[int, int]],
        shape: torch.Size,
        between: int,
        tokens: int,
    ) -> None:
        memory, moving, written = bytearray(), [], []
        for name, arguments in calls:
            places = []
            for kind, content in arguments:
                memory += bytes(-len(memory) % 16)
                places.append(len(memory))
                moving += _pointers(kind, content, len(memory), rooms, parameters)
                memory += content
            written.append(_Written(name, places))
        self._keep(_Content(bytes(memory), written, moving, tokens), shape, between)

    @classmethod
    def of(cls, tapes: Sequence["Tape"], size: int) -> "Tape":
        """All of them in a row: each has what the one before gives, of `size` bytes at most, as its first tokens."""
        memory, written, moving, line = bytearray(), [], [], -(-size // _LINE) * _LINE
        for number, tape in enumerate(tapes):
            memory += bytes(-len(memory) % 16)
            start, own = len(memory), tape._content
            # what goes from one to the next is in two rooms in turn, before what is between the steps of any
            last = own.tokens + 1
            given = _Moved(1, 0) if number == 0 else _Moved(last, (number - 1) % 2 * line)
            result = _Moved(0, 0) if number == len(tapes) - 1 else _Moved(last, number % 2 * line)
            to = [result, given, *(_Moved(which, 0) for which in range(2, last)), _Moved(last, 2 * line)]
            written += [_Written(name, [start + place for place in places]) for name, places in own.calls]
            for one in own.moving:
                which, offset = to[one.which]
                moving.append(_Moving(start + one.place, which, offset + one.offset))
            memory += own.memory
        row, between = cls.__new__(cls), max(each._between for each in tapes)
        row._keep(_Content(bytes(memory), written, moving, own.tokens), tapes[-1]._shape, 2 * line + between)
        return row

    def _keep(self, content: _Content, shape: torch.Size, between: int) -> None:
        self._content, self._shape, self._between = content, shape, between
        loaded, calls = library(), []
        for name, places in content.calls:
            kept = (ctypes.c_int64 * len(places))(*places)
            address = ctypes.cast(getattr(loaded, f"{name}_unpacked"), ctypes.c_void_p).value
            calls.append((_Call(address, ctypes.addressof(kept)), kept))
        calls_kept = (_Call * len(calls))(*(call for call, _ in calls))
        moving_kept = (_Moving * len(content.moving))(*content.moving)
        self._alive = calls, calls_kept, moving_kept
        self._tape = _Tape(content.memory, len(content.memory), ctypes.addressof(calls_kept), len(calls))
        self._tape.moving, self._tape.moving_count = ctypes.addressof(moving_kept), len(content.moving)
        self._address = ctypes.c_void_p(ctypes.addressof(self._tape))
        # both elements' are the same
        self._replay = loaded.replay_float

    def __call__(self, *tokens: Tensor) -> Tensor:
        """What is computed of contiguous tokens, of the very sizes."""
        out, between = tokens[0].new_empty(self._shape), _room_of(self._between)
        pointers = [x.data_ptr() for x in (out, *tokens, between)]
        self._replay(self._address, (ctypes.c_void_p * len(pointers))(*pointers))
        return out


class _Kept(threading.local):
    """What is between, of all tapes of a thread: one runs at a time."""

    room: Tensor | None = None


_KEPT = _Kept()


def _room_of(count: int) -> Tensor:
    """So many bytes, or more; what was there before may still be.

    Memory that is given back is often taken from the system anew, page by page, which takes longer than to fill it.
    """
    room = _KEPT.room
    if room is not None and room.numel() >= count:
        return room
    room = torch.empty(count, dtype=torch.uint8)
    if count <= _MOST_KEPT:
        _KEPT.room = room
    return room


class Recorder(TorchDispatchMode):
    """Listens to what `function(*tokens)` does, until it does what can't be written down."""

    def __init__(self, function: Callable[..., Tensor | None], *tokens: Tensor) -> None:
        super().__init__()
        self._function, self._tokens = function, tokens
        self._made: list[Tensor] = []
        self._calls: list[_Heard] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("subquad::"):
            # as the dispatcher does, but listening to what it does
            with self:
                return OPERATORS[name.removeprefix("subquad::")].implementations[args[-1]].function(*args[:-1])
        gives_views = any(one.alias_info is not None for one in func._schema.returns)
        if func._schema.is_mutable or not (gives_views or name in _MAKES_ROOM | _MAY_LOOK):
            # before it is computed, which may take long and would be for nothing
            raise _NotAllError
        results = func(*args, **(kwargs or {}))
        if name in _MAKES_ROOM:
            self._made.append(results)
        elif not _looks(results, args):
            raise _NotAllError
        return results

    def _hear(self, kernel: Any, *arguments: Any) -> Any:
        if not all(isinstance(one, (ctypes.Structure, *PLAIN_NUMBERS)) for one in arguments):
            raise _NotAllError
        self._calls.append(_Heard(kernel.__name__, [(type(one), bytes(one)) for one in arguments]))
        return kernel(*arguments)

    def run(self, parameters: Iterable[Tensor]) -> tuple[Tensor, Tape] | None:
        """What the function gives, and a tape of it, which may read `parameters`; None where there can be none."""
        try:
            with self, heard_by(self._hear):
                result = self._function(*self._tokens)
        except _NotAllError:
            return None
        if result is None or not self._calls:
            return None
        tape = self._tape_of(result, [_memory_of(x) for x in parameters])
        return None if tape is None else (result, tape)

    def _tape_of(self, result: Tensor, parameters: list[tuple[int, int]]) -> Tape | None:
        last, between, rooms = len(self._tokens) + 1, 0, []
        for which, x in enumerate(self._tokens, 1):
            # they may lie within a larger tensor, elsewhere at each call
            rooms.append(_Room(x.data_ptr(), x.data_ptr() + x.numel() * x.element_size(), which, 0))
        size, first = result.numel() * result.element_size(), result.data_ptr()
        for x in self._made:
            start, behind = _memory_of(x)
            if start == first and behind - start == size:
                rooms.append(_Room(start, behind, 0, 0))
            else:
                rooms.append(_Room(start, behind, last, between))
                between += -(start - behind) // _LINE * _LINE + _LINE
        is_made = any(room.which == 0 for room in rooms) and result.dtype == self._tokens[0].dtype
        if not result.is_contiguous() or not is_made or _overlap(rooms):
            return None
        try:
            return Tape(self._calls, rooms, parameters, result.shape, between, len(self._tokens))
        except ValueError:
            return None


def _memory_of(x: Tensor) -> tuple[int, int]:
    """The first byte of a tensor's memory, and that behind the last."""
    memory = x.untyped_storage()
    return memory.data_ptr(), memory.data_ptr() + memory.nbytes()


def _overlap(rooms: list[_Room]) -> bool:
    """Whether some have memory in common: whose a pointer is could not be said."""
    rooms = sorted(rooms)
    return any(one.behind > following.first for one, following in itertools.pairwise(rooms))


def _looks(results: Any, args: Any) -> bool:
    """Whether results are what is given, looked at in other ways."""
    seen = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, Tensor)}
    return all(isinstance(x, Tensor) and x.untyped_storage().data_ptr() in seen for x in tree_leaves(results))


@functools.cache
def _pointers_in(kind: type) -> tuple[int, ...]:
    """Where there are pointers in an argument."""
    if kind is ctypes.c_void_p:
        return (0,)
    if not issubclass(kind, ctypes.Structure):
        return ()
    fields = [(getattr(kind, field[0]).offset, field[1]) for field in kind._fields_]
    return tuple(offset + place for offset, inner in fields for place in _pointers_in(inner))


def _pointers(
    kind: type, content: bytes, place: int, rooms: list[_Room], parameters: list[tuple[int, int]]
) -> list[_Moving]:
    """Those of an argument that move."""
    moving = []
    for at in _pointers_in(kind):
        pointer = ctypes.c_void_p.from_buffer_copy(content, at).value
        if pointer is None:
            continue
        room = next((room for room in rooms if room.first <= pointer < room.behind), None)
        if room is None:
            if any(first <= pointer < behind for first, behind in parameters):
                continue
            raise ValueError("a kernel reads what is neither a parameter nor was made for it")
        moving.append(_Moving(place + at, room.which, room.offset + pointer - room.first))
    return moving
