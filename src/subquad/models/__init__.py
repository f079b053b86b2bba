"""Hosts, who gather tokens, and the networks made of a host and a mechanism."""

from subquad.models.create import create_model, parse_attention
from subquad.models.files import load_checkpoint, restore_model, save_weights
from subquad.models.variants import HOSTS, VARIANTS

__all__ = [
    "HOSTS",
    "VARIANTS",
    "create_model",
    "load_checkpoint",
    "parse_attention",
    "restore_model",
    "save_weights",
]
