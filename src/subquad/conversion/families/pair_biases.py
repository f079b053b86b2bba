"""Biases of pairs of tokens on the logits of softmax attention, carried by longer queries and keys."""

import torch
import torch.nn.functional as F
from torch import Tensor


def with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads (b, h, n, d + n) whose softmax attention has a bias (h, n, n) on its logits.

    A query is followed by its bias to each key, a key by a one at its own place; values by zeros.
    """
    n = q.shape[2]
    longer = q.shape[-1] + n
    # softmax attention divides by the root of the width that it sees
    q = torch.cat([q * (longer / q.shape[-1]) ** 0.5, (bias * longer**0.5).expand(q.shape[0], -1, -1, -1)], dim=-1)
    own = torch.eye(n, dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
    return q, torch.cat([k, own], dim=-1), F.pad(v, (0, n))
