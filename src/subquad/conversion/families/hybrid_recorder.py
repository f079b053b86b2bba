"""Where tokens stand behind a convolutional network that reads an image for transformers' DPT (`is_hybrid`)."""

from typing import Any

from torch import Tensor, nn

from subquad.conversion.grid_recorder import GridRecorder, is_called
from subquad.errors import SubquadError
from subquad.grid import TokenGrid

HYBRID = "transformers.models.dpt.modeling_dpt.DPTViTHybridEmbeddings"


class HybridRecorder(GridRecorder):
    """Listens to that embedding, which has a token for each patch of the image, or to a convolution as others do."""

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        return is_called(module, HYBRID) or super().hears(module)

    @classmethod
    def map_from(cls, embedding: Any, size: Any) -> tuple[int, int]:
        if not is_called(embedding, HYBRID):
            return super().map_from(embedding, size)
        height, width = (side // embedding.patch_size for side in size)
        if min(height, width) < 1:
            raise SubquadError(f"images of {size[0]}×{size[1]} px hold no patch of {embedding.patch_size}")
        return height, width

    def __call__(self, module: Any, arguments: Any, image: Any) -> None:
        if not is_called(module, HYBRID):
            super().__call__(module, arguments, image)
            return
        pixels: Tensor = arguments[0]
        self.record(TokenGrid(*self.map_from(module, pixels.shape[-2:])))
