"""Test-time training as attention (ViT³): an inner model learns k → v by one step of gradient descent, and answers q.

    f(x) = (x W₁) ⊙ SiLU(x W₂)                            a gated unit a head, rows multiply
    L = −Σ_j ⟨f(k_j), v_j⟩ / (3n);  G = ∂L/∂W             over all keys at once
    U = W − G / (‖G‖ + 1)                                 a norm for each column
    o_i = (q_i U₁) ⊙ SiLU(q_i U₂)

and the same step for a depthwise 3×3 convolution of the map. Han et al. 2026, arXiv 2512.01643, section 4, with the
damping and the factor 1/3 of the released code. Linear in n: 6 n d² products a head for the unit, 18 n d for the
convolution. Gradients of the step are written out; gradients for training go through them.

Letters: b batch, h heads, n m queries and keys, d channels of a head, y x rows and columns of the map, i j of a kernel.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from subquad import kernels, spread
from subquad.grid import TokenGrid, rows_beside
from subquad.ops.image_by_image import by_image
from subquad.ops.map_formulas import filter_map
from subquad.ops.padding import totals, zero_padding
from subquad.ops.precision import in_fp32, kept_in_fp32
from subquad.rope import Rotation, rotation_of, tables_of, turned

UNIT_SHAPES = kernels.ttt_unit.shapes.without("cos", "sin").extended(padding="b m")
FILTER_SHAPES = kernels.Shapes(
    "a filter trained on keys", q="b h n d", k="b h m d", v="b h m d", w3="h*d 1 3 3", padding="b m"
)

TAPS = 3
"""Rows, and columns, of the kernel; the root of their number is the inner loss's scale, of the unit as well."""


def ttt_unit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    padding: Tensor | None = None,
    *,
    rotation: Rotation | None = None,
    backend: str | None = None,
) -> Tensor:
    """(b, h, n_q, d): a gated unit of `w1` and `w2` (h, d, d), trained on keys and values, at the queries.

    `rotation` turns queries and keys, which stand on one grid then; `padding` (b, n_k).
    """
    UNIT_SHAPES.check(q, k, v, w1, w2, padding)
    cos, sin, interleaved = tables_of(rotation)
    tensors, settings = (q, k, v, w1, w2, cos, sin), (interleaved, 1 / TAPS)
    return kernels.compute(kernels.ttt_unit, _unit, tensors, settings, (padding,), backend=backend)


@in_fp32
def _unit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    loss_scale: float,
    padding: Tensor | None = None,
) -> Tensor:
    rotation = rotation_of(cos, sin, interleaved)

    def learn_and_answer(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        count, *sums = totals(v, padding, *unit_sums(k, v, w1, w2, padding, rotation))
        return unit_answers(q, w1, w2, sums, count, rotation, loss_scale=loss_scale)

    return by_image(learn_and_answer, q, k, v, padding)


@kept_in_fp32
def unit_sums(
    k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, padding: Tensor | None = None, rotation: Rotation | None = None
) -> tuple[Tensor, Tensor]:
    """What some keys and values (b, h, n, d) add to both gradients (b, h, d, d) of a gated unit, but for -1 / (3n)."""
    (k,) = turned(rotation, k)
    # keys that are not there have no values, whatever stands there
    k, v = zero_padding(k, padding), zero_padding(v, padding)
    straight, gate = k @ w1, k @ w2
    open_share = gate.sigmoid()
    # what SiLU gives, and its slope
    activated, slope = gate * open_share, open_share * (1 + gate * (1 - open_share))
    return k.mT @ (v * activated), k.mT @ (v * straight * slope)


@in_fp32
def unit_answers(
    q: Tensor,
    w1: Tensor,
    w2: Tensor,
    sums: Sequence[Tensor],
    count: Tensor | int,
    rotation: Rotation | None = None,
    *,
    loss_scale: float = 1 / TAPS,
) -> Tensor:
    """`ttt_unit` of some queries (b, h, n, d), from the sums over `count` keys."""
    (q,) = turned(rotation, q)
    # the sums first: 1 / n of a value has few digits in half precision
    scale = loss_scale / count
    first, second = (w + damped(step * scale) for w, step in zip((w1, w2), sums, strict=True))
    return (q @ first) * F.silu(q @ second)


def ttt_filter(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w3: Tensor,
    padding: Tensor | None = None,
    *,
    grid: TokenGrid,
    kv_grid: TokenGrid,
) -> Tensor:
    """(b, h, n_q, d): a depthwise convolution `w3` (h·d, 1, 3, 3), trained on the map of keys, of the queries' map.

    Outside of a map, and where `padding` (b, n_k) is, lie zeros: on the map of queries as well, where that is the same.
    Prefix tokens, which have no place on it, teach nothing and get zeros.
    """
    FILTER_SHAPES.check(q, k, v, w3, padding, n=grid.num_tokens, m=kv_grid.num_tokens)
    return _filter(q, k, v, w3, padding, grid=grid, kv_grid=kv_grid)


def _filter(
    q: Tensor, k: Tensor, v: Tensor, w3: Tensor, padding: Tensor | None, *, grid: TokenGrid, kv_grid: TokenGrid
) -> Tensor:
    on_map = None if padding is None else padding[:, kv_grid.prefix :]
    sums = filter_sums(k, v, padding, grid=kv_grid, seen=kv_grid)
    # a channel of them is counted, as half precision has no numbers of many tokens
    count, products = totals(v[:, :, kv_grid.prefix :, :1].to(sums.dtype), on_map, sums)
    q = zero_padding(q, padding if grid == kv_grid else None)
    return filter_answers(q, w3, products, count, grid=grid, seen=grid)


def filter_sums(k: Tensor, v: Tensor, padding: Tensor | None = None, *, grid: TokenGrid, seen: TokenGrid) -> Tensor:
    """What the values (b, h, n, d) of a grid, or of some rows of one, add to `ttt_filter`'s step: (b, h, t, d).

    Keys (b, h, m, d) stand on `seen`: the grid, or its rows and those beside them that a kernel looks at.
    In fp32 at least.
    """

    def shifted(k: Tensor, v: Tensor, size: int, shape: tuple[int, int]) -> Tensor:
        return _products(k, v, size, grid=grid, seen=seen)

    heads, tokens = v.shape[1], (zero_padding(k, padding), zero_padding(v, padding))
    cannot = None if seen == grid else "keys stand on the rows beside as well"
    settings = (TAPS, grid.shape)
    products = kernels.compute(kernels.map_products, shifted, tokens, settings, cannot=cannot, optional=True)
    return rearrange(products, "b t (h d) -> b h t d", h=heads)


@kept_in_fp32
def _products(k: Tensor, v: Tensor, size: int, *, grid: TokenGrid, seen: TokenGrid) -> Tensor:
    """Products (b, t, h·d) of the values' map with the keys', shifted by each tap of a kernel, summed over places."""
    keys, values = seen.to_map(k), grid.to_map(v)
    (border, _), (above, below) = rows_beside(size), grid.beside(seen)
    keys, beyond = spread.with_borders(keys, border)
    filled = F.pad(keys, (border, border, beyond - above, beyond - below))
    # the gradient of a convolution's kernel is what its input and its output's gradient have in common, shifted
    rows, columns = values.shape[-2:]
    products = [
        (filled[:, :, i : i + rows, j : j + columns] * values).sum((-2, -1))
        for i, j in itertools.product(range(size), repeat=2)
    ]
    return torch.stack(products, dim=-2)


def filter_answers(
    q: Tensor, w3: Tensor, products: Tensor, count: Tensor | int, *, grid: TokenGrid, seen: TokenGrid
) -> Tensor:
    """`ttt_filter` (b, h, n, d) on a grid, or some rows of one, from queries on `seen` and sums of `count` places."""

    def filtered(q: Tensor, filters: Tensor, bias: None, shape: tuple[int, int]) -> Tensor:
        return _filtered(q, filters, seen)

    filters = _trained(products, w3, count)
    cannot = None if seen == grid else "queries stand on the rows beside as well"
    given, settings = (q, filters, None), (grid.shape,)
    answers = kernels.compute(kernels.depthwise, filtered, given, settings, cannot=cannot, optional=True)
    return grid.of(seen, answers)


@in_fp32
def _filtered(q: Tensor, filters: Tensor, seen: TokenGrid) -> Tensor:
    return seen.to_heads(filter_map(seen.to_map(q), filters), q.shape[1])


@kept_in_fp32
def _trained(products: Tensor, w3: Tensor, count: Tensor | int) -> Tensor:
    """Filters (b, h·d, i, j) of each image, a step from `w3`."""
    step = damped(products / (TAPS * count))
    return w3[:, 0] + rearrange(step, "b h (i j) d -> b (h d) i j", i=TAPS)


def damped(step: Tensor) -> Tensor:
    """Steps (…, i, o) whose columns, one for each output, are shorter than 1: divided by their length + 1."""
    return step / (step.norm(dim=-2, keepdim=True) + 1)
