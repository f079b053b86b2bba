"""Attention layers of MONAI's transformers, `SABlock`: its ViT and what stands on it (UNETR), of images and volumes."""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

from subquad.conversion.converted_attention import ConvertedAttention, channels_into, channels_out_of
from subquad.conversion.families.patches_recorder import PatchesRecorder
from subquad.conversion.grid_recorder import GridRecorder
from subquad.errors import SubquadError

PROJECTIONS = ("to_q", "to_k", "to_v")


class MonaiAttention(ConvertedAttention):
    """Queries, keys and values of one projection or of three."""

    replaces: ClassVar[tuple[str, ...]] = ("monai.networks.blocks.selfattention.SABlock",)
    listener: ClassVar[type[GridRecorder]] = PatchesRecorder

    def check(self, original: Any) -> None:
        # what earlier versions have no word for is not there
        if getattr(original, "causal", False):
            raise SubquadError("its tokens see those in front of them alone (causal), which no converted layer can do")
        if getattr(original, "rel_positional_embedding", None) is not None:
            raise SubquadError("it has relative positions (rel_pos_embedding), which are not carried over")
        if original.save_attn:
            raise SubquadError(
                "it keeps its attention map (save_attn), and a converted layer forms none: make the network without, "
                "its weights are the same"
            )

    def scale_of(self, original: Any) -> float | None:
        return float(original.scale)

    def sizes(self, original: Any) -> tuple[int, int]:
        first, times = (original.qkv, 3) if is_fused(original) else (original.to_q, 1)
        return original.num_heads, channels_out_of(first) // times // original.num_heads

    def tokens_width(self, original: Any) -> int:
        return channels_into(original.qkv if is_fused(original) else original.to_q)

    def kept(self, original: Any) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        # identities stand in the places of the others
        names = (*(("qkv",) if is_fused(original) else PROJECTIONS), "out_proj", "drop_output")
        return ((name, part) for name, part in super().kept(original) if name in names)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        apart = [self.through(name, x) for name in PROJECTIONS if self.has(name)]
        q, k, v = map(self.split, apart or self.through("qkv", x).chunk(3, dim=-1))
        # MONAI's (b, n) is 0 for what must not be seen
        y = self.mix(q, k, v, x, padding=None if attn_mask is None else attn_mask == 0)
        return self.through("drop_output", self.through("out_proj", y))


class MonaiCrossAttention(ConvertedAttention):
    """What MONAI's blocks have beside it, unused in earlier versions: no attention among tokens."""

    replaces: ClassVar[tuple[str, ...]] = ("monai.networks.blocks.crossattention.CrossAttentionBlock",)

    @classmethod
    def is_self_attention(cls, original: nn.Module, block: nn.Module, path: str) -> bool:
        return False


def is_fused(original: Any) -> bool:
    """Whether queries, keys and values have one projection, as in all but newer versions."""
    return bool(getattr(original, "use_combined_linear", True))
