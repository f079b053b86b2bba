"""transformers' Swin and Swin v2: tokens (b, n, c) and the (height, width) of their map."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from subquad.conversion.families.windowed_blocks import (
    Parts,
    WindowedBlock,
    as_cosines,
    carry,
    continuous_bias,
    window_bias,
)
from subquad.grid import TokenGrid
from subquad.inference.foreign_halves import first_half_of
from subquad.inference.halves import drops_nothing
from subquad.inference.transformers_blocks import DROPPED_BY, PROJECTED_BY, VIT, half_of_plain_mlp
from subquad.tracing import smaller, surely


class TransformersSwinLayer(WindowedBlock):
    """Norms before attention, and a table of biases."""

    replaces: ClassVar[tuple[str, ...]] = ("transformers.models.swin.modeling_swin.SwinLayer",)
    recorded_as: ClassVar[str | None] = "transformers.models.swin.modeling_swin.SwinStage"
    layer_name: ClassVar[str] = "attention"
    pads_first: ClassVar[bool] = True
    attention: nn.ModuleDict
    layernorm_before: nn.Module
    layernorm_after: nn.Module
    mlp: nn.Module

    def sizes(self, original: Any) -> tuple[int, int]:
        attention = original.attention
        return attention.num_attention_heads, attention.head_dim

    def window_of(self, original: Any) -> tuple[int, int]:
        # the layer's own `window_size` is another once it was called with a smaller map
        return original.attention.relative_position_bias.window_size

    def shift_of(self, original: Any) -> tuple[int, int]:
        return original.shift_size, original.shift_size

    def projections(self, attention: Any) -> nn.Module:
        parts = nn.ModuleDict({name: getattr(attention, name) for name in (*PROJECTED_BY, "o_proj")})
        if self.window is not None:
            table = Parts()
            carry(attention.relative_position_bias, table, "relative_position_bias_table")
            parts["relative_position_bias"] = table
        return parts

    def is_shifted(self, grid: TokenGrid, always_partition: bool) -> bool:
        """Whether windows are shifted on a map: not where one is as high or wide, unless a backbone asks for it."""
        return always_partition or self.window is None or not surely(smaller(*grid.shape) <= self.window.height)

    def forward(
        self,
        hidden_states: Tensor,
        input_dimensions: tuple[int, int],
        always_partition: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        grid = TokenGrid(*input_dimensions)
        shifted, drops = self.is_shifted(grid, always_partition), map(self._modules.get, DROPPED_BY)
        if self.wants_few_steps and not self.training and drops_nothing(*drops):
            return self.replayed_on(hidden_states, grid, shifted=shifted), None
        image = self.through("layernorm_before", hidden_states).unflatten(1, grid.shape)
        attended = self.through("dropout", self.attended(image, shifted)).flatten(1, 2)
        x = hidden_states + self.through("drop_path", attended)
        return x + self.through("dropout", self.through("mlp", self.through("layernorm_after", x))), None

    def few_steps(self, x: Tensor, grid: TokenGrid, shifted: bool = True) -> Tensor:
        y = None
        if self.window is None:
            y = first_half_of(self, x, self.layernorm_before, self.attention, self, None, grid)
        if y is None:
            y = x + self.attended(self.layernorm_before(x).unflatten(1, grid.shape), shifted).flatten(1, 2)
        home, _, _ = self.replaces[0].rpartition(".")
        behind = half_of_plain_mlp(self, y, self.layernorm_after, self.mlp, VIT.mlp, home, None)
        return y + self.mlp(self.layernorm_after(y)) if behind is None else behind

    def heads_of(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts: Any = self._modules["attention"]
        q, k, v = (self.split(parts[name](tokens)) for name in PROJECTED_BY)
        return q, k, v

    def bias(self, window: TokenGrid) -> Tensor:
        parts: Any = self._modules["attention"]
        (table,) = parts["relative_position_bias"]("relative_position_bias_table")
        return window_bias(table, window)

    def project(self, tokens: Tensor) -> Tensor:
        parts: Any = self._modules["attention"]
        return parts["o_proj"](tokens)

    # what subquad.inference asks for

    projected_by: ClassVar[tuple[str, ...]] = PROJECTED_BY
    answered_by: ClassVar[str] = "o_proj"

    def between(self, projected: Sequence[Tensor], x: Tensor, positions: TokenGrid | None = None) -> Tensor:
        """What goes into the last projection (b, n, h·d), of tokens that stand on the grid `positions`."""
        q, k, v = map(self.split, projected)
        return self.mix(q, k, v, x, grid=positions)


class TransformersSwinV2Layer(TransformersSwinLayer):
    """Norms behind attention, cosines of queries and keys, and biases of a small network."""

    replaces: ClassVar[tuple[str, ...]] = ("transformers.models.swinv2.modeling_swinv2.Swinv2Layer",)

    def sizes(self, original: Any) -> tuple[int, int]:
        attention = original.attention.self
        return attention.num_attention_heads, attention.attention_head_size

    def window_of(self, original: Any) -> tuple[int, int]:
        return original.window_size, original.window_size

    def projections(self, attention: Any) -> nn.Module:
        own = attention.self
        parts = Parts({name: getattr(own, name) for name in ("query", "key", "value")})
        carry(own, parts, "logit_scale")
        if self.window is not None:
            parts["continuous_position_bias_mlp"] = own.continuous_position_bias_mlp
            distances = own.relative_coords_table.detach().clone()
            parts.register_buffer("relative_coords_table", distances, persistent=False)
        return nn.ModuleDict({"self": parts, "output": attention.output})

    def forward(self, hidden_states: Tensor, input_dimensions: tuple[int, int], *args: Any, **kwargs: Any) -> Any:
        attended = self.attended(hidden_states.unflatten(1, tuple(input_dimensions))).flatten(1, 2)
        x = hidden_states + self.through("drop_path", self.through("layernorm_before", attended))
        y = self.through("output", self.through("intermediate", x))
        return (x + self.through("drop_path", self.through("layernorm_after", y)),)

    def heads_of(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts: Any = self._modules["attention"]["self"]  # type: ignore[index]
        q, k, v = (self.split(parts[name](tokens)) for name in ("query", "key", "value"))
        (scale,) = parts("logit_scale")
        return *as_cosines(q, k, scale), v

    def bias(self, window: TokenGrid) -> Tensor:
        parts: Any = self._modules["attention"]["self"]  # type: ignore[index]
        (distances,) = parts("relative_coords_table")
        return continuous_bias(parts["continuous_position_bias_mlp"], distances, window)

    def project(self, tokens: Tensor) -> Tensor:
        parts: Any = self._modules["attention"]
        return parts["output"](tokens, tokens)
