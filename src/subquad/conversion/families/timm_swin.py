"""timm's Swin (also Swin S3) and Swin v2, (b, y, x, c) to (b, y, x, c)."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.conversion.converted_attention import biased
from subquad.conversion.families.windowed_blocks import (
    BIAS,
    Parts,
    WindowedBlock,
    WithTable,
    as_cosines,
    carry,
    continuous_bias,
)
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.inference.foreign_halves import first_half_of, three
from subquad.inference.timm_blocks import behind_factors

DISTANCES = "relative_coords_table"


class TimmSwinBlock(WithTable, WindowedBlock):
    """Norms before attention, and a table of biases."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.swin_transformer.SwinTransformerBlock",)
    known: ClassVar[str] = "timm.models.swin_transformer.WindowAttention"
    norm1: nn.Module

    def check(self, original: Any) -> None:
        kind = type(original.attn)
        if f"{kind.__module__}.{kind.__qualname__}" != self.known:
            raise SubquadError(f"this Swin block has a {kind.__module__}.{kind.__qualname__}, which is not known here")

    def forward(self, x: Tensor) -> Tensor:
        if self.wants_few_steps and not self.training:
            return self.replayed_on(x.flatten(1, 2), TokenGrid(x.shape[1], x.shape[2])).view_as(x)
        x = x + self.through("drop_path1", self.attended(self.through("norm1", x)))
        tokens = x.flatten(1, 2)
        return x + self.through("drop_path2", self.through("mlp", self.through("norm2", tokens))).view_as(x)

    def few_steps(self, x: Tensor, grid: TokenGrid) -> Tensor:
        y = None
        if self.window is None:
            y = first_half_of(self, x, self.norm1, self.attn, self, None, grid)
        if y is None:
            y = x + self.through("drop_path1", self.attended(self.norm1(x).unflatten(1, grid.shape)).flatten(1, 2))
        return behind_factors(self, y, None)

    def move_bias(self, move: Callable[[Any], None]) -> None:
        # by the rule of the timm that is installed
        twin: Any = deepcopy(self.original)
        twin.attn.register_parameter(BIAS, self.get_parameter(f"attn.{BIAS}"))
        move(twin)
        self.attn.register_parameter(BIAS, twin.attn.get_parameter(BIAS))

    # what subquad.inference asks for

    projected_by: ClassVar[tuple[str, ...]] = ("qkv",)
    answered_by: ClassVar[str] = "proj"

    def between(self, projected: Sequence[Tensor], x: Tensor, positions: TokenGrid | None = None) -> Tensor:
        """What goes into the last projection (b, n, h·d), of tokens that stand on the grid `positions`."""
        q, k, v = map(self.split, three(projected))
        return self.mix(q, k, v, x, grid=positions)


class TimmSwinV2Block(TimmSwinBlock):
    """Norms behind attention, cosines of queries and keys, and biases of a small network: arXiv 2111.09883."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.swin_transformer_v2.SwinTransformerV2Block",)
    known: ClassVar[str] = "timm.models.swin_transformer_v2.WindowAttention"

    def projections(self, attention: Any) -> nn.Module:
        parts = Parts({name: getattr(attention, name) for name in self.names})
        for name in ("logit_scale", "q_bias", "v_bias"):
            carry(attention, parts, name)
        if self.window is not None:
            parts["cpb_mlp"] = attention.cpb_mlp
            parts.register_buffer(DISTANCES, attention.relative_coords_table.detach().clone(), persistent=False)
        return parts

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.through("drop_path1", self.through("norm1", self.attended(x)))
        tokens = x.flatten(1, 2)
        return x + self.through("drop_path2", self.through("norm2", self.through("mlp", tokens))).view_as(x)

    def heads_of(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale, of_queries, of_values = self.attn("logit_scale", "q_bias", "v_bias")
        if of_queries is None:
            fused = self.attn["qkv"](tokens)
        else:
            # keys have none
            fused = biased(self.attn["qkv"], tokens, torch.cat([of_queries, torch.zeros_like(of_queries), of_values]))
        q, k, v = map(self.split, fused.chunk(3, dim=-1))
        return *as_cosines(q, k, scale), v

    def bias(self, window: TokenGrid) -> Tensor:
        (distances,) = self.attn(DISTANCES)
        return continuous_bias(self.attn["cpb_mlp"], distances, window)

    def move_bias(self, move: Callable[[Any], None]) -> None:
        twin: Any = deepcopy(self.original)
        move(twin)
        old = self.attn.get_buffer(DISTANCES)
        self.attn.register_buffer(DISTANCES, twin.attn.get_buffer(DISTANCES).to(old), persistent=False)
