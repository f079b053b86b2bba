"""What a row of attention says by itself: how spread it is, how near it looks, how much of it is negative.

Weights are (…, n_q, n_k): what multiplies the values in a mechanism's global part. Rows of mechanisms with negative
entries are measured by their absolute values, made to sum to one; `negative_mass` says how much that hides. Results
keep the leading dimensions and the queries: averages come last, since the mean of maps is another map.
"""

import math

import torch
from torch import Tensor

from subquad.errors import SubquadError
from subquad.grid import TokenGrid


def entropy(weights: Tensor, *, normalised: bool = False) -> Tensor:
    """−Σ |w| ln |w| of every row, (…, n_q), in nats; `normalised` divides by that of the uniform row, ln n_k.

    PolaFormer (Meng et al. 2025, arXiv 2501.15061), section 3.2: linear attention's is high.
    """
    shares = _shares(weights)
    nats = torch.special.entr(shares).sum(-1)
    return nats / math.log(weights.shape[-1]) if normalised and weights.shape[-1] > 1 else nats


def negative_mass(weights: Tensor) -> Tensor:
    """The share of a row's absolute weight that is negative, (…, n_q)."""
    return weights.clamp(max=0).abs().sum(-1) / weights.abs().sum(-1).clamp(min=_tiny(weights))


def local_mass(
    weights: Tensor, grid: TokenGrid, window: int = 3, *, with_self: bool = True, renormalise: bool = False
) -> Tensor:
    """The share of a row that lies within the window × window places around its query, (…, places).

    InLine (Han et al. 2024, arXiv 2412.06590), section 4.2. Windows are cut at borders.

    Args:
        weights: of the tokens of `grid` on themselves.
        grid: the map; rows of prefix tokens are left out.
        window: side of the neighbourhood, odd.
        with_self: whether a query's own place counts.
        renormalise: let the weight on prefix tokens not count in the whole.
    """
    if window < 1 or window % 2 == 0:
        raise SubquadError(f"a neighbourhood around a query has an odd side, got {window}")
    shares = _on_places(weights, grid, renormalise)
    rows, columns = _offsets(grid, weights)
    near = (rows.abs() <= window // 2) & (columns.abs() <= window // 2)
    if not with_self:
        near &= (rows != 0) | (columns != 0)
    return (shares * near).sum(-1)


def attention_distance(weights: Tensor, grid: TokenGrid) -> Tensor:
    """How far from its query a row looks on average, in places of the map, (…, places); prefix tokens left out."""
    rows, columns = _offsets(grid, weights)
    return (_on_places(weights, grid, True) * torch.hypot(rows.to(weights), columns.to(weights))).sum(-1)


def uniform_weights(grid: TokenGrid) -> Tensor:
    """Attention that looks everywhere alike, (n, n) in float64: the line that other figures are read against."""
    return torch.full((grid.num_tokens, grid.num_tokens), 1 / grid.num_tokens, dtype=torch.float64)


def _shares(weights: Tensor) -> Tensor:
    size = weights.abs()
    return size / size.sum(-1, keepdim=True).clamp(min=_tiny(weights))


def _on_places(weights: Tensor, grid: TokenGrid, renormalise: bool) -> Tensor:
    """Shares of rows of places on places."""
    if weights.shape[-2:] != (grid.num_tokens, grid.num_tokens):
        shape = "×".join(map(str, weights.shape[-2:]))
        raise SubquadError(f"weights of {shape} are not those of the {grid.num_tokens} tokens of {grid} on themselves")
    shares = _shares(weights)[..., grid.prefix :, grid.prefix :]
    return shares / shares.sum(-1, keepdim=True).clamp(min=_tiny(weights)) if renormalise else shares


def _offsets(grid: TokenGrid, like: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns from every place to every other."""
    place = torch.arange(grid.num_places, device=like.device)
    y, x = place // grid.width, place % grid.width
    return y[None, :] - y[:, None], x[None, :] - x[:, None]


def _tiny(weights: Tensor) -> float:
    return torch.finfo(weights.dtype).tiny
