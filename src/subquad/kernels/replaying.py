"""What one module computes again and again by kernels alone: listened to once, then made again from a tape.

Which kernel computes, whether shapes fit and how parameters are handed over depends on little that changes from one
call to the next, and to find it out anew takes Python longer than to compute a layer of few tokens. What was found
holds for tokens of the same shapes as long as the module, and all within it, is as it was, and its parameters lie where
they lay: they are read there, so that changes in place, by whatever way, are seen.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, cast
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

    def is_heard(self) -> bool:
        """Whether somebody listens to a module within, or has put something in its forward's place."""
        return self._is_called or is_listened_to(*self._hooks)

    def learns(self) -> bool:
        """Whether a gradient is wanted of a parameter."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.parameters)


_UNKNOWN: Any = object()


@dataclass
class _Found:
    """What is known of a function of a module: tapes with what they hold for, or None where there can be none.

    `changes` are those after which a tape did not hold any more.
    """

    tapes: dict[Hashable, tuple[_State, Tape] | None] = field(default_factory=dict)
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
    if not _may_replay(tokens):
        return function(*tokens)
    sizes = [(x.shape, x.dtype) for x in tokens]
    key = (*sizes, settings, torch.get_num_threads(), backends.asked(None))
    found = tapes_of(owner).setdefault(name, _Found())
    # threads may call a module at a time
    kept = found.tapes.get(key, _UNKNOWN)
    if kept is not _UNKNOWN:
        if kept is None:
            return function(*tokens)
        state, tape = kept
        if state.holds():
            return function(*tokens) if state.learns() else tape(*tokens)
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
    return result


def may_be_replayed() -> bool:
    """Whether what is computed here is listened to: steps that pay only where they are made again are taken then."""
    return is_heard_here()


def _may_replay(tokens: tuple[Tensor, ...]) -> bool:
    """Whether kernels alone decide on what is computed of these, and nobody listens."""
    if is_heard(tokens) or spread.is_spread() or torch.is_autocast_enabled("cpu") or _all_modules_are_heard():
        return False
    learned = torch.is_grad_enabled()
    return all(
        x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0 and not (learned and x.requires_grad)
        for x in tokens
    )
