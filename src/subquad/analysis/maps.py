"""What maps of attention are like: to each other from layer to layer, to their diagonal, and to their mirror image.

LaViT (Zhang et al. 2024, arXiv 2406.00427) starts from maps of deep layers that hardly change, and holds its own to the
diagonal and to symmetry. Its measures of them are not printed; similarity is DeepViT's (Zhou et al. 2021, arXiv
2103.11886), the others are ours.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.errors import SubquadError


def map_similarity(first: Tensor, second: Tensor, *, columns: bool = True, centre: bool = True) -> Tensor:
    """The mean cosine between columns, or rows, of two maps (…, n_q, n_k), (…).

    Without centring independent maps are far from 0: Gaussian logits of deviation s give about exp(−s²).

    Args:
        first: a map.
        second: one of the same shape, as of the next layer.
        columns: compare how a token is used by all queries, else what a query looks at.
        centre: subtract each column's, or row's, mean first, as correlation does; one that is constant but for
            rounding is like no other, and counts as 0.
    """
    if first.shape != second.shape:
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise SubquadError(f"maps that are compared have one shape: got {shapes}")
    dim = -2 if columns else -1
    if centre:
        first, second = (_centred(one, dim) for one in (first, second))
    return (_directions(first, dim) * _directions(second, dim)).sum(dim).mean(-1)


def _directions(vectors: Tensor, dim: int) -> Tensor:
    """Vectors of length 1, however short they were; zeros stay."""
    largest = vectors.abs().amax(dim, keepdim=True)
    return F.normalize(vectors / largest.clamp_min(torch.finfo(vectors.dtype).tiny), dim=dim)


def _centred(vectors: Tensor, dim: int) -> Tensor:
    """Vectors less their means; zeros where that leaves nothing but rounding."""
    left = vectors - vectors.mean(dim, keepdim=True)
    rounding = 8 * torch.finfo(vectors.dtype).eps * vectors.abs().amax(dim, keepdim=True)
    return torch.where(left.abs().amax(dim, keepdim=True) <= rounding, 0.0, left)


def drift(first: Tensor, second: Tensor) -> Tensor:
    """Half the absolute difference of rows, their total variation where they are probabilities, (…)."""
    return (first - second).abs().sum(-1).mean(-1) / 2


@dataclass(frozen=True)
class Diagonality:
    """How much queries look at themselves, of maps (…, n, n), each (…).

    Attributes:
        ratio: the mean weight on oneself over the mean absolute weight: 1 where all are alike, n for the identity.
        rank: the mean share of a row's other entries that are below it, those alike counting half: ½ by chance.
        highest: the share of rows whose largest entry it is: 1/n by chance.
    """

    ratio: Tensor
    rank: Tensor
    highest: Tensor


def diagonality(weights: Tensor) -> Diagonality:
    """See `Diagonality`."""
    _check_square(weights)
    count = weights.shape[-1]
    own = weights.diagonal(dim1=-2, dim2=-1)
    below = (weights < own[..., None]).sum((-2, -1)).to(weights)
    alike = (weights == own[..., None]).sum((-2, -1)).to(weights) - count
    return Diagonality(
        ratio=count * own.mean(-1) / weights.abs().sum(-1).mean(-1),
        rank=(below + alike / 2) / (count * (count - 1)),
        highest=(weights.argmax(-1) == torch.arange(count, device=weights.device)).to(weights).mean(-1),
    )


def symmetry(weights: Tensor, *, centre: bool = True) -> Tensor:
    """From −1, antisymmetric, to 1, symmetric, (…), of maps (…, n, n); 0 where nothing is left to compare.

    (‖S‖² − ‖K‖²) / ‖A‖² with S and K = (A ± Aᵀ)/2. Without centring, positive maps look symmetric whatever they are.
    """
    _check_square(weights)
    if centre:
        weights = weights - weights.mean((-2, -1), keepdim=True)
    size = weights.square().sum((-2, -1)).clamp(min=torch.finfo(weights.dtype).tiny)
    # ‖S‖² − ‖K‖² is the inner product of A and its transpose
    return (weights * weights.mT).sum((-2, -1)) / size


def _check_square(weights: Tensor) -> None:
    if weights.dim() < 2 or weights.shape[-1] != weights.shape[-2]:
        raise SubquadError(f"a map of tokens on themselves is square, (…, n, n): got {tuple(weights.shape)}")
