"""MHLA: linear attention with a state for each block of the map, mixed anew for each block of queries. Linear in n.

    S_b = Σ_(j in b) K_j [v_j, 1]ᵀ      [Y_i, N_i] = Q_i Σ_b M_(blk i, b) S_b      y_i = Y_i / (N_i + ε)

with Q = ReLU(RMSNorm(q)) + 10⁻⁶, K alike, norms over all heads' channels, and M one number for each pair of blocks.
Cost 2 n d² + m² d² a head with m blocks. Zhang et al. 2026, arXiv 2601.07832, eq. 4; `normaliser="released"` is that of
its code, see `mhla_attention`.
"""

import itertools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import kernels, spread
from subquad.errors import unknown_name
from subquad.grid import GridRows, TokenGrid
from subquad.kernels import Shapes
from subquad.ops.image_by_image import by_image
from subquad.ops.padding import zero_padding
from subquad.ops.precision import in_fp32, kept_in_fp32

SHAPES = Shapes(
    "MHLA", q="b h n d", k="b h m d", v="b h m d", mixing="i j", q_scale="h 1 d", k_scale="h 1 d", padding="b m"
)
WEIGHTS_SHAPES = SHAPES.without("v")
NORMALISERS = ("paper", "released")
FLOOR = 1e-6
"""Of the features, and what is added to normalisers."""


def mhla_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    padding: Tensor | None = None,
    *,
    grid: TokenGrid,
    kv_grid: TokenGrid,
    pieces: tuple[int, int],
    normaliser: str = "paper",
) -> Tensor:
    """(b, h, n_q, d) from q (b, h, n_q, d), k and v (b, h, n_k, d); `padding` (b, n_k).

    Each map is cut into `pieces`, (rows, columns) of blocks of nearly equal size, in raster order; prefix tokens, where
    a grid has some, are a block in front. `mixing` (blocks of queries, blocks of keys) weighs the states, `q_scale` and
    `k_scale` (h, 1, d) are the weights of the norms.

    The released normaliser takes, for the query at position t of its block, not its own products with the key sums of
    all blocks but those of the queries at position t of these blocks, each with its own: rows do not sum to 1. A
    position that a smaller block has not is its nearest. It knows no prefix, no padding and one grid.
    """
    check_normaliser(normaliser)
    SHAPES.check(q, k, v, mixing, q_scale, k_scale, padding, **_sizes(grid, kv_grid, pieces))
    if normaliser == "paper" and padding is None and not spread.is_spread():
        y = _by_kernels(q, k, v, mixing, q_scale, k_scale, grid=grid, kv_grid=kv_grid, pieces=pieces)
        if y is not None:
            return y
    return _mhla(
        q, k, v, mixing, q_scale, k_scale, padding, grid=grid, kv_grid=kv_grid, pieces=pieces, normaliser=normaliser
    )


def _by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    *,
    grid: TokenGrid,
    kv_grid: TokenGrid,
    pieces: tuple[int, int],
) -> Tensor | None:
    """The same by kernels that sum up and answer block by block; None where there is none."""
    states = kernels.compute_if_possible(kernels.mhla_sums, (k, v, k_scale), (kv_grid.shape, pieces), _sums)
    if states is None:
        return None
    tensors = q, _mixed(states, mixing), q_scale
    return kernels.compute_if_possible(kernels.mhla_answers, tensors, (grid.shape, pieces), _answers)


def _sums(k: Tensor, v: Tensor, scale: Tensor, shape: tuple[int, int], pieces: tuple[int, int]) -> Tensor:
    """What the kernel `mhla_sums` computes."""
    grid = TokenGrid(*shape, k.shape[2] - math.prod(shape))
    return mhla_sums(k, v, scale, cut(grid, pieces, k.device), grid=grid)


def _answers(q: Tensor, mixed: Tensor, scale: Tensor, shape: tuple[int, int], pieces: tuple[int, int]) -> Tensor:
    """What the kernel `mhla_answers` computes."""
    grid = TokenGrid(*shape, q.shape[2] - math.prod(shape))
    as_they_are = torch.eye(mixed.shape[2], dtype=mixed.dtype, device=mixed.device)
    return mhla_answers(q, mixed, as_they_are, scale, cut(grid, pieces, q.device), grid=grid)


@kept_in_fp32
def _mixed(states: Tensor, mixing: Tensor) -> Tensor:
    """States (b, h, j, d, d + 1) of the blocks of keys, mixed for each block of queries (b, h, i, d, d + 1)."""
    flat = states.flatten(3).flatten(0, 1)
    # a product for each head: of two and four axes PyTorch makes one, and copies all states for it
    mixed = torch.bmm(mixing.to(states.dtype).expand(flat.shape[0], -1, -1), flat)
    return mixed.unflatten(0, states.shape[:2]).unflatten(3, states.shape[3:])


@in_fp32
def _mhla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    padding: Tensor | None,
    *,
    grid: TokenGrid,
    kv_grid: TokenGrid,
    pieces: tuple[int, int],
    normaliser: str,
) -> Tensor:
    of_queries = cut(grid, pieces, q.device)
    of_keys = of_queries if grid == kv_grid else cut(kv_grid, pieces, q.device)

    def mix(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        states = spread.total(mhla_sums(k, v, k_scale, of_keys, padding, grid=kv_grid))
        return mhla_answers(q, states, mixing, q_scale, of_queries, grid=grid, normaliser=normaliser)

    return by_image(mix, q, k, v, padding)


@kept_in_fp32
def mhla_sums(
    k: Tensor, v: Tensor, k_scale: Tensor, cut: "Cut", padding: Tensor | None = None, *, grid: TokenGrid
) -> Tensor:
    """What keys and values (b, h, n, d) of a grid, or of some rows of one, add to all states (b, h, m, d, d + 1).

    A state is the sum of products of a block's keys with its values and with 1; prefix tokens' is in front.
    """
    k, v = zero_padding(features(k, k_scale), padding), zero_padding(v, padding)
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    keys, values = (in_blocks(x[:, :, grid.prefix :], cut) for x in (k, v))
    states = keys.masked_fill(cut.absent[..., None], 0).mT @ values
    if grid.whole is not grid:
        states = F.pad(states, (0, 0, 0, 0, cut.first, cut.of_whole - cut.first - states.shape[2]))
    if not grid.whole.prefix:
        return states
    of_prefix = k[:, :, : grid.prefix].mT @ v[:, :, : grid.prefix]
    return torch.cat([of_prefix[:, :, None], states], dim=2)


@in_fp32
def mhla_answers(
    q: Tensor,
    states: Tensor,
    mixing: Tensor,
    q_scale: Tensor,
    cut: "Cut",
    *,
    grid: TokenGrid,
    normaliser: str = "paper",
) -> Tensor:
    """`mhla_attention` of queries (b, h, n, d) of a grid, or of some rows of one, from the states of all blocks."""
    q = features(q, q_scale)
    mixed = _mixed(states, mixing)
    first = min(grid.whole.prefix, 1) + cut.first
    inside = in_blocks(q[:, :, grid.prefix :], cut)
    y = inside @ mixed[:, :, first : first + len(cut.places)]
    if normaliser == "released":
        products = (inside @ states[..., -1:]).squeeze(-1).masked_fill(cut.empty[:, None], 0)
        y = torch.cat([y[..., :-1], (mixing @ products)[..., None]], dim=-1)
    y = y.flatten(2, 3).index_select(2, cut.slots)
    if grid.prefix:
        y = torch.cat([q[:, :, : grid.prefix] @ mixed[:, :, 0], y], dim=2)
    return y[..., :-1] / (y[..., -1:] + FLOOR)


def check_normaliser(name: str) -> None:
    """Raise SubquadError for a name that is none of NORMALISERS."""
    if name not in NORMALISERS:
        raise unknown_name("normaliser", name, NORMALISERS)


def _sizes(grid: TokenGrid, kv_grid: TokenGrid, pieces: tuple[int, int]) -> dict[str, int]:
    """The letters of `SHAPES` that grids and blocks decide on."""
    blocks = [math.prod(pieces) + min(one.whole.prefix, 1) for one in (grid, kv_grid)]
    return {"n": grid.num_tokens, "m": kv_grid.num_tokens, "i": blocks[0], "j": blocks[1]}


def features(x: Tensor, scale: Tensor) -> Tensor:
    """ReLU of the tokens (b, h, n, d), normed over the channels of all heads, and a floor under it."""
    eps = torch.finfo(x.dtype).eps  # what the released code leaves to PyTorch, of fp32 at least
    normed = x * (x.square().mean(dim=(1, 3), keepdim=True) + eps).rsqrt()
    return (normed * scale).relu() + FLOOR


class Cut(NamedTuple):
    """A map in blocks of w positions each, that of the largest of them; smaller blocks have absent ones.

    Of some rows there are the blocks that they have a part of, and their tokens in them.

    Attributes:
        first: the first of these blocks among those of the whole map.
        of_whole: how many blocks the whole map has.
        places: of the map's tokens, by block and position, (m, w); for absent positions the nearest in the block.
        absent: which positions a block has not, (m, w).
        empty: which blocks have none at all, (m,): there are more than rows or columns.
        blocks: the block of each of the map's tokens, (n,).
        slots: where each of the map's tokens is among all blocks' positions, (n,).
    """

    first: int
    of_whole: int
    places: Tensor
    absent: Tensor
    empty: Tensor
    blocks: Tensor
    slots: Tensor


def cut(grid: TokenGrid, pieces: tuple[int, int], device: torch.device) -> Cut:
    """Cut the map of a grid into (rows, columns) of blocks whose sides differ by one token at most."""
    rows, columns = (_cut_side(size, count, device) for size, count in zip(grid.shape, pieces, strict=True))
    first = 0
    if isinstance(grid, GridRows):
        first, rows = _cut_rows(grid, pieces[0], device)
    width = rows.counts.new_ones(()) * grid.width

    def pairs(of_rows: Tensor, of_columns: Tensor) -> Tensor:
        """From (m_y, p_y) and (m_x, p_x) all four together, by block and position."""
        both = of_rows[:, None, :, None] + of_columns[None, :, None, :]
        return both.flatten(2).flatten(0, 1)

    places = pairs(rows.places * width, columns.places)
    absent = pairs(rows.absent.long(), columns.absent.long()) > 0
    empty = ((rows.counts == 0)[:, None] | (columns.counts == 0)).flatten()
    blocks = (rows.blocks[:, None] * pieces[1] + columns.blocks).flatten()
    within = (rows.positions[:, None] * columns.places.shape[1] + columns.positions).flatten()
    return Cut(first * pieces[1], math.prod(pieces), places, absent, empty, blocks, blocks * places.shape[1] + within)


class _Side(NamedTuple):
    """One side of a map, cut: as `Cut`, with the position of each token in its block and the blocks' lengths."""

    places: Tensor
    absent: Tensor
    counts: Tensor
    blocks: Tensor
    positions: Tensor


def _cut_side(size: int, count: int, device: torch.device) -> _Side:
    tokens, bounds = torch.arange(size, device=device), torch.arange(count + 1, device=device)
    length = tokens[-1:] + 1  # a tensor, as a size may be a symbol
    bounds = bounds * length // count
    starts, counts = bounds[:-1], bounds.diff()
    steps = torch.arange((size + count - 1) // count, device=device)
    places = (starts[:, None] + torch.minimum(steps, (counts[:, None] - 1).clamp(min=0))).clamp(max=size - 1)
    blocks = ((tokens + 1) * count - 1) // length
    return _Side(places, steps >= counts[:, None], counts, blocks, tokens - starts[blocks])


def _cut_rows(grid: GridRows, count: int, device: torch.device) -> tuple[int, _Side]:
    """The blocks of rows, `count` in the whole grid, that some rows have a part of, cut; and which is the first."""
    bounds = [i * grid.whole.height // count for i in range(count + 1)]
    inside = [(max(low, grid.first), min(high, grid.behind)) for low, high in itertools.pairwise(bounds)]
    here = [i for i, (low, high) in enumerate(inside) if low < high]
    parts = [(low - grid.first, high - low) for low, high in inside[here[0] : here[-1] + 1]]
    starts, counts = (torch.tensor([max(part[i], 0) for part in parts], device=device) for i in (0, 1))
    steps = torch.arange(int(max(size for _, size in parts)), device=device)
    places = starts[:, None] + torch.minimum(steps, (counts[:, None] - 1).clamp(min=0))
    blocks = torch.arange(len(parts), device=device).repeat_interleave(counts, output_size=grid.height)
    positions = torch.arange(grid.height, device=device) - starts[blocks]
    return here[0], _Side(places.clamp(max=grid.height - 1), steps >= counts[:, None], counts, blocks, positions)


def in_blocks(x: Tensor, cut: Cut) -> Tensor:
    """A map's tokens (b, h, n, d) by block and position, (b, h, m, w, d); absent positions have their nearest."""
    return x.index_select(2, cut.places.flatten()).unflatten(2, cut.places.shape)


@in_fp32
def mhla_weights(
    q: Tensor,
    k: Tensor,
    mixing: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    padding: Tensor | None = None,
    *,
    grid: TokenGrid,
    kv_grid: TokenGrid,
    pieces: tuple[int, int],
    normaliser: str = "paper",
) -> Tensor:
    """Explicit weights (b, h, n_q, n_k) of `mhla_attention`: A_ij = M_(blk i, blk j) Q_i·K_j / N_i."""
    check_normaliser(normaliser)
    WEIGHTS_SHAPES.check(q, k, mixing, q_scale, k_scale, padding, **_sizes(grid, kv_grid, pieces))
    q, k = features(q, q_scale), zero_padding(features(k, k_scale), padding)
    of_queries, of_keys = (blocks_of(one, pieces, q.device) for one in (grid, kv_grid))
    products = q @ k.mT * mixing[of_queries[:, None], of_keys]
    if normaliser == "paper":
        return products / (products.sum(dim=-1, keepdim=True) + FLOOR)
    halves = cut(grid, pieces, q.device)
    others = halves.places[:, halves.slots % halves.places.shape[1]]  # (m, n): in each block, who is where a query is
    sums = torch.stack([k[:, :, of_keys == block].sum(dim=2) for block in range(len(mixing))], dim=2)
    normaliser_of = (q[:, :, others] * sums[:, :, :, None]).sum(dim=-1) * mixing.T[:, of_queries]
    return products / (normaliser_of.sum(dim=2)[..., None] + FLOOR)


def blocks_of(grid: TokenGrid, pieces: tuple[int, int], device: torch.device) -> Tensor:
    """The block of every token of a grid, (n,): prefix tokens are in the first, if there are some."""
    blocks = cut(grid, pieces, device).blocks
    return torch.cat([blocks.new_zeros(grid.prefix), blocks + 1]) if grid.prefix else blocks
