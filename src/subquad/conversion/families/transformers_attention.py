"""Attention layers of transformers' vision encoders (5.0 and newer): q, k and v apart, an answer that is a pair."""

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from subquad.attention import traits_of
from subquad.conversion.converted_attention import ConvertedAttention, channels_into
from subquad.conversion.families.hybrid_recorder import HybridRecorder
from subquad.conversion.families.pair_biases import with_bias
from subquad.conversion.grid_recorder import GridRecorder
from subquad.errors import SubquadError
from subquad.inference.rotations import of_two_tables, remembered
from subquad.rope import Rotation
from subquad.tracing import insist


class TransformersAttention(ConvertedAttention):
    """ViT, DeiT, DINOv2 with and without registers, DINOv3, SigLIP, I-JEPA, MSN; CLIP and what is derived from it.

    AIMv2, TIPS v2, Pixio, MLCD and Sapiens 2 as well, whose queries and keys may have norms, head by head.
    """

    replaces = tuple(
        f"transformers.models.{name}.modeling_{name}.{cls}"
        for name, cls in (
            ("vit", "ViTAttention"),
            ("deit", "DeiTAttention"),
            ("dinov2", "Dinov2Attention"),
            ("dinov2_with_registers", "Dinov2WithRegistersAttention"),
            ("dinov3_vit", "DINOv3ViTAttention"),
            ("siglip", "SiglipAttention"),
            ("clip", "CLIPAttention"),
            ("ijepa", "IJepaAttention"),
            ("vit_msn", "ViTMSNAttention"),
            ("metaclip_2", "MetaClip2Attention"),
            ("altclip", "AltCLIPAttention"),
            ("chinese_clip", "ChineseCLIPVisionAttention"),
            ("clipseg", "CLIPSegAttention"),
            ("owlvit", "OwlViTAttention"),
            ("owlv2", "Owlv2Attention"),
            ("git", "GitVisionAttention"),
            ("granite_docling", "GraniteDoclingVisionAttention"),
            ("idefics2", "Idefics2VisionAttention"),
            ("idefics3", "Idefics3VisionAttention"),
            ("smolvlm", "SmolVLMVisionAttention"),
            ("kosmos2", "Kosmos2VisionAttention"),
            ("aimv2", "Aimv2Attention"),
            ("tipsv2", "Tipsv2VisionAttention"),
            ("pixio", "PixioAttention"),
            ("mlcd", "MLCDAttention"),
            ("ovis2", "Ovis2VisionAttention"),
            ("sapiens2", "Sapiens2Attention"),
            ("step3p7", "Step3p7VisionAttention"),
        )
    )

    fills_images: ClassVar[bool] = True

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        # transformers' layers and tools look these up
        self.config = original.config
        self.is_causal = False
        self.output_projection = "o_proj" if hasattr(original, "o_proj") else "out_proj"

    def check(self, original: Any) -> None:
        if not all(hasattr(original, name) for name in ("q_proj", "k_proj", "v_proj")):
            raise SubquadError("this layer is of an older transformers: version 5.0 or newer is read")

    def scale_of(self, original: Any) -> float | None:
        return getattr(original, "scaling", getattr(original, "scale", None))

    def sizes(self, original: Any) -> tuple[int, int]:
        heads = getattr(original, "num_heads", None) or original.num_attention_heads
        return heads, original.head_dim

    def tokens_width(self, original: Any) -> int:
        return channels_into(original.q_proj)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        padding = None if attention_mask is None else padding_of(attention_mask)
        projected = [self.through(name, hidden_states) for name in self.projected_by]
        y = self._answers(projected, hidden_states, position_embeddings, padding)
        return self.through(self.output_projection, y), None

    def _answers(
        self,
        projected: Sequence[Tensor],
        x: Tensor,
        turned_by: tuple[Tensor, Tensor] | Rotation | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """What goes into the last projection, of queries, keys and values (b, n, h·d)."""
        q, k, v = self._heads(*projected)
        rotation = turned_by if turned_by is None or isinstance(turned_by, Rotation) else self.rotation_of(x, turned_by)
        return self.mix(q, k, v, x, rotation=rotation, padding=padding)

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads (b, h, n, d) of what is projected (b, n, h·d), behind the norms of queries and keys."""
        return self.through("q_norm", self.split(q)), self.through("k_norm", self.split(k)), self.split(v)

    # what subquad.inference asks for

    projected_by: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")

    @property
    def answered_by(self) -> str:
        """The layer that projects back."""
        return self.output_projection

    def rotation_of(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Rotation:
        """Cosines and sines as a rotation of tokens x (b, n, c)."""
        return remembered(of_two_tables, *positions, num_tokens=x.shape[1])

    def between(self, projected: Sequence[Tensor], x: Tensor, positions: Rotation | None = None) -> Tensor:
        """What goes into the last projection (b, n, h·d), of what is projected of tokens x."""
        return self._answers(projected, x, positions)


class InternVLAttention(TransformersAttention):
    """InternVL's and Janus', whose queries and keys have their norms across all heads."""

    replaces = (
        "transformers.models.internvl.modeling_internvl.InternVLVisionAttention",
        "transformers.models.janus.modeling_janus.JanusVisionAttention",
        "transformers.models.qianfan_ocr.modeling_qianfan_ocr.QianfanOCRVisionAttention",
    )

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.output_projection = "projection_layer"

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        y, weights = super().forward(hidden_states, *args, **kwargs)
        return self.through("projection_dropout", y), weights

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.through("q_norm", q)), self.split(self.through("k_norm", k)), self.split(v)


class FusedTransformersAttention(ConvertedAttention):
    """BLIP's and BLIP-2's, whose queries, keys and values have one projection."""

    replaces: ClassVar[tuple[str, ...]] = (
        "transformers.models.blip.modeling_blip.BlipAttention",
        "transformers.models.blip_2.modeling_blip_2.Blip2Attention",
        "transformers.models.instructblip.modeling_instructblip.InstructBlipAttention",
        "transformers.models.instructblipvideo.modeling_instructblipvideo.InstructBlipVideoAttention",
    )

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, original.head_dim

    def tokens_width(self, original: Any) -> int:
        return channels_into(original.qkv)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        q, k, v = (self.split(part) for part in self.through("qkv", hidden_states).chunk(3, dim=-1))
        return self.through("projection", self.mix(q, k, v, hidden_states)), None


class TransformersSelfAttention(ConvertedAttention):
    """DPT's and ViTPose's, whose output projection is a module behind it."""

    listener: ClassVar[type[GridRecorder]] = HybridRecorder
    replaces: ClassVar[tuple[str, ...]] = (
        "transformers.models.dpt.modeling_dpt.DPTSelfAttention",
        "transformers.models.vitpose_backbone.modeling_vitpose_backbone.VitPoseBackboneSelfAttention",
    )

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_attention_heads, original.attention_head_size

    def scale_of(self, original: Any) -> float | None:
        return getattr(original, "scaling", None)

    def tokens_width(self, original: Any) -> int:
        return channels_into(original.query)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        projected = [self.through(name, hidden_states) for name in ("query", "key", "value")]
        return self.answers(projected, hidden_states), None

    # what subquad.inference asks for

    @property
    def tokens_behind(self) -> int:
        """How many tokens stand behind the map, which `answers` gets in front."""
        return 0

    def answers(self, projected: Sequence[Tensor], x: Tensor) -> Tensor:
        """What goes into the last projection (b, n, h·d), of what is projected of tokens x."""
        q, k, v = map(self.split, projected)
        return self.mix(q, k, v, x)


class TransformersBeitAttention(TransformersAttention):
    """BEiT's, whose masks are biases of all pairs: with a mechanism that forms no pairs they are left out."""

    replaces = ("transformers.models.beit.modeling_beit.BeitAttention",)
    # masks go with queries and keys
    projected_by = ()

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (self.split(self.through(name, hidden_states)) for name in ("q_proj", "k_proj", "v_proj"))
        if attention_mask is not None and traits_of(self.inner).quadratic:
            q, k, v = with_bias(q, k, v, attention_mask)
        y = self.mix(q, k, v, hidden_states)
        y = y.unflatten(-1, (self.num_heads, -1))[..., : self.width].flatten(2)
        return self.through(self.output_projection, y), None


class ShufflingAttention(TransformersAttention):
    """ViT-MAE's own class, which hands tokens over in a random order, and is refused."""

    replaces = ("transformers.models.vit_mae.modeling_vit_mae.ViTMAEAttention",)

    def check(self, original: Any) -> NoReturn:
        raise SubquadError(
            "transformers' ViTMAE shuffles and drops tokens, so that nobody knows where they stand: open its weights "
            "with transformers.ViTModel, which can be converted"
        )


def padding_of(attention_mask: Tensor) -> Tensor:
    """Transformers' mask of pairs (b, 1, n, n), True or 0 for what may be seen, as padding (b, n), True for the rest.

    Whole images have none in eager mode, and one of ones where a network is exported.

    Raises:
        SubquadError: queries see different keys, or it is none of numbers.
    """
    if not isinstance(attention_mask, Tensor):
        raise SubquadError(
            f"a converted layer is handed a {type(attention_mask).__name__} and takes masks of numbers: convert the "
            'network with set_attn_implementation("sdpa"), or set that now'
        )
    seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    alike = "a converted layer takes masks of absent tokens, and none that differ among queries or heads"
    if seen.shape[1] != 1:
        raise SubquadError(alike)
    insist((seen == seen[..., :1, :]).all(), alike)
    return ~seen[:, 0, 0]
