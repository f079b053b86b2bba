"""Self-attention of diffusers' generators of films, Wan, LTX-Video and Cosmos, whose cross-attention stays as it is.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels of all.
"""

from typing import Any, ClassVar

from torch import Tensor, nn

from subquad.conversion.families.diffusers_attention import (
    DiffusersAttention,
    refuse_given,
    rotation_of,
    rotation_of_halves,
    rotation_of_turns,
)
from subquad.conversion.families.diffusers_recorder import TRANSFORMERS
from subquad.conversion.families.film_recorder import FilmRecorder, TokensOfFilmRecorder
from subquad.conversion.grid_recorder import GridRecorder, is_called
from subquad.errors import SubquadError
from subquad.grid import TokenGrid


class WanRecorder(FilmRecorder):
    """Knows the usual latents of Wan, which the network does not say: 81 frames of 480×832 px."""

    usual_size: ClassVar[tuple[int, int] | None] = (60, 104)
    usual_frames: ClassVar[int | None] = 21


class LTXRecorder(TokensOfFilmRecorder):
    """Listens to LTX-Video's rotary embedding, which is told of how many frames, rows and columns a film is."""

    # that of 161 frames of 512×704 px
    usual_size: ClassVar[tuple[int, int] | None] = (16, 22)
    usual_frames: ClassVar[int | None] = 21

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        return is_called(module, f"{TRANSFORMERS}.transformer_ltx.LTXVideoRotaryPosEmbed")

    def __call__(self, module: Any, arguments: Any, tables: Any) -> None:
        """Record the map of all frames.

        Raises:
            SubquadError: the network is told coordinates instead, as where other films or images condition it.
        """
        sizes = arguments[1:4]
        if None in sizes or len(sizes) != 3 or arguments[5:] not in ((), (None,)):
            raise SubquadError(
                "a converted LTX-Video is called with num_frames, height and width of the latent, and no video_coords: "
                "films and images that condition it can't be converted"
            )
        self.record(TokenGrid(*self.map_from(module, sizes)))


class CosmosRecorder(FilmRecorder):
    """Listens to Cosmos' rotary embedding, which is given the film."""

    # that of 121 frames of 704×1,280 px
    usual_size: ClassVar[tuple[int, int] | None] = (88, 160)
    usual_frames: ClassVar[int | None] = 16

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        return is_called(module, f"{TRANSFORMERS}.transformer_cosmos.CosmosRotaryPosEmbed")

    @classmethod
    def map_from(cls, embedding: Any, size: Any) -> tuple[int, int]:
        frames, rows, columns = (
            length // patch for length, patch in zip((1, *size)[-3:], embedding.patch_size, strict=True)
        )
        return max(frames, 1) * rows, columns

    def __call__(self, module: Any, arguments: Any, tables: Any) -> None:
        self.record(TokenGrid(*self.map_from(module, arguments[0].shape)))


class CosmosAttention(DiffusersAttention):
    """Cosmos' (1, 2 and 2.5; NVIDIA 2025, arXiv 2501.03575): rotary positions of one half of a head with the other."""

    processors: ClassVar[tuple[str, ...]] = ("CosmosAttnProcessor2_0",)
    listener: ClassVar[type[GridRecorder]] = CosmosRecorder

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Tokens of all frames (b, n, c); tables of rotary positions (n, d)."""
        refuse_given({"encoder_hidden_states": encoder_hidden_states, "attention_mask": attention_mask, **kwargs})
        rotation = None if image_rotary_emb is None else rotation_of_halves(*image_rotary_emb)
        return self.attend(hidden_states, None, rotation)


class AcrossHeads(DiffusersAttention):
    """What these have in common: norms of queries and keys go across the heads."""

    def check(self, original: Any) -> None:
        self.refuse_patched(original)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.heads, original.inner_dim // original.heads

    def heads_of(self, tokens: Tensor, projection: str, norm: str) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.through(projection.format(name), tokens) for name in "qkv")
        q, k = self.through(norm.format("q"), q), self.through(norm.format("k"), k)
        return self.split(q), self.split(k), self.split(v)


class FirstAcrossHeads(AcrossHeads):
    """Those whose layers do not say themselves that they are no cross-attention: a block's first is none."""

    @classmethod
    def is_self_attention(cls, original: Any, block: Any, path: str) -> bool:
        return block.attn1 is original

    @classmethod
    def sees_text(cls, original: Any) -> bool:
        return False


class LTXAttention(FirstAcrossHeads):
    """LTX-Video's (HaCohen et al. 2025, arXiv 2501.00103): rotary positions, which differ from head to head."""

    replaces: ClassVar[tuple[str, ...]] = (f"{TRANSFORMERS}.transformer_ltx.LTXAttention",)
    processors: ClassVar[tuple[str, ...]] = ("LTXVideoAttnProcessor",)
    listener: ClassVar[type[GridRecorder]] = LTXRecorder

    def check(self, original: Any) -> None:
        super().check(original)
        if original.inner_kv_dim != original.inner_dim:
            raise SubquadError("its heads share keys: this can't be converted")

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Tokens of all frames (b, n, c); tables of rotary positions (b, n, c), the same for all films."""
        refuse_given({"encoder_hidden_states": encoder_hidden_states, "attention_mask": attention_mask, **kwargs})
        rotation = None
        if image_rotary_emb is not None:
            tables = (
                table[0].unflatten(-1, (self.num_heads, self.width)).transpose(0, 1) for table in image_rotary_emb
            )
            rotation = rotation_of(*tables)
        return self.attend(hidden_states, None, rotation)


class WanAttention(AcrossHeads):
    """Wan's (2.1 and 2.2; Wan Team 2025, arXiv 2503.20314) and what is built of it: rotary positions."""

    replaces: ClassVar[tuple[str, ...]] = tuple(
        f"{TRANSFORMERS}.transformer_{module}"
        for module in ("chronoedit.WanAttention", "skyreels_v2.SkyReelsV2Attention", "wan.WanAttention")
    )
    processors: ClassVar[tuple[str, ...]] = ("SkyReelsV2AttnProcessor", "WanAttnProcessor")
    listener: ClassVar[type[GridRecorder]] = WanRecorder

    def check(self, original: Any) -> None:
        super().check(original)
        if original.added_kv_proj_dim is not None:
            raise SubquadError("it attends to an image beside the film, which a converted layer does not know")

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Tokens of all frames (b, n, c); tables of rotary positions (1, n, 1, d)."""
        refuse_given({"encoder_hidden_states": encoder_hidden_states, "attention_mask": attention_mask, **kwargs})
        rotation = None if rotary_emb is None else rotation_of(*(table[0, :, 0] for table in rotary_emb))
        return self.attend(hidden_states, None, rotation)


class AnyFlowAttention(FirstAcrossHeads):
    """AnyFlow's, which is Wan's: rotary positions are complex numbers, the same for queries and keys."""

    replaces: ClassVar[tuple[str, ...]] = (f"{TRANSFORMERS}.transformer_anyflow.AnyFlowAttention",)
    processors: ClassVar[tuple[str, ...]] = ("AnyFlowAttnProcessor",)
    listener: ClassVar[type[GridRecorder]] = WanRecorder

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Tokens of all frames (b, n, c); numbers (1, 1, n, d / 2) of queries and keys."""
        refuse_given({"encoder_hidden_states": encoder_hidden_states, "attention_mask": attention_mask, **kwargs})
        rotation = None if rotary_emb is None else rotation_of_turns(rotary_emb["query"][0, 0])
        return self.attend(hidden_states, None, rotation)
