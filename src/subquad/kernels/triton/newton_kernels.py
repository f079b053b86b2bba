"""Newton's steps on CUDA devices: all of them in one program for each matrix.

    Y ← Z = Y + Y (I − A Y), made symmetric; Y starts from α A

Backward, with G the gradient of Z and M = Yᵀ G: Y gets G + G (I − A Y)ᵀ − Aᵀ M, and A gets −M Yᵀ. What Y was before
each step is computed once more and kept until its step is gone back. A program's matrices lie in memory that nothing
else touches, which its multiprocessor's cache holds forward. Larger ones are multiplied by PyTorch's library.

Formulas: subquad.ops.soft_formula.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import square_of
from subquad.kernels.triton.tiles import product

LARGEST = 64
"""Rows of a matrix that one program holds."""


@triton.jit
def times(
    left,
    right,
    row,
    column,
    right_row,
    right_column,
    count,
    SIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The product of two matrices in memory, with the strides of their rows and columns.

    A few columns of the left one at a time: what all of them need would not fit the registers.
    """
    places = tl.arange(0, SIDE)
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, count, CHUNK):
        inner = start + tl.arange(0, CHUNK)
        inside = (places[:, None] < count) & (inner[None, :] < count)
        a = tl.load(left + places[:, None] * row + inner[None, :] * column, mask=inside, other=0.0)
        inside = (inner[:, None] < count) & (places[None, :] < count)
        b = tl.load(right + inner[:, None] * right_row + places[None, :] * right_column, mask=inside, other=0.0)
        total += product(a, b, tl.float32, PRECISION)
    return total


@triton.jit
def all_steps(
    gram,
    start,
    each,
    residual,
    count,
    steps,
    kept,
    SIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Give where Y stands behind the last step; `each` has room for `kept` of them in turn, (m, m) each."""
    rows, columns = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    place, inside, size = rows * count + columns, (rows < count) & (columns < count), count * count
    identity = tl.where(rows == columns, 1.0, 0.0)
    tl.store(each + place, start * tl.load(gram + place, mask=inside, other=0.0), mask=inside)
    # other threads of this program read what these have written
    tl.debug_barrier()
    for done in range(steps):
        before = each + (done % kept) * size
        left = identity - times(gram, before, count, 1, count, 1, count, SIDE, CHUNK, PRECISION)
        tl.store(residual + place, left, mask=inside)
        tl.debug_barrier()
        y = tl.load(before + place, mask=inside, other=0.0)
        y += times(before, residual, count, 1, count, 1, count, SIDE, CHUNK, PRECISION)
        y = (y + tl.trans(y)) * 0.5
        tl.store(each + ((done + 1) % kept) * size + place, y, mask=inside)
        tl.debug_barrier()
    return each + (steps % kept) * size


@triton.jit
def inverse_kernel(
    gram, alpha, scratch, out, count, steps, SIDE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr
):
    """All steps of a matrix; `scratch` is (3, m, m) for each."""
    matrix, size = tl.program_id(0).to(tl.int64), count * count
    residual, start = scratch + 3 * matrix * size, tl.load(alpha + matrix)
    last = all_steps(gram + matrix * size, start, residual + size, residual, count, steps, 2, SIDE, CHUNK, PRECISION)
    rows, columns = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    place, inside = rows * count + columns, (rows < count) & (columns < count)
    tl.store(out + matrix * size + place, tl.load(last + place, mask=inside, other=0.0), mask=inside)


@triton.jit
def inverse_gradient_kernel(
    grad,
    gram,
    alpha,
    scratch,
    dgram,
    dalpha,
    count,
    steps,
    SIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of a matrix and of its α; `scratch` is (4 + steps, m, m) for each."""
    matrix, size = tl.program_id(0).to(tl.int64), count * count
    rows, columns = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    place, inside = rows * count + columns, (rows < count) & (columns < count)
    identity = tl.where(rows == columns, 1.0, 0.0)
    gram += matrix * size
    residual, start = scratch + (4 + steps) * matrix * size, tl.load(alpha + matrix)
    of_y, moved, each = residual + size, residual + 2 * size, residual + 3 * size
    all_steps(gram, start, each, residual, count, steps, steps + 1, SIDE, CHUNK, PRECISION)
    grads, to_gram = tl.load(grad + matrix * size + place, mask=inside, other=0.0), tl.zeros((SIDE, SIDE), tl.float32)
    for done in range(steps):
        y = each + (steps - 1 - done) * size
        grads = (grads + tl.trans(grads)) * 0.5
        tl.store(of_y + place, grads, mask=inside)
        left = identity - times(gram, y, count, 1, count, 1, count, SIDE, CHUNK, PRECISION)
        tl.store(residual + place, left, mask=inside)
        tl.debug_barrier()
        tl.store(moved + place, times(y, of_y, 1, count, count, 1, count, SIDE, CHUNK, PRECISION), mask=inside)
        grads += times(of_y, residual, count, 1, 1, count, count, SIDE, CHUNK, PRECISION)
        tl.debug_barrier()
        grads -= times(gram, moved, 1, count, count, 1, count, SIDE, CHUNK, PRECISION)
        to_gram -= times(moved, y, count, 1, 1, count, count, SIDE, CHUNK, PRECISION)
        # the next step writes what these have read
        tl.debug_barrier()
    of_gram = tl.load(gram + place, mask=inside, other=0.0)
    tl.store(dgram + matrix * size + place, to_gram + start * grads, mask=inside)
    tl.store(dalpha + matrix, tl.sum(tl.sum(grads * of_gram, axis=1), axis=0))


def newton_inverse(gram: Tensor, alpha: Tensor, steps: int) -> Tensor:
    """From `alpha` (..., 1, 1) times `gram` (..., m, m), ridge included; in fp32 throughout."""
    (matrices, starts), m = _in_a_row(gram, alpha), gram.shape[-1]
    if m > LARGEST:
        *_, out = _each(matrices, starts[:, None, None], steps)
    else:
        out = torch.empty_like(matrices)
        scratch = matrices.new_empty(matrices.shape[0], 3, m, m)
        inverse_kernel[matrices.shape[0],](matrices, starts, scratch, out, m, steps, **square_of("newton", matrices))
    return out.reshape(gram.shape).to(gram.dtype)


def newton_inverse_gradient(grad: Tensor, gram: Tensor, alpha: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """To gram and alpha."""
    (matrices, starts), m = _in_a_row(gram, alpha), gram.shape[-1]
    grads, count = grad.reshape(-1, m, m).float().contiguous(), matrices.shape[0]
    dgram, dalpha = torch.empty_like(matrices), torch.empty_like(starts)
    if m > LARGEST:
        dgram.zero_()
        for y in reversed([*_each(matrices, starts[:, None, None], steps)][:-1]):
            grads = (grads + grads.mT) / 2
            moved = y.mT @ grads
            grads = grads + grads @ _residual(matrices, y).mT - matrices.mT @ moved
            dgram -= moved @ y.mT
        dgram += starts[:, None, None] * grads
        dalpha = (grads * matrices).sum(dim=(1, 2))
    else:
        scratch = matrices.new_empty(count, 4 + steps, m, m)
        settings = square_of("newton.gradient", matrices)
        inverse_gradient_kernel[count,](grads, matrices, starts, scratch, dgram, dalpha, m, steps, **settings)
    return dgram.reshape(gram.shape).to(gram.dtype), dalpha.reshape(alpha.shape).to(alpha.dtype)


def _in_a_row(gram: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    m = gram.shape[-1]
    return gram.reshape(-1, m, m).float().contiguous(), alpha.reshape(-1).float().contiguous()


def _each(gram: Tensor, alpha: Tensor, steps: int) -> Iterator[Tensor]:
    """Y before the first step and after each of them."""
    inverse = alpha * gram
    yield inverse
    for _ in range(steps):
        inverse = torch.baddbmm(inverse, inverse, _residual(gram, inverse))
        inverse = (inverse + inverse.mT) / 2
        yield inverse


def _residual(gram: Tensor, inverse: Tensor) -> Tensor:
    """I − A Y."""
    residual = torch.bmm(gram, inverse).neg_()
    residual.diagonal(dim1=-2, dim2=-1).add_(1)
    return residual
