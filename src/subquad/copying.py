"""Copies of networks, and what can't be copied: functions in the place of a `forward` that hold the module itself.

PyTorch copies methods with what they are of, and functions as they are. What diffusers puts onto modules for its caches
(`enable_cache`) and other types of numbers in memory (`enable_layerwise_casting`) is such a function, and so is what
`forward = torch.compile(forward)` makes.
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from torch import nn

from subquad.errors import SubquadError

DEEP = 4
"""How many functions and objects within each other are looked into."""


Copied = TypeVar("Copied", bound=nn.Module)


def copied(model: Copied, hint: str = "take it away") -> Copied:
    """A copy of a network; raises as `refuse_held_forwards`."""
    refuse_held_forwards(model.named_modules(), hint)
    return deepcopy(model)


def refuse_held_forwards(modules: Iterable[tuple[str, nn.Module]], hint: str) -> None:
    """Raise for the first of some modules, by their paths, whose copy would call the module itself.

    Raises:
        SubquadError: there is one; `hint` says what to do besides.
    """
    for path, module in modules:
        if _holds_a_module(vars(module).get("forward")):
            named = f"the forward of {path or 'this network'}, a {type(module).__name__},"
            raise SubquadError(
                f"{named} was replaced by a function that holds this very module, as diffusers' enable_cache and "
                f"enable_layerwise_casting do, so that a copy would go on calling it: {hint}"
            )


def _holds_a_module(forward: Any) -> bool:
    """Whether a function, behind what fixes its arguments, has a module among what it was made with."""
    while isinstance(forward, partial):
        forward = forward.func
    return isinstance(forward, FunctionType) and any(_reaches(one, DEEP) for one in _made_with(forward))


def _made_with(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            # of a name that was given nothing yet
            continue


def _reaches(value: Any, deep: int) -> bool:
    """Whether this is a module, or a function or an object that has one."""
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, MethodType):
        return _reaches(value.__self__, deep)
    # what a library holds is no part of the function
    if deep == 0 or isinstance(value, type | ModuleType):
        return False
    if isinstance(value, partial):
        return any(_reaches(one, deep - 1) for one in (value.func, *value.args, *value.keywords.values()))
    if isinstance(value, FunctionType):
        return any(_reaches(one, deep - 1) for one in _made_with(value))
    return any(_reaches(one, deep - 1) for one in getattr(value, "__dict__", {}).values())
