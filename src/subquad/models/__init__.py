"""Hosts, who gather tokens, and the networks made of a host and a mechanism."""

from subquad.models.catalogue import attention_label
from subquad.models.convert import convert_checkpoint
from subquad.models.create import create_model, parse_attention
from subquad.models.files import load_checkpoint, read_weights, restore_model, save_weights
from subquad.models.networks import NETWORKS
from subquad.models.variants import HOSTS, VARIANTS
from subquad.models.zoo import default_cfgs  # and registers the networks with timm

__all__ = [
    "HOSTS",
    "NETWORKS",
    "VARIANTS",
    "attention_label",
    "convert_checkpoint",
    "create_model",
    "default_cfgs",
    "load_checkpoint",
    "parse_attention",
    "read_weights",
    "restore_model",
    "save_weights",
]
