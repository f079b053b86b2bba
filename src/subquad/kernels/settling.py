"""Kernels that one module calls again and again: what there is to look at is looked at once.

Which kernel computes, whether shapes fit and how parameters are handed over depends on little that changes from one
call to the next. To find it out anew takes longer than to compute a narrow layer of few tokens. What was found holds
for tensors of the same shapes as long as the parameters lie where they lay: they are read there, so that changes in
place, by whatever way, are seen.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from subquad.kernels import backends
from subquad.kernels.choosing import choose, compute_if_possible
from subquad.kernels.declaring import Operator, Settings, Tensors, is_heard
from subquad.kernels.gradients import learns

Places = tuple[int, ...]
Found = tuple[Places, list[Any], Callable[..., Tensor]]

_FOUND: WeakKeyDictionary[nn.Module, dict[str, Found]] = WeakKeyDictionary()
"""By the module and the operator's name: which tensors move, what it holds for, and what computes these."""


def compute_for(owner: nn.Module, operator: Operator, tensors: Tensors, settings: Settings = ()) -> Tensor | None:
    """What `compute_if_possible` gives of these, of which all but some tokens are parameters of `owner`.

    A module has one set of parameters for an operator.
    """
    if is_heard(tensors) or learns(*tensors):
        return compute_if_possible(operator, tensors, settings)
    found = _FOUND.get(owner, {}).get(operator.name)
    if found is None or _held(found[0], tensors, settings) != found[1]:
        found = _settled(operator, tensors, settings)
        if found is None:
            return compute_if_possible(operator, tensors, settings)
        _FOUND.setdefault(owner, {})[operator.name] = found
    places, _, computed = found
    return computed(*[tensors[place] for place in places])


def _held(places: Places, tensors: Tensors, settings: Settings) -> list[Any]:
    """What a call was looked at for: shapes of what moves, the memory of what does not."""
    held: list[Any] = [backends.asked(None), settings]
    for place, tensor in enumerate(tensors):
        if tensor is None:
            held.append(None)
        elif place in places:
            held.append((tensor.shape, tensor.dtype, tensor.device))
        else:
            held.append((tensor.data_ptr(), tensor.stride()))
    return held


def _settled(operator: Operator, tensors: Tensors, settings: Settings) -> Found | None:
    """The kernel that was chosen for these, with what does not move; None where none is, or it can't be settled."""
    chosen = choose(operator, tensors, settings, optional=True)
    settle = None if chosen is None else operator.implementations[chosen].settle
    if chosen is None or settle is None:
        return None
    operator.shapes.check(*tensors)
    names = list(operator.shapes.texts)
    places = tuple(names.index(name) for name in operator.implementations[chosen].moving)
    still = [tensor for place, tensor in enumerate(tensors) if place not in places]
    first = tensors[places[0]]
    assert first is not None
    # of what is converted first a copy would be kept
    if any(x is not None and (x.dtype != first.dtype or not x.is_contiguous()) for x in still):
        return None
    return places, _held(places, tensors, settings), settle(first.dtype, *still, *settings)
