"""Where tokens stand whose patches no module cuts: by the image, or the map, that a part is handed.

Networks of one's own often cut patches by `unfold`, by einops' function or by reshaping, for a linear layer. Then no
module gives a map: the part that does it is listened to, in front, and how large patches are is known from elsewhere.
"""

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from subquad.conversion.checkpointed_calls import first_tensor
from subquad.conversion.grid_recorder import GridRecorder
from subquad.conversion.sketched_calls import MAKERS
from subquad.errors import SubquadError
from subquad.grid import TokenGrid


class ImageRecorder(GridRecorder):
    """Listens to a part that is handed images or maps (b, c, height, width), in front of it.

    Args:
        prefix: tokens in front of the map.
        patch: (height, width) of a patch.
    """

    in_front: ClassVar[bool] = True

    def __init__(self, prefix: int, patch: tuple[int, int]) -> None:
        super().__init__(prefix)
        self.patch = patch

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"patch": self.patch}

    def __call__(self, module: Any, arguments: Any, named: Any) -> None:
        """What a hook in front of the part is called with.

        Raises:
            SubquadError: these are no images, or smaller than a patch.
        """
        image = first_tensor(arguments, named)
        if image is None or image.dim() != 4:
            given = [tuple(one.shape) for one in (*arguments, *named.values()) if isinstance(one, Tensor)]
            raise SubquadError(f"a converted network takes images (b, c, height, width), got {given}")
        height, width = (length // side for length, side in zip(image.shape[-2:], self.patch, strict=True))
        if not height or not width:
            sides = [f"{y}×{x}" for y, x in (image.shape[-2:], self.patch)]
            raise SubquadError(f"images of {sides[0]} px hold no patch of {sides[1]}")
        self.record(TokenGrid(height, width))


class SurroundingRecorder(ImageRecorder):
    """Listens to several parts of a network of several maps, each handed the map on which the tokens within it stand.

    To what gives a map, as a convolution in front of tokens that nothing else surrounds, it listens behind.
    """

    def __init__(self, prefix: int) -> None:
        super().__init__(prefix, (1, 1))

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix}

    def hook_onto(self, module: nn.Module) -> RemovableHandle:
        if isinstance(module, MAKERS):
            return module.register_forward_hook(self)
        return super().hook_onto(module)

    def __call__(self, module: Any, arguments: Any, behind: Any) -> None:
        map_ = behind if isinstance(module, MAKERS) else first_tensor(arguments, behind)
        if isinstance(map_, Tensor) and map_.dim() == 5:
            # the maps of a volume stand below one another
            map_ = map_.flatten(2, 3)
        super().__call__(module, (map_,), {})
