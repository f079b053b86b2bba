"""What one module computes again and again by kernels alone: listened to once, then made again from a tape.

Which kernel computes, whether shapes fit and how parameters are handed over depends on little that changes from one
call to the next, and to find it out anew takes Python longer than to compute a layer of few tokens. What was found
holds for tokens of the same shapes as long as the module, and all within it, is as it was, and its parameters lie where
they lay: they are read there, so that changes in place, by whatever way, are seen.
"""

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from subquad import spread
from subquad.kernels import backends
from subquad.kernels.cpu.library import is_heard_here
from subquad.kernels.cpu.tape import Recorder, Tape
from subquad.kernels.declaring import is_heard
from subquad.tracing import is_listened_to

MOST = 16
"""Sizes that a module is listened to with, and changes of it after which it is not any more."""


TAPES = "_tapes_of_subquad"
"""Where a module has its tapes: with it, as they hold what may lead back to it, and are gone when it is."""

OF_EVERY_MODULE = (vars(nn.Module()).keys() - {"training"}) | {TAPES}
"""What PyTorch, or this file, keeps with a module beside what its class has."""


class _State:
    """How a module and all within it are: what they have, and where parameters lie."""

    def __init__(self, owner: nn.Module) -> None:
        modules = list(owner.modules())
        # the owner itself is not held: it goes when nobody else holds it, and this with it
        self._owner, self._within = ref(owner), modules[1:]
        self._classes = list(map(type, modules))
        self.parameters = [*owner.parameters(), *owner.buffers()]
        own = [(vars(each), vars(each).keys() - OF_EVERY_MODULE) for each in modules]
        parts = [part for each in modules for part in (each._parameters, each._buffers, each._modules)]
        seen = own + [(part, part.keys()) for part in parts if part]
        self._hooks = [hooks for each in modules for hooks in (each._forward_hooks, each._forward_pre_hooks)]
        self._parts = [*(part for part, _ in seen), *self._hooks]
        self._lengths = [len(part) for part in self._parts]
        self._tapes = [TAPES in part for part in self._parts]
        self._holders = [part for part, names in seen for _ in names]
        self._names = [name for _, names in seen for name in names]
        self._values = list(map(getitem, self._holders, self._names))
        calls = [vars(each)["forward"] for each in modules if "forward" in vars(each)]
        self._is_called = not all(getattr(call, "computes_the_same", False) for call in calls)
        # tensors of other classes, as quantized ones, lie nowhere
        self.has_places = all(type(x) in (nn.Parameter, Tensor) for x in self.parameters)
        self._places = self._where() if self.has_places else []

    def _where(self) -> list[Any]:
        return [(x.data_ptr(), x.shape, x.stride()) for x in self.parameters]

    def holds(self) -> bool:
        """Whether nothing is another."""
        try:
            has_the_same = list(map(getitem, self._holders, self._names)) == self._values
        except (KeyError, RuntimeError, ValueError):
            # something is gone, or tensors do not say in one word whether they are equal
            return False
        if not has_the_same or [type(self._owner()), *map(type, self._within)] != self._classes:
            return False
        return self._has_lengths() and self._places == self._where()

    def _has_lengths(self) -> bool:
        """Whether there is neither more nor less; tapes of modules within may have come since."""
        if (lengths := list(map(len, self._parts))) == self._lengths:
            return True
        tapes = [TAPES in part for part in self._parts]
        pairs = (lengths, tapes), (self._lengths, self._tapes)
        now, before = ([one - more for one, more in zip(*pair, strict=True)] for pair in pairs)
        if now != before:
            return False
        self._lengths, self._tapes = lengths, tapes
        return True

    def is_of(self, owner: nn.Module) -> bool:
        """Whether it is a module's."""
        return self._owner() is owner

    def is_heard(self) -> bool:
        """Whether somebody listens to a module within, or has put something in its forward's place."""
        return self._is_called or is_listened_to(*self._hooks)

    def learns(self) -> bool:
        """Whether a gradient is wanted of a parameter."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.parameters)


class _Row:
    """How modules in a row are, each of which makes all it makes by a tape."""

    def __init__(self, owner: nn.Module, states: list[_State]) -> None:
        self._owner, self._states = ref(owner), states

    def holds(self) -> bool:
        """Whether they are the same, and nothing of them is another."""
        owner = self._owner()
        return owner is not None and self.is_of(owner) and all(state.holds() for state in self._states)

    def is_of(self, owner: nn.Module) -> bool:
        """Whether they are what an owner has, one after the other."""
        modules = list(owner.children())
        return len(modules) == len(self._states) and all(
            state.is_of(module) for state, module in zip(self._states, modules, strict=True)
        )

    def learns(self) -> bool:
        """Whether a gradient is wanted of a parameter."""
        return torch.is_grad_enabled() and any(state.learns() for state in self._states)


_UNKNOWN: Any = object()


@dataclass
class _Found:
    """What is known of a function of a module: tapes with what they hold for, or None where there can be none.

    `changes` are those after which a tape did not hold any more.
    """

    tapes: dict[Hashable, tuple[_State, Tape] | None] = field(default_factory=dict)
    rows: dict[Hashable, tuple[_Row, Tape]] = field(default_factory=dict)
    changes: int = 0


def _all_modules_are_heard() -> bool:
    """Whether somebody listens to whatever module is called."""
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


class Tapes(dict[str, _Found]):
    """What is known of a module's functions, by name. A copy of the module, or one from a file, knows nothing.

    What is known holds what the module has, this among it: it is forgotten as soon as the module is gone.
    """

    def __init__(self, owner: nn.Module | None = None) -> None:
        super().__init__()
        self.owner = None if owner is None else ref(owner, lambda _: self.clear())

    def __copy__(self) -> "Tapes":
        return Tapes()

    def __deepcopy__(self, memo: Any) -> "Tapes":
        return Tapes()

    def __reduce__(self) -> Any:
        return Tapes, ()


def tapes_of(owner: nn.Module) -> Tapes:
    """What is known of a module."""
    tapes = vars(owner).get(TAPES)
    # a shallow copy has another's
    if tapes is None or tapes.owner is None or tapes.owner() is not owner:
        tapes = vars(owner)[TAPES] = Tapes(owner)
    return cast(Tapes, tapes)


def replayed(
    owner: nn.Module,
    name: str,
    function: Callable[..., Tensor | None],
    *tokens: Tensor,
    settings: Hashable = None,
) -> Tensor | None:
    """What `function(*tokens)` gives, by a tape from the second call of the same sizes on, where kernels do all of it.

    While it is listened to, `may_be_replayed` is true; where it does what can't be written down it begins again.

    Args:
        owner: whose parameters it reads.
        name: of the function among those of its owner.
        function: of tokens, of what its owner has, and of `settings`, and of nothing else.
        tokens: what differs from call to call.
        settings: what else it depends on.
    """
    if not may_replay(tokens):
        return function(*tokens)
    key = key_of(tokens, settings)
    found = tapes_of(owner).setdefault(name, _Found())
    # threads may call a module at a time
    kept = found.tapes.get(key, _UNKNOWN)
    if kept is not _UNKNOWN:
        if kept is None:
            return function(*tokens)
        state, tape = kept
        if state.holds():
            return function(*tokens) if state.learns() else _noted(Made(state, tape, tokens, tape(*tokens)))
        found.tapes.pop(key, None)
        found.changes += 1
    if len(found.tapes) >= MOST or found.changes >= MOST:
        return function(*tokens)
    state = _State(owner)
    if state.is_heard() or not state.has_places:
        return function(*tokens)
    recorded = Recorder(function, *tokens).run(state.parameters)
    if recorded is None:
        found.tapes[key] = None
        return function(*tokens)
    result, tape = recorded
    found.tapes[key] = state, tape
    return _noted(Made(state, tape, tokens, result))


def replayed_in_a_row(
    owner: nn.Module, function: Callable[..., Tensor], *tokens: Tensor, settings: Hashable = None
) -> Tensor:
    """What `function(*tokens)` gives, which calls the modules of `owner` in turn, each with what the one before gave.

    The first of the tokens go into the first module, all others into each. Where each of them is a tape (`replayed`)
    and nothing else, all are one call of the library from then on: of a small network Python takes half as long as
    the kernels to go from one block to the next.
    """
    if not may_replay(tokens):
        return function(*tokens)
    key = key_of(tokens, settings)
    found = tapes_of(owner).setdefault("in a row", _Found())
    kept = found.rows.get(key)
    if kept is not None:
        row, tape = kept
        if row.holds():
            return function(*tokens) if row.learns() else tape(*tokens)
        found.rows.pop(key, None)
        found.changes += 1
    if len(found.rows) >= MOST or found.changes >= MOST:
        return function(*tokens)
    result, made = noting(function, *tokens)
    new = _in_a_row(owner, tokens, made, result)
    if new is None:
        found.changes += 1
    else:
        found.rows[key] = new
    return result


def _in_a_row(
    owner: nn.Module, tokens: tuple[Tensor, ...], made: "list[Made]", result: Tensor
) -> tuple[_Row, Tape] | None:
    """What was made as one; None where it was not made by each module of its owner, of what the one before made."""
    row, (x, *others) = _Row(owner, [each.state for each in made]), tokens
    if not made or not row.is_of(owner) or any(len(each.tokens) != len(tokens) for each in made):
        return None
    # they are all held, so that no two lie in the same place
    pairs = list(zip([*(each.tokens[0] for each in made), result], [x, *(each.result for each in made)], strict=True))
    for each in made:
        pairs += zip(each.tokens[1:], others, strict=True)
    if not all(_are_the_same(one, other) for one, other in pairs):
        return None
    size = max(each.result.numel() * each.result.element_size() for each in made)
    return row, Tape.of([each.tape for each in made], size)


def _are_the_same(one: Tensor, other: Tensor) -> bool:
    """Whether these are the same numbers, which lie in the same place."""
    place = (one.data_ptr(), one.shape, one.dtype)
    return place == (other.data_ptr(), other.shape, other.dtype) and one.is_contiguous() and other.is_contiguous()


def key_of(tokens: tuple[Tensor, ...], settings: Hashable) -> Hashable:
    """What a tape holds for."""
    sizes = [(x.shape, x.dtype) for x in tokens]
    return (*sizes, settings, torch.get_num_threads(), backends.asked(None))


class Made(NamedTuple):
    """What was made of tokens by a tape, or while it was recorded."""

    state: _State
    tape: Tape
    tokens: tuple[Tensor, ...]
    result: Tensor


class _Noted(threading.local):
    """What was made in this thread, while somebody wants to know."""

    made: list[Made] | None = None


_NOTED = _Noted()


def _noted(made: Made) -> Tensor:
    if _NOTED.made is not None:
        _NOTED.made.append(made)
    return made.result


def noting(function: Callable[..., Tensor], *tokens: Tensor) -> tuple[Tensor, list[Made]]:
    """What `function(*tokens)` gives, and what within it was made by tapes."""
    before, _NOTED.made = _NOTED.made, []
    try:
        return function(*tokens), _NOTED.made
    finally:
        _NOTED.made = before


def may_be_replayed() -> bool:
    """Whether what is computed here is listened to: steps that pay only where they are made again are taken then."""
    return is_heard_here()


def may_replay(tokens: tuple[Tensor, ...]) -> bool:
    """Whether kernels alone decide on what is computed of these, and nobody listens."""
    if is_heard(tokens) or spread.is_spread() or torch.is_autocast_enabled("cpu") or _all_modules_are_heard():
        return False
    learned = torch.is_grad_enabled()
    return all(
        x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0 and not (learned and x.requires_grad)
        for x in tokens
    )
