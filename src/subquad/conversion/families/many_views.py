"""Attention of Depth Anything 3, which sees the tokens of one view in some blocks and those of all views in others.

Lin et al. 2025, arXiv 2511.10647, as the package `depth-anything-3` has it. Blocks of all views are handed the views'
tokens one behind the other, each view's class token in front of its own. For a mechanism the maps of all views are one
map, each below the one before it, as those of a film, and the class tokens stand in front of it.

Letters: b batch, n tokens, d channels of a head.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from subquad.conversion.checkpointed_calls import in_backward
from subquad.conversion.converted_attention import Mechanism
from subquad.conversion.families.dino_attention import Dinov2Attention
from subquad.conversion.grid_recorder import GridRecorder
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.positions import GridTable
from subquad.rope import Rotation, with_signs


class ViewsRecorder(GridRecorder):
    """Listens to the embedding of views; a layer's tokens are those of one or of several."""

    def grid_of(self, tokens: Tensor, prefix: int | None = None) -> TokenGrid:
        """The grid of tokens (b, n, c) of any number of views, of which each has `prefix` tokens in front.

        Raises:
            SubquadError: nothing was embedded yet, or these tokens are of no whole number of views.
        """
        if self._rows_here() is not None:
            return super().grid_of(tokens, prefix)
        front = self.prefix if prefix is None else prefix
        # what is computed again in a backward pass is of no image that was the last
        known = self.calls.standing or (None if in_backward() else self.last_standing)
        each = 0 if known is None else known.grid.num_places + front
        views = tokens.shape[-2] // each if each else 0
        if known is None or views < 2 or tokens.shape[-2] != views * each:
            return super().grid_of(tokens, prefix)
        return TokenGrid(views * known.grid.height, known.grid.width, views * front)


class ViewsAttention(Dinov2Attention):
    """Puts class tokens in front of the maps of all views, and back; turns as the network's own module does."""

    replaces: ClassVar[tuple[str, ...]] = ("depth_anything_3.model.dinov2.layers.attention.Attention",)
    listener: ClassVar[type[GridRecorder]] = ViewsRecorder

    def make_inner(self, original: Any, mechanism: Mechanism, grid: TokenGrid) -> Any:
        inner = super().make_inner(original, mechanism, grid)
        for table in inner.modules():
            if isinstance(table, GridTable):
                # class tokens of all views have the same place
                table.repeats_prefix = True
        return inner

    def forward(self, x: Tensor, pos: Tensor | None = None, attn_mask: Any = None) -> Tensor:  # type: ignore[override]
        if attn_mask is not None:
            raise SubquadError("a converted layer takes no attn_mask: call Depth Anything 3 without one")
        grid = self.grid_under(x)
        views = grid.prefix // self.tokens_in_front
        if views == 1:
            return self.of_map(x, pos, grid)
        order = class_tokens_first(views, x.shape[1], self.tokens_in_front, x.device)
        y = self.of_map(x.index_select(1, order), pos if pos is None else pos.index_select(1, order), grid)
        return y.index_select(1, order.argsort())

    def of_map(self, x: Tensor, pos: Tensor | None, grid: TokenGrid) -> Tensor:
        """Project, mix, project back: (b, n, c) to (b, n, c), of tokens that stand on `grid`."""
        q, k, v = map(self.split, self.projections(x))
        q, k = self.through("q_norm", q), self.through("k_norm", k)
        rotation = None
        if pos is not None and self.has("rope"):
            q, k, rotation = in_halves(q), in_halves(k), self.rotation_at(pos, q)
        y = self.mix(q, k, v, x, grid=grid, rotation=rotation)
        return self.through("proj_drop", self.through("proj", y))

    def rotation_at(self, pos: Tensor, like: Tensor) -> Rotation:
        """How tokens turn at places (b, n, 2), which are the same in all of a batch: as the network turns ones."""
        probe = torch.zeros(1, 1, pos.shape[1], self.width, dtype=like.dtype, device=like.device)
        # the first of each pair, of rows and of columns
        probe.unflatten(-1, (2, 2, -1))[..., 0, :] = 1
        turned = self.get_submodule("rope")(probe, pos[:1])[0, 0].unflatten(-1, (2, 2, -1))
        cos, sin = (torch.cat([turned[..., part, :].flatten(-2)] * 2, dim=-1) for part in (0, 1))
        return Rotation(cos, with_signs(sin, interleaved=False), interleaved=False)


def class_tokens_first(views: int, count: int, front: int, device: torch.device) -> Tensor:
    """(n,), where tokens stand among those of all views: the tokens in front of each view's map, then the maps."""
    of_views = torch.arange(count, device=device).view(views, -1)
    return torch.cat([of_views[:, :front].T.flatten(), of_views[:, front:].flatten()])


def in_halves(tokens: Tensor) -> Tensor:
    """Heads (b, h, n, d) whose pairs, apart for rows and columns, become a channel of each half of all."""
    return tokens.unflatten(-1, (2, 2, -1)).transpose(-3, -2).flatten(-3)
