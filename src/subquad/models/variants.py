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


def deit(embed_dim: int, num_heads: int, drop_path_rate: float) -> Variant:
    """A DeiT, arXiv 2012.12877: patches of 16 px, 12 blocks, a class token."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "drop_path_rate": drop_path_rate}
    return Variant("vit", (12,), sizes, "deit")


VARIANTS: dict[str, Variant] = {
    "deit_tiny": deit(192, 3, 0.0),
    "deit_small": deit(384, 6, 0.1),
    "deit_base": deit(768, 12, 0.3),
}
