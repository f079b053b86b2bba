"""A whole mechanism at once, with all that is between a layer's projections, where a kernel does that.

Each function gives None where none does, as where gradients are wanted or tokens are spread: then the mechanism goes
its steps, which say what is computed. On narrow layers calling these one by one costs as much as they do themselves.
"""

from typing import Any

from torch import Tensor

from subquad import kernels, spread
from subquad.grid import TokenGrid
from subquad.kernels import Operator
from subquad.ops.soft_formula import RIDGE, START
from subquad.ops.ttt_formula import TAPS
from subquad.positions import BiasTables
from subquad.rope import Rotation, tables_of


def inline_at_once(q: Tensor, k: Tensor, v: Tensor, x: Tensor, *mlp: Tensor | None, grid: TokenGrid) -> Tensor | None:
    """InLine attention of tokens (b, h, n, d) whose local taps an MLP predicts from the mean of x (b, n, h·d).

    `mlp` has weight and bias of its two layers, (h·d, d, 1) and (9·h·d, d, 1).
    """
    return _computed(kernels.inline_mixer, (q, k, v, x, *mlp), (grid.shape,))


def agent_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: BiasTables,
    query_bias: BiasTables,
    weight: Tensor,
    bias: Tensor | None,
    *,
    grid: TokenGrid,
    agent_grid: TokenGrid,
    filters: str,
) -> Tensor | None:
    """Agent attention of agents that are means of the queries (b, h, n, d) over the bins of `agent_grid`.

    `weight` (f, 1, w, w) and `bias` (f,) are the local branch's; whose filters they are says `filters`, see
    `filters_of_channels`.
    """
    tensors = q, k, v, *key_bias, *query_bias, weight, bias
    return _computed(kernels.agent_mixer, tensors, (grid.shape, agent_grid.shape, filters))


def pola_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    power: Tensor,
    temperature: Tensor,
    positions: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    alpha: float,
    grid: TokenGrid,
    filters: str,
    eps: float = 1e-6,
) -> Tensor | None:
    """PolaFormer's attention with its gate g, from `power` and `temperature` (h, 1, d) as they are learned."""
    tensors = q, k, v, g, power, temperature, positions, weight, bias
    return _computed(kernels.pola_mixer, tensors, (grid.shape, alpha, eps, filters))


def soft_at_once(
    q: Tensor,
    v: Tensor,
    windows: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    steps: int,
    scale: float,
    norm_eps: float,
    grid: TokenGrid,
    filters: str,
) -> Tensor | None:
    """Softmax-free attention, inverse "ridge", of landmarks that a convolution `windows` (d, d, i, j) makes."""
    tensors = q, v, windows, norm_weight, norm_bias, weight, bias
    settings = grid.shape, steps, scale, norm_eps, RIDGE, START, filters
    return _computed(kernels.soft_mixer, tensors, settings)


def focused_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor,
    positions: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    power: float,
    grid: TokenGrid,
    filters: str,
    eps: float = 1e-6,
) -> Tensor | None:
    """Focused attention, from `temperature` (h, 1, d) as it is learned and `positions` (h, n, d) of the keys."""
    tensors = q, k, v, temperature, positions, weight, bias
    return _computed(kernels.focused_mixer, tensors, (grid.shape, power, eps, filters))


def polapp_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    same: Tensor,
    opposite: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    rotation: Rotation | None,
    grid: TokenGrid,
    filters: str,
    eps: float = 1e-6,
) -> Tensor | None:
    """PolaFormer++'s attention with its gate g, from the spikiness (h, 1, 2d) as it is learned."""
    cos, sin, interleaved = tables_of(rotation)
    tensors = q, k, v, g, same, opposite, cos, sin, weight, bias
    return _computed(kernels.polapp_mixer, tensors, (grid.shape, interleaved, eps, filters))


def ttt_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    *,
    rotation: Rotation | None,
    grid: TokenGrid,
) -> Tensor | None:
    """Test-time training of the units' heads, and of the filters' behind them; see `ttt_unit` and `ttt_filter`."""
    cos, sin, interleaved = tables_of(rotation)
    return _computed(kernels.ttt_mixer, (q, k, v, w1, w2, w3, cos, sin), (grid.shape, interleaved, 1 / TAPS))


def circulant_at_once(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, grid: TokenGrid) -> Tensor | None:
    """Circulant attention times SiLU of its gate g, on a grid without prefix."""
    return _computed(kernels.circulant_mixer, (q, k, v, g), (grid.shape,))


def mhla_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    pieces: tuple[int, int],
    least: float,
    grid: TokenGrid,
    filters: str,
) -> Tensor | None:
    """MHLA with the paper's normaliser, from the matrix of blocks as it is learned, `least` its smallest number."""
    tensors = q, k, v, mixing, q_scale, k_scale, weight, bias
    return _computed(kernels.mhla_mixer, tensors, (grid.shape, pieces, least, filters))


def _computed(operator: Operator, tensors: tuple[Tensor | None, ...], settings: tuple[Any, ...]) -> Tensor | None:
    if spread.is_spread():
        return None
    return kernels.compute_if_possible(operator, tensors, settings)
