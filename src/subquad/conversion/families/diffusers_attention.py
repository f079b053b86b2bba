"""Self-attention of diffusers' transformers: DiT, PixArt and HunyuanDiT; SD3, whose text attends as well.

Tokens of a text stand nowhere on the map and come first, as prefix tokens; there may be more or fewer at each call.
Cross-attention stays as it is.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from subquad.conversion.converted_attention import ConvertedAttention, Mechanism, channels_into, channels_out_of
from subquad.diffusion.patchable_layers import EXTRAS, REPLACEABLE
from subquad.diffusion.processor import MergedAttention
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.positions import GridTable
from subquad.rope import Rotation, with_signs
from subquad.tracing import insist

OF_IMAGE = ("to_{}", "norm_{}")
OF_TEXT = ("add_{}_proj", "norm_added_{}")
"""How diffusers calls what projects and norms queries, keys and values; a text may share those of the image."""


class DiffusersAttention(ConvertedAttention):
    """Stand for the attention of DiT, PixArt, HunyuanDiT and SD3."""

    replaces: ClassVar[tuple[str, ...]] = tuple(
        f"diffusers.models.attention_processor.{name}" for name in ("Attention", "MochiAttention")
    )

    processors: ClassVar[tuple[str, ...]] = (
        *sorted(REPLACEABLE),
        "JointAttnProcessor2_0",
        "XFormersJointAttnProcessor",
        "HunyuanAttnProcessor2_0",
    )
    """Processors of diffusers that a layer may have, which compute plain softmax attention."""

    extras: ClassVar[tuple[str, ...]] = EXTRAS
    """What a layer may do beside attention, which is not carried over."""

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        # what networks and pipelines of diffusers look up
        self.heads = self.num_heads
        self.is_cross_attention = False
        self.context_pre_only = getattr(original, "context_pre_only", None)

    def check(self, original: Any) -> None:
        self.refuse_patched(original)
        for extra in self.extras:
            if getattr(original, extra, None):
                raise SubquadError(f"it has a {extra}, which a converted layer does not know")
        if original.to_k is None:
            raise SubquadError("its heads have no keys: this can't be converted")
        if norm_width(original) not in (None, head_of(original)):
            raise SubquadError("its norms of queries and keys go across the heads: this can't be converted")

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.heads, head_of(original)

    def tokens_width(self, original: Any) -> int:
        return channels_into(original.to_q)

    def refuse_patched(self, original: Any) -> None:
        """Raise where a layer's processor computes something else than it usually does, or projections are fused."""
        kind = type(original.processor).__name__
        if isinstance(original.processor, MergedAttention):
            raise SubquadError("agents or token merging are on: call remove_agent_attention() first")
        if kind not in self.processors:
            raise SubquadError(
                f"it has a {kind}, which no converted layer stands for: where it is not the network's own, reset it "
                "with set_attn_processor"
            )
        if getattr(original, "fused_projections", False):
            raise SubquadError("its projections are fused: call unfuse_qkv_projections() first")

    @classmethod
    def standing_for(cls, original: Any) -> type[ConvertedAttention]:
        # one class of diffusers is called in as many ways as it has processors
        if cls is not DiffusersAttention:
            return cls
        return next((one for one in _derived_from(cls) if one.fits(original)), cls)

    @classmethod
    def fits(cls, original: Any) -> bool:
        """Whether layers with the processor of this one are this class's own."""
        return type(original.processor).__name__ in vars(cls).get("processors", ())

    @classmethod
    def is_self_attention(cls, original: Any, block: Any, path: str) -> bool:
        # texts may go through blocks of their own first, and Latte's frames see each other in others
        if "temporal_transformer_blocks." in path:
            return False
        return not getattr(original, "is_cross_attention", False) and "TokenRefiner" not in type(block).__name__

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
        tokens, heads = image, list(self.heads_of(image, *OF_IMAGE))
        if text is not None:
            text_heads = self.heads_of(text, *(OF_TEXT if self.has("add_q_proj") else OF_IMAGE))
            heads = [torch.cat(pair, dim=2) for pair in zip(text_heads, heads, strict=True)]
            tokens = torch.cat([text, image], dim=1)
        q, k, v = heads
        padding = None if padding is None else padding.expand(len(tokens), -1)
        y = self.mix(q, k, v, tokens, grid=self.grid_of_call(image, tokens), rotation=rotation, padding=padding)
        if text is None:
            return self.project_out(self.gated(y, tokens))
        of_text, of_image = y.split([text.shape[1], image.shape[1]], dim=1)
        if self.has("add_q_proj"):
            return self.project_out(of_image), self.through("to_add_out", of_text)
        return self.project_out(of_image), self.project_out(of_text)

    def gated(self, y: Tensor, tokens: Tensor) -> Tensor:
        """What goes into the last projection, of what is mixed of tokens."""
        return y

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


LEAST_ADDED = -1e3
"""What is added to a score and is less than this hides a key; what is more weighs it."""


def _derived_from(cls: type[DiffusersAttention]) -> Iterator[type[DiffusersAttention]]:
    for one in cls.__subclasses__():
        yield from (one, *_derived_from(one))


def refuse_given(arguments: Mapping[str, Any]) -> None:
    """Raise where a layer is called with something that it does not know; a scale diffusers' own layers pass over."""
    if names := [name for name, value in arguments.items() if value is not None and name != "scale"]:
        raise SubquadError(f"a converted layer of diffusers takes no {' and no '.join(names)}")


def absent_tokens(mask: Tensor | None) -> Tensor | None:
    """(b, n), True for tokens that no one sees.

    They are said by a mask of keys (b, 1, 1, n), or of pairs (b, 1, n, n) of which both are there: True for what is
    seen, what is added to scores, or 1 for what is there and 0 for the rest, as Chroma's pipeline has it.

    Raises:
        SubquadError: it says more of pairs than which tokens are there.
    """
    if mask is None:
        return None
    more = (
        f"an attention mask of {tuple(mask.shape)} that says more than which tokens are there can't be converted: give "
        "one of True and False"
    )
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise SubquadError(more)
    seen = mask
    if mask.dtype != torch.bool:
        # nothing that is added to hide a token is above 0
        of_ones = (mask > 0).any()
        seen = torch.where(of_ones, mask == 1, mask == 0)
        insist((seen | torch.where(of_ones, mask == 0, mask <= LEAST_ADDED)).all(), more)
    if mask.shape[2] == 1:
        return ~seen[:, 0, 0]
    present = seen.diagonal(dim1=-2, dim2=-1)[:, 0]
    insist((seen[:, 0] == (present[:, :, None] & present[:, None, :])).all(), more)
    return ~present


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


def rotation_of_halves(cos: Tensor, sin: Tensor) -> Rotation:
    """The same of the two halves of a head's channels."""
    return Rotation(cos, with_signs(sin, interleaved=False), interleaved=False)


def rotation_of_turns(turns: Tensor) -> Rotation:
    """That of neighbouring pairs, of complex numbers (n, d / 2)."""
    return rotation_of(*(part.repeat_interleave(2, dim=-1) for part in (turns.real, turns.imag)))
