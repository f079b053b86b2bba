"""The table of networks: rows of literals. What a row does not say is the host's default."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from subquad.models.vit import ViT

HOSTS: dict[str, type[nn.Module]] = {"vit": ViT}


@dataclass(frozen=True)
class Variant:
    """A network without its mechanism: a host and its sizes.

    Attributes:
        host: a name of HOSTS.
        depths: blocks of each stage.
        arguments: of the host's constructor.
        recipe: the training recipe it was published with.
    """

    host: str
    depths: tuple[int, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    recipe: str = ""


def deit(embed_dim: int, num_heads: int, drop_path_rate: float = 0.0) -> Variant:
    """A DeiT, arXiv 2012.12877: patches of 16 px, 12 blocks, a class token."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "drop_path_rate": drop_path_rate}
    return Variant("vit", (12,), sizes, "deit")


def small_deit(embed_dim: int, num_heads: int, depth: int, patch_size: int, img_size: int, recipe: str) -> Variant:
    """A DeiT of ours for small images, to compare mechanisms in minutes; nobody published it."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "patch_size": patch_size}
    return Variant("vit", (depth,), sizes | {"img_size": (img_size, img_size)}, recipe)


VARIANTS: dict[str, Variant] = {
    "deit_micro": small_deit(64, num_heads=4, depth=3, patch_size=4, img_size=16, recipe="digits"),
    "deit_mini": small_deit(128, num_heads=4, depth=6, patch_size=4, img_size=32, recipe="cifar10_small"),
    "deit_tiny": deit(192, num_heads=3),
    "deit_small": deit(384, num_heads=6, drop_path_rate=0.1),
    "deit_base": deit(768, num_heads=12, drop_path_rate=0.3),
}
