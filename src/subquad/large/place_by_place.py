"""Networks that say something of each place of their last map by itself, as segmenters with a linear head do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.large.streaming import StreamedBlocks
from subquad.models.stages import ImageRows
from subquad.tracing import up_to_multiple


@dataclass(frozen=True)
class PlaceByPlace:
    """Such a network, in evaluation, for a walk over its tokens.

    Attributes:
        backbone: gives the last map.
        norm: of its tokens, behind the backbone's own.
        head: tokens (…, c) to logits (…, classes).
        multiple: images are filled up with zeros to sides that are multiples of it.
    """

    backbone: nn.Module
    norm: nn.Module
    head: nn.Linear
    multiple: int = 1


class FilledRows:
    """An image with zeros below and to the right of it, up to multiples of a number of pixels."""

    def __init__(self, image: ImageRows, multiple: int) -> None:
        self.image = image
        height, width = (up_to_multiple(side, multiple) for side in image.shape)
        self.shape = height, width

    def rows(self, first: int, behind: int) -> Tensor:
        """Its rows from `first` to before `behind`, (1, channels, y, x)."""
        height, width = self.image.shape
        there = self.image.rows(min(first, height - 1), min(behind, height))
        if first >= height:
            there = there[:, :, :0]
        return F.pad(there, [0, self.shape[1] - width, 0, behind - first - there.shape[2]])


class PlacesHost:
    """What a walk asks of one: its backbone's blocks, and of each place the head's answer. It has none of the image."""

    def __init__(self, parts: PlaceByPlace, backbone: Any) -> None:
        self.backbone, self.norm = backbone, parts.norm
        self.model, self.in_chans = backbone.model, backbone.in_chans
        self.num_features, self.num_classes = backbone.num_features, parts.head.out_features
        self.multiple = parts.multiple
        self.heads: Sequence[Any] = [parts.head]
        self.fc_norm: Any = nn.Identity()
        self.global_pool: str | None = None

    def image(self, image: ImageRows) -> ImageRows:
        return FilledRows(image, self.multiple)

    def stages(self, size: tuple[int, int]) -> list[StreamedBlocks]:
        stages: list[StreamedBlocks] = self.backbone.stages(size)
        return stages

    def normed(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.norm(self.backbone.normed(tokens))
        return y

    def logits(self, tokens: Tensor) -> Tensor:
        raise AssertionError("places alone are told")


@torch.no_grad()
def linear_of(decoder: nn.Module, head: nn.Module, channels: int) -> nn.Linear:
    """The linear layer that a decoder of one map and its head are together, by what they say of zeros and of ones."""
    like = next(head.parameters())
    asked = torch.cat([like.new_zeros(1, channels), torch.eye(channels, dtype=like.dtype, device=like.device)])
    said = head(decoder([asked[..., None, None]])).flatten(1)
    layer = nn.Linear(channels, said.shape[1], device=like.device, dtype=like.dtype)
    layer.bias.copy_(said[0])
    layer.weight.copy_((said[1:] - said[0]).mT)
    return layer
