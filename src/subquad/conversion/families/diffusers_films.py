"""Self-attention of diffusers' generators of films: Wan's, whose cross-attention to texts and images stays as it is.

Letters: b batch, n tokens, d channels of a head, c = h·d channels of all.
"""

from typing import Any, ClassVar

from torch import Tensor

from subquad.conversion.families.diffusers_attention import (
    DiffusersAttention,
    refuse_given,
    refuse_patched,
    rotation_of,
)
from subquad.conversion.families.diffusers_recorder import TRANSFORMERS
from subquad.conversion.families.film_recorder import FilmRecorder
from subquad.conversion.grid_recorder import GridRecorder
from subquad.errors import SubquadError


class WanRecorder(FilmRecorder):
    """Knows the usual latents of Wan, which the network does not say: 81 frames of 480×832 px."""

    usual_size: ClassVar[tuple[int, int] | None] = (60, 104)

    @classmethod
    def whole_size(cls, config: Any, size: tuple[int, int]) -> tuple[int, ...]:
        return 21, *size


class WanAttention(DiffusersAttention):
    """Wan's (2.1 and 2.2; Wan Team 2025, arXiv 2503.20314): norms across heads, rotary positions."""

    replaces: ClassVar[tuple[str, ...]] = tuple(
        f"{TRANSFORMERS}.transformer_{module}.WanAttention" for module in ("wan", "chronoedit")
    )
    listener: ClassVar[type[GridRecorder]] = WanRecorder

    def check(self, original: Any) -> None:
        refuse_patched(original)
        if original.added_kv_proj_dim is not None:
            raise SubquadError("it attends to an image beside the film, which a converted layer does not know")

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.heads, original.inner_dim // original.heads

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

    def heads_of(self, tokens: Tensor, projection: str, norm: str) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.through(projection.format(name), tokens) for name in "qkv")
        q, k = self.through(norm.format("q"), q), self.through(norm.format("k"), k)
        return self.split(q), self.split(k), self.split(v)
