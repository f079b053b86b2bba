"""Decoders as mmsegmentation has them, for what the authors released.

Semantic FPN: Kirillov et al. 2019, arXiv 1901.02446, section 3, with BatchNorm and 3×3 convolutions behind the sums.
UPerNet is that of segmentation_models_pytorch without the norms that it has in front: Swin's maps are normed already.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork

from subquad.models.pyramid import STRIDES


class SemanticFPN(nn.Module):
    """Every level of a feature pyramid is brought to the finest one by convolutions and doublings, and all are added.

    Args:
        channels: of the four maps, finest first.
        width: of the pyramid; what is given has half of it.
    """

    def __init__(self, channels: Sequence[int], width: int) -> None:
        super().__init__()
        self.fpn = FeaturePyramidNetwork(list(channels), width)
        # as many as there are doublings, and one for the finest level
        counts = [max(1, level) for level in range(len(STRIDES))]
        self.scale_heads = nn.ModuleList(
            nn.ModuleList(Conv2dNormActivation(width if k == 0 else width // 2, width // 2, 3) for k in range(count))
            for count in counts
        )

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps (b, c, y, x), finest first, to (b, width / 2, y, x) of the finest; others in front are not looked at."""
        maps = maps[-len(STRIDES) :]
        levels = self.fpn(OrderedDict((str(k), image) for k, image in enumerate(maps))).values()
        total: Tensor | None = None
        for level, (image, units) in enumerate(zip(levels, self.scale_heads, strict=True)):
            for unit in units:  # type: ignore[attr-defined]
                image = unit(image)
                if level:
                    image = F.interpolate(image, scale_factor=2.0, mode="bilinear", align_corners=False)
            total = image if total is None else total + _resized(image, total.shape[-2:])
        assert total is not None
        return total


def _resized(image: Tensor, size: Sequence[int]) -> Tensor:
    if image.shape[-2:] == size:
        return image
    return F.interpolate(image, size=tuple(size), mode="bilinear", align_corners=False)


def semantic_fpn(channels: list[int], width: int = 256) -> tuple[nn.Module, int, int]:
    """Semantic FPN, its width, and that of an auxiliary head, which it has not."""
    return SemanticFPN(channels, width), width // 2, 0


def upernet(channels: list[int], width: int = 512) -> tuple[nn.Module, int, int]:
    """UPerNet on maps that are normed already, its width, and that of its auxiliary head."""
    from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder

    decoder = UPerNetDecoder(encoder_channels=[3, 0, *channels], encoder_depth=5, decoder_channels=width)
    decoder.feature_norms = nn.ModuleList(nn.Identity() for _ in channels)
    return decoder, width, width // 2
