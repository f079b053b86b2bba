"""Looking inside: the explicit attention of a whole network."""

from subquad.analysis.attention import LayerAttention, attention_weights

__all__ = ["LayerAttention", "attention_weights"]
