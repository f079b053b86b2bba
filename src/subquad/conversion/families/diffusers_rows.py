"""Attention of diffusers' networks that have latents as rows of tokens: Qwen-Image, Z-Image, Lumina 2, Flux, Krea 2.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from subquad.conversion.converted_attention import Mechanism, channels_into
from subquad.conversion.families.diffusers_attention import (
    DiffusersAttention,
    absent_tokens,
    refuse_given,
    rotation_of_turns,
)
from subquad.conversion.families.diffusers_recorder import (
    TRANSFORMERS,
    Flux2Recorder,
    Flux3Recorder,
    FluxRecorder,
    LatentRecorder,
    QwenRecorder,
    ZRecorder,
)
from subquad.conversion.grid_recorder import GridRecorder
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.rope import Rotation
from subquad.tracing import is_exporting

LIKE_FLUX = {
    "flux": "Flux",
    "bria": "Bria",
    "bria_fibo": "BriaFibo",
    "longcat_image": "LongCatImage",
    "ovis_image": "OvisImage",
}
"""Networks of diffusers with a layer like Flux's, and how their classes are called."""


class QwenAttention(DiffusersAttention):
    """Qwen-Image's: rotary positions of both, as complex numbers, and texts with absent tokens."""

    processors: ClassVar[tuple[str, ...]] = ("QwenDoubleStreamAttnProcessor2_0",)
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


class UnevenRows(DiffusersAttention):
    """What networks have in common whose tokens beside the map differ in number among their blocks.

    Attributes:
        network: how it is called.
    """

    network: ClassVar[str]

    @classmethod
    def sees_text(cls, original: Any) -> bool:
        return True

    def make_inner(self, original: Any, mechanism: Mechanism, grid: TokenGrid) -> Any:
        # there are some beside the map, with which a mechanism may be of no use
        inner = super().make_inner(original, mechanism, TokenGrid(*grid.shape, 32))
        if self.prefix_of_tables is not None:
            raise SubquadError(
                f"{type(inner).__name__} learns positions of tokens, and how many {self.network} has beside the map "
                "differs among its blocks: take a mechanism without position tables, as linear or inline"
            )
        return inner

    def grid_of_call(self, image: Tensor, tokens: Tensor) -> TokenGrid:
        return self.behind_text(self.recorder.grid_within(tokens, self), tokens)

    def mix_rows(self, x: Tensor, present: Tensor | None, turns: Tensor | None) -> Tensor:
        """What a call answers of tokens (b, n, c), of which as many are there as `present` (b, n) says, the first ones.

        Rotary positions are complex numbers (b, n, d / 2). They differ where texts of a batch have different lengths:
        then one image after the other is mixed.
        """
        if is_exporting() and present is not None:
            raise SubquadError(
                f"texts of {self.network} that differ in length are mixed image for image, which can't be exported: "
                "hand over texts of one length, or an image at a time"
            )
        if is_exporting() or (present is None and (turns is None or len(x) == 1)):
            return self.of_one_length(x, turns)
        return self.mix_apart(x, present, turns)

    @torch.compiler.disable
    def mix_apart(self, x: Tensor, present: Tensor | None, turns: Tensor | None) -> Tensor:
        """The same of several images, whose texts may have different lengths: what is compiled can't ask."""
        if present is None and (turns is None or all(torch.equal(one, turns[0]) for one in turns)):
            return self.of_one_length(x, turns)
        y = torch.zeros_like(x)
        for number, tokens in enumerate(x):
            there = slice(len(tokens) if present is None else int(present[number].sum()))
            own = None if turns is None else turns[number : number + 1, there]
            y[number, there] = self.of_one_length(tokens[None, there], own)[0]
        return y

    def of_one_length(self, x: Tensor, turns: Tensor | None) -> Tensor:
        """The same of images whose texts have one length, and stand in front of the image."""
        answer: Tensor = self.attend(x, None, None if turns is None else rotation_of_turns(turns[0]))
        return answer


class ZAttention(UnevenRows):
    """Z-Image's, one row of an image and behind it what fills it up, and a text; here these stand in front of it."""

    processors: ClassVar[tuple[str, ...]] = ("ZSingleStreamAttnProcessor",)
    listener: ClassVar[type[GridRecorder]] = ZRecorder
    others_see: ClassVar[str | None] = "texts alone"
    network: ClassVar[str] = "Z-Image"

    @classmethod
    def is_target(cls, original: Any, block: Any, number: int) -> bool:
        # those that refine what is no image are told no noise level
        return bool(block.modulation)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Tokens (b, n, c), which of them are there (b, n), and rotary positions (b, n, d / 2): see `mix_rows`."""
        refuse_given(kwargs)
        return self.mix_rows(hidden_states, attention_mask, freqs_cis)

    def of_one_length(self, x: Tensor, turns: Tensor | None) -> Tensor:
        behind = self.recorder.grid_within(x, self).prefix
        turns = None if turns is None else turns.roll(behind, dims=1)
        return super().of_one_length(x.roll(behind, dims=1), turns).roll(-behind, dims=1)


class LuminaAttention(UnevenRows):
    """Lumina 2's: blocks of the image alone, and those of a text and behind it the image; heads share keys."""

    processors: ClassVar[tuple[str, ...]] = ("Lumina2AttnProcessor2_0",)
    listener: ClassVar[type[GridRecorder]] = LatentRecorder
    network: ClassVar[str] = "Lumina 2"

    @classmethod
    def is_self_attention(cls, original: Any, block: Any, path: str) -> bool:
        return "context_refiner." not in path

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Tokens (b, n, c), handed over twice; the rest as Z-Image's."""
        refuse_given(kwargs)
        return self.mix_rows(hidden_states, attention_mask, image_rotary_emb)


class AuraAttention(DiffusersAttention):
    """AuraFlow's: text and registers in front of the image, in its last blocks in one row with it."""

    processors: ClassVar[tuple[str, ...]] = ("AuraFlowAttnProcessor2_0",)
    listener: ClassVar[type[GridRecorder]] = LatentRecorder

    @classmethod
    def sees_text(cls, original: Any) -> bool:
        return True

    def grid_of_call(self, image: Tensor, tokens: Tensor) -> TokenGrid:
        return self.behind_text(self.recorder.grid_within(tokens, self), tokens)


class FluxAttention(DiffusersAttention):
    """Flux's: rotary positions of both, and blocks in which text and image are one row of tokens already."""

    replaces: ClassVar[tuple[str, ...]] = tuple(
        f"{TRANSFORMERS}.transformer_{module}.{name}Attention" for module, name in LIKE_FLUX.items()
    )
    # blocks of FIBO that have text and image in one row have Bria's in diffusers' usual layer
    processors: ClassVar[tuple[str, ...]] = tuple(f"{name}AttnProcessor" for name in LIKE_FLUX.values())
    listener: ClassVar[type[GridRecorder]] = FluxRecorder

    @classmethod
    def sees_text(cls, original: Any) -> bool:
        return True

    def absent(self, attention_mask: Tensor | None) -> Tensor | None:
        return absent_tokens(attention_mask)

    def grid_of_call(self, image: Tensor, tokens: Tensor) -> TokenGrid:
        # text and image may be one row already, and texts of other threads have other lengths
        return self.behind_text(self.recorder.grid_within(tokens, self), tokens)


class Flux2Attention(FluxAttention):
    """Flux 2's, of blocks in which text and image have projections of their own."""

    replaces: ClassVar[tuple[str, ...]] = (f"{TRANSFORMERS}.transformer_flux2.Flux2Attention",)
    processors: ClassVar[tuple[str, ...]] = ("Flux2AttnProcessor",)
    listener: ClassVar[type[GridRecorder]] = Flux2Recorder


class Flux2ParallelAttention(FluxAttention):
    """Flux 2's of the other blocks: projections shared with those of the block's MLP, which is within the layer."""

    replaces: ClassVar[tuple[str, ...]] = (f"{TRANSFORMERS}.transformer_flux2.Flux2ParallelSelfAttention",)
    processors: ClassVar[tuple[str, ...]] = ("Flux2ParallelSelfAttnProcessor",)
    listener: ClassVar[type[GridRecorder]] = Flux2Recorder

    def check(self, original: Any) -> None:
        self.refuse_patched(original)

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


class KreaAttention(FluxAttention):
    """Krea 2's: one row of text and image, heads that share keys, and a gate; blocks of the text alone stay."""

    replaces: ClassVar[tuple[str, ...]] = (f"{TRANSFORMERS}.transformer_krea2.Krea2Attention",)
    processors: ClassVar[tuple[str, ...]] = ("Krea2AttnProcessor",)

    def check(self, original: Any) -> None:
        self.refuse_patched(original)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, original.head_dim

    @classmethod
    def is_self_attention(cls, original: Any, block: Any, path: str) -> bool:
        return "text_fusion." not in path

    def gated(self, y: Tensor, tokens: Tensor) -> Tensor:
        return y * self.through("to_gate", tokens).sigmoid()


class Flux3Attention(UnevenRows):
    """Flux 3's: blocks of the image alone, and behind them those of a text and the image; the text's own stay."""

    replaces: ClassVar[tuple[str, ...]] = (f"{TRANSFORMERS}.transformer_flux3.Flux3Attention",)
    processors: ClassVar[tuple[str, ...]] = ("Flux3AttnProcessor",)
    listener: ClassVar[type[GridRecorder]] = Flux3Recorder
    network: ClassVar[str] = "Flux 3"

    def check(self, original: Any) -> None:
        self.refuse_patched(original)

    @classmethod
    def is_self_attention(cls, original: Any, block: Any, path: str) -> bool:
        return "txt_mode_blocks." not in path and "mode_blocks.image_cond." not in path

    def heads_of(self, tokens: Tensor, projection: str, norm: str) -> tuple[Tensor, Tensor, Tensor]:
        # its norms stay in fp32 where the network does not
        q, k, v = (self.split(self.through(projection.format(name), tokens)) for name in "qkv")
        return self.through(norm.format("q"), q.float()).to(v), self.through(norm.format("k"), k.float()).to(v), v
