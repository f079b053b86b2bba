"""A patch embedding and the attention layers behind it, and which images a foreign network says it is made for."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from subquad.conversion.attention_layers import Layer
from subquad.conversion.converted_attention import is_quadratic
from subquad.conversion.example_calls import Example
from subquad.conversion.families.twins import OF_LIBRARIES
from subquad.conversion.grid_recorder import GridRecorder
from subquad.conversion.image_recorder import ImageRecorder
from subquad.conversion.pyramids import stage_of
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.models.layers import SelfAttention
from subquad.models.stated_inputs import OF_IMAGES, said_size, size_of_weights

LIBRARIES = OF_LIBRARIES - {"torch"}
"""Whose networks are known, and are refused for reasons of their own."""


@dataclass(frozen=True)
class Tower:
    """A patch embedding and the attention layers behind it.

    Attributes:
        embedding: path of the module that knows where tokens stand, as the convolution that cuts an image into patches.
        grid: of the image that position parameters are made for, its prefix tokens included.
        layers: in the order of the blocks.
        host: the host whose usual settings mechanisms have here, see `Traits.in_hosts`.
        recorder: what listens to the embedding.
        resizing: paths of the convolutions behind it that lead from stage to stage, to which it listens as well.
        patch: (height, width) of the patches that the part at `embedding` cuts, where it is no module that shows it.
        example: what a network of anybody's code may be run for, to see what layers are handed.
    """

    embedding: str
    grid: TokenGrid
    layers: tuple[Layer, ...]
    host: str = "vit"
    recorder: type[GridRecorder] = GridRecorder
    resizing: tuple[str, ...] = ()
    patch: tuple[int, int] | None = None
    example: Example | None = None

    def make_recorder(self) -> GridRecorder:
        """One that listens to the embedding, for all layers."""
        if self.patch is not None:
            return ImageRecorder(self.grid.prefix, self.patch)
        return self.recorder(self.grid.prefix)

    @property
    def depths(self) -> list[int]:
        """Blocks of each stage."""
        return [len(stage) for stage in self.paths_by_stage]

    @property
    def is_plain(self) -> bool:
        """Whether every layer forms all pairs of the tokens of one map, and all blocks are alike."""
        forms_pairs = all(_mixes_quadratically(layer.module) for layer in self.layers)
        on_one_map = all(layer.is_target and layer.grid == self.grid for layer in self.layers)
        return forms_pairs and on_one_map and self.host == "vit"

    @property
    def paths_by_stage(self) -> list[list[str]]:
        """Where the layers of each stage stand."""
        stages = groupby((layer.path for layer in self.layers), key=stage_of)
        return [list(stage) for _, stage in stages]


def _mixes_quadratically(module: Any) -> bool:
    """Whether this layer's cost grows with n²; foreign ones do, ours say it."""
    return not isinstance(module, SelfAttention) or is_quadratic(module.inner)


def within(size: tuple[int, ...] | None, most: int) -> tuple[int, ...] | None:
    """A size that was asked for; raises a SubquadError where it has more sides than the network's images."""
    if size is not None and len(size) > most:
        raise SubquadError(
            f"img_size has {len(size)} sides, {size}, and this network takes images: give height and width"
        )
    return size


def size_of(root: Any, model: Any) -> tuple[int, int] | None:
    """(height, width) of the images, or of what else a network is handed, that it says it is made for."""
    # configurations first: networks of diffusers warn where they are asked for what stands there
    config = getattr(model, "config", None)
    holders = (getattr(root, "patch_embed", None), getattr(root, "config", None), root, model)
    for holder in (*holders, getattr(config, "vision_config", None)):
        size = said_size(holder, (*OF_IMAGES, "sample_size", "crop_size"))
        if size is not None:
            return size
        height, width = (getattr(holder, f"sample_{side}", None) for side in ("height", "width"))
        if isinstance(height, int) and isinstance(width, int):
            return height, width
    return size_of_weights(root)
