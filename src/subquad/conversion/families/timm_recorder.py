"""Where tokens stand in timm's networks: behind a convolution of patches, or behind NaFlexViT's embedding."""

from typing import Any

from torch import nn

from subquad.conversion.grid_recorder import GridRecorder, is_called
from subquad.errors import SubquadError
from subquad.grid import TokenGrid


def is_naflex(module: nn.Module) -> bool:
    """Whether this is NaFlexViT's embedding, which answers with tokens and the grid that they stand on."""
    return is_called(module, "timm.models.naflexvit.NaFlexEmbeds")


class TimmRecorder(GridRecorder):
    """Listens to either."""

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        return is_naflex(module) or super().hears(module)

    @classmethod
    def map_from(cls, embedding: Any, size: tuple[int, int]) -> tuple[int, int]:
        if not is_naflex(embedding):
            return super().map_from(embedding, size)
        height, width = embedding.dynamic_feat_size(size)
        if min(height, width) < 1:
            raise SubquadError(f"images of {size[0]}×{size[1]} px hold no patch of {embedding.patch_size}")
        return height, width

    def __call__(self, module: Any, arguments: Any, image: Any) -> None:
        if not is_naflex(module):
            super().__call__(module, arguments, image)
            return
        _, grid = image
        if grid is None:
            raise SubquadError(
                "a converted NaFlexViT takes images (b, c, height, width) of one size at a time, and no patches of "
                "images of several sizes (patch_coord)"
            )
        self.record(TokenGrid(*grid))
