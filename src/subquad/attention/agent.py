"""Agent attention: a few agents, pooled from the queries, collect from the keys and hand out to the queries.

Cost 4 n a d a head. Han et al. 2023, arXiv 2312.08874, eq. 4-6.
"""

import math

import torch.nn.functional as F
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
from subquad.errors import SubquadError
from subquad.grid import GridRows, TokenGrid
from subquad.ops import agent_attention, agent_weights, pool_tokens
from subquad.ops.agent_formula import agent_answers, agent_sums
from subquad.ops.at_once import agent_at_once
from subquad.ops.map_formulas import pool_rows
from subquad.ops.padding import zero_padding
from subquad.ops.weighted_sums import merge_weighted
from subquad.positions import BiasTables, GridBias
from subquad.ranges import Positive, checks_arguments


class AgentAttention(nn.Module):
    """`num_agents` is a perfect square on a map; on a grid of one row the agents stand in a row.

    `pooled_agents` puts another number of agents to work than the `num_agents` that the bias tables are made for; the
    tables are then resampled over the agents, as the paper's detectors do with a classifier's weights.
    """

    inputs = ("q", "k", "v", "padding")
    # its two softmaxes can't be told apart from their product, which is what loses keys
    traits = Traits(
        label="agent",
        pools=True,
        key_removal=renormalised,
        start_quietly=lambda new: silence(new.agent_bias, new.query_bias, new.local),
        # CSwin's and MAViT's LePE is the depthwise branch of the mechanism
        in_hosts={
            "pvt": {"num_agents": (9, 16, 49, 49)},
            "pvt_v2": {"num_agents": (9, 16, 49, 49)},
            "swin": {"num_agents": (9, 16, 49, 49)},
            "cswin": {"num_agents": (9, 16, 49, 49), "local": False},
            "mavit": {"num_agents": (9, 16, 49, 49), "local": False},
        },
        spreads=True,
        colour="#d55e00",
    )

    @checks_arguments
    def __init__(
        self,
        dim: Positive,
        num_heads: Positive,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
        num_agents: Positive = 49,
        pooled_agents: Positive | None = None,
        local: bool = True,
    ) -> None:
        super().__init__()
        width = head_dim(dim, num_heads)
        self.num_heads = num_heads
        table_grid = agent_grid(num_agents, grid)
        self.agent_grid = agent_grid(pooled_agents, grid) if pooled_agents else table_grid
        self.agent_bias = GridBias(num_heads, table_grid, kv_grid)  # agents to keys
        self.query_bias = GridBias(num_heads, table_grid, grid)  # queries to agents
        self.local = LocalConv(num_heads, width, 3) if local else None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        (of_keys, of_queries), local = self.biases(grid, kv_grid), self.local
        if padding is None and grid == kv_grid and is_plain(local, LocalConv):
            whole = self._at_once(q, k, v, of_keys, of_queries, local, grid)
            if whole is not None:
                return whole
        agents, idle = self.pool(q, padding, grid=grid, kv_grid=kv_grid)
        y = agent_attention(q, agents, k, v, of_keys, of_queries, padding, idle)
        return finish(local, y, v, grid=grid, kv_grid=kv_grid, padding=padding)

    def weights(
        self, q: Tensor, k: Tensor, padding: Tensor | None = None, *, grid: TokenGrid, kv_grid: TokenGrid
    ) -> Tensor:
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        agents, idle = self.pool(q, padding, grid=grid, kv_grid=kv_grid)
        return agent_weights(q, agents, k, *self.biases(grid, kv_grid), padding, idle)[:, :, None]

    def streaming(self, grid: TokenGrid) -> Streaming:
        """See `subquad.attention.sweeps`."""

        def pooled(rows: GridRows, q: Tensor) -> State:
            return (pool_rows(q, rows, self.agent_grid),)

        def collected(rows: GridRows, agents: State, k: Tensor, v: Tensor) -> State:
            return agent_sums(agents[0], k, v, self.agent_bias(rows, self.agent_grid))

        def answers(rows: GridRows, agents: State, state: State, q: Tensor, v: Tensor | None = None) -> Tensor:
            y = agent_answers(q, agents[0], state, self.query_bias(rows, self.agent_grid))
            return finish_rows(self.local, y, v, rows=rows)

        sums = Sweep(("q",), pooled), Sweep(("k", "v"), collected, merge=merge_weighted)
        return Streaming(sums, Sweep(("q",), answers, values_beside(self.local)))

    def _at_once(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        of_keys: Tensor | BiasTables,
        of_queries: Tensor | BiasTables,
        local: LocalConv,
        grid: TokenGrid,
    ) -> Tensor | None:
        """All of it as one operation, where there is a kernel for it and biases are tables; else None."""
        if isinstance(of_keys, Tensor) or isinstance(of_queries, Tensor):
            return None
        learned = of_keys, of_queries, local.weight, local.bias
        return agent_at_once(q, k, v, *learned, grid=grid, agent_grid=self.agent_grid, filters=local.filters)

    def biases(self, grid: TokenGrid, kv_grid: TokenGrid) -> tuple[Tensor | BiasTables, Tensor | BiasTables]:
        """Give the biases of agents and keys, and those of agents and queries, as `agent_attention` takes them."""
        of_queries = self._bias(self.query_bias, grid)
        queries = of_queries.mT if isinstance(of_queries, Tensor) else of_queries
        return self._bias(self.agent_bias, kv_grid), queries

    def _bias(self, bias: GridBias, grid: TokenGrid) -> Tensor | BiasTables:
        """(h, a, n), or the tables of it where nobody has put anything in the place of what writes it out."""
        return bias.tables(grid, self.agent_grid) if is_plain(bias, GridBias) else bias(grid, self.agent_grid)

    def pool(
        self, q: Tensor, padding: Tensor | None, *, grid: TokenGrid, kv_grid: TokenGrid
    ) -> tuple[Tensor, Tensor | None]:
        """Agents (b, h, a, d), means of the queries over adaptive bins, and which found only padding (b, a)."""
        # padding describes the keys: where queries stand on another grid, none of them is absent
        if padding is None or grid != kv_grid:
            return pool_tokens(q, grid, self.agent_grid), None
        means = F.adaptive_avg_pool2d(grid.to_map(zero_padding(q, padding)), self.agent_grid.shape)
        present = grid.to_map((~padding)[:, None, :, None].to(q.dtype))
        shares = F.adaptive_avg_pool2d(present, self.agent_grid.shape)
        idle = (shares == 0).flatten(1)
        return self._to_agents(means / shares.masked_fill(shares == 0, 1)), idle

    def _to_agents(self, image: Tensor) -> Tensor:
        return self.agent_grid.to_heads(image, self.num_heads)


def agent_grid(num_agents: int, grid: TokenGrid) -> TokenGrid:
    """Where the agents stand: a square on a map, a row on a grid of one row."""
    if grid.height == 1:
        return TokenGrid(1, num_agents)
    side = math.isqrt(num_agents)
    if side < 1 or side * side != num_agents:
        raise SubquadError(
            f"num_agents={num_agents} is not a perfect square: use {max(side, 1) ** 2} or {(max(side, 1) + 1) ** 2}"
        )
    return TokenGrid(side, side)
