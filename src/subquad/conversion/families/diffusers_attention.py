"""Self-attention of diffusers' transformers: DiT and PixArt; SD3, Qwen-Image and Flux, whose text attends as well.

Tokens of a text stand nowhere on the map and come first, as prefix tokens; there may be more or fewer at each call.
Cross-attention stays as it is.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from subquad.conversion.converted_attention import ConvertedAttention, Mechanism, channels_into, channels_out_of
from subquad.conversion.families.diffusers_recorder import (
    TRANSFORMERS,
    Flux2Recorder,
    FluxRecorder,
    QwenRecorder,
    ZRecorder,
)
from subquad.conversion.grid_recorder import GridRecorder
from subquad.diffusion.patchable_layers import EXTRAS, REPLACEABLE
from subquad.diffusion.processor import MergedAttention
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.positions import GridTable
from subquad.rope import Rotation, with_signs

LIKE_FLUX = {
    "flux": "Flux",
    "bria": "Bria",
    "bria_fibo": "BriaFibo",
    "longcat_image": "LongCatImage",
    "ovis_image": "OvisImage",
}
"""Networks of diffusers with a layer like Flux's, and how their classes are called."""

PROCESSORS = (
    REPLACEABLE
    | {"JointAttnProcessor2_0", "XFormersJointAttnProcessor"}
    | {"QwenDoubleStreamAttnProcessor2_0", "ZSingleStreamAttnProcessor", "WanAttnProcessor"}
    | {"Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor"}
    | {f"{name}AttnProcessor" for name in LIKE_FLUX.values()}
)
"""Processors of diffusers that compute plain softmax attention, of image tokens alone or of a text's as well."""


class DiffusersAttention(ConvertedAttention):
    """Stand for the attention of DiT, PixArt and SD3."""

    replaces: ClassVar[tuple[str, ...]] = ("diffusers.models.attention_processor.Attention",)

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        # what networks and pipelines of diffusers look up
        self.heads = original.heads
        self.is_cross_attention = False
        self.context_pre_only = getattr(original, "context_pre_only", None)

    def check(self, original: Any) -> None:
        refuse_patched(original)
        for extra in EXTRAS:
            if getattr(original, extra, None):
                raise SubquadError(f"it has a {extra}, which a converted layer does not know")
        if original.to_k is None or channels_out_of(original.to_k) != channels_out_of(original.to_q):
            raise SubquadError("its heads share keys, or have none: this can't be converted")
        if norm_width(original) not in (None, head_of(original)):
            raise SubquadError("its norms of queries and keys go across the heads: this can't be converted")

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.heads, head_of(original)

    def tokens_width(self, original: Any) -> int:
        return channels_into(original.to_q)

    @classmethod
    def standing_for(cls, original: Any) -> type[ConvertedAttention]:
        # one class of diffusers is called in as many ways as it has processors
        return CALLED_OTHERWISE.get(type(original.processor).__name__, cls) if cls is DiffusersAttention else cls

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
        refuse_given(kwargs)
        rotation = None if image_rotary_emb is None else rotation_of(*image_rotary_emb)
        return self.attend(hidden_states, encoder_hidden_states, rotation, self.absent(attention_mask))

    def absent(self, attention_mask: Tensor | None) -> Tensor | None:
        """(b, n), True for tokens that no one sees; raises a SubquadError where a mask says something else."""
        refuse_given({"attention_mask": attention_mask})
        return None

    def attend(
        self, image: Tensor, text: Tensor | None, rotation: Rotation | None, padding: Tensor | None = None
    ) -> Any:
        """What a call answers: tokens (b, n, c), or those of the image and of a text that attends with them.

        `padding` (b, n) is True for tokens, those of the text first, that no one sees.
        """
        tokens, heads = image, list(self.heads_of(image, "to_{}", "norm_{}"))
        if text is not None:
            text_heads = self.heads_of(text, "add_{}_proj", "norm_added_{}")
            heads = [torch.cat(pair, dim=2) for pair in zip(text_heads, heads, strict=True)]
            tokens = torch.cat([text, image], dim=1)
        q, k, v = heads
        y = self.mix(q, k, v, tokens, grid=self.grid_of_call(image, tokens), rotation=rotation, padding=padding)
        if text is None:
            return self.project_out(y)
        of_text, of_image = y.split([text.shape[1], image.shape[1]], dim=1)
        return self.project_out(of_image), self.through("to_add_out", of_text)

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


class QwenAttention(DiffusersAttention):
    """Qwen-Image's: rotary positions of both, as complex numbers, and texts with absent tokens."""

    listener: ClassVar[type[GridRecorder]] = QwenRecorder

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Image tokens (b, n, c), and those of the text."""
        refuse_given(kwargs)
        rotation = None
        if image_rotary_emb is not None:
            rotation = rotation_of_turns(torch.cat(tuple(reversed(image_rotary_emb))))
        padding = None
        if encoder_hidden_states_mask is not None:
            present = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
            padding = ~torch.cat([encoder_hidden_states_mask.bool(), present], dim=1)
        return self.attend(hidden_states, encoder_hidden_states, rotation, padding)


class ZAttention(DiffusersAttention):
    """Z-Image's, one row of an image and behind it what fills it up, and a text; here these stand in front of it."""

    listener: ClassVar[type[GridRecorder]] = ZRecorder
    others_see: ClassVar[str | None] = "texts alone"

    def make_inner(self, original: Any, mechanism: Mechanism, grid: TokenGrid) -> Any:
        # there are some beside the map, with which a mechanism may be of no use
        inner = super().make_inner(original, mechanism, TokenGrid(*grid.shape, 32))
        if self.prefix_of_tables is not None:
            raise SubquadError(
                f"{type(inner).__name__} learns positions of tokens, and how many Z-Image has beside the map differs "
                "among its blocks: take a mechanism without position tables, as linear or inline"
            )
        return inner

    @classmethod
    def is_target(cls, original: Any, block: Any, number: int) -> bool:
        # those that refine what is no image are told no noise level
        return bool(block.modulation)

    @classmethod
    def sees_text(cls, original: Any) -> bool:
        return True

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Tokens (b, n, c), of which as many are there as `attention_mask` (b, n) says, the first ones.

        Rotary positions are complex numbers (b, n, d / 2). They differ where texts of a batch have different lengths:
        then one image after the other is mixed.
        """
        refuse_given(kwargs)
        if torch.compiler.is_compiling():
            # what is traced can't be asked
            refuse_given({"attention_mask": attention_mask})
            return self.of_one_length(hidden_states, freqs_cis)
        if attention_mask is None and (freqs_cis is None or all(torch.equal(one, freqs_cis[0]) for one in freqs_cis)):
            return self.of_one_length(hidden_states, freqs_cis)
        y = torch.zeros_like(hidden_states)
        for number, tokens in enumerate(hidden_states):
            there = slice(len(tokens) if attention_mask is None else int(attention_mask[number].sum()))
            turns = None if freqs_cis is None else freqs_cis[number : number + 1, there]
            y[number, there] = self.of_one_length(tokens[None, there], turns)[0]
        return y

    def of_one_length(self, x: Tensor, turns: Tensor | None) -> Tensor:
        """The same of images whose texts have one length."""
        behind = self.recorder.grid_within(x, self).prefix
        x = x.roll(behind, dims=1)
        rotation = None if turns is None else rotation_of_turns(turns[0].roll(behind, dims=0))
        return self.attend(x, None, rotation).roll(-behind, dims=1)

    def grid_of_call(self, image: Tensor, tokens: Tensor) -> TokenGrid:
        return self.behind_text(self.recorder.grid_within(tokens, self), tokens)


class FluxAttention(DiffusersAttention):
    """Flux's: rotary positions of both, and blocks in which text and image are one row of tokens already."""

    replaces: ClassVar[tuple[str, ...]] = tuple(
        f"{TRANSFORMERS}.transformer_{module}.{name}Attention" for module, name in LIKE_FLUX.items()
    )
    listener: ClassVar[type[GridRecorder]] = FluxRecorder

    @classmethod
    def sees_text(cls, original: Any) -> bool:
        return True

    def absent(self, attention_mask: Tensor | None) -> Tensor | None:
        return absent_tokens(attention_mask)

    def grid_of_call(self, image: Tensor, tokens: Tensor) -> TokenGrid:
        # text and image may be one row already
        grid = self.recorder.grid_of(tokens)
        return self.behind_text(TokenGrid(*grid.shape), tokens)


class Flux2Attention(FluxAttention):
    """Flux 2's, of blocks in which text and image have projections of their own."""

    replaces: ClassVar[tuple[str, ...]] = (f"{TRANSFORMERS}.transformer_flux2.Flux2Attention",)
    listener: ClassVar[type[GridRecorder]] = Flux2Recorder


class Flux2ParallelAttention(FluxAttention):
    """Flux 2's of the other blocks: projections shared with those of the block's MLP, which is within the layer."""

    replaces: ClassVar[tuple[str, ...]] = (f"{TRANSFORMERS}.transformer_flux2.Flux2ParallelSelfAttention",)
    listener: ClassVar[type[GridRecorder]] = Flux2Recorder

    def check(self, original: Any) -> None:
        refuse_patched(original)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.heads, original.inner_dim // original.heads

    def tokens_width(self, original: Any) -> int:
        return channels_into(original.to_qkv_mlp_proj)

    def attend(
        self, image: Tensor, text: Tensor | None, rotation: Rotation | None, padding: Tensor | None = None
    ) -> Any:
        fused = self.through("to_qkv_mlp_proj", image)
        dim = self.num_heads * self.width
        q, k, v, hidden = fused.split([dim, dim, dim, fused.shape[-1] - 3 * dim], dim=-1)
        q, k, v = map(self.split, (q, k, v))
        q, k = self.through("norm_q", q), self.through("norm_k", k)
        y = self.mix(q, k, v, image, grid=self.grid_of_call(image, image), rotation=rotation, padding=padding)
        return self.through("to_out", torch.cat([y, self.through("mlp_act_fn", hidden)], dim=-1))


CALLED_OTHERWISE: dict[str, type[DiffusersAttention]] = {
    "QwenDoubleStreamAttnProcessor2_0": QwenAttention,
    "ZSingleStreamAttnProcessor": ZAttention,
    # in the blocks of FIBO that have text and image in one row
    "BriaAttnProcessor": FluxAttention,
}
"""What stands for diffusers' usual layer with a processor that is called in another way than most."""


LEAST_ADDED = -1e3
"""What is added to a score and is less than this hides a key; what is more weighs it."""


def refuse_patched(original: Any) -> None:
    """Raise where a layer's processor computes something else than plain attention, or its projections are fused."""
    kind = type(original.processor).__name__
    if isinstance(original.processor, MergedAttention):
        raise SubquadError("agents or token merging are on: call remove_agent_attention() first")
    if kind not in PROCESSORS:
        raise SubquadError(
            f"it has a {kind}, which no converted layer stands for: where it is not the network's own, reset it with "
            "set_attn_processor"
        )
    if getattr(original, "fused_projections", False):
        raise SubquadError("its projections are fused: call unfuse_qkv_projections() first")


def refuse_given(arguments: Mapping[str, Any]) -> None:
    """Raise where a layer is called with something that it does not know."""
    if names := [name for name, value in arguments.items() if value is not None]:
        raise SubquadError(f"a converted layer of diffusers takes no {' and no '.join(names)}")


def absent_tokens(mask: Tensor | None) -> Tensor | None:
    """(b, n), True for tokens that no one sees.

    They are said by a mask of keys (b, 1, 1, n), or of pairs (b, 1, n, n) of which both are there: True for what is
    seen, or what is added to scores.

    Raises:
        SubquadError: it says more of pairs than which tokens are there.
    """
    if mask is None:
        return None
    seen = mask if mask.dtype == torch.bool else mask == 0
    # what is traced can't be asked
    asked = not torch.compiler.is_compiling()
    weighs = mask.dtype != torch.bool and asked and bool((~seen & (mask > LEAST_ADDED)).any())
    if mask.dim() == 4 and mask.shape[1] == 1 and not weighs:
        if mask.shape[2] == 1:
            return ~seen[:, 0, 0]
        present = seen.diagonal(dim1=-2, dim2=-1)[:, 0]
        if not asked or torch.equal(seen[:, 0], present[:, :, None] & present[:, None, :]):
            return ~present
    raise SubquadError(
        f"an attention mask of {tuple(mask.shape)} that says more than which tokens are there can't be converted"
    )


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


def rotation_of_turns(turns: Tensor) -> Rotation:
    """The same of complex numbers (n, d / 2)."""
    return rotation_of(*(part.repeat_interleave(2, dim=-1) for part in (turns.real, turns.imag)))
