"""Images of a batch one after the other, where that keeps temporaries in the cache of a CPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from subquad import spread
from subquad.tracing import is_traced

LARGE = 2**16
"""Elements of an image's tensor from which on it pays; below, the calls cost more than the memory."""


def by_image(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """`function` of tensors with a batch axis in front, for each image in turn on the CPU, else for all at once.

    A linear mechanism makes several temporaries of the size of its inputs. For a batch they fall out of the cache and,
    above malloc's thresholds, into freshly mapped pages at every call: PolaFormer's core on 8 images of 3,136 tokens
    takes 118 ms at once and 61 ms in turn. Where other processes hold tokens as well, all at once are one message.
    """
    first = tensors[0]
    assert first is not None
    batch = first.shape[0]
    at_once = first.device.type != "cpu" or is_traced() or spread.is_spread()
    if at_once or batch < 2 or first[0].numel() < LARGE:
        return function(*tensors)
    # split, not slices: its gradient is one concatenation
    parts = [[None] * batch if tensor is None else tensor.split(1) for tensor in tensors]
    return torch.cat([function(*image) for image in zip(*parts, strict=True)])
