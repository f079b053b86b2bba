"""Attention of SAM's image encoders, timm's and transformers': tokens as a map, and biases of rows and columns.

Kirillov et al. 2023, arXiv 2304.02643; the biases are those of MViTv2, Li et al. 2021, arXiv 2112.01526, eq. 4: the
logit of a query and a key gets q·R_y(distance in rows) + q·R_x(distance in columns). Mechanisms that form the pairs get
them by longer queries and keys, exactly; for others they are left out, and their tables with them.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels, y x rows and columns.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention import traits_of
from subquad.conversion.converted_attention import ConvertedAttention, channels_into
from subquad.conversion.grid_recorder import GridRecorder, OverlappingRecorder
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.rope import Rotation, with_signs

TABLES = ("rel_pos_h", "rel_pos_w")


class SamAttention(ConvertedAttention):
    """timm's layer, (b, y, x, c) to (b, y, x, c), and that of Meta's own package, which timm's is as."""

    replaces: ClassVar[tuple[str, ...]] = (
        "timm.models.vision_transformer_sam.Attention",
        "segment_anything.modeling.image_encoder.Attention",
    )

    def check(self, original: Any) -> None:
        if getattr(original, "rope", None) is not None:
            raise SubquadError("a SAM encoder with rotary positions can't be converted")

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, channels_into(original.proj) // original.num_heads

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        unused = {"attn_drop"} if traits_of(self.inner).quadratic else {"attn_drop", *TABLES}
        return ((name, part) for name, part in super().kept(original) if name not in unused)

    @classmethod
    def is_target(cls, original: nn.Module, block: nn.Module, number: int) -> bool:
        return not getattr(block, "window_size", 0)

    @property
    def rotation(self) -> Rotation | None:
        """How tokens turn, of encoders whose layers know it."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        grid = TokenGrid(x.shape[1], x.shape[2])
        tokens = x.flatten(1, 2)
        q, k, v = (self.split(part) for part in self.through("qkv", tokens).chunk(3, dim=-1))
        q, k = self.through("q_norm", q), self.through("k_norm", k)
        rows, columns = map(self.own_weight, TABLES)
        if rows is not None and columns is not None:
            q, k, v = with_distances(q, k, v, rows, columns, grid)
        y = self.mix(q, k, v, tokens, grid=grid, rotation=self.rotation)
        y = y.unflatten(-1, (self.num_heads, -1))[..., : self.width].flatten(2)
        return self.through("proj_drop", self.through("proj", y)).view(x.shape)


class TransformersSamAttention(SamAttention):
    """transformers' layer, which answers with a pair: tokens, and weights that are not formed."""

    replaces: ClassVar[tuple[str, ...]] = (
        "transformers.models.sam.modeling_sam.SamVisionAttention",
        "transformers.models.sam.modeling_sam.SamVisionSdpaAttention",
        "transformers.models.sam_hq.modeling_sam_hq.SamHQVisionAttention",
        "transformers.models.sam_hq.modeling_sam_hq.SamHQVisionSdpaAttention",
        # what reads documents with SAM's encoder has a copy of it
        "transformers.models.deepseek_ocr2.modeling_deepseek_ocr2.DeepseekOcr2SamVisionAttention",
        "transformers.models.deepseek_ocr2.modeling_deepseek_ocr2.DeepseekOcr2SamVisionSdpaAttention",
        "transformers.models.got_ocr2.modeling_got_ocr2.GotOcr2VisionAttention",
        "transformers.models.pp_formulanet.modeling_pp_formulanet.PPFormulaNetVisionAttention",
        "transformers.models.slanext.modeling_slanext.SLANeXtVisionAttention",
        "transformers.models.unlimited_ocr.modeling_unlimited_ocr.UnlimitedOcrSamVisionAttention",
        "transformers.models.unlimited_ocr.modeling_unlimited_ocr.UnlimitedOcrSamVisionSdpaAttention",
    )

    def check(self, original: Any) -> None:
        """All of them can be converted."""

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_attention_heads, channels_into(original.proj) // original.num_attention_heads

    def forward(self, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(hidden_states), None


class VitDetAttention(SamAttention):
    """transformers' ViTDet (Li et al. 2022, arXiv 2203.16527) and what stands on it, as ViTMatte."""

    replaces: ClassVar[tuple[str, ...]] = ("transformers.models.vitdet.modeling_vitdet.VitDetAttention",)

    def check(self, original: Any) -> None:
        """All of them can be converted."""

    def forward(self, hidden_state: Tensor, output_attentions: bool = False) -> tuple[Tensor]:  # type: ignore[override]
        return (super().forward(hidden_state),)


class Sam2Attention(SamAttention):
    """transformers' SAM 2, a pyramid (Hiera): blocks that pool their queries lead from stage to stage, and stay."""

    replaces: ClassVar[tuple[str, ...]] = ("transformers.models.sam2.modeling_sam2.Sam2MultiScaleAttention",)
    listener: ClassVar[type[GridRecorder]] = OverlappingRecorder

    def check(self, original: Any) -> None:
        if self.pooled_by(original):
            raise SubquadError("a block that pools its queries can't be converted: leave it out of `blocks`")

    @classmethod
    def pooled_by(cls, original: Any) -> tuple[int, int] | None:
        """How many rows and columns of queries become one, if that is so."""
        return tuple(original.query_stride) if original.query_stride else None

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_attention_heads, original.dim_out // original.num_attention_heads

    @classmethod
    def is_target(cls, original: Any, block: nn.Module, number: int) -> bool:
        return super().is_target(original, block, number) and not cls.pooled_by(original)

    @classmethod
    def grid_behind(cls, original: Any, grid: TokenGrid) -> TokenGrid:
        down, right = cls.pooled_by(original) or (1, 1)
        return TokenGrid(max(grid.height // down, 1), max(grid.width // right, 1))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return super().forward(hidden_states)


class TimmSam2Attention(Sam2Attention):
    """timm's image encoder of SAM 2 (`sam2_hiera_tiny` and others)."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.hieradet_sam2.MultiScaleAttention",)

    @classmethod
    def pooled_by(cls, original: Any) -> tuple[int, int] | None:
        return None if original.q_pool is None else original.q_pool.stride

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, original.dim_out // original.num_heads

    @classmethod
    def is_target(cls, original: Any, block: Any, number: int) -> bool:
        return not block.is_windowed and not cls.pooled_by(original)


class Sam2Recorder(OverlappingRecorder):
    """Listens to an encoder alone, too, which does not say that SAM 2 is made for these."""

    usual_size = (1024, 1024)


class MetasSam2Attention(TimmSam2Attention):
    """That of Meta's own package `sam2`, whose blocks that see the whole map have windows of 0."""

    replaces: ClassVar[tuple[str, ...]] = ("sam2.modeling.backbones.hieradet.MultiScaleAttention",)
    listener: ClassVar[type[GridRecorder]] = Sam2Recorder

    @classmethod
    def pooled_by(cls, original: Any) -> tuple[int, int] | None:
        stride = super().pooled_by(original)
        return (stride, stride) if isinstance(stride, int) else stride

    @classmethod
    def is_target(cls, original: Any, block: Any, number: int) -> bool:
        return not block.window_size and not cls.pooled_by(original)


class Sam3Attention(ConvertedAttention):
    """SAM 3's, with rotary positions of the window or of the whole map."""

    replaces: ClassVar[tuple[str, ...]] = ("transformers.models.sam3.modeling_sam3.Sam3ViTRoPEAttention",)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_attention_heads, original.head_dim

    @classmethod
    def is_target(cls, original: nn.Module, block: nn.Module, number: int) -> bool:
        return SamAttention.is_target(original, block, number)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Tensor, None]:
        grid = TokenGrid(hidden_states.shape[1], hidden_states.shape[2])
        x = hidden_states.flatten(1, 2)
        q, k, v = (self.split(self.through(name, x)) for name in ("q_proj", "k_proj", "v_proj"))
        cos, sin = (table.flatten(0, -2) for table in position_embeddings)
        rotation = Rotation(cos, with_signs(sin, interleaved=True), interleaved=True)
        y = self.mix(q, k, v, x, grid=grid, rotation=rotation)
        return self.through("o_proj", y).view(hidden_states.shape), None


class Sam3Recorder(GridRecorder):
    """Listens to an encoder that says only in its layers on which map they stand."""

    @classmethod
    def size_of(cls, network: nn.Module, embedding: Any) -> tuple[int, ...] | None:
        """The largest of the layers' maps, in pixels: those of windows are smaller."""
        layers: Any = [one for one in network.modules() if hasattr(one, "rope_pt_size")]
        maps = [tuple(layer.input_size) for layer in layers if layer.input_size]
        sides = zip(max(maps, default=()), embedding.stride, strict=False)
        return tuple(length * stride for length, stride in sides) or None


class MetasSam3Attention(SamAttention):
    """That of Meta's own package `sam3`, with rotary positions of the window or of the whole map, in its buffers."""

    replaces: ClassVar[tuple[str, ...]] = ("sam3.model.vitdet.Attention",)
    listener: ClassVar[type[GridRecorder]] = Sam3Recorder

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        # complex numbers are of no half precision and of no engine
        turns = original.freqs_cis
        cos, sin = (
            (None, None) if turns is None else (one.repeat_interleave(2, dim=-1) for one in (turns.real, turns.imag))
        )
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", None if sin is None else with_signs(sin, interleaved=True), persistent=False)

    def check(self, original: Any) -> None:
        if original.cls_token or original.use_rel_pos:
            what = "class tokens" if original.cls_token else "relative positions"
            raise SubquadError(f"an encoder of SAM 3 with {what} can't be converted")

    @property
    def rotation(self) -> Rotation | None:
        cos, sin = (cast(Tensor | None, getattr(self, name)) for name in ("cos", "sin"))
        return None if cos is None or sin is None else Rotation(cos, sin, interleaved=True)


def with_distances(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, grid: TokenGrid
) -> tuple[Tensor, Tensor, Tensor]:
    """Heads (b, h, n, d + y + x) whose softmax attention has the biases of `rows` (2y - 1, d) and `columns`.

    A query is followed by its bias to each row and each column, a key by a one at its own; values by zeros. Tables of
    other lengths are resampled.
    """
    height, width = grid.shape
    places = q.unflatten(2, (height, width))
    to_rows = torch.einsum("bhyxd,yid->bhyxi", places, distances(rows, height)).flatten(2, 3)
    to_columns = torch.einsum("bhyxd,xjd->bhyxj", places, distances(columns, width)).flatten(2, 3)
    longer = q.shape[-1] + height + width
    # softmax attention divides by the root of the width that it sees
    scale = (longer / q.shape[-1]) ** 0.5
    q = torch.cat([q * scale, to_rows * longer**0.5, to_columns * longer**0.5], dim=-1)
    own_row = torch.eye(height, dtype=k.dtype, device=k.device).repeat_interleave(width, dim=0)
    own_column = torch.eye(width, dtype=k.dtype, device=k.device).repeat(height, 1)
    own = torch.cat([own_row, own_column], dim=-1).expand(*k.shape[:2], -1, -1)
    return q, torch.cat([k, own], dim=-1), F.pad(v, (0, height + width))


def distances(table: Tensor, size: int) -> Tensor:
    """(s, s, d) of `size` queries and keys on a line, from a table (2s - 1, d) of their distances."""
    if len(table) != 2 * size - 1:
        table = F.interpolate(table.T[None], size=2 * size - 1, mode="linear")[0].T
    places = torch.arange(size, device=table.device)
    return table[places[:, None] - places[None, :] + size - 1]
