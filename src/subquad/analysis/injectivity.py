"""Whether different queries have different weights: InLine's propositions 1 and 2 (Han et al. 2024, arXiv 2412.06590).

Softmax and InLine's subtraction tell all queries apart where the keys, with a one beside them, have full rank; a
division by the sum of homogeneous features tells no two queries of one ray apart, whatever the keys.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from subquad.errors import SubquadError, unknown_name
from subquad.ops import inline_weights, linear_weights, softmax_weights

KINDS: dict[str, Callable[..., Tensor]] = {
    "softmax": softmax_weights,
    "inline": inline_weights,
    "linear": partial(linear_weights, eps=0.0),
}
"""What computes explicit weights."""


def weights_of(kind: str, queries: Tensor, keys: Tensor) -> Tensor:
    """Weights (…, n_q, n_k) of queries (…, n_q, d) on keys (…, n_k, d); linear attention's features are ReLU."""
    if kind not in KINDS:
        raise unknown_name("kind of attention", kind, KINDS)
    return KINDS[kind](queries[None, None], keys[None, None])[0, 0]


def tells_apart(keys: Tensor, *, tolerance: float = 1e-9) -> bool:
    """Whether keys (n, d) let softmax and InLine tell all queries apart.

    They do exactly where the rank of [K, 1] is d + 1, for which n > d keys are needed: differences of keys then span
    all directions, and a difference of queries shows in some difference of scores.
    """
    with_one = torch.cat([keys.double(), torch.ones_like(keys[:, :1]).double()], dim=1)
    values = torch.linalg.svdvals(with_one)
    return keys.shape[0] > keys.shape[1] and bool(values[-1] > tolerance * values[0])


def confused_by(kind: str, keys: Tensor) -> tuple[Tensor, Tensor] | None:
    """Two different queries (d,) that keys (n, d) give the same weights, or None where there are none.

    Of linear attention a query and its double; of the others two that differ by what no difference of keys sees.

    Raises:
        SubquadError: no key has a positive entry, so that linear attention has nothing to divide.
    """
    keys = keys.double()
    if kind == "linear":
        query = keys.clamp(min=0).sum(0)
        if not query.any():
            raise SubquadError("no key has a positive entry: ReLU features of all of them are 0")
        return query, 2 * query
    if kind not in KINDS:
        raise unknown_name("kind of attention", kind, KINDS)
    if tells_apart(keys):
        return None
    # a direction in which all keys are alike
    unseen = torch.linalg.svd(keys - keys.mean(0), full_matrices=True).Vh[-1]
    query = keys.mean(0)
    return query, query + unseen
