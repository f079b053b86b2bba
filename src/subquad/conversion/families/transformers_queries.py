"""Attention layers of transformers whose networks have tokens of their own beside an image's: queries of objects."""

from typing import Any

from torch import Tensor

from subquad.conversion.families.transformers_attention import TransformersAttention, TransformersSelfAttention
from subquad.errors import SubquadError
from subquad.tracing import is_traced


class EomtAttention(TransformersAttention):
    """EoMT's (Kerssies et al. 2025, arXiv 2503.19108): in the last blocks queries stand in front of all other tokens.

    In training each query is masked to the segment that it has found, until `attn_mask_probs` is zero.
    """

    replaces = tuple(
        f"transformers.models.{name}.modeling_{name}.{cls}"
        for name, cls in (("eomt", "EomtAttention"), ("eomt_dinov3", "EomtDinov3Attention"))
    )

    @classmethod
    def tokens_beside(cls, original: Any, number: int) -> int:
        config = original.config
        return config.num_queries if number >= config.num_hidden_layers - config.num_blocks else 0

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        # what may be seen has a constant above zero, and is no padding
        if attention_mask is not None and (is_traced() or bool((attention_mask < 0).any())):
            raise SubquadError(
                "this EoMT masks what its queries see, which a converted layer can't honour: set its attn_mask_probs "
                "to zeros and call it in evaluation, as trained ones are, or keep its last blocks"
            )
        return super().forward(hidden_states, None, position_embeddings)


class YolosAttention(TransformersSelfAttention):
    """YOLOS' (Fang et al. 2021, arXiv 2106.00666): detection tokens stand behind the map, and here in front of it."""

    replaces = ("transformers.models.yolos.modeling_yolos.YolosSelfAttention",)

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.num_detection_tokens = original.config.num_detection_tokens

    @classmethod
    def tokens_beside(cls, original: Any, number: int) -> int:
        return int(original.config.num_detection_tokens)

    @property
    def tokens_behind(self) -> int:
        """How many tokens stand behind the map, which `answers` gets in front."""
        return self.num_detection_tokens

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        y, weights = super().forward(hidden_states.roll(self.tokens_behind, dims=1))
        return y.roll(-self.tokens_behind, dims=1), weights
