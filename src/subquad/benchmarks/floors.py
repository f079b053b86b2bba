"""The least time that an operation can take: its tokens have to be read and written once."""

import statistics

import torch

from subquad.timing import seconds_of

COPIED = {"cuda": 2**30, "cpu": 2**27}
"""Bytes of the copy that is timed: more than any cache holds."""


def copy_gb_per_s(device: torch.device, repeats: int = 11) -> float:
    """10^9 bytes a second, read and written ones counted, of PyTorch copying a large tensor: the median."""
    source = torch.ones(COPIED.get(device.type, 2**27) // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copy()
    seconds = statistics.median(seconds_of(copy, device) for _ in range(repeats))
    return 2 * source.numel() * source.element_size() / seconds / 1e9


def moved_bytes(inputs: int, shape: tuple[int, int, int], dtype: torch.dtype, *, backward: bool) -> int:
    """Of an operation with so many `inputs` of `shape` (b, n, c): each read once, the output written once.

    The backward pass reads the inputs and the output's gradient, and writes a gradient for each input.
    """
    tensors = inputs + 1 + (2 * inputs + 1 if backward else 0)
    return tensors * torch.Size(shape).numel() * dtype.itemsize
