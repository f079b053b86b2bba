"""Our own plain host's layer, with any mechanism."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from subquad.conversion.converted_attention import ConvertedAttention
from subquad.grid import TokenGrid
from subquad.models.layers import move_tables
from subquad.rope import Rotation


class OwnAttention(ConvertedAttention):
    """Called with the grid, as all our layers; it needs no recorder."""

    replaces = ("subquad.models.layers.SelfAttention",)

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.projected = tuple(original.projected)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, original.proj.in_features // original.num_heads

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        return ((name, part) for name, part in super().kept(original) if name != "inner")

    def forward(
        self,
        x: Tensor,
        *,
        grid: TokenGrid,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        grid.check(x)
        fused = self.through("project", x).chunk(len(self.projected), dim=-1)
        parts = {name: self.split(part) for name, part in zip(self.projected, fused, strict=True)}
        q, v = self.through("q_norm", parts["q"]), parts["v"]
        # SOFT's keys are its queries
        k = self.through("k_norm", parts["k"]) if "k" in parts else q
        return self.through("proj", self.mix(q, k, v, x, grid=grid, rotation=rotation, padding=padding, mask=mask))

    def regrid(self, old: TokenGrid, new: TokenGrid) -> None:
        """Make position parameters for `new` instead of `old`."""
        move_tables(self.inner, {old: new})
