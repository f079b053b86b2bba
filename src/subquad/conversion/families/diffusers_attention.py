"""Self-attention of diffusers' transformers: DiT and PixArt; SD3 and Flux, whose text and image attend together.

Tokens of a text stand nowhere on the map and come first, as prefix tokens; there may be more or fewer at each call.
Cross-attention stays as it is.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.conversion.converted_attention import ConvertedAttention, Mechanism, channels_into, channels_out_of
from subquad.conversion.grid_recorder import GridRecorder, is_called
from subquad.diffusion.patchable_layers import EXTRAS, REPLACEABLE
from subquad.diffusion.processor import MergedAttention
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.positions import GridTable
from subquad.rope import Rotation, with_signs

FLUX = "diffusers.models.transformers.transformer_flux"

PROCESSORS = REPLACEABLE | {"JointAttnProcessor2_0", "XFormersJointAttnProcessor", "FluxAttnProcessor"}
"""Processors of diffusers that compute plain softmax attention, of image tokens alone or of a text's as well."""


class DiffusersAttention(ConvertedAttention):
    """Stand for the attention of DiT, PixArt and SD3."""

    replaces: ClassVar[tuple[str, ...]] = ("diffusers.models.attention_processor.Attention",)

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        # what networks and pipelines of diffusers look up
        self.heads = original.heads
        self.is_cross_attention = False
        self.context_pre_only = original.context_pre_only

    def check(self, original: Any) -> None:
        kind = type(original.processor).__name__
        if isinstance(original.processor, MergedAttention):
            raise SubquadError("agents or token merging are on: call remove_agent_attention() first")
        if kind not in PROCESSORS:
            raise SubquadError(f"it has a {kind}, which is not plain attention: reset it with set_attn_processor")
        for extra in EXTRAS:
            if getattr(original, extra, None):
                raise SubquadError(f"it has a {extra}, which a converted layer does not know")
        if getattr(original, "fused_projections", False):
            raise SubquadError("its projections are fused: call unfuse_qkv_projections() on a network that is not")
        if original.to_k is None or channels_out_of(original.to_k) != channels_out_of(original.to_q):
            raise SubquadError("its heads share keys, or have none: this can't be converted")
        if norm_width(original) not in (None, head_of(original)):
            raise SubquadError("its norms of queries and keys go across the heads: this can't be converted")

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.heads, head_of(original)

    def tokens_width(self, original: Any) -> int:
        return channels_into(original.to_q)

    @classmethod
    def is_self_attention(cls, original: Any) -> bool:
        return not getattr(original, "is_cross_attention", False)

    @classmethod
    def grid_of(cls, original: Any, grid: TokenGrid) -> TokenGrid:
        return grid if cls.sees_text(original) else TokenGrid(*grid.shape)

    @classmethod
    def sees_text(cls, original: Any) -> bool:
        """Whether tokens of a text attend together with those of the image."""
        return original.added_kv_proj_dim is not None

    def make_inner(self, original: Any, mechanism: Mechanism, grid: TokenGrid) -> Any:
        inner = super().make_inner(original, mechanism, grid)
        has_tables = any(isinstance(module, GridTable) for module in inner.modules())
        self.prefix_of_tables = grid.prefix if has_tables else None
        return inner

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Image tokens (b, n, c), or a pair: image tokens and those of the text."""
        given = {"attention_mask": attention_mask, **kwargs}
        if names := [name for name, value in given.items() if value is not None]:
            raise SubquadError(f"a converted layer of diffusers takes no {' and no '.join(names)}")
        tokens, heads = hidden_states, list(self.heads_of(hidden_states, "to_{}", "norm_{}"))
        if encoder_hidden_states is not None:
            text_heads = self.heads_of(encoder_hidden_states, "add_{}_proj", "norm_added_{}")
            heads = [torch.cat(pair, dim=2) for pair in zip(text_heads, heads, strict=True)]
            tokens = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        grid = self.grid_of_call(hidden_states, tokens)
        rotation = None if image_rotary_emb is None else rotation_of(*image_rotary_emb)
        q, k, v = heads
        y = self.mix(q, k, v, tokens, grid=grid, rotation=rotation)
        if encoder_hidden_states is None:
            return self.project_out(y)
        text, image = y.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], dim=1)
        return self.project_out(image), self.through("to_add_out", text)

    def grid_of_call(self, image: Tensor, tokens: Tensor) -> TokenGrid:
        """The grid of all tokens of a call, (b, n, c), of which `image` are those behind a text.

        Raises:
            SubquadError: positions are made for another number of text tokens.
        """
        return self.behind_text(self.recorder.map_of(image), tokens)

    def behind_text(self, grid: TokenGrid, tokens: Tensor) -> TokenGrid:
        """A map behind as many tokens of a text as there are more."""
        prefix = tokens.shape[1] - grid.num_places
        if self.prefix_of_tables not in (None, prefix):
            raise SubquadError(
                f"{type(self.inner).__name__} has positions for {self.prefix_of_tables} text tokens and gets {prefix}: "
                f"convert with prefix={prefix} and texts of that length, or to a mechanism without position tables"
            )
        return TokenGrid(*grid.shape, prefix)

    def heads_of(self, tokens: Tensor, projection: str, norm: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (b, h, n, d), by the names of what projects and norms them."""
        q, k, v = (self.split(self.through(projection.format(name), tokens)) for name in "qkv")
        return self.through(norm.format("q"), q), self.through(norm.format("k"), k), v

    def project_out(self, tokens: Tensor) -> Tensor:
        """Through what stands behind the attention, if anything."""
        for step in self.to_out if self.has("to_out") else ():  # type: ignore[union-attr]
            tokens = step(tokens)
        return tokens


class FluxRecorder(GridRecorder):
    """Listens to Flux's position embedding, whose argument says where tokens stand: (n, 3), rows and columns last."""

    # that of 1,024 px, which the network does not say
    usual_size: ClassVar[tuple[int, int] | None] = (128, 128)

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        return is_called(module, f"{FLUX}.FluxPosEmbed")

    @classmethod
    def map_from(cls, embedding: Any, size: tuple[int, int]) -> tuple[int, int]:
        # four neighbours of a latent are put into one token before the network sees them
        return max(size[0] // 2, 1), max(size[1] // 2, 1)

    def __call__(self, module: Any, arguments: Any, embedded: Any) -> None:
        if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
            # numbers can't be read where a network is exported: the grid is that of the call before
            return
        self.read(arguments[0])

    @torch.compiler.disable
    def read(self, ids: Tensor) -> None:
        """Find the map at the end of all places.

        Raises:
            SubquadError: there is none, or there are several.
        """
        places = ids[:, -2:].round().long().tolist()
        height, width = (max(column) + 1 for column in zip(*places, strict=True))
        count = height * width
        expected = [[row, column] for row in range(height) for column in range(width)]
        if places[-count:] != expected or any(place != [0, 0] for place in places[:-count]):
            raise SubquadError(
                f"img_ids and txt_ids of {len(places)} tokens are no text followed by one map of {height}×{width}: "
                "pictures beside the one that is made can't be converted"
            )
        self.prefix = len(places) - count
        self.record(TokenGrid(height, width))


class FluxAttention(DiffusersAttention):
    """Flux's: rotary positions of both, and blocks in which text and image are one row of tokens already."""

    replaces: ClassVar[tuple[str, ...]] = (f"{FLUX}.FluxAttention",)
    listener: ClassVar[type[GridRecorder]] = FluxRecorder

    @classmethod
    def sees_text(cls, original: Any) -> bool:
        return True

    def grid_of_call(self, image: Tensor, tokens: Tensor) -> TokenGrid:
        # text and image may be one row already
        grid = self.recorder.grid_of(tokens)
        return self.behind_text(TokenGrid(*grid.shape), tokens)


def head_of(original: Any) -> int:
    """Channels of a head."""
    return channels_out_of(original.to_q) // original.heads


def norm_width(original: Any) -> int | None:
    """Channels that the norm of queries sees at a time, as far as its weight says."""
    weight = getattr(getattr(original, "norm_q", None), "weight", None)
    return None if weight is None else weight.shape[-1]


def rotation_of(cos: Tensor, sin: Tensor) -> Rotation:
    """Tables (n, d) of neighbouring pairs of channels, of text and image."""
    return Rotation(cos, with_signs(sin, interleaved=True), interleaved=True)
