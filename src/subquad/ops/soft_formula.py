"""Softmax-free attention: a Gaussian kernel in its low-rank form through m landmarks. Cost n m d + m³ a head.

    κ(x, y) = exp(−‖x − y‖² / 2)   P = κ(q, l)   A = κ(l, l)   o = P A⁺ (Pᵀ v)

SOFT, Lu et al. 2021, arXiv 2110.11945, eq. 3-9; its normalised variant, arXiv 2207.03341. What A⁺ is has a name, see
`INVERSES`: the released networks mean a fixed number of Newton steps, which is another function than a solver's.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from subquad import kernels, spread
from subquad.errors import SubquadError, unknown_name
from subquad.ops.padding import zero_padding
from subquad.ops.precision import in_fp32

SHAPES = kernels.soft_gather.shapes.extended(padding="b n", idle="b m")
WEIGHTS_SHAPES = SHAPES.without("v")
RIDGE = 0.01
"""What Newton's steps have on the diagonal of the `soft_*` networks."""
START = 0.9 * 2
"""Over the square of the largest row sum it is what Newton's steps start from."""
INVERSE_SHAPES = kernels.newton_inverse.shapes
KERNEL_SHAPES = kernels.Shapes("a Gaussian kernel", x="... n d", y="... m d")


def soft_attention(
    q: Tensor,
    landmarks: Tensor,
    v: Tensor,
    padding: Tensor | None = None,
    idle: Tensor | None = None,
    *,
    inverse: str = "ridge",
    steps: int = 20,
    gradient: str = "steps",
    scale: float = 1,
    backend: str | None = None,
) -> Tensor:
    """(b, h, n, d) from q, which is also the key, (b, h, n, d), landmarks (b, h, m, d) and v (b, h, n, d).

    `padding` (b, n) leaves out keys, `idle` (b, m) landmarks. `inverse` is a name of INVERSES, with `steps` Newton
    steps where it has some; for `gradient` see `newton_inverse`. Queries are multiplied by `scale`, landmarks are not.
    """
    SHAPES.check(q, landmarks, v, padding, idle)
    # landmarks are few: what is between the two maps is of no weight, and in fp32
    wide = landmarks.to(torch.promote_types(landmarks.dtype, torch.float32))
    tensors, cannot = (q, wide, v), None if padding is None and idle is None else "it knows no padding"
    kernel = kernels.choose(kernels.soft_gather, tensors, (scale,), backend=backend, cannot=cannot)
    if kernel is None:
        return _eager(q, landmarks, v, padding, idle, inverse=inverse, steps=steps, gradient=gradient, scale=scale)
    gathered = spread.total(kernels.run(kernels.soft_gather, kernel, _gather, tensors, (scale,)))
    solved = _solve(wide, gathered, inverse=inverse, steps=steps, gradient=gradient)
    return kernels.run(kernels.soft_spread, kernel, _spread, (q, wide, solved), (scale,))


@in_fp32
def _gather(x: Tensor, landmarks: Tensor, v: Tensor, scale: float) -> Tensor:
    return gaussian_kernel(landmarks, x * scale) @ v


@in_fp32
def _spread(x: Tensor, landmarks: Tensor, u: Tensor, scale: float) -> Tensor:
    return gaussian_kernel(x * scale, landmarks) @ u


@in_fp32
def _solve(landmarks: Tensor, gathered: Tensor, *, inverse: str, steps: int, gradient: str) -> Tensor:
    return _solver(gaussian_kernel(landmarks, landmarks), inverse, steps, gradient)(gathered)


@in_fp32
def _eager(
    q: Tensor,
    landmarks: Tensor,
    v: Tensor,
    padding: Tensor | None,
    idle: Tensor | None,
    *,
    inverse: str,
    steps: int,
    gradient: str,
    scale: float,
) -> Tensor:
    # a value of nothing makes nothing of any number, but not of NaN
    kernel, solve = _low_rank(zero_padding(q, padding) * scale, landmarks, idle, inverse, steps, gradient)
    return kernel @ solve(spread.total(kernel.mT @ zero_padding(v, padding)))


@in_fp32
def soft_weights(
    q: Tensor,
    landmarks: Tensor,
    padding: Tensor | None = None,
    idle: Tensor | None = None,
    *,
    inverse: str = "ridge",
    steps: int = 20,
) -> Tensor:
    """Explicit weights (b, h, n, n) of `soft_attention`."""
    WEIGHTS_SHAPES.check(q, landmarks, padding, idle)
    kernel, solve = _low_rank(q, landmarks, idle, inverse, steps, "steps")
    return kernel @ solve(zero_padding(kernel, padding).mT)


Solve = Callable[[Tensor], Tensor]


def _low_rank(
    q: Tensor, landmarks: Tensor, idle: Tensor | None, inverse: str, steps: int, gradient: str
) -> tuple[Tensor, Solve]:
    """κ(q, landmarks), and A⁺ as what it does to a matrix of m rows."""
    kernel, gram = gaussian_kernel(q, landmarks), gaussian_kernel(landmarks, landmarks)
    if idle is not None:
        # an idle landmark sees no token and only itself: the others' inverse is as if it were not there
        kernel = kernel.masked_fill(idle[:, None, None, :], 0)
        pairs = (idle[:, None, :] | idle[:, :, None])[:, None]
        gram = torch.where(pairs, torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device), gram)
    return kernel, _solver(gram, inverse, steps, gradient)


def _solver(gram: Tensor, inverse: str, steps: int, gradient: str) -> Solve:
    if inverse not in INVERSES:
        raise unknown_name("inverse", inverse, INVERSES)
    return INVERSES[inverse](gram, steps, gradient)


def gaussian_kernel(x: Tensor, y: Tensor) -> Tensor:
    """κ of all pairs: (..., n, d) and (..., m, d) -> (..., n, m)."""
    KERNEL_SHAPES.check(x, y)
    squares = x.square().sum(dim=-1)[..., :, None] + y.square().sum(dim=-1)[..., None, :]
    # rounding can make the distance of near points slightly negative
    return torch.exp(-0.5 * (squares - 2 * x @ y.mT).clamp(min=0))


@in_fp32
def newton_inverse(
    gram: Tensor, alpha: Tensor | float | None = None, *, steps: int = 20, ridge: float = RIDGE, gradient: str = "steps"
) -> Tensor:
    """Approximate inverse of A + ridge·I by `steps` Newton steps Y ← 2Y − Y(A + ridge·I)Y (paper, algorithm 1).

    The number of steps is part of the definition: the result is the spectral filter (1 − (1 − αw²)^(2^steps)) / w, so
    that with 20 steps eigenvalues below about 1/1374 of the largest row sum are damped, not inverted.

    Args:
        gram: A (..., m, m), symmetric with positive entries.
        alpha: Y starts from α(A + ridge·I); (..., 1, 1), or one number for all; 1.8 / (largest row sum of A)² if left
            out.
        steps: Newton steps.
        ridge: added to the diagonal.
        gradient: "steps" is the gradient of what is computed; "inverse" that of the exact inverse, −YᵀGYᵀ, as the
            released networks were trained with: less memory, and the same where the steps have converged.
    """
    if steps < 0:
        raise SubquadError(f"Newton's method takes some steps or none, got {steps}")
    alpha = gram.new_tensor(alpha) if isinstance(alpha, float) else alpha
    if alpha is not None and not alpha.dim():
        alpha = alpha.expand(*gram.shape[:-2], 1, 1)
    INVERSE_SHAPES.check(gram, alpha)
    if alpha is None:
        alpha = usual_alpha(gram)
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    if gradient == "inverse":
        inverse = _iterate((gram + ridge * identity).detach(), alpha.detach(), identity, steps)
        if not (torch.is_grad_enabled() and gram.requires_grad):
            return inverse
        # adds nothing, and has the gradient wanted
        return inverse - inverse @ (gram - gram.detach()) @ inverse
    if gradient != "steps":
        raise unknown_name("gradient", gradient, ("steps", "inverse"))
    return _iterate(gram + ridge * identity, alpha, identity, steps)


def _iterate(gram: Tensor, alpha: Tensor, identity: Tensor, steps: int) -> Tensor:
    def eager(gram: Tensor, alpha: Tensor, steps: int) -> Tensor:
        inverse = alpha * gram
        for _ in range(steps):
            # 2Y − YBY with the residual split off and kept symmetric: half the rounding error of the plain form in fp32
            inverse = inverse + inverse @ (identity - gram @ inverse)
            inverse = (inverse + inverse.mT) / 2
        return inverse

    return kernels.compute(kernels.newton_inverse, eager, (gram, alpha), (steps,))


def row_sum(gram: Tensor) -> Tensor:
    """The largest row sum of each matrix, (..., 1, 1): its 1-norm, as entries are positive."""
    return gram.sum(dim=-1).amax(dim=-1)[..., None, None]


def usual_alpha(gram: Tensor) -> Tensor:
    """Where Newton's steps start by default: 1.8 / (largest row sum of A)², (..., 1, 1)."""
    return START / row_sum(gram).square()


def halved_alpha(gram: Tensor, *, most: int = 10) -> Tensor:
    """The start α of the networks without ridge, for each matrix: 2/n₁², halved until ‖I − αA²‖₁ ≤ 1.01.

    The released code takes n₁ and the test over the whole batch, so that an image's result depends on its neighbours;
    per matrix it is the same wherever the steps converge. At α = 2/n₁² itself the first step maps a matrix near the
    identity to 0, for good: what needs no halving starts from 1.8/n₁² and converges to the same inverse.
    """
    square = gram @ gram
    diagonal, columns = square.diagonal(dim1=-2, dim2=-1), square.sum(dim=-2)
    halvings = torch.arange(most + 1, device=gram.device, dtype=gram.dtype)
    alphas = 2 / row_sum(gram).square() * 0.5 ** halvings[:, None]  # (..., k, 1)
    norms = ((1 - alphas * diagonal[..., None, :]).abs() + alphas * (columns - diagonal)[..., None, :]).amax(dim=-1)
    too_large = (norms.detach() > 1.01).cumprod(dim=-1).sum(dim=-1, keepdim=True).clamp(max=most)
    alpha = alphas.squeeze(-1).gather(-1, too_large)[..., None]
    return torch.where(too_large[..., None] == 0, 0.9 * alpha, alpha)


def newton_start(inverse: str, gram: Tensor) -> tuple[float, Tensor] | None:
    """What one of `INVERSES` adds to the diagonal of A, and α, where its steps start; None where it makes no steps."""
    if inverse == "ridge":
        return RIDGE, usual_alpha(gram)
    return (0.0, halved_alpha(gram)) if inverse in ("norm", "plain") else None


def _ridge(gram: Tensor, steps: int, gradient: str) -> Solve:
    inverse = _by_newton("ridge", gram, steps, gradient)
    return lambda x: inverse @ x


def _plain(gram: Tensor, steps: int, gradient: str) -> Solve:
    inverse = _by_newton("plain", gram, steps, gradient)
    return lambda x: inverse @ x


def _norm(gram: Tensor, steps: int, gradient: str) -> Solve:
    inverse = _by_newton("norm", gram, steps, gradient)
    root = gram.sum(dim=-1, keepdim=True).rsqrt()
    return lambda x: root * (inverse @ (root * x))


def _by_newton(name: str, gram: Tensor, steps: int, gradient: str) -> Tensor:
    start = newton_start(name, gram)
    assert start is not None
    ridge, alpha = start
    return newton_inverse(gram, alpha, steps=steps, ridge=ridge, gradient=gradient)


def _cholesky(gram: Tensor, steps: int, gradient: str) -> Solve:
    ridged = gram + RIDGE * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    # with the ridge the matrix is positive definite by far more than rounding: no check that would wait for a GPU
    factor = torch.linalg.cholesky_ex(ridged)[0]
    return lambda x: torch.cholesky_solve(x, factor)


def _pinv(gram: Tensor, steps: int, gradient: str) -> Solve:
    inverse = torch.linalg.pinv(gram, hermitian=True)
    return lambda x: inverse @ x


INVERSES: dict[str, Callable[[Tensor, int, str], Solve]] = {
    "ridge": _ridge,
    "norm": _norm,
    "plain": _plain,
    "cholesky": _cholesky,
    "pinv": _pinv,
}
"""What stands for A⁺: "ridge", Newton on A + 0.01·I (the `soft_*` networks); "norm", Newton on A and then
D^-½ Y D^-½ with the row sums D (`soft_norm_*`); "plain", Newton on A (the checkpoints of 2021); "cholesky", the exact
inverse of A + 0.01·I; "pinv", the pseudo-inverse, unreliable in fp32 beyond some hundred landmarks."""
