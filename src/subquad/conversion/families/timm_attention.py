"""timm's attention layers of plain networks: ViT, DeiT, DINOv2, SigLIP; EVA and DINOv3 with rotary positions."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.conversion.converted_attention import ConvertedAttention, biased, channels_into
from subquad.conversion.families.timm_recorder import TimmRecorder
from subquad.conversion.grid_recorder import GridRecorder
from subquad.errors import SubquadError
from subquad.inference.foreign_halves import three
from subquad.inference.rotations import of_one_table, remembered
from subquad.rope import Rotation


class TimmAttention(ConvertedAttention):
    """Fused or separate projections, norms of q and k, a norm and a gate of the answer."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.layers.attention.Attention",)
    listener: ClassVar[type[GridRecorder]] = TimmRecorder
    is_anybodys: ClassVar[bool] = True

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.rotate_half = bool(getattr(original, "rotate_half", False))

    def scale_of(self, original: Any) -> float | None:
        # which PyTorch's fused attention is not told
        return None if getattr(original, "fused_attn", False) else getattr(original, "scale", None)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, original.head_dim

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        return ((name, part) for name, part in super().kept(original) if name != "attn_drop")

    def tokens_width(self, original: Any) -> int:
        return channels_into(original.qkv or original.q_proj)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.attend(x, None, attn_mask, is_causal)

    def attend(self, x: Tensor, rope: Tensor | None, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """Project, mix, project back: (b, n, c) to (b, n, c)."""
        if is_causal:
            raise SubquadError("a converted layer has no causal attention: call the network without is_causal")
        y = self._answers(self.projections(x), x, rope, forbidden(attn_mask))
        return self.through("proj_drop", self.through("proj", y))

    def _answers(
        self, projected: Iterable[Tensor], x: Tensor, rope: Tensor | Rotation | None, mask: Tensor | None = None
    ) -> Tensor:
        """What goes into the last projection, of queries, keys and values (b, n, h·d)."""
        q, k, v = map(self.split, projected)
        q, k = self.through("q_norm", q), self.through("k_norm", k)
        rotation = rope if rope is None or isinstance(rope, Rotation) else self.rotation_of(x, rope)
        y = self.through("norm", self.mix(q, k, v, x, rotation=rotation, mask=mask))
        return y * self.through("gate", x).sigmoid() if self.has("gate") else y

    # what subquad.inference asks for

    reading = (*ConvertedAttention.reading, "gate")

    answered_by: ClassVar[str] = "proj"

    @property
    def projected_by(self) -> tuple[str, ...]:
        """The layers that project the tokens; none of EVA's, whose biases stand beside."""
        if not self.has("qkv"):
            return "q_proj", "k_proj", "v_proj"
        return ("qkv",) if self.own_weight("q_bias") is None else ()

    def rotation_of(self, x: Tensor, rope: Tensor) -> Rotation:
        """Timm's table as a rotation of tokens x (b, n, c)."""
        # not the layer's own number: of some rows of an image only the first bring prefix tokens
        prefix = self.recorder.grid_of(x).prefix
        return remembered(of_one_table, rope, prefix=prefix, interleaved=not self.rotate_half)

    def between(self, projected: Sequence[Tensor], x: Tensor, positions: Rotation | None = None) -> Tensor:
        """What goes into the last projection (b, n, h·d), of what the first gives of tokens x."""
        return self._answers(three(projected), x, positions)

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values (b, n, h·d)."""
        if not self.has("qkv"):
            return tuple(self.through(name, x) for name in ("q_proj", "k_proj", "v_proj"))
        of_queries, of_values = self.own_weight("q_bias"), self.own_weight("v_bias")
        if of_queries is None or of_values is None:
            return self.through("qkv", x).chunk(3, dim=-1)
        # EVA's keys have no bias
        bias = torch.cat([of_queries, torch.zeros_like(of_queries), of_values])
        return biased(self.get_submodule("qkv"), x, bias).chunk(3, dim=-1)


class TimmRopeAttention(TimmAttention):
    """The same with rotary positions, which a call hands over."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.layers.attention.AttentionRope", "timm.models.eva.EvaAttention")

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        return self.attend(x, rope, attn_mask, is_causal)


def forbidden(attn_mask: Tensor | None) -> Tensor | None:
    """Timm's mask, True or 0 for pairs that may be seen, as ours: True for those that may not.

    Raises:
        SubquadError: it is a bias, of numbers other than 0 and minus infinity.
    """
    if attn_mask is None or attn_mask.dtype == torch.bool:
        return None if attn_mask is None else ~attn_mask
    unseen = attn_mask == float("-inf")
    if not bool((unseen | (attn_mask == 0)).all()):
        raise SubquadError("a converted layer takes masks of True and False, and no biases of pairs")
    return unseen
