"""Linear attention, the plain one: positive features and a division. Cost 2 n d² a head. arXiv 2006.16236."""

from functools import partial

from torch import Tensor, nn

from subquad.attention.bricks import LocalConv, check_tokens, finish, finish_rows, head_dim, silence, values_beside
from subquad.attention.key_removal import renormalised
from subquad.attention.sweeps import Branch, State, Streaming, Sweep
from subquad.attention.traits import Traits
from subquad.grid import GridRows, TokenGrid
from subquad.ops import linear_attention, linear_weights
from subquad.ops.branch_at_once import linear_branch_answers, linear_branch_sums
from subquad.ops.linear_formula import check_feature_map, linear_answers, linear_sums
from subquad.ranges import Positive, checks_arguments


class LinearAttention(nn.Module):
    """`feature_map` is "relu" or "elu" (ELU + 1); `local` adds a depthwise 3×3 of the values, as others have it."""

    inputs = ("q", "k", "v", "padding")
    traits = Traits(
        label="linear",
        key_removal=renormalised,
        start_quietly=lambda new: silence(new.local),
        spreads=True,
        colour="#0072b2",
    )

    @checks_arguments
    def __init__(
        self,
        dim: Positive,
        num_heads: Positive,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
        feature_map: str = "relu",
        local: bool = False,
    ) -> None:
        super().__init__()
        check_feature_map(feature_map)
        self.feature_map = feature_map
        width = head_dim(dim, num_heads)
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
        y = linear_attention(q, k, v, padding, feature_map=self.feature_map)
        return finish(self.local, y, v, grid=grid, kv_grid=kv_grid, padding=padding)

    def streaming(self, grid: TokenGrid) -> Streaming:
        """See `subquad.attention.sweeps`."""

        def sums(rows: GridRows, k: Tensor, v: Tensor) -> State:
            return (linear_sums(k, v, feature_map=self.feature_map),)

        def answers(rows: GridRows, state: State, q: Tensor, v: Tensor | None = None) -> Tensor:
            y = linear_answers(q, state[0], grid.num_tokens, feature_map=self.feature_map)
            return finish_rows(self.local, y, v, rows=rows)

        return Streaming((Sweep(("k", "v"), sums),), Sweep(("q",), answers, values_beside(self.local)))

    @property
    def branch(self) -> Branch | None:
        """See `subquad.attention.sweeps`; None where the local branch reads values on their map, and of subclasses."""
        if type(self) is not LinearAttention or self.local is not None:
            return None
        steps = linear_branch_sums, linear_branch_answers
        return Branch(*(partial(step, feature_map=self.feature_map) for step in steps))

    def weights(
        self, q: Tensor, k: Tensor, padding: Tensor | None = None, *, grid: TokenGrid, kv_grid: TokenGrid
    ) -> Tensor:
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        return linear_weights(q, k, padding, feature_map=self.feature_map)[:, :, None]
