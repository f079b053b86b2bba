"""Hosts, who gather tokens, and the networks made of a host and a mechanism."""

from subquad.models.attention_names import names_in
from subquad.models.checkpoint_conversion import convert_checkpoint
from subquad.models.create import create_model
from subquad.models.frames import join_frames
from subquad.models.listing import attention_label
from subquad.models.networks import NETWORKS
from subquad.models.restoring import restore, restore_model
from subquad.models.timm_names import default_cfgs  # and registers the networks with timm
from subquad.models.variants import HOSTS, VARIANTS
from subquad.weights.files import classes_in, load_checkpoint, read_note, read_weights, save_weights, weight_file

__all__ = [
    "HOSTS",
    "NETWORKS",
    "VARIANTS",
    "attention_label",
    "classes_in",
    "convert_checkpoint",
    "create_model",
    "default_cfgs",
    "join_frames",
    "load_checkpoint",
    "names_in",
    "read_note",
    "read_weights",
    "restore",
    "restore_model",
    "save_weights",
    "weight_file",
]
