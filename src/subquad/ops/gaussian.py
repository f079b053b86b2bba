"""Softmax-free attention: a Gaussian kernel in its low-rank form through m landmarks. Cost n m d + m³ a head.

    κ(x, y) = exp(−‖x − y‖² / 2)   P = κ(q, l)   A = κ(l, l)   o = P A⁺ (Pᵀ v)

SOFT, Lu et al. 2021, arXiv 2110.11945, eq. 3-9; A⁺ by 20 Newton steps, with the ridge of the released code.
"""

import torch
from torch import Tensor

from subquad.ops.padding import zero_padding
from subquad.ops.precision import in_fp32


@in_fp32
def gaussian_attention(
    q: Tensor,
    landmarks: Tensor,
    v: Tensor,
    padding: Tensor | None = None,
    idle: Tensor | None = None,
    *,
    steps: int = 20,
) -> Tensor:
    """(b, h, n, d) from q, which is also the key, (b, h, n, d), landmarks (b, h, m, d) and v (b, h, n, d).

    `padding` (b, n) leaves out keys, `idle` (b, m) landmarks.
    """
    kernel, inverse = _low_rank(q, landmarks, idle, steps)
    return kernel @ (inverse @ (kernel.mT @ zero_padding(v, padding)))


@in_fp32
def gaussian_weights(
    q: Tensor, landmarks: Tensor, padding: Tensor | None = None, idle: Tensor | None = None, *, steps: int = 20
) -> Tensor:
    """Explicit weights (b, h, n, n) of `gaussian_attention`."""
    kernel, inverse = _low_rank(q, landmarks, idle, steps)
    return kernel @ inverse @ zero_padding(kernel, padding).mT


def _low_rank(q: Tensor, landmarks: Tensor, idle: Tensor | None, steps: int) -> tuple[Tensor, Tensor]:
    kernel, gram = gaussian_kernel(q, landmarks), gaussian_kernel(landmarks, landmarks)
    if idle is not None:
        # an idle landmark sees no token and only itself: the others' inverse is as if it were not there
        kernel = kernel.masked_fill(idle[:, None, None, :], 0)
        pairs = (idle[:, None, :] | idle[:, :, None])[:, None]
        gram = torch.where(pairs, torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device), gram)
    return kernel, newton_inverse(gram, steps=steps)


def gaussian_kernel(x: Tensor, y: Tensor) -> Tensor:
    """κ of all pairs: (..., n, d) and (..., m, d) -> (..., n, m)."""
    squares = x.square().sum(dim=-1)[..., :, None] + y.square().sum(dim=-1)[..., None, :]
    # rounding can make the distance of near points slightly negative
    return torch.exp(-0.5 * (squares - 2 * x @ y.mT).clamp(min=0))


@in_fp32
def newton_inverse(gram: Tensor, *, steps: int = 20, ridge: float = 0.01) -> Tensor:
    """Approximate inverse of A + ridge·I by `steps` Newton steps Y ← 2Y − Y(A + ridge·I)Y (paper, algorithm 1).

    The number of steps is part of the definition: with 20, eigenvalues below about 1/1374 of the largest row sum are
    damped, not inverted. A (..., m, m) is symmetric with positive entries. Gradients run through the steps.
    """
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    alpha = 0.9 * 2 / gram.sum(dim=-1).amax(dim=-1)[..., None, None].square()
    gram = gram + ridge * identity
    inverse = alpha * gram
    for _ in range(steps):
        # 2Y − YBY with the residual split off and kept symmetric: half the rounding error of the plain form in fp32
        inverse = inverse + inverse @ (identity - gram @ inverse)
        inverse = (inverse + inverse.mT) / 2
    return inverse
