"""How many directions an attention map, or a layer's output, has: ranks, counted in four ways.

PolaFormer (arXiv 2501.15061), section 4.4, and FLatten (Han et al. 2023, arXiv 2308.00442), figure 5: the map of linear
attention has at most as many as a head has channels, and a depthwise convolution adds to them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """Hold the ranks of matrices (…, n, m), each (…); NaN of one whose numbers are not finite.

    Attributes:
        numerical: singular values above a share of the largest.
        effective: the exponential of the entropy of singular values that sum to one; Roy & Vetterli 2007.
        stable: the sum of their squares by the largest one's.
        most: the smallest number of them that has 99 % of the sum of squares.
    """

    numerical: Tensor
    effective: Tensor
    stable: Tensor
    most: Tensor


def ranks(matrix: Tensor, *, tolerance: float = 1e-3) -> Ranks:
    """The ranks of matrices (…, n, m), in float64; cubic in their side."""
    values = singular_values(matrix)
    unknown = values.isnan().any(-1)
    squares = values.square()
    shares = values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
    missing = 1 - squares.cumsum(-1) / squares.sum(-1, keepdim=True)
    return Ranks(
        numerical=(values > tolerance * values[..., :1]).sum(-1).to(values).masked_fill(unknown, torch.nan),
        effective=torch.special.entr(shares).sum(-1).exp(),
        stable=squares.sum(-1) / squares[..., 0],
        most=((missing > 0.01 + 1e-12).sum(-1) + 1).to(values).masked_fill(unknown, torch.nan),
    )


def singular_values(matrix: Tensor) -> Tensor:
    """The singular values of matrices (…, n, m), in float64; NaN of those that are not finite, which LAPACK refuses."""
    endless = ~matrix.isfinite().all(-1).all(-1)
    values = torch.linalg.svdvals(matrix.double().masked_fill(endless[..., None, None], 0))
    return values.masked_fill(endless[..., None], torch.nan)


def centred(tokens: Tensor) -> Tensor:
    """Tokens (…, n, c) without their mean: the ranks of what is left say how alike they all are."""
    return tokens - tokens.mean(-2, keepdim=True)


def token_similarity(tokens: Tensor) -> Tensor:
    """The mean cosine of two different tokens (…, n, c), (…): near 1 where all have become alike."""
    unit = torch.nn.functional.normalize(tokens, dim=-1)
    count = tokens.shape[-2]
    # the sum over all pairs is the square of the sum
    whole = unit.sum(-2).square().sum(-1)
    own = unit.square().sum((-2, -1))
    return (whole - own) / (count * (count - 1))
