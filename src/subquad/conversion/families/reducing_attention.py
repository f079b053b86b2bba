"""Attention of pyramids whose keys are reduced: timm's PVTv2, Twins; transformers' SegFormer, PVT, PVTv2, GLPN; MiT.

Wang et al. 2021, arXiv 2102.12122 and 2106.13797; Xie et al. 2021, arXiv 2105.15203. A quadratic mechanism keeps the
fewer keys, all others see the whole map, and the convolutions that reduce it go, as in our own PVT.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels, y x rows and columns.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from subquad.conversion.converted_attention import (
    ConvertedAttention,
    Mechanism,
    channels_into,
    is_quadratic,
)
from subquad.conversion.grid_recorder import GridRecorder, OverlappingRecorder
from subquad.errors import SubquadError
from subquad.grid import TokenGrid


class PyramidRecorder(OverlappingRecorder):
    """Listens to a pyramid's embeddings; SegFormer's and GLPN's do not say which images they are made for."""

    usual_size = (512, 512)


class ReducingAttention(ConvertedAttention):
    """What all of them share: tokens come with the height and width of their map.

    Attributes:
        projected_as: the layers that project tokens to queries, and reduced ones to keys and values, together or apart.
        reduced_by: the layers that make fewer tokens of a map, where there are such: a pooling, a convolution, and
            behind them, of tokens, a norm and an activation.
        answered_as: the layers behind the mechanism.
    """

    host: ClassVar[str] = "pvt"
    listener: ClassVar[type[GridRecorder]] = PyramidRecorder
    in_pyramid: ClassVar[bool] = True
    projected_as: ClassVar[tuple[str, ...]] = ("query", "key", "value")
    reduced_by: ClassVar[tuple[str, str, str, str]]
    answered_as: ClassVar[tuple[str, ...]] = ("proj", "proj_drop")

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_attention_heads, original.attention_head_size

    def tokens_width(self, original: Any) -> int:
        return channels_into(getattr(original, self.projected_as[0]))

    def make_inner(self, original: Any, mechanism: Mechanism, grid: TokenGrid) -> Any:
        self.reduces = is_quadratic(mechanism)
        kv_grid = self.fewer(original, grid) if self.reduces else grid
        return mechanism(self.num_heads * self.width, self.num_heads, grid=grid, kv_grid=kv_grid)

    def fewer(self, original: Any, grid: TokenGrid) -> TokenGrid:
        """The grid of the keys of a map."""
        pool, convolution = (getattr(original, name, None) for name in self.reduced_by[:2])
        if pool is not None:
            return TokenGrid(pool.output_size, pool.output_size)
        if convolution is None:
            return grid
        down, right = convolution.stride
        return TokenGrid(max(grid.height // down, 1), max(grid.width // right, 1))

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        unused = ("attn_drop", "dropout", *(() if self.reduces else self.reduced_by))
        return ((name, part) for name, part in super().kept(original) if name not in unused)

    def forward(self, hidden_states: Tensor, height: int, width: int, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return self.attend(hidden_states, TokenGrid(height, width, self.tokens_in_front)), None

    def attend(self, x: Tensor, grid: TokenGrid) -> Tensor:
        """Project, mix, project back: (b, n, c) to (b, n, c)."""
        of_queries, *of_keys = self.projected_as
        keys, kv_grid = self.reduced(x, grid) if self.reduces else (x, grid)
        projected = [self.through(of_queries, x), *(self.through(name, keys) for name in of_keys)]
        y = self.mix(*self.heads(projected), x, grid=grid, kv_grid=kv_grid)
        for name in self.answered_as:
            y = self.through(name, y)
        return y

    def heads(self, projected: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (b, h, n, d) of what is projected, keys and values together or apart."""
        q, *others = projected
        k, v = others if len(others) == 2 else others[0].chunk(2, dim=-1)
        return self.split(q), self.split(k), self.split(v)

    def reduced(self, x: Tensor, grid: TokenGrid) -> tuple[Tensor, TokenGrid]:
        """Tokens (b, n, c) that keys and values are made of, and where they stand."""
        pool, convolution, norm, activation = self.reduced_by
        if not self.has(convolution):
            return x, grid
        image = self.through(convolution, self.through(pool, grid.to_image(x)))
        tokens = self.through(activation, self.through(norm, image.flatten(2).mT))
        return tokens, TokenGrid(image.shape[-2], image.shape[-1])

    # what subquad.inference asks for

    @property
    def projected_by(self) -> tuple[str, ...]:
        """The layers that project the tokens; none where keys are reduced in between, or nothing projects back."""
        return self.projected_as if self.answered_as and not self.reduces else ()

    @property
    def answered_by(self) -> str:
        """The layer that projects back."""
        return self.answered_as[0]

    def between(self, projected: Sequence[Tensor], x: Tensor, positions: TokenGrid | None = None) -> Tensor:
        """What goes into the last projection (b, n, h·d), of tokens that stand on the grid `positions`."""
        return self.mix(*self.heads(projected), x, grid=positions)


class TimmReducingAttention(ReducingAttention):
    """timm's PVTv2, its form with pooled keys (`linear`) too."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.pvt_v2.Attention",)
    projected_as: ClassVar[tuple[str, ...]] = ("q", "kv")
    reduced_by: ClassVar[tuple[str, str, str, str]] = ("pool", "sr", "norm", "act")

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, original.head_dim

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:  # type: ignore[override]
        return self.attend(x, TokenGrid(*feat_size))


class MitAttention(TimmReducingAttention):
    """SegFormer's encoder, MiT, in segmentation_models_pytorch: an identity stands where nothing is reduced."""

    replaces: ClassVar[tuple[str, ...]] = ("segmentation_models_pytorch.encoders.mix_transformer.Attention",)

    def scale_of(self, original: Any) -> float | None:
        return float(original.scale)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, original.dim // original.num_heads

    def kept(self, original: Any) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        unused = self.reduced_by if original.sr_ratio == 1 else ()
        return ((name, part) for name, part in super().kept(original) if name not in unused)

    def fewer(self, original: Any, grid: TokenGrid) -> TokenGrid:
        return grid if original.sr_ratio == 1 else super().fewer(original, grid)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:  # type: ignore[override]
        return self.attend(x, TokenGrid(height, width))


class TwinsAttention(TimmReducingAttention):
    """Of timm's Twins, Chu et al. 2021, arXiv 2104.13840: all of PCPVT's, every second layer of SVT's."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.twins.GlobalSubSampleAttn",)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, original.dim // original.num_heads

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:  # type: ignore[override]
        return self.attend(x, TokenGrid(*size))


class TwinsWindows(TwinsAttention):
    """Twins-SVT's attention within windows, which stay: they are cheap as they are."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.twins.LocallyGroupedAttn",)
    others_see: ClassVar[str | None] = "windows"

    @classmethod
    def is_target(cls, original: nn.Module, block: nn.Module, number: int) -> bool:
        return False


class TransformersPvtV2Attention(ReducingAttention):
    """transformers' PVTv2, its form with pooled keys (`linear_attention`) too."""

    replaces: ClassVar[tuple[str, ...]] = ("transformers.models.pvt_v2.modeling_pvt_v2.PvtV2SelfAttention",)
    reduced_by: ClassVar[tuple[str, str, str, str]] = ("pool", "spatial_reduction", "layer_norm", "act")


class TransformersPvtAttention(ReducingAttention):
    """transformers' PVT, whose last stage has a class token in front of its map."""

    replaces: ClassVar[tuple[str, ...]] = ("transformers.models.pvt.modeling_pvt.PvtEfficientSelfAttention",)
    reduced_by: ClassVar[tuple[str, str, str, str]] = ("pool", "sequence_reduction", "layer_norm", "act")
    answered_as: ClassVar[tuple[str, ...]] = ()


class OlderSegformerAttention(ReducingAttention):
    """GLPN's, whose output projection is a module behind it; SegFormer's of older transformers have the same names."""

    replaces: ClassVar[tuple[str, ...]] = (
        "transformers.models.glpn.modeling_glpn.GLPNEfficientSelfAttention",
        "transformers.models.segformer.modeling_segformer.SegformerEfficientSelfAttention",
    )
    reduced_by: ClassVar[tuple[str, str, str, str]] = ("pool", "sr", "layer_norm", "act")
    answered_as: ClassVar[tuple[str, ...]] = ()


class SegformerAttention(ReducingAttention):
    """SegFormer's, which reduces tokens by one module."""

    replaces: ClassVar[tuple[str, ...]] = ("transformers.models.segformer.modeling_segformer.SegformerAttention",)
    projected_as: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    reduced_by: ClassVar[tuple[str, str, str, str]] = ("pool", "sequence_reduction", "layer_norm", "act")
    answered_as: ClassVar[tuple[str, ...]] = ("o_proj",)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_attention_heads, original.head_dim

    def forward(
        self, hidden_states: Tensor, height: int, width: int, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:
            raise SubquadError("a converted SegFormer takes no attention_mask: reduced keys can't be told apart by one")
        return self.attend(hidden_states, TokenGrid(height, width)), None

    def fewer(self, original: Any, grid: TokenGrid) -> TokenGrid:
        return super().fewer(getattr(original, "sequence_reduction", None), grid)

    def reduced(self, x: Tensor, grid: TokenGrid) -> tuple[Tensor, TokenGrid]:
        if not self.has("sequence_reduction"):
            return x, grid
        reduction: Any = self._modules["sequence_reduction"]
        down, right = reduction.sequence_reduction.stride
        return reduction(x, grid.height, grid.width), TokenGrid(grid.height // down, grid.width // right)
