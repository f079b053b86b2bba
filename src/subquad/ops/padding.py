"""Sums over tokens: those that are not there are left out, those that other processes hold are counted in."""

from typing import Any

import torch
from torch import Tensor

from subquad import kernels, spread
from subquad.errors import SubquadError
from subquad.tracing import is_symbol

PADDED = kernels.Shapes("what leaves out absent tokens", tokens="b h n d", padding="b n")


def check_padding(x: Tensor, padding: Tensor) -> None:
    """Raise SubquadError where `padding` is not true or false of each token of `x` (b, h, n, d)."""
    if padding.dtype != torch.bool:
        raise SubquadError(
            f"padding is True where a token is absent, got numbers of {padding.dtype}: "
            "of a mask with 1 where tokens are, as transformers has it, give mask == 0"
        )
    PADDED.check(x, padding)


def zero_padding(x: Tensor, padding: Tensor | None) -> Tensor:
    """`x` (b, h, n, d) with zeros where `padding` (b, n) is True."""
    if padding is None:
        return x
    check_padding(x, padding)
    return x.masked_fill(padding[:, None, :, None], 0)


def count_here(x: Tensor, padding: Tensor | None) -> Tensor | int:
    """How many tokens of `x` (b, h, n, d) this process has: n, or (b, 1, 1, 1) where it differs by image."""
    return x.shape[-2] if padding is None else (~padding).sum(dim=-1).to(x.dtype)[:, None, None, None]


def at_least_one(count: Tensor | int) -> Any:
    """A number of tokens to divide by: the mean of none is nothing."""
    if isinstance(count, Tensor):
        return count.clamp(min=1)
    return count if is_symbol(count) else max(count, 1)


def totals(x: Tensor, padding: Tensor | None, *sums: Tensor) -> tuple[Any, ...]:
    """How many tokens of `x` (b, h, n, d) there are, at least 1, and `sums` over tokens like these; of all processes.

    The number is one for all images, or (b, 1, 1, 1) where it differs by image.
    """
    count, *summed = spread.sums(count_here(x, padding), *sums)
    return at_least_one(count), *summed


def count_tokens(x: Tensor, padding: Tensor | None) -> Tensor | int:
    """How many tokens of `x` (b, h, n, d) are there: n, or (b, 1, 1, 1) where it differs by image; at least 1."""
    return totals(x, padding)[0]


def mean_present(x: Tensor, padding: Tensor) -> Tensor:
    """Mean (b, c) over those of the tokens x (b, n, c) that are there, summed in fp32: fp16 ends at 65,504."""
    present = ~padding[..., None]
    total = x.masked_fill(~present, 0).sum(dim=1, dtype=torch.promote_types(x.dtype, torch.float32))
    return (total / present.sum(dim=1).clamp(min=1)).to(x.dtype)


def mean_token(x: Tensor, padding: Tensor | None) -> Tensor:
    """Mean over the tokens that are there: (b, h, n, d) -> (b, h, 1, d)."""
    count, total = totals(x, padding, zero_padding(x, padding).sum(dim=-2, keepdim=True))
    return total / count
