"""Means over adaptive bins of the map on CUDA devices, and their gradient.

Bin i of c along a line of s places has those from ⌊i s / c⌋ to ⌈(i + 1) s / c⌉: bins may overlap, and a place y lies in
those from ⌊y c / s⌋ to ⌈(y + 1) c / s⌉. A program has one bin; backward, a block of tokens that read their bins.

Formulas: subquad.ops.map_formulas.
"""

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.declaring import empty_tokens
from subquad.kernels.triton.launch import SUMMED, lines_of
from subquad.kernels.triton.tiles import program, tokens_of, write


@triton.jit
def pool_kernel(
    x,
    out,
    heads,
    prefix,
    height,
    width,
    bin_rows,
    bin_columns,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mean of one bin."""
    place, batch, head = program(bin_rows * bin_columns, heads)
    columns = tl.arange(0, BLOCK_D)
    row, column = place // bin_columns, place % bin_columns
    top, left = row * height // bin_rows, column * width // bin_columns
    tall = ((row + 1) * height + bin_rows - 1) // bin_rows - top
    wide = ((column + 1) * width + bin_columns - 1) // bin_columns - left
    total = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, tall * wide, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        token = prefix + (top + inner // wide) * width + left + inner % wide
        at = x.data + batch * x.batch + head * x.head + token.to(tl.int64)[:, None] * x.token + columns[None, :]
        tile = tl.load(at, mask=(inner[:, None] < tall * wide) & (columns[None, :] < D), other=0.0)
        total += tl.sum(tile.to(tl.float32), axis=0)
    at = out + tl.program_id(0).to(tl.int64) * D + columns
    tl.store(at, (total / (tall * wide)).to(out.dtype.element_ty), mask=columns < D)


@triton.jit
def pool_gradient_kernel(
    grad,
    dx,
    heads,
    count,
    blocks,
    prefix,
    height,
    width,
    bin_rows,
    bin_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of a block of tokens, of which each lies in at most ROWS · COLUMNS bins."""
    block, batch, head = program(blocks, heads)
    columns, rows = tl.arange(0, BLOCK_D), block * BLOCK + tl.arange(0, BLOCK)
    place = tl.maximum(rows - prefix, 0)
    y, across = place // width, place % width
    total = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for other in range(ROWS * COLUMNS):
        row, column = y * bin_rows // height + other // COLUMNS, across * bin_columns // width + other % COLUMNS
        top, left = row * height // bin_rows, column * width // bin_columns
        tall = ((row + 1) * height + bin_rows - 1) // bin_rows - top
        wide = ((column + 1) * width + bin_columns - 1) // bin_columns - left
        inside = (rows >= prefix) & (rows < count) & (row < bin_rows) & (column < bin_columns)
        inside = inside & (top <= y) & (left <= across)
        at = grad.data + batch * grad.batch + head * grad.head
        at += (row * bin_columns + column).to(tl.int64)[:, None] * grad.token + columns[None, :]
        grads = tl.load(at, mask=inside[:, None] & (columns[None, :] < D), other=0.0).to(tl.float32)
        total += grads / (tall * wide)[:, None]
    write(dx, total, batch, head, rows, columns, count, D)


def pool(x: Tensor, shape: list[int], bins: list[int]) -> Tensor:
    """Means (b, h, a, d) of the tokens on a map over its adaptive bins."""
    (b, h, n, d), (height, width), count = x.shape, shape, bins[0] * bins[1]
    out = x.new_empty(b, h, count, d)
    numbers = h, n - height * width, height, width, *bins
    pool_kernel[b * h * count,](tokens_of(x), out, *numbers, **lines_of("pool", x, block=SUMMED))
    return out


def pool_gradient(grad: Tensor, x: Tensor, shape: list[int], bins: list[int]) -> Tensor:
    """To x; 0 for tokens of the prefix."""
    (b, h, n, _), (height, width) = x.shape, shape
    dx, settings = empty_tokens(x), lines_of("pool.gradient", x)
    blocks = -(-n // settings["BLOCK"])
    numbers = h, n, blocks, n - height * width, height, width, *bins
    rows, columns = (most_bins(size, count) for size, count in zip(shape, bins, strict=True))
    pool_gradient_kernel[b * h * blocks,](
        tokens_of(grad), tokens_of(dx), *numbers, ROWS=rows, COLUMNS=columns, **settings
    )
    return dx


def most_bins(size: int, count: int) -> int:
    """In how many of `count` bins along a line of `size` places one of these may lie."""
    return 1 if size % count == 0 else -(-count // size) + 1
