"""What is computed on the map: the local branch, a depthwise convolution of the values; sums over windows and bins."""

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from subquad import kernels, spread
from subquad.errors import SubquadError
from subquad.grid import GridRows, TokenGrid, rows_beside
from subquad.kernels.map_operators import FILTERS
from subquad.ops.precision import kept_in_fp32
from subquad.positions import bin_means, means_of_rows
from subquad.tracing import first, is_exporting, larger, surely

SHAPES = kernels.Shapes("the local branch", y="b h n d", v="b h m d", weight=FILTERS, bias="h*d", gate="b h n d")
POOL_SHAPES = kernels.pool.shapes
WINDOWS_SHAPES = kernels.convolve_windows.shapes


def add_local(
    y: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    grid: TokenGrid,
    kv_grid: TokenGrid,
    backend: str | None = None,
) -> Tensor:
    """(y + depthwise of v) · gate: (b, h, n_q, d) from y and gate (b, h, n_q, d) and values v (b, h, n_k, d).

    `weight` is (h·d, k, k), or (b, h·d, k, k) with a kernel for each image; zeros lie outside of the map. On another
    grid than the queries' the values are resized bilinearly first. Queries of some rows of a map may have those of more
    of its rows: then those beside them count in. Prefix tokens, which have no place on the map, keep y · gate. The
    result may be `y` itself, changed.
    """
    SHAPES.check(y, v, weight, bias, gate, n=grid.num_tokens, m=kv_grid.num_tokens)
    if weight.shape[-1] % 2 == 0:
        raise SubquadError(f"the local branch needs kernels of odd size, got {tuple(weight.shape[-2:])}")
    seen = kv_grid if any(grid.beside(kv_grid)) else grid
    cannot = None if seen == kv_grid else f"values on a grid of {kv_grid} are resized to {grid} first"
    whole_cannot = cannot if seen is grid else "it has values of the rows beside as well"
    # of an expanded tensor several tokens are one place in memory
    y = y.contiguous() if 0 in y.stride() else y

    def filtered(v: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> Tensor:
        return seen.to_heads(filter_map(values_on(seen, kv_grid, v), weight, bias), num_heads)

    def branch(y: Tensor, v: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor | None, _: Any) -> Tensor:
        values, shape = (v, weight, bias), (seen.shape,)
        added = kernels.compute(kernels.depthwise, filtered, values, shape, backend=backend, cannot=cannot)
        y = y + grid.of(seen, added)
        return y if gate is None else y * gate

    # kept for the backward pass: were y in it, the graph would hold itself
    num_heads, tensors = y.shape[1], (y, v, gate, weight, bias)
    settings, operator = (grid.shape,), kernels.local_branch
    return kernels.compute(operator, branch, tensors, settings, backend=backend, cannot=whole_cannot, optional=True)


def values_on(grid: TokenGrid, kv_grid: TokenGrid, v: Tensor) -> Tensor:
    """The map (b, h·d, y, x) of values v (b, h, n_k, d), resized bilinearly from their grid to that of the queries."""
    image = kv_grid.to_map(v)
    if grid.whole is not grid and not kv_grid.stands_on(grid):
        raise SubquadError(
            f"values of {kv_grid} can't be resized to {grid}, as other processes hold the rows between: take sr_ratio=1"
        )
    return image if kv_grid.stands_on(grid) else F.interpolate(image, grid.shape, mode="bilinear")


def filter_map(image: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Depthwise convolution of (b, c, y, x) with kernels (c, k, k), or (b, c, k, k) of each image's own."""
    half, _ = rows_beside(weight.shape[-1])
    image, above = spread.with_borders(image, half)
    if weight.dim() == 3:
        return F.conv2d(image, weight[:, None], bias, padding=(above, half), groups=image.shape[1])
    if is_exporting() or len(image) == 0:
        return _shifted_products(image, weight, bias)
    # all images become channels of one: on the CPU 4 to 8 times faster than nine shifted products
    channels = rearrange(image, "b c y x -> 1 (b c) y x")
    kernels = rearrange(weight, "b c i j -> (b c) 1 i j")
    filtered = F.conv2d(channels, kernels, padding=(above, half), groups=channels.shape[1])
    filtered = rearrange(filtered, "1 (b c) y x -> b c y x", c=image.shape[1])
    return filtered if bias is None else filtered + bias[:, None, None]


def _shifted_products(image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same tap by tap: of formats of networks, none has a convolution with as many groups as the batch makes."""
    size, (rows, columns) = weight.shape[-1], image.shape[-2:]
    filled = F.pad(image, (size // 2,) * 4)
    products = [
        filled[:, :, i : i + rows, j : j + columns] * weight[:, :, i, j, None, None]
        for i, j in itertools.product(range(size), repeat=2)
    ]
    summed = functools.reduce(torch.add, products)
    return summed if bias is None else summed + bias[:, None, None]


def pool_tokens(x: Tensor, grid: TokenGrid, bins: TokenGrid, *, backend: str | None = None) -> Tensor:
    """Means (b, h, y·x of bins, d) of the tokens (b, h, n, d) on the map of `grid` over adaptive bins."""
    POOL_SHAPES.check(x, n=grid.num_tokens)

    def means(x: Tensor, shape: tuple[int, int], bins_shape: tuple[int, int]) -> Tensor:
        if is_exporting():
            return _means_of_tokens(x, grid, bins)
        return bins.without_prefix.to_heads(spread.total(means_of_rows(grid.to_map(x), grid, bins_shape)), x.shape[1])

    return kernels.compute(kernels.pool, means, (x,), (grid.shape, bins.shape), backend=backend)


def _means_of_tokens(x: Tensor, grid: TokenGrid, bins: TokenGrid) -> Tensor:
    """The same as products with matrices of the bins, of tokens as they lie: OpenVINO spends its time on exchanges."""
    rows, columns = (bin_means(size, count, x) for size, count in zip(grid.shape, bins.shape, strict=True))
    image = x[:, :, grid.prefix :].unflatten(2, grid.shape)
    means = rows @ image.flatten(3)
    return (columns @ means.unflatten(3, (grid.width, -1))).flatten(2, 3)


@kept_in_fp32
def pool_rows(x: Tensor, rows: GridRows, bins: TokenGrid) -> Tensor:
    """What tokens (b, h, n, d) of some rows add to `pool_tokens` of their whole grid."""
    return bins.to_heads(means_of_rows(rows.to_map(x), rows, bins.shape), x.shape[1])


def convolve_windows(x: Tensor, weight: Tensor, grid: TokenGrid, *, backend: str | None = None) -> Tensor:
    """A convolution of each head's map whose windows lie side by side: (b, h, m, d) from (b, h, n, d).

    `weight` is (d, d, i, j); places that fill no window are left out, and a map smaller than one is filled up with
    zeros. It is one product of matrices, on the CPU several times as fast as a convolution.
    """
    WINDOWS_SHAPES.check(x, weight, n=grid.num_tokens)
    rows, columns = weight.shape[2:]
    is_small = surely(grid.height < rows) or surely(grid.width < columns)
    small = f"a map of {grid} is smaller than a window" if is_small else None

    def products(x: Tensor, weight: Tensor, *shape: int) -> Tensor:
        # channels stay last, as tokens have them: so do those of the gradient, which is added to tokens' others
        places = rearrange(x[:, :, grid.prefix :], "b h (y x) d -> b y x h d", y=grid.height, x=grid.width)
        places = fill_window(_with_whole_windows(places, grid, rows), (rows, columns), behind=2)
        places = first(places, places.shape[1] // rows * rows, 1)
        places = first(places, places.shape[2] // columns * columns, 2)
        windows = rearrange(places, "b (y i) (x j) h d -> b h (y x) (i j d)", i=rows, j=columns)
        products = windows @ rearrange(weight, "o d i j -> (i j d) o")
        return spread.total(_among_all_windows(products, grid, (rows, columns)))

    operator, tensors = kernels.convolve_windows, (x, weight)
    return kernels.compute(operator, products, tensors, grid.shape, backend=backend, cannot=small)


def _with_whole_windows(places: Tensor, grid: TokenGrid, rows: int) -> Tensor:
    """The places (b, y, x, h, d) of some rows with zeros for those rows that share a window with them."""
    if not isinstance(grid, GridRows):
        return places
    above = grid.first % rows
    return F.pad(places, (0, 0) * 3 + (above, -(above + grid.height) % rows))


def _among_all_windows(products: Tensor, grid: TokenGrid, window: tuple[int, int]) -> Tensor:
    """Those of the windows of some rows (b, h, m, d) at their places among all windows of the map, zeros at others'."""
    if not isinstance(grid, GridRows):
        return products
    rows, columns = (max(size // step, 1) for size, step in zip(grid.whole.shape, window, strict=True))
    here = products.shape[2] // columns
    above = grid.first // window[0]
    # rows at the end of the map that fill no window are cut off
    return F.pad(products, (0, 0, above * columns, (rows - above - here) * columns))


def fill_window(image: Tensor, window: tuple[int, int], *, behind: int = 0) -> Tensor:
    """A map (…, y, x) with so many axes `behind` these, filled up with zeros to the size of `window` at least."""
    sizes = image.shape[image.dim() - behind - 2 : image.dim() - behind]
    bottom, right = (larger(0, wanted - size) for wanted, size in zip(window, sizes, strict=True))
    if surely(bottom == 0) and surely(right == 0):
        return image
    return F.pad(image, (0, 0) * behind + (0, right, 0, bottom))
