"""Networks of dense prediction: a pyramid of any backbone, and a decoder on it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.errors import SubquadError, unknown_name
from subquad.large.place_by_place import PlaceByPlace, linear_of
from subquad.models.assembling import as_json
from subquad.models.pyramid import STRIDES, OnBackbone, Pyramid, cropped
from subquad.models.stages import fill_up
from subquad.ranges import Positive, checks_arguments
from subquad.tasks.accuracy import evaluating
from subquad.tasks.backbone_arguments import build_backbone
from subquad.tasks.conventions import OPENMMLAB, OWN, check_conventions, pyramid_of
from subquad.tasks.segmentation import openmmlab_decoders

AUXILIARY_WEIGHT = 0.4
"""Of UPerNet's second head in the loss, as the papers have it."""


def _semantic_fpn(channels: list[int], width: int = 256) -> tuple[nn.Module, int, int]:
    from segmentation_models_pytorch.decoders.fpn.decoder import FPNDecoder

    if width % 64:
        raise SubquadError(f"the decoder fpn norms groups of channels: head_channels is a multiple of 64, got {width}")
    sizes = {"pyramid_channels": width, "segmentation_channels": width // 2, "dropout": 0.1}
    decoder = FPNDecoder(encoder_channels=_with_stem(channels), encoder_depth=5, merge_policy="add", **sizes)
    return decoder, width // 2, 0


def _upernet(channels: list[int], width: int = 512) -> tuple[nn.Module, int, int]:
    from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder

    decoder = UPerNetDecoder(encoder_channels=_with_stem(channels), encoder_depth=5, decoder_channels=width)
    return decoder, width, width // 2


def _linear(channels: list[int], width: int | None = None) -> tuple[nn.Module, int, int]:
    return LinearDecoder(channels[-1], width), width or channels[-1], 0


class LinearDecoder(nn.Module):
    """A batch norm of the last map, brought to fewer channels if that is asked for: no place looks at another."""

    def __init__(self, channels: int, width: int | None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.reduction = nn.Identity() if width is None else nn.Conv2d(channels, width, 1)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """The last of the maps (b, c, y, x), normed."""
        y: Tensor = self.reduction(self.norm(maps[-1]))
        return y


Decoder = Callable[..., tuple[nn.Module, int, int]]

SEGMENTERS: dict[str, Decoder] = {"fpn": _semantic_fpn, "upernet": _upernet, "linear": _linear}
"""Decoders by name, made for a pyramid's channels and of a width: the decoder, the channels that it gives, and those of
an auxiliary head, or 0.

fpn: Semantic FPN, Kirillov et al. 2019, arXiv 1901.02446, section 3; upernet: Xiao et al. 2018, arXiv 1807.10221;
linear: what DINOv2 is judged by, Oquab et al. 2023, arXiv 2304.07193, section 7.4: each place of the last map alone.
"""

PLACE_BY_PLACE = ("linear",)
"""Those that read the backbone's last map alone, no place beside another: an image can be streamed through them."""

BY_CONVENTIONS: dict[str, dict[str, Decoder]] = {
    OWN: SEGMENTERS,
    OPENMMLAB: {"fpn": openmmlab_decoders.semantic_fpn, "upernet": openmmlab_decoders.upernet, "linear": _linear},
}
"""Decoders by whose conventions they follow."""


class Segmenter(OnBackbone):
    """Logits of classes at every pixel.

    Args:
        pyramid: of a backbone.
        head: a name of `SEGMENTERS`.
        num_classes: classes that are told apart.
        head_channels: width of the decoder; the published one if left out.
        conventions: whose decoder it is, one of `CONVENTIONS`, of which the pyramid is as well.
    """

    @checks_arguments
    def __init__(
        self,
        pyramid: Pyramid,
        *,
        head: str,
        num_classes: Positive,
        head_channels: Positive | None = None,
        conventions: str = OWN,
    ) -> None:
        super().__init__()
        check_conventions(conventions)
        decoders = BY_CONVENTIONS[conventions]
        if head not in decoders:
            raise unknown_name("head", head, decoders)
        try:
            own = {} if head_channels is None else {"width": head_channels}
            self.decoder, width, auxiliary = decoders[head](pyramid.channels, **own)
        except ImportError:
            raise SubquadError("segmentation needs its library: pip install 'subquad[dense]'") from None
        self.pyramid, self.num_classes, self.head_name = pyramid, num_classes, head
        self.head = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(width, num_classes, 1))
        self.auxiliary: nn.Module | None = None
        if auxiliary:
            self.auxiliary = nn.Sequential(
                nn.Conv2d(pyramid.channels[2], auxiliary, 3, padding=1, bias=False),
                nn.BatchNorm2d(auxiliary),
                nn.ReLU(),
                nn.Dropout2d(0.1),
                nn.Conv2d(auxiliary, num_classes, 1),
            )

    @property
    def least_size(self) -> int:
        """Pixels of the shortest side of a program for images of any size."""
        return self.pyramid.least_size

    @property
    def no_streaming(self) -> str:
        """Why an image can't go through it some rows at a time; empty where it can."""
        if self.head_name in PLACE_BY_PLACE:
            return ""
        return (
            f"norms and pools of its decoder ({self.head_name}) are of whole maps; the backbone can be, "
            f"model.pyramid.backbone, for its features, and segmenters with --head {PLACE_BY_PLACE[0]}"
        )

    def place_by_place(self) -> PlaceByPlace:
        """Its backbone, the norm of the last map's places, and the linear layer that is the rest, in evaluation."""
        norm = self.pyramid.norms[-1] if len(self.pyramid.norms) else nn.Identity()
        with evaluating(self):
            head = linear_of(self.decoder, self.head, self.pyramid.channels[-1])
        return PlaceByPlace(self.pyramid.backbone, norm, head, self.pyramid.strides[-1] if self.pyramid.filled else 1)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Images (b, 3, height, width) of any size to logits (b, num_classes, height, width).

        In training a network with an auxiliary head gives its logits, of the same size, as well.
        """
        size, padded = x.shape[-2:], fill_up(x, self.pyramid.strides[-1]) if self.pyramid.filled else x
        maps = self.pyramid(padded)
        # the decoders expect maps at strides 1 and 2 before the others, and do not look at them
        y = self._to_pixels(self.head(self._decoded([padded, padded, *maps])), padded, size)
        if self.auxiliary is None or not self.training:
            return y
        return y, self._to_pixels(self.auxiliary(maps[2]), padded, size)

    def _decoded(self, maps: list[Tensor]) -> Tensor:
        """What the decoder makes of maps; raises where a norm of groups has one number of an image each."""
        try:
            decoded: Tensor = self.decoder(maps)
        except ValueError as error:
            # PyTorch refuses them in evaluation as well; in training it is batch norms, and a matter of the batch
            if self.training or "more than 1 value per channel" not in str(error):
                raise
        else:
            return decoded
        size = "×".join(map(str, maps[0].shape[-2:]))
        raise SubquadError(
            f"images of {size} px leave the head {self.head_name} maps of one place, which its norms do not take: take "
            "larger ones, or train a head with more --head-channels"
        )

    @staticmethod
    def _to_pixels(logits: Tensor, padded: Tensor, size: Any) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        whole = F.interpolate(wide, size=padded.shape[-2:], mode="bilinear", align_corners=False)
        return cropped(whole, *size)


def build_segmenter(
    backbone: dict[str, Any],
    *,
    head: str,
    num_classes: int,
    head_channels: int | None = None,
    frozen_stages: int = 0,
    conventions: str = OWN,
) -> Segmenter:
    """A segmenter on `create_model(**backbone)`; its `creation` holds the arguments of this call.

    The backbone's own entries `checkpoint` (weights to start from, of a classifier), `grad_checkpointing` and
    `chunk_tokens` are not among those of `create_model`.
    """
    check_conventions(conventions)
    network = build_backbone(backbone)
    given: dict[str, Any] = {"head": head, "num_classes": num_classes, "head_channels": head_channels}
    given["conventions"] = conventions
    last = (network.feature_info[-1]["reduction"],)
    strides = last if head in PLACE_BY_PLACE else STRIDES
    made = Segmenter(pyramid_of(network, conventions, frozen_stages=frozen_stages, strides=strides), **given)
    made.creation = as_json({"task": "segment", **given, "frozen_stages": frozen_stages})
    return made


def _with_stem(channels: list[int]) -> list[int]:
    """Channels as the decoders count them: of maps at strides 1 and 2 first, which they do not use."""
    return [3, 0, *channels]
