"""A feature pyramid network on the maps of a backbone, as torchvision's detectors take it.

Lin et al. 2017, arXiv 1612.03144.
"""

from collections import OrderedDict

from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, FeaturePyramidNetwork

from subquad.models.pyramid import Pyramid


class FeatureLevels(nn.Module):
    """Levels of one width, by name, finest first.

    Args:
        pyramid: the maps.
        width: of the levels.
        extra: further, coarser levels.
    """

    def __init__(self, pyramid: Pyramid, width: int, extra: ExtraFPNBlock) -> None:
        super().__init__()
        self.pyramid, self.out_channels = pyramid, width
        self.fpn = FeaturePyramidNetwork(pyramid.channels, width, extra)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = enumerate(self.pyramid(x))
        found: dict[str, Tensor] = self.fpn(OrderedDict((str(k), image) for k, image in maps))
        return found
