"""What may change of the tensors that a file takes: how many images there are, and their height and width."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subquad.errors import SubquadError

DYNAMIC = ("batch", "size")
"""What may change from call to call: the number of images; their height and width."""


@dataclass(frozen=True)
class Axes:
    """What a tensor has of images.

    Attributes:
        batch: its first axis is as long as there are images.
        sides: its last two are their height and width.
    """

    batch: bool
    sides: bool

    def changing(self, tensor: Tensor, dims: Mapping[str, Any]) -> dict[int, Any]:
        """What `dims` says of "batch", "height" and "width", by the tensor's axes."""
        found = {0: dims.get("batch")} if self.batch else {}
        if self.sides:
            found |= {tensor.dim() - 2: dims.get("height"), tensor.dim() - 1: dims.get("width")}
        return {axis: dim for axis, dim in found.items() if dim is not None}

    def resized(self, tensor: Tensor, batch: int, size: tuple[int, int]) -> Tensor:
        """Its first rows, and the first of each side; where they do not suffice they come again."""
        wanted = {0: batch} if self.batch else {}
        if self.sides:
            wanted |= {tensor.dim() - 2: size[0], tensor.dim() - 1: size[1]}
        for axis, length in wanted.items():
            tensor = tensor.index_select(axis, torch.arange(length) % tensor.shape[axis])
        return tensor


OF_IMAGES = (Axes(batch=True, sides=True),)
"""What networks take that take images and nothing else."""


def axes_of(tensors: Sequence[Tensor]) -> tuple[Axes, ...]:
    """What tensors have of images.

    The first of more than one axis has a batch, and all others that are as long. The first of at least four has sides,
    and all others that end in the same two.
    """
    batch = next((len(one) for one in tensors if one.dim() > 1), None)
    size = next((one.shape[-2:] for one in tensors if one.dim() >= 4), None)
    return tuple(
        Axes(one.dim() > 0 and len(one) == batch, one.dim() >= 4 and one.shape[-2:] == size) for one in tensors
    )


def images_in(tensors: Sequence[Tensor], axes: Sequence[Axes]) -> tuple[int, tuple[int, int]]:
    """How many images tensors are of, and their height and width; 1 each where they are of none."""
    pairs = list(zip(tensors, axes, strict=True))
    batch = next((len(tensor) for tensor, one in pairs if one.batch), 1)
    height, width = next((tensor.shape[-2:] for tensor, one in pairs if one.sides), (1, 1))
    return batch, (height, width)


def check_dynamic(dynamic: Sequence[str], axes: Sequence[Axes]) -> None:
    """Raise SubquadError where something else is asked to change, or what no tensor has."""
    for name in dynamic:
        if name not in DYNAMIC:
            raise SubquadError(f"what may change is {' or '.join(DYNAMIC)}, got '{name}'")
    if "batch" in dynamic and not any(one.batch for one in axes):
        raise SubquadError("none of what the file takes has a batch: leave batch out of what is dynamic")
    if "size" in dynamic and not any(one.sides for one in axes):
        raise SubquadError(
            "none of what the file takes is a map of four axes, of which the last two could change: leave size out of "
            "what is dynamic"
        )
