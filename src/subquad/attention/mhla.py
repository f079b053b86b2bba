"""MHLA: linear attention whose queries choose among the blocks of the map, by a learned matrix of the blocks.

Cost 2 n d² + m² d² a head with m blocks. Zhang et al. 2026, arXiv 2601.07832, eq. 4 and its released code.
"""

import itertools
import math

import torch
from torch import Tensor, nn

from subquad.attention.bricks import (
    LocalConv,
    check_tokens,
    finish,
    finish_rows,
    head_dim,
    is_plain,
    silence,
    values_beside,
)
from subquad.attention.key_removal import renormalised
from subquad.attention.sweeps import State, Streaming, Sweep
from subquad.attention.traits import Traits
from subquad.errors import SubquadError, unknown_name
from subquad.grid import GridRows, TokenGrid
from subquad.ops import mhla_attention, mhla_weights
from subquad.ops.at_once import mhla_at_once
from subquad.ops.mhla_formula import check_normaliser, cut, mhla_answers, mhla_sums
from subquad.ranges import AboveZero, Positive, checks_arguments

LEAST = 1e-6
"""What the mixing has at least, with the paper's normaliser: of blocks that nobody sees there would be no way back."""


class MHLAAttention(nn.Module):
    """`num_pieces` blocks, as square as the grid of construction allows, cut any grid of a call.

    `mixing` says how the matrix of the blocks starts, see `mixing_start`, with `sigma` for "exp" and `near`, in blocks,
    for "local". `normaliser` is "paper", with rows that sum to 1, or "released", that of the code, where the matrix is
    free to be negative; see `mhla_attention`. `local` is a depthwise `kernel_size`² of the values. Queries and keys are
    normed over all heads.
    """

    inputs = ("q", "k", "v", "padding")
    traits = Traits(
        label="MHLA",
        # blocks are parts of the grid
        pools=True,
        key_removal=renormalised,
        start_quietly=lambda new: silence(new.local),
        spreads=True,
        colour="#6a9a1f",
    )

    @checks_arguments
    def __init__(
        self,
        dim: Positive,
        num_heads: Positive,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
        num_pieces: Positive = 16,
        mixing: str = "linear",
        sigma: AboveZero = 3,
        near: AboveZero = 1.5,
        normaliser: str = "paper",
        local: bool = True,
        kernel_size: Positive = 5,
    ) -> None:
        super().__init__()
        width = head_dim(dim, num_heads)
        if mixing not in STARTS:
            raise unknown_name("mixing", mixing, STARTS)
        check_normaliser(normaliser)
        self.normaliser, self.pieces = normaliser, pieces_of(grid, num_pieces)
        self.prefixes = grid.prefix > 0, kv_grid.prefix > 0
        self._check(grid, kv_grid, None)
        self.q_scale = nn.Parameter(torch.ones(num_heads, 1, width))
        self.k_scale = nn.Parameter(torch.ones(num_heads, 1, width))
        start = mixing_start(mixing, self.pieces, sigma, near, self.prefixes)
        if normaliser == "paper":
            start = start.clamp(min=LEAST)
        self.mixing = nn.Parameter(torch.empty(start.shape))
        with torch.no_grad():
            self.mixing.copy_(start)
        self.local = LocalConv(num_heads, width, kernel_size) if local else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None, *, grid: TokenGrid, kv_grid: TokenGrid
    ) -> Tensor:
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        self._check(grid, kv_grid, padding)
        if padding is None and grid == kv_grid and self.normaliser == "paper" and is_plain(self.local, LocalConv):
            whole = self._at_once(q, k, v, self.local, grid)
            if whole is not None:
                return whole
        y = mhla_attention(
            q,
            k,
            v,
            self._mixing(grid, kv_grid),
            self.q_scale,
            self.k_scale,
            padding,
            grid=grid,
            kv_grid=kv_grid,
            pieces=self.pieces,
            normaliser=self.normaliser,
        )
        return finish(self.local, y, v, grid=grid, kv_grid=kv_grid, padding=padding)

    def _at_once(self, q: Tensor, k: Tensor, v: Tensor, local: LocalConv, grid: TokenGrid) -> Tensor | None:
        learned = self._of_blocks(grid, grid), self.q_scale, self.k_scale, local.weight, local.bias
        return mhla_at_once(q, k, v, *learned, pieces=self.pieces, least=LEAST, grid=grid, filters=local.filters)

    def weights(
        self, q: Tensor, k: Tensor, padding: Tensor | None = None, *, grid: TokenGrid, kv_grid: TokenGrid
    ) -> Tensor:
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        self._check(grid, kv_grid, padding)
        weights = mhla_weights(
            q,
            k,
            self._mixing(grid, kv_grid),
            self.q_scale,
            self.k_scale,
            padding,
            grid=grid,
            kv_grid=kv_grid,
            pieces=self.pieces,
            normaliser=self.normaliser,
        )
        return weights[:, :, None]

    def streaming(self, grid: TokenGrid) -> Streaming:
        """See `subquad.attention.sweeps`; SubquadError with the released normaliser."""
        if self.normaliser != "paper":
            raise SubquadError(
                "MHLA attention can't be streamed with the released normaliser: it mixes the queries of all blocks; "
                "take normaliser='paper'"
            )
        self._check(grid, grid, None)
        mixing = self._mixing(grid, grid)

        def sums(rows: GridRows, k: Tensor, v: Tensor) -> State:
            return (mhla_sums(k, v, self.k_scale, cut(rows, self.pieces, k.device), grid=rows),)

        def answers(rows: GridRows, state: State, q: Tensor, v: Tensor | None = None) -> Tensor:
            blocks = cut(rows, self.pieces, q.device)
            y = mhla_answers(q, state[0], mixing, self.q_scale, blocks, grid=rows)
            return finish_rows(self.local, y, v, rows=rows)

        return Streaming((Sweep(("k", "v"), sums),), Sweep(("q",), answers, values_beside(self.local)))

    def differs_on(self, grid: TokenGrid) -> str:
        """What its weights are of, made on another grid, and what here; empty where both are alike."""
        there = pieces_of(grid, math.prod(self.pieces))
        return "" if there == self.pieces else "blocks of {}×{} there and of {}×{} here".format(*there, *self.pieces)

    def _mixing(self, grid: TokenGrid, kv_grid: TokenGrid) -> Tensor:
        """The matrix of the blocks that these grids have, as it weighs them."""
        mixing = self._of_blocks(grid, kv_grid)
        return mixing.clamp(min=LEAST) if self.normaliser == "paper" else mixing

    def _of_blocks(self, grid: TokenGrid, kv_grid: TokenGrid) -> Tensor:
        """The same as it is learned."""
        rows, columns = (
            int(built and not one.whole.prefix) for built, one in zip(self.prefixes, (grid, kv_grid), strict=True)
        )
        return self.mixing[rows:, columns:]

    def _check(self, grid: TokenGrid, kv_grid: TokenGrid, padding: Tensor | None) -> None:
        for built, one in zip(self.prefixes, (grid, kv_grid), strict=True):
            if one.prefix and not built:
                raise SubquadError(
                    f"built for grids without prefix tokens but called with {one.prefix}: MHLA mixes blocks, and has "
                    "none for these; construct the mechanism with the grid that it will see"
                )
        if self.normaliser == "paper":
            return
        if grid.whole is not grid:
            raise SubquadError(
                "MHLA's released normaliser mixes the queries of all blocks, which other processes hold: take "
                "normaliser='paper'"
            )
        what = f"{grid.prefix or kv_grid.prefix} prefix tokens" if grid.prefix or kv_grid.prefix else ""
        what = what or ("" if grid == kv_grid else f"queries on {grid} with keys on {kv_grid}")
        what = what or ("" if padding is None else "padding")
        if what:
            raise SubquadError(
                f"MHLA's released normaliser mixes the queries of blocks, and knows no {what}: take normaliser='paper'"
            )


def pieces_of(grid: TokenGrid, count: int) -> tuple[int, int]:
    """Rows and columns of `count` blocks that are as square as may be on a grid; a sequence is cut in a row."""
    if grid.height == 1 or grid.width == 1:
        return (1, count) if grid.height == 1 else (count, 1)

    def oblong(rows: int) -> float:
        return abs(math.log(grid.height / rows) - math.log(grid.width / (count // rows)))

    rows = min((rows for rows in range(1, count + 1) if count % rows == 0), key=oblong)
    return rows, count // rows


STARTS = ("linear", "cos", "exp", "local", "gaussian")


def mixing_start(
    kind: str,
    pieces: tuple[int, int],
    sigma: float = 3,
    near: float = 1.5,
    prefixes: tuple[bool, bool] = (False, False),
) -> Tensor:
    """What the matrix of the blocks starts from, float64, by the distances D between their centres.

    "linear" is 1 − D / max D, "cos" cos(π/4 · D / max D), "exp" exp(−D / sigma), "local" D ≤ near, each divided by
    its sums over columns; "gaussian" is exp(−D² / 2(max D / 3)²). Prefix tokens, a block in front where `prefixes` of
    (queries, keys) says so, are at no distance from all.
    """
    places = list(itertools.product(range(pieces[0]), range(pieces[1])))
    centres = torch.tensor(places, dtype=torch.float64, device="cpu")
    distances = torch.linalg.vector_norm(centres[:, None] - centres, dim=-1)
    farthest = max(distances.max().item(), 1.0)  # of one block there is no other
    distances = nn.functional.pad(distances, (int(prefixes[1]), 0, int(prefixes[0]), 0))
    if kind == "gaussian":
        return torch.exp(-(distances.square()) / (2 * (farthest / 3) ** 2))
    start = {
        "linear": lambda: 1 - distances / farthest,
        "cos": lambda: torch.cos(math.pi / 4 * distances / farthest),
        "exp": lambda: torch.exp(-distances / sigma),
        "local": lambda: (distances <= near).to(distances.dtype),
    }[kind]()
    return start / start.sum(dim=0, keepdim=True)
