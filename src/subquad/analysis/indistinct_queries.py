"""Queries that a mechanism does not tell apart: InLine's measure of injectivity (arXiv 2412.06590, section 4.1)."""

import torch
from torch import Tensor


def confused_queries(
    weights: Tensor, queries: Tensor, *, same_weights: float = 1e-3, other_query: float = 0.1, relative: bool = False
) -> Tensor:
    """How many pairs of queries are different and have the same weights, (…), unordered.

    The paper does not print its thresholds; these are ours.

    Args:
        weights: (…, n_q, n_k).
        queries: (…, n_q, d), what the weights were computed from.
        same_weights: rows are the same below this Euclidean distance, which shrinks as 1/√n_k where rows are spread.
        other_query: queries differ where their distance is above this share of the shorter one.
        relative: take the distance of rows as a share of the longer one.
    """
    apart = torch.cdist(weights, weights, compute_mode="donot_use_mm_for_euclid_dist")
    if relative:
        size = weights.norm(dim=-1)
        apart = apart / torch.maximum(size[..., :, None], size[..., None, :]).clamp(min=torch.finfo(size.dtype).tiny)
    length = queries.norm(dim=-1)
    shorter = torch.minimum(length[..., :, None], length[..., None, :])
    distance = torch.cdist(queries, queries, compute_mode="donot_use_mm_for_euclid_dist")
    confused = (apart < same_weights) & (distance > other_query * shorter)
    return confused.triu(diagonal=1).sum((-2, -1))
