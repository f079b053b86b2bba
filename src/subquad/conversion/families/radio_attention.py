"""RADIO of transformers (Ranzinger et al. 2023, arXiv 2312.06709), which cuts patches without a convolution."""

from typing import Any, ClassVar

from torch import Tensor, nn

from subquad.conversion.families.transformers_attention import TransformersAttention
from subquad.conversion.grid_recorder import GridRecorder, is_called
from subquad.errors import SubquadError
from subquad.grid import TokenGrid

RADIO = "transformers.models.radio.modeling_radio"


class RadioRecorder(GridRecorder):
    """Listens to RADIO's embedding, which is given images and answers with tokens."""

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        return is_called(module, f"{RADIO}.RadioPatchEmbeddings")

    @classmethod
    def map_from(cls, embedding: Any, size: tuple[int, int]) -> tuple[int, int]:
        height, width = (length // embedding.patch_size for length in size)
        if min(height, width) < 1:
            raise SubquadError(f"images of {size[0]}×{size[1]} px hold no patch of {embedding.patch_size}")
        return height, width

    def __call__(self, module: Any, arguments: Any, embedded: Any) -> None:
        images: Tensor = arguments[0]
        if images.dim() != 4:
            raise SubquadError(
                "a converted RADIO takes images (b, c, height, width) of one size at a time, and no rows of patches "
                "(image_grid_hw)"
            )
        size = module.patch_size
        self.record(TokenGrid(images.shape[-2] // size, images.shape[-1] // size))


class RadioAttention(TransformersAttention):
    """RADIO's, whose layers are as DINOv2's are."""

    replaces = (f"{RADIO}.RadioAttention",)
    listener: ClassVar[type[GridRecorder]] = RadioRecorder
