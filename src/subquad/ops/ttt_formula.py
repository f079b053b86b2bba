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

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from subquad import kernels, spread
from subquad.grid import TokenGrid
from subquad.ops.image_by_image import by_image
from subquad.ops.map_formulas import filter_map
from subquad.ops.padding import totals, zero_padding
from subquad.ops.precision import in_fp32
from subquad.rope import Rotation, rotation_of, tables_of

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
        if rotation is not None:
            q, k = rotation.turn(q), rotation.turn(k)
        v = zero_padding(v, padding)
        # keys that are not there have no values, whatever stands there
        k = zero_padding(k, padding)
        straight, gate = k @ w1, k @ w2
        open_share = gate.sigmoid()
        # what SiLU gives, and its slope
        activated, slope = gate * open_share, open_share * (1 + gate * (1 - open_share))
        # the sums first: 1 / n of a value has few digits in half precision
        count, first, second = totals(v, padding, k.mT @ (v * activated), k.mT @ (v * straight * slope))
        scale = loss_scale / count
        return (q @ (w1 + damped(first * scale))) * F.silu(q @ (w2 + damped(second * scale)))

    return by_image(learn_and_answer, q, k, v, padding)


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
    # the gradient of a convolution's kernel is what its input and its output's gradient have in common, shifted
    filled, beyond = spread.with_borders(keys, TAPS // 2)
    filled = F.pad(filled, (TAPS // 2, TAPS // 2, beyond, beyond))
    rows, columns = kv_grid.shape
    products = [
        (filled[:, :, i : i + rows, j : j + columns] * values).sum((-2, -1))
        for i, j in itertools.product(range(TAPS), repeat=2)
    ]
    step = rearrange(torch.stack(products, dim=-2), "b t (h d) -> b h t d", h=q.shape[1])
    count, step = totals(v[:, :, kv_grid.prefix :], on_map, step)
    step = step / (TAPS * count)
    kernels = w3[:, 0] + rearrange(damped(step), "b h (i j) d -> b (h d) i j", i=TAPS)
    return grid.to_heads(filter_map(queries, kernels), q.shape[1])


def damped(step: Tensor) -> Tensor:
    """Steps (…, i, o) whose columns, one for each output, are shorter than 1: divided by their length + 1."""
    return step / (step.norm(dim=-2, keepdim=True) + 1)
