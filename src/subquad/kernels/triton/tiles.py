"""What the kernels are made of: how tokens are handed to them, tiles read and written, products.

Letters in shapes: n tokens of a block, d channels of a head.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Tokens(NamedTuple):
    """Tokens (b, h, n, d) as a kernel sees them: where they begin, and the strides of their first three axes."""

    data: Any
    batch: Any
    head: Any
    token: Any


class Bias(NamedTuple):
    """A bias (h, f, n) as a kernel sees it: where it begins, and its strides."""

    data: Any
    head: Any
    few: Any
    token: Any


def tokens_of(x: Tensor | None) -> Tokens | None:
    """Give a tensor (b, h, n, d) with its strides; (h, n, d) is the same for all images."""
    if x is None:
        return None
    if x.stride(-1) != 1:
        x = x.contiguous()
    return Tokens(x, *x.stride()[:3]) if x.dim() == 4 else Tokens(x, 0, *x.stride()[:2])


def bias_of(x: Tensor | None) -> Bias | None:
    """Give a bias (h, f, n) with its strides."""
    return None if x is None else Bias(x, *x.stride())


@triton.jit
def program(splits, heads):
    """Which split, image and head a program computes.

    Tokens of an image are counted in 32 bits, as each thread divides by sides of a map; images and heads are multiplied
    by what may be more.
    """
    place = tl.program_id(0)
    pair = place // splits
    return place % splits, (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)


@triton.jit
def read(x, batch, head, rows, columns, count, D: tl.constexpr):
    """The tile (n, d) of `rows`; zeros from `count` on."""
    at = x.data + batch * x.batch + head * x.head + rows.to(tl.int64)[:, None] * x.token + columns[None, :]
    return tl.load(at, mask=(rows[:, None] < count) & (columns[None, :] < D), other=0.0)


@triton.jit
def write(x, tile, batch, head, rows, columns, count, D: tl.constexpr):
    """Store a tile (n, d)."""
    at = x.data + batch * x.batch + head * x.head + rows.to(tl.int64)[:, None] * x.token + columns[None, :]
    tl.store(at, tile.to(x.data.dtype.element_ty), mask=(rows[:, None] < count) & (columns[None, :] < D))


@triton.jit
def read_square(x, columns, D: tl.constexpr):
    """A matrix (d, d)."""
    inside = (columns[:, None] < D) & (columns[None, :] < D)
    return tl.load(x + columns[:, None] * D + columns[None, :], mask=inside, other=0.0)


@triton.jit
def write_square(x, tile, columns, D: tl.constexpr):
    """Store a matrix (d, d)."""
    inside = (columns[:, None] < D) & (columns[None, :] < D)
    tl.store(x + columns[:, None] * D + columns[None, :], tile, mask=inside)


@triton.jit
def read_row(x, row, columns, D: tl.constexpr):
    """Row `row` of a matrix (…, d)."""
    return tl.load(x + row * D + columns, mask=columns < D, other=0.0)


@triton.jit
def write_row(x, row, values, columns, D: tl.constexpr):
    """Store row `row` of a matrix (…, d)."""
    tl.store(x + row * D + columns, values, mask=columns < D)


@triton.jit
def product(a, b, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """The product of two tiles, summed in fp32; of "nearest" numbers in tf32, of which tensor cores cut digits off.

    Of "halves" it has fp32's digits: see `product_of_halves`.
    """
    if PRECISION == "nearest":
        return tl.dot(nearest(a.to(DOT)), nearest(b.to(DOT)), input_precision="tf32")
    elif PRECISION == "halves":
        return product_of_halves(a, b)
    else:
        return tl.dot(a.to(DOT), b.to(DOT), input_precision=PRECISION)


@triton.jit
def product_of_halves(a, b):
    """The product with fp32's digits, of numbers in tf32 and what these leave of fp32 ones; fp16 leaves nothing.

    Triton has such products as well ("tf32x3"), of three where two are enough for fp16.
    """
    high_a, high_b = cut(a.to(tl.float32)), cut(b.to(tl.float32))
    out = tl.zeros((a.shape[0], b.shape[1]), tl.float32)
    if a.dtype == tl.float32:
        out = tl.dot(left_of(a, high_a), high_b, out, input_precision="tf32")
    if b.dtype == tl.float32:
        out = tl.dot(high_a, left_of(b, high_b), out, input_precision="tf32")
    return tl.dot(high_a, high_b, out, input_precision="tf32")


@triton.jit
def cut(x):
    """Numbers in fp32 without the last 13 digits, which tf32 does not have."""
    return (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def left_of(x, high):
    """What was cut off; nothing of what is infinite."""
    return tl.where(x == high, 0.0, x - high)


@triton.jit
def nearest(x):
    """Numbers in fp32 that are the nearest ones in tf32 when their last 13 digits are cut off."""
    above = (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
    # NaN of all digits would become a zero
    return tl.where(x == x, above, x)


@triton.jit
def as_multiplied(x, PRECISION: tl.constexpr):
    """The numbers that a product sees of fp32 ones, for what is taken off a product and has to cancel."""
    if PRECISION == "ieee" or PRECISION == "halves":
        return x
    else:
        return cut(nearest(x))


@triton.jit
def sums_over_tokens(given, made, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Σ givenᵀ made of two tiles of tokens (n, d), of which the first is as it was read.

    A tile that was computed stands right: Hopper's tensor cores take a left one that lies across from shared memory
    only, where it lies as it was read, and computing it once more in that order takes longer than all else.
    """
    return product(tl.trans(given), made, DOT, PRECISION)
