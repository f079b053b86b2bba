"""What explicit weights become when a query loses keys: what a mechanism says of itself, `Traits.key_removal`.

Letters: n_q queries, n_k keys; weights are (…, n_q, n_k), `removed` (n_q, n_k) is True for pairs that are gone.
"""

from torch import Tensor


def renormalised(weights: Tensor, removed: Tensor) -> Tensor:
    """Bring rows without what is removed back to their sums: what softmax and divisions do."""
    left = weights.masked_fill(removed, 0)
    total = left.sum(-1, keepdim=True)
    return left * (weights.sum(-1, keepdim=True) / total.where(total != 0, 1))


def recentred(weights: Tensor, removed: Tensor) -> Tensor:
    """Take InLine's rows over the keys that are left: their mean and number are those of what is left."""
    count, kept = weights.shape[-1], (~removed).sum(-1, keepdim=True).clamp(min=1).to(weights)
    mean = weights.masked_fill(removed, 0).sum(-1, keepdim=True) / kept
    return (1 / kept + (weights - mean) * (count / kept)).masked_fill(removed, 0)


def cut(weights: Tensor, removed: Tensor) -> Tensor:
    """Leave out what is removed and nothing else: weights that each stand for themselves, without a common sum."""
    return weights.masked_fill(removed, 0)
