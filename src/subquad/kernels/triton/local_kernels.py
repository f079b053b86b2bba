"""The local branch on CUDA devices: a depthwise convolution of tokens on their map, forward and backward.

A program has some tokens in the order in which they lie, wherever rows of the map end among them; tokens beside them
are read once for each tap, and come from the cache. Gradients of taps are sums over all tokens: each program gives the
sums over its own, and these are added up, over images as well.

Letters: b batch, h heads, n tokens, d channels of a head, k taps along a side. Formulas: subquad.ops.map_formulas.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.declaring import empty_tokens
from subquad.kernels.triton.launch import OF_ONE_WARP, SUMMED, lines_of, split_of
from subquad.kernels.triton.tiles import program, read, tokens_of, write


@triton.jit
def places_of(rows, prefix, width):
    """Rows and columns of tokens on the map; the prefix lies far off, where no filter reaches."""
    place = rows - prefix
    y = place // width
    return tl.where(place >= 0, y, -0x40000000), place - y * width


@triton.jit
def addresses_of(x, batch, head, rows, columns):
    """Where a tile (n, d) of tokens lies; what is so many tokens on lies so many strides on."""
    return x.data + batch * x.batch + head * x.head + rows.to(tl.int64)[:, None] * x.token + columns[None, :]


@triton.jit
def read_on_map(at, y, across, columns, height, width, D: tl.constexpr):
    """The tile (n, d) at these addresses, which is in rows y and columns `across` of the map; zeros where that ends."""
    inside = (y >= 0) & (y < height) & (across >= 0) & (across < width)
    return tl.load(at, mask=inside[:, None] & (columns[None, :] < D), other=0.0).to(tl.float32)


@triton.jit
def filter_kernel(
    v,
    y,
    gate,
    out,
    weight,
    bias,
    heads,
    count,
    blocks,
    prefix,
    height,
    width,
    per_image,
    SIZE: tl.constexpr,
    FLIPPED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of (y + depthwise of v) · gate; y and gate may be absent. `per_image`: stride of images' kernels."""
    block, batch, head = program(blocks, heads)
    columns, rows = tl.arange(0, BLOCK_D), block * BLOCK + tl.arange(0, BLOCK)
    channels = head * D + columns
    total = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    if bias is not None:
        added = tl.load(bias + channels, mask=columns < D, other=0.0).to(tl.float32)
        total += tl.where(rows[:, None] >= prefix, added[None, :], 0.0)
    y_on_map, across = places_of(rows, prefix, width)
    at = addresses_of(v, batch, head, rows, columns)
    for row in range(SIZE):
        # what is written out reads many taps ahead
        for column in tl.static_range(SIZE):
            tap = row * SIZE + column
            place = batch * per_image + channels * (SIZE * SIZE) + (SIZE * SIZE - 1 - tap if FLIPPED else tap)
            factor = tl.load(weight + place, mask=columns < D, other=0.0).to(tl.float32)
            down, right = row - SIZE // 2, column - SIZE // 2
            beside = at + tl.cast(down * width + right, tl.int64) * v.token
            total += read_on_map(beside, y_on_map + down, across + right, columns, height, width, D) * factor[None, :]
    if y is not None:
        total += read(y, batch, head, rows, columns, count, D).to(tl.float32)
    if gate is not None:
        total *= read(gate, batch, head, rows, columns, count, D).to(tl.float32)
    write(out, total, batch, head, rows, columns, count, D)


@triton.jit
def add_to(at, more, columns, D: tl.constexpr):
    """Add to what lies at some addresses, which no other program touches."""
    tl.store(at, tl.load(at, mask=columns < D, other=0.0) + more, mask=columns < D)


@triton.jit
def taps_kernel(
    grad,
    v,
    shares,
    heads,
    count,
    splits,
    chunk,
    prefix,
    height,
    width,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A split's shares (k² + 1, h·d) of the gradients of the taps and, below them, of a bias, from zeros on."""
    split, batch, head = program(splits, heads)
    columns = tl.arange(0, BLOCK_D)
    shares += (batch * splits + split) * ((SIZE * SIZE + 1) * heads * D) + head * D + columns
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        y, across = places_of(rows, prefix, width)
        grads = read_on_map(addresses_of(grad, batch, head, rows, columns), y, across, columns, height, width, D)
        at = addresses_of(v, batch, head, rows, columns)
        for row in range(SIZE):
            for column in tl.static_range(SIZE):
                down, right = row - SIZE // 2, column - SIZE // 2
                beside = at + tl.cast(down * width + right, tl.int64) * v.token
                values = read_on_map(beside, y + down, across + right, columns, height, width, D)
                add_to(shares + (row * SIZE + column) * heads * D, tl.sum(grads * values, axis=0), columns, D)
        add_to(shares + SIZE * SIZE * heads * D, tl.sum(grads, axis=0), columns, D)
        # other threads of this program add to what these have written
        tl.debug_barrier()


def local_branch(y: Tensor, v: Tensor, g: Tensor | None, weight: Tensor, bias: Tensor | None, shape: list[int]) -> None:
    """Y ← (y + depthwise of v on its map) · g."""
    # channels that do not lie side by side are copied where kernels read them, and then there is where to write them
    summed = y if y.stride(-1) == 1 else y.contiguous()
    _filter(summed, v, weight, bias, shape, summed, g)
    if summed is not y:
        y.copy_(summed)


def depthwise(v: Tensor, weight: Tensor, bias: Tensor | None, shape: list[int]) -> Tensor:
    """Depthwise convolution of the values on their map; 0 for tokens of the prefix."""
    out = empty_tokens(v)
    _filter(out, v, weight, bias, shape)
    return out


def depthwise_gradient(grad: Tensor, v: Tensor, weight: Tensor, shape: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """To v, the weight and a bias, which are sums over images where these share them."""
    (b, h, n, d), (height, width), size = v.shape, shape, weight.shape[-1]
    dv = empty_tokens(v)
    _filter(dv, grad, weight, None, shape, flipped=True)
    settings = lines_of("local.taps", v, block=SUMMED)
    split = split_of(v, settings["BLOCK"], more=OF_ONE_WARP)
    shares = v.new_zeros(b, split.pieces, size**2 + 1, h * d, dtype=torch.float32)
    numbers = h, n, *split, n - height * width, height, width
    taps_kernel[b * h * split.pieces,](tokens_of(grad), tokens_of(v), shares, *numbers, SIZE=size, **settings)
    of_images = shares.sum(dim=1)
    dbias = of_images[:, -1].sum(dim=0)
    taps = of_images[:, :-1] if weight.dim() == 4 else of_images[:, :-1].sum(dim=0)
    dweight = taps.mT.unflatten(-1, (size, size)).contiguous()
    return dv, dweight.to(weight.dtype), dbias.to(weight.dtype)


def _filter(
    out: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: list[int],
    y: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    flipped: bool = False,
) -> None:
    (b, h, n, _), (height, width) = v.shape, shape
    settings = lines_of("local.filter", v)
    blocks, weight = -(-n // settings["BLOCK"]), weight.contiguous()
    per_image = weight.stride(0) if weight.dim() == 4 else 0
    numbers = h, n, blocks, n - height * width, height, width, per_image
    parameters = weight, None if bias is None else bias.contiguous()
    filter_kernel[b * h * blocks,](
        *map(tokens_of, (v, y, gate, out)), *parameters, *numbers, SIZE=weight.shape[-1], FLIPPED=flipped, **settings
    )
