"""Attention layers of vit-pytorch's plain networks: `ViT`, `SimpleViT`, those with flash attention, those of films."""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

from subquad.conversion.converted_attention import ConvertedAttention, channels_into, channels_out_of
from subquad.conversion.families.patches_recorder import PatchesRecorder
from subquad.conversion.grid_recorder import GridRecorder


class VitPytorchAttention(ConvertedAttention):
    """A norm in front, queries, keys and values of one projection; what replaces softmax has nothing to learn."""

    replaces: ClassVar[tuple[str, ...]] = tuple(
        f"vit_pytorch.{name}.Attention"
        for name in ("vit", "vit_3d", "simple_vit", "simple_vit_3d", "simple_flash_attn_vit")
    )
    listener: ClassVar[type[GridRecorder]] = PatchesRecorder

    def scale_of(self, original: Any) -> float | None:
        return float(original.scale)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.heads, channels_out_of(original.to_qkv) // 3 // original.heads

    def tokens_width(self, original: Any) -> int:
        return channels_into(original.to_qkv)

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        return ((name, part) for name, part in super().kept(original) if name in ("norm", "to_qkv", "to_out"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.through("norm", x)
        q, k, v = (self.split(part) for part in self.through("to_qkv", x).chunk(3, dim=-1))
        return self.through("to_out", self.mix(q, k, v, x))
