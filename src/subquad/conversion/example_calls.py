"""What a foreign network is called with where it is run to see what its layers are handed: images, or what is given.

Letters: b batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from subquad.errors import SubquadError, shown


@dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Call":
        """The same with other tensors."""
        return Call(*tree_map_only(Tensor, change, (self.args, self.kwargs)))


@dataclass(frozen=True)
class Example:
    """What a network can be called with.

    Attributes:
        image: (channels, height, width) of images, which some networks take and nothing else.
        given: else the arguments of a call, by name; the first tensor among them is a batch, and so are all others
            that are as long.
    """

    image: tuple[int, int, int] | None = None
    given: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        if self.image is not None:
            return f"images of {self.image[1]}×{self.image[2]} px"
        return f"what is given, {', '.join(self.given or ())}"

    def call(self, batch: int, like: Tensor) -> Call:
        """A call of so many alike, on the device of a tensor; random images have its dtype as well."""
        if self.image is not None:
            # random numbers of other devices are others' business
            drawn = torch.randn(1, *self.image, device="meta" if like.is_meta else "cpu").to(like)
            return Call((drawn.expand(batch, *self.image),))
        alike = _several(dict(self.given or {}), batch)
        return Call(kwargs=tree_map_only(Tensor, lambda one: one.detach().to(like.device), alike))


def _several(given: dict[str, Any], batch: int) -> dict[str, Any]:
    """The same of the first of a batch, so many times."""
    length = next((len(one) for one in tree_leaves(given) if isinstance(one, Tensor) and one.dim() > 1), None)

    def of_first(one: Tensor) -> Tensor:
        if one.dim() == 0 or len(one) != length:
            return one
        return one[:1].expand(batch, *one.shape[1:])

    alike: dict[str, Any] = tree_map_only(Tensor, of_first, given)
    return alike


def check_given(given: Any) -> None:
    """Raise a SubquadError where these are no arguments of a call by name, with a tensor that has a batch."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise SubquadError(f"given are the arguments of a call of the network, by name, got {shown(given)}")
    if not any(isinstance(one, Tensor) and one.dim() > 1 for one in tree_leaves(dict(given))):
        raise SubquadError(f"none of what is given is a tensor with a batch: {', '.join(given) or 'nothing is'}")


SHAPE = "shape of a tensor"
"""Where a note holds, in the place of a tensor, its shape and dtype."""


def as_outline(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given as JSON can hold it: of tensors what they are of, and no numbers.

    Raises:
        SubquadError: something else is no JSON.
    """

    def outline(value: Any) -> Any:
        if isinstance(value, Tensor):
            return {SHAPE: list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, Mapping):
            return {str(name): outline(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [outline(one) for one in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise SubquadError(f"given are tensors, numbers and text, and lists of those, got {shown(value)}")

    return {name: outline(value) for name, value in given.items()}


MOST_NUMBERS = 2**28
"""In a tensor that is made of what a file says."""


def of_outline(outline: Any) -> Any:
    """What an outline is of, with random numbers for fractions, and zeros for the rest.

    Raises:
        SubquadError: it is none.
    """
    if isinstance(outline, dict) and SHAPE in outline:
        return _tensor(outline[SHAPE], outline.get("dtype"))
    if isinstance(outline, dict):
        return {name: of_outline(one) for name, one in outline.items()}
    return [of_outline(one) for one in outline] if isinstance(outline, list) else outline


def _tensor(shape: Any, kind: Any) -> Tensor:
    dtype = getattr(torch, kind, None) if isinstance(kind, str) else None
    sides = isinstance(shape, list) and all(type(side) is int and side > 0 for side in shape)
    if not sides or not isinstance(dtype, torch.dtype) or torch.Size(shape).numel() > MOST_NUMBERS:
        raise SubquadError(f"a tensor of {shown(shape)} and {shown(kind)} can't be made")
    made = torch.zeros(shape, dtype=dtype)
    return made.normal_() if made.is_floating_point() else made
