"""How the tokens of a film stand: the maps of all its frames are one map, each below the one before it.

f frames of y rows are f·y rows. What a mechanism does near a place, as a local branch, goes over from the last rows of
a frame to the first ones of the next.

Letters: b batch, c channels, f frames, y x rows and columns.
"""

from typing import Any, ClassVar

from torch import Tensor, nn

from subquad.conversion.grid_recorder import REPLACED, GridRecorder
from subquad.errors import SubquadError
from subquad.grid import TokenGrid


class FilmRecorder(GridRecorder):
    """Listens to a convolution over frames, rows and columns that cuts a film into patches.

    Attributes:
        usual_frames: of what the network is usually asked for, where it does not say so itself.
    """

    usual_frames: ClassVar[int | None] = None

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.Conv3d) and module.stride == module.kernel_size and module.stride[-1] > 1

    @classmethod
    def map_from(cls, embedding: Any, size: Any) -> tuple[int, int]:
        """Rows, of all frames, and columns, of a film of this (frames, height, width), or (height, width) of one."""
        frames, height, width = (embedding.stride[0], *size)[-3:]
        if any(length < stride for length, stride in zip((frames, height, width), embedding.stride, strict=True)):
            raise SubquadError(f"{frames} frames of {height}×{width} px hold no patch of {embedding.kernel_size}")
        rows, columns = height // embedding.stride[1], width // embedding.stride[2]
        return frames // embedding.stride[0] * rows, columns

    @classmethod
    def most_sides(cls, embedding: nn.Module) -> int:
        return 3

    @classmethod
    def whole_size(cls, config: Any, size: tuple[int, ...]) -> tuple[int, ...]:
        if len(size) == 3:
            return size
        said = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
        frames = cls.usual_frames or said
        return (frames, *size) if isinstance(frames, int) else size

    def __call__(self, module: Any, arguments: Any, film: Tensor) -> None:
        """Record the map of a film's patches (b, c, f, y, x)."""
        if not isinstance(film, Tensor) or film.dim() != 5:
            raise SubquadError(f"the patch embedding, now a {type(module).__name__} that gives no film, {REPLACED}")
        self.record(TokenGrid(film.shape[-3] * film.shape[-2], film.shape[-1]))


class TokensOfFilmRecorder(FilmRecorder):
    """Listens to what is told how many frames, rows and columns of tokens a film has."""

    @classmethod
    def map_from(cls, embedding: Any, size: Any) -> tuple[int, int]:
        frames, height, width = (1, *size)[-3:]
        return frames * height, width
