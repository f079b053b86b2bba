"""Several frames of one scene, or views of it, as one sequence: every token attends to all tokens of all frames.

Frames lie below each other on one tall grid, (f·y) × x, behind one set of prefix tokens. Each has the positions that
an image has, the table's and rotary ones alike, and a learned vector for its number, which starts at zero.

Letters: b batch, f frames, n tokens, c channels, y x rows and columns of a frame.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from subquad.besides import Besides, Network, class_besides
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.models import backbone
from subquad.models.backbone import Backbone
from subquad.models.stages import Stage
from subquad.models.vit import ViT
from subquad.ranges import Positive, checks_arguments
from subquad.rope import Rotation


@dataclass(frozen=True, eq=False)
class FrameGrid(TokenGrid):
    """The tall grid of `frames` frames below each other."""

    frames: int = 1


@checks_arguments
def join_frames(model: Network, most_frames: Positive = 16) -> Network:
    """Let a plain network take up to so many frames (b, f, channels, height, width) as one sequence, in place.

    Its logits are of the scene; its map holds frames below each other, (b, f·y, x, c). With one frame and vectors of
    frames that are zero, as they are at first, it is the network as it was. What a mechanism itself does on the grid
    takes the frames for one tall image: agents are means over it, biases are stretched over it, and a convolution
    looks across the seam of two frames.

    Args:
        model: a ViT of `create_model`, trained or not, of any mechanism.
        most_frames: that a scene has.

    Returns:
        The network, with one parameter more, `stages.0.frame_embed` (1, most_frames, 1, c).

    Raises:
        SubquadError: for another network, in one line.
    """
    if not isinstance(model, ViT) or isinstance(model, _Framed):
        what = "takes frames already" if isinstance(model, _Framed) else "can't take frames as one sequence"
        raise SubquadError(f"{type(model).__name__} {what}: a plain ViT of create_model can (deit_tiny and its like)")
    if hasattr(model, "exchange"):
        raise SubquadError("frames are not taken by networks whose tokens are spread over processes")
    stage: Any = model.stages[0]
    stage.__class__ = _FramedStage
    like = next(model.parameters())
    stage.frame_embed = nn.Parameter(like.new_zeros(1, most_frames, 1, model.num_features))
    # no arguments of `create_model` make it so
    model.creation = {}
    framed: Any = model
    framed.__class__ = class_besides(_Framed, type(model), f"Framed{type(model).__name__}")
    return framed


class _Framed(Besides, Backbone):
    """What a network is besides its own class while it takes frames."""

    takes_frames = True
    no_streaming = "it takes several frames: stream them one by one through the network without join_frames"

    def check_images(self, x: Tensor) -> None:
        # by the module, where FX looks for what it leaves whole
        backbone.refuse_no_frames(x, self.in_chans, self.stages[0].frame_embed.shape[1])
        super().check_images(x.flatten(0, 1))

    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | {"stages.0.frame_embed"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        groups = super().group_matcher(coarse)
        return groups | {"stem": rf"{groups['stem']}|^stages\.0\.frame_embed"}


class _FramedStage(Stage):
    """A stage whose tokens are those of several frames."""

    frame_embed: Tensor

    def tokens_of(self, x: Tensor) -> tuple[Tensor, TokenGrid]:
        frames, prefix = x.shape[1], self.grid.prefix
        image = self.embed(x.flatten(0, 1))
        one = TokenGrid(image.shape[-2], image.shape[-1], prefix)
        tokens = rearrange(self.placed(image, one), "(b f) n c -> b f n c", f=frames)
        # of the frames' prefix tokens, which are all alike, those of the first
        first, places = tokens[:, 0, :prefix], tokens[:, :, prefix:] + self.frame_embed[:, :frames]
        tall = FrameGrid(frames * one.height, one.width, prefix, frames)
        return self.drop(torch.cat([first, places.flatten(1, 2)], dim=1)), tall

    def rotations(self, tokens: Tensor, grid: TokenGrid) -> dict[int, Rotation]:
        assert isinstance(grid, FrameGrid)
        of_frame = super().rotations(tokens, TokenGrid(grid.height // grid.frames, grid.width))
        return {width: _repeated(rotation, grid.frames, grid.prefix) for width, rotation in of_frame.items()}


def _repeated(rotation: Rotation, frames: int, prefix: int) -> Rotation:
    """The rotation of a frame's places, of all frames behind prefix tokens, which do not turn."""
    rows = (0, 0, prefix, 0)
    cos, sin = (torch.cat([table] * frames, dim=-2) for table in (rotation.cos, rotation.sin))
    return rotation._replace(cos=F.pad(cos, rows, value=1), sin=F.pad(sin, rows))
