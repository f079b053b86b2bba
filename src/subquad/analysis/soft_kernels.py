"""What SOFT approximates, and how far its Newton steps get (Lu et al. 2021, arXiv 2110.11945, sections 3.2 and 3.3)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.analysis.spectra import singular_values
from subquad.errors import SubquadError
from subquad.ops.soft_formula import gaussian_kernel, newton_inverse


@dataclass(frozen=True)
class Convergence:
    """After 0, 1, 2, … steps, each (…, steps + 1).

    Attributes:
        relative: ‖B − BYB‖ / ‖B‖ in Frobenius norm: the paper's, which large eigenvalues dominate.
        identity: the largest singular value of I − BY: below 1 where Y converges, near 0 where it has.
    """

    relative: Tensor
    identity: Tensor


def newton_convergence(
    gram: Tensor, steps: int, *, ridge: float = 0.01, alpha: Tensor | float | None = None
) -> Convergence:
    """How near Newton's steps come to the inverse of B = A + ridge·I, A (…, m, m), in the precision of A.

    The residual squares in every step: I − BY_k = (I − αB²)^(2^k); α is that of `usual_alpha` if left out.
    """
    if steps < 0:
        raise SubquadError(f"there are no {steps} Newton steps")
    whole = gram + ridge * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    identity = torch.eye(gram.shape[-1], dtype=torch.float64, device=gram.device)
    exact = whole.double()
    relative, far = [], []
    for count in range(steps + 1):
        left = identity - exact @ newton_inverse(gram, alpha, steps=count, ridge=ridge).double()
        relative.append((left @ exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1)))
        far.append(singular_values(left)[..., 0])
    return Convergence(torch.stack(relative, -1), torch.stack(far, -1))


def newton_filter(eigenvalues: Tensor, alpha: Tensor | float, steps: int) -> Tensor:
    """What Newton's steps make of an eigenvalue w of B: (1 − (1 − αw²)^(2^steps)) / w, nearly 1/w in the end."""
    return (1 - (1 - alpha * eigenvalues.square()) ** (2**steps)) / eigenvalues


def nystrom_error(tokens: Tensor, landmarks: Tensor) -> Tensor:
    """‖S − C A⁺ Cᵀ‖ / ‖S‖ of the Gaussian kernel S of tokens (…, n, d) with landmarks (…, m, d), (…).

    With exact pseudo-inverses, in float64. A network's landmarks are learned and no sample of its tokens, and it does
    not approximate S: this measures the method, not a trained layer.
    """
    x, y = tokens.double(), landmarks.double()
    whole, cross, small = gaussian_kernel(x, x), gaussian_kernel(x, y), gaussian_kernel(y, y)
    guess = cross @ torch.linalg.pinv(small, hermitian=True) @ cross.mT
    return (whole - guess).norm(dim=(-2, -1)) / whole.norm(dim=(-2, -1))


def best_error(tokens: Tensor, count: int) -> Tensor:
    """The least error that any matrix of rank `count` has in place of the Gaussian kernel of tokens (…, n, d), (…)."""
    values = torch.linalg.eigvalsh(gaussian_kernel(tokens.double(), tokens.double())).flip(-1)
    return values[..., count:].norm(dim=-1) / values.norm(dim=-1)


def half_correlation(gates: Tensor, num_heads: int) -> dict[str, Tensor]:
    """Correlations between the channels of PolaFormer's gate G, (samples, c), per head: (num_heads,) each.

    "same" and "opposite" are means over pairs of channels within a half of a head, "cross" over pairs of the two
    halves: arXiv 2501.15061 calls the last negative, its own figure shows about +0.06.
    """
    if gates.shape[-1] % (2 * num_heads):
        raise SubquadError(f"{gates.shape[-1]} channels are not two halves of {num_heads} heads")
    by_head = gates.unflatten(-1, (num_heads, -1)).movedim(-2, 0)
    left = by_head - by_head.mean(-2, keepdim=True)
    unit = torch.nn.functional.normalize(left, dim=-2)
    matrix = unit.mT @ unit
    half = matrix.shape[-1] // 2
    pairs = half * (half - 1)

    def within(block: Tensor) -> Tensor:
        return (block.sum((-2, -1)) - block.diagonal(dim1=-2, dim2=-1).sum(-1)) / max(pairs, 1)

    same, opposite, cross = matrix[:, :half, :half], matrix[:, half:, half:], matrix[:, :half, half:]
    return {"same": within(same), "opposite": within(opposite), "cross": cross.mean((-2, -1))}
