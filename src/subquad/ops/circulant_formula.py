"""Circulant attention: one kernel over all offsets for each channel, which all queries share. n log n.

    a_δ = n^-½ Σ_i q_i k_(i+δ)      w = softmax of a over the n offsets δ      y_i = Σ_δ w_δ v_(i+δ)

for each channel by itself, i and δ on the torus that the map becomes when it is joined at its borders. Both sums are
correlations, products of 2-D Fourier transforms. Han et al. 2025, arXiv 2512.21542; the scale is that of its code,
where the paper writes 1/n (docs/papers.md).
"""

import math

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from subquad import kernels
from subquad.grid import TokenGrid
from subquad.kernels import Shapes
from subquad.ops.image_by_image import by_image
from subquad.ops.precision import in_fp32
from subquad.tracing import is_exporting

SHAPES = Shapes("circulant attention", q="b h n d", k="b h n d", v="b h n d")
WEIGHTS_SHAPES = SHAPES.without("v")


def circulant_attention(q: Tensor, k: Tensor, v: Tensor, *, grid: TokenGrid, backend: str | None = None) -> Tensor:
    """(b, h, n, d) from q, k and v (b, h, n, d), on a grid without prefix tokens."""
    SHAPES.check(q, k, v, n=grid.num_tokens)
    return kernels.compute(kernels.circulant_attention, _circulant, (q, k, v), (grid.shape,), backend=backend)


@in_fp32
def _circulant(q: Tensor, k: Tensor, v: Tensor, shape: tuple[int, int]) -> Tensor:
    grid = TokenGrid(*shape)
    # a transform of nothing is an error
    correlate = _by_products if is_exporting() or q.numel() == 0 else _by_transforms

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return correlate(kernel_of(correlate(q, k, grid)), v, grid)

    return by_image(mix, q, k, v)


def kernel_of(scores: Tensor) -> Tensor:
    """The softmax over the n offsets of sums of products (b, h, n, d)."""
    count = scores.new_ones(()) * scores.shape[-2]  # a tensor, as a size may be a symbol that has no root
    return (scores * count.rsqrt()).softmax(dim=-2)


def _by_transforms(x: Tensor, y: Tensor, grid: TokenGrid) -> Tensor:
    """Σ_i x_i y_(i+δ) for every offset δ, of each channel: (b, h, n, d) from two of them."""
    maps = (tokens.unflatten(2, grid.shape) for tokens in (x, y))
    of_x, of_y = (torch.fft.rfft2(image, dim=(2, 3)) for image in maps)
    # without its size an odd width would come back one short
    return torch.fft.irfft2(of_x.conj() * of_y, s=grid.shape, dim=(2, 3)).flatten(2, 3)


def _by_products(x: Tensor, y: Tensor, grid: TokenGrid) -> Tensor:
    """The same with transforms as products of matrices: formats of networks know no complex numbers."""
    rows, columns = (_waves(size, x) for size in grid.shape)

    def transformed(tokens: Tensor) -> tuple[Tensor, Tensor]:
        image = tokens.unflatten(2, grid.shape)
        real, imaginary = columns[0] @ image, -(columns[1] @ image)
        return _turned(real.flatten(3), imaginary.flatten(3), rows)

    (a, b), (c, d) = transformed(x), transformed(y)
    real, imaginary = _turned(a * c + b * d, b * c - a * d, rows)  # of the conjugate, whose transform is the inverse
    real, imaginary = (part.unflatten(3, (grid.width, -1)) for part in (real, imaginary))
    return (columns[0] @ real + columns[1] @ imaginary).flatten(2, 3) / grid.num_places


def _waves(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of 2π jk / size, (size, size) each."""
    steps = torch.arange(size, device=like.device)
    count = steps[-1:] + 1  # a tensor, as ONNX has no remainder by a size
    # a remainder first: of large numbers the cosine is inexact
    angles = (steps[:, None] * steps % count).to(like.dtype) / count * (2 * math.pi)
    return angles.cos(), angles.sin()


def _turned(real: Tensor, imaginary: Tensor, waves: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The transform along the last axis but one: (cos − i sin) @ (real + i imaginary)."""
    cosine, sine = waves
    return cosine @ real + sine @ imaginary, cosine @ imaginary - sine @ real


@in_fp32
def circulant_weights(q: Tensor, k: Tensor, *, grid: TokenGrid) -> Tensor:
    """Explicit weights (b, h, d, n, n) of `circulant_attention`, a stream for each channel: A_ij = w_(j−i).

    Written as the formula is, without transforms. Rows sum to 1, and so do columns.
    """
    WEIGHTS_SHAPES.check(q, k, n=grid.num_tokens)
    offsets = offsets_on(grid, q.device)
    # where i + δ is, as j − i = δ says
    there = offsets.argsort(dim=1)
    scores = torch.stack([torch.einsum("bhid,bhid->bhd", q, k[:, :, places]) for places in there.unbind(1)], dim=2)
    return kernel_of(scores)[:, :, offsets].movedim(-1, 2)


def offsets_on(grid: TokenGrid, device: torch.device) -> Tensor:
    """The offset of every place j from every place i on the torus, (n, n): where it leads to from the first place."""
    rows, columns = (torch.arange(size, device=device) for size in grid.shape)
    down = (rows - rows[:, None]) % grid.height
    right = (columns - columns[:, None]) % grid.width
    return (down[:, None, :, None] * grid.width + right[:, None]).flatten(2).flatten(0, 1)


def _transform_flops(real_numbers: int, length: int) -> int:
    """Operations of a real Fourier transform over `length` numbers, of many at once: 2.5 n log₂ n each."""
    return int(2.5 * real_numbers * math.log2(max(length, 2)))


def _forward_flops(x: tuple[int, ...], dim: list[int], *_: object, out_shape: object = None, **__: object) -> int:
    return _transform_flops(math.prod(x), math.prod(x[axis] for axis in dim))


def _inverse_flops(x: object, dim: list[int], *_: object, out_shape: tuple[int, ...], **__: object) -> int:
    return _transform_flops(math.prod(out_shape), math.prod(out_shape[axis] for axis in dim))


# PyTorch counts none of its transforms
for _transform, _formula in ((torch.ops.aten._fft_r2c, _forward_flops), (torch.ops.aten._fft_c2r, _inverse_flops)):
    if _transform not in flop_registry:
        register_flop_formula(_transform)(_formula)
