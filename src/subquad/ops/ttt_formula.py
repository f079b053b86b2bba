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
from subquad.grid import GridRows, TokenGrid
from subquad.ops.image_by_image import by_image
from subquad.ops.map_formulas import filter_map
from subquad.ops.padding import totals, zero_padding
from subquad.ops.precision import in_fp32, kept_in_fp32
from subquad.rope import Rotation, turned

UNIT_SHAPES = kernels.Shapes(
    "a gated unit trained on keys", q="b h n d", k="b h m d", v="b h m d", w1="h d d", w2="h d d", padding="b m"
)
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
) -> Tensor:
    """(b, h, n_q, d): a gated unit of `w1` and `w2` (h, d, d), trained on keys and values, at the queries.

    `rotation` turns queries and keys, which stand on one grid then; `padding` (b, n_k).
    """
    UNIT_SHAPES.check(q, k, v, w1, w2, padding)
    return _unit(q, k, v, w1, w2, padding, rotation=rotation)


@in_fp32
def _unit(
    q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, padding: Tensor | None, *, rotation: Rotation | None
) -> Tensor:
    def learn_and_answer(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        count, *sums = totals(v, padding, *unit_sums(k, v, w1, w2, padding, rotation))
        return unit_answers(q, w1, w2, sums, count, rotation)

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
) -> Tensor:
    """`ttt_unit` of some queries (b, h, n, d), from the sums over `count` keys."""
    (q,) = turned(rotation, q)
    # the sums first: 1 / n of a value has few digits in half precision
    scale = 1 / (TAPS * count)
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


@in_fp32
def _filter(
    q: Tensor, k: Tensor, v: Tensor, w3: Tensor, padding: Tensor | None, *, grid: TokenGrid, kv_grid: TokenGrid
) -> Tensor:
    on_map = None if padding is None else padding[:, kv_grid.prefix :]
    keys, values = (kv_grid.to_map(zero_padding(tokens, padding)) for tokens in (k, v))
    queries = grid.to_map(zero_padding(q, padding if grid == kv_grid else None))
    filled, beyond = spread.with_borders(keys, TAPS // 2)
    filled = F.pad(filled, (TAPS // 2, TAPS // 2, beyond, beyond))
    products = _tap_products(filled, values, q.shape[1])
    count, products = totals(v[:, :, kv_grid.prefix :], on_map, products)
    return grid.to_heads(filter_map(queries, _trained(w3, products, count)), q.shape[1])


def _tap_products(filled: Tensor, values: Tensor, num_heads: int) -> Tensor:
    """What keys, a map with a border (b, h·d, y, x), have in common with values, for each tap: (b, h, t, d)."""
    # the gradient of a convolution's kernel is what its input and its output's gradient have in common, shifted
    rows, columns = values.shape[-2:]
    products = [
        (filled[:, :, i : i + rows, j : j + columns] * values).sum((-2, -1))
        for i, j in itertools.product(range(TAPS), repeat=2)
    ]
    return rearrange(torch.stack(products, dim=-2), "b t (h d) -> b h t d", h=num_heads)


def _trained(w3: Tensor, products: Tensor, count: Tensor | int) -> Tensor:
    """The kernels (b, h·d, 3, 3) that `count` places have trained."""
    step = damped(products / (TAPS * count))
    return w3[:, 0] + rearrange(step, "b h (i j) d -> b (h d) i j", i=TAPS)


@kept_in_fp32
def filter_sums(k: Tensor, v: Tensor, *, rows: GridRows) -> Tensor:
    """What some rows' values (b, h, n, d), with keys of a row more above and below, add to `ttt_filter`'s step."""
    seen = rows.widened(TAPS // 2)
    above, below = rows.first - seen.first, seen.behind - rows.behind
    border = TAPS // 2
    filled = F.pad(seen.grid.to_map(k), (border, border, border - above, border - below))
    return _tap_products(filled, rows.grid.to_map(v), v.shape[1])


@in_fp32
def filter_answers(q: Tensor, w3: Tensor, products: Tensor, *, rows: GridRows) -> Tensor:
    """`ttt_filter` of some rows, from queries (b, h, n, d) of a row more above and below, and the sums over all."""
    seen, num_heads = rows.widened(TAPS // 2), q.shape[1]
    image = filter_map(seen.grid.to_map(q), _trained(w3, products, rows.whole.num_places))
    return rows.of(seen, seen.grid.to_heads(image, num_heads))


def damped(step: Tensor) -> Tensor:
    """Steps (…, i, o) whose columns, one for each output, are shorter than 1: divided by their length + 1."""
    return step / (step.norm(dim=-2, keepdim=True) + 1)
