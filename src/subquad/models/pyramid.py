"""The maps that dense heads stand on: four levels at strides 4, 8, 16 and 32 of any backbone, each normed if wanted."""

import re
from collections.abc import Sequence
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.models.backbone import Backbone
from subquad.models.stages import fill_up
from subquad.ranges import Count, Positive, checks_arguments
from subquad.tracing import first, surely, up_to_multiple

STRIDES = (4, 8, 16, 32)


class OnBackbone(nn.Module):
    """A network that stands on a backbone, which says what optimizers ask: what is not decayed, and what are layers."""

    _own_arguments: dict[str, Any] | None = None

    @property
    def creation(self) -> dict[str, Any]:
        """The arguments that make it, those of its backbone as they are by now; empty where none make one of both."""
        backbone = self._backbone()[1].creation
        return {**self._own_arguments, "backbone": backbone} if self._own_arguments and backbone else {}

    @creation.setter
    def creation(self, arguments: dict[str, Any] | None) -> None:
        self._own_arguments = arguments

    def no_weight_decay(self) -> set[str]:
        """Parameters that the papers' recipes do not decay."""
        prefix, backbone = self._backbone()
        return {f"{prefix}.{name}" for name in backbone.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups, for layer-wise learning rates: those of the backbone, and all that stands on it as the last."""
        prefix, backbone = self._backbone()

        def within(pattern: str) -> str:
            return pattern.replace("^", rf"^{re.escape(prefix)}\.", 1)

        return {
            name: within(found) if isinstance(found, str) else [(within(pattern), place) for pattern, place in found]
            for name, found in backbone.group_matcher(coarse).items()
        }

    def _backbone(self) -> tuple[str, Backbone]:
        """The backbone and its name."""
        return next((name, part) for name, part in self.named_modules() if isinstance(part, Backbone))


class Pyramid(OnBackbone):
    """Maps of a backbone, finest first.

    A network of stages gives one map each, with a LayerNorm of its own, as the papers' dense networks have. The last
    map of a plain ViT is brought to four sizes by (de)convolutions: Li et al. 2022, arXiv 2203.16527, section 3.

    Args:
        backbone: a network without a classifier, of four stages or of one; what its maps do not need is dropped.
        frozen_stages: how many stages, the patch embedding with the first of them, are not trained.
        strides: of the maps that are given, finest first; a plain network's may be its own alone, whatever it is.
        normed: whether maps of stages have a LayerNorm of their own.
        filled: whether images are filled up to multiples of 32 with zeros; those of a plain network always are.
    """

    @checks_arguments
    def __init__(
        self,
        backbone: Backbone,
        *,
        frozen_stages: Count = 0,
        strides: Sequence[Positive] = STRIDES,
        normed: bool = True,
        filled: bool = True,
    ) -> None:
        super().__init__()
        stages = len(backbone.stages)
        if stages not in (1, len(STRIDES)):
            raise SubquadError(f"a pyramid is made of four stages or of one, and this backbone has {stages}")
        if frozen_stages > stages:
            raise SubquadError(f"frozen_stages={frozen_stages}: the backbone has {stages}")
        self.is_plain = stages == 1
        made = backbone.creation
        self.indices = backbone.prune_intermediate_layers(1 if self.is_plain else stages, prune_norm=not self.is_plain)
        # whoever makes the pyramid again begins with the whole network
        backbone.creation = made
        infos = [backbone.feature_info[i] for i in self.indices]
        widths = [info["num_chs"] for info in infos]
        self.strides = tuple(strides)
        if not self.is_plain and not set(self.strides) <= set(STRIDES):
            raise SubquadError(f"a pyramid has maps at strides 4, 8, 16 and 32, not {list(self.strides)}")
        own = dict(zip(STRIDES, widths, strict=False))
        self.channels: list[int] = [widths[0] if self.is_plain else own[stride] for stride in self.strides]
        self.backbone, self.frozen_stages = backbone, frozen_stages
        self.filled = filled or self.is_plain
        has_norms = normed and not self.is_plain
        self.norms: nn.ModuleList = nn.ModuleList(map(nn.LayerNorm, self.channels) if has_norms else ())
        self.scales: nn.ModuleList = nn.ModuleList()
        if self.is_plain:
            self.scales.extend(_rescaled(widths[0], infos[0]["reduction"] / stride) for stride in self.strides)
        elif [info["reduction"] for info in infos] != list(STRIDES):
            raise SubquadError(f"a pyramid has strides 4, 8, 16 and 32, not {[info['reduction'] for info in infos]}")
        for stage in backbone.stages[:frozen_stages]:
            stage.requires_grad_(False)

    def train(self, mode: bool = True) -> "Pyramid":
        """Frozen stages stay as they are in evaluation."""
        super().train(mode)
        for stage in self.backbone.stages[: self.frozen_stages]:
            stage.eval()
        return self

    @property
    def least_size(self) -> int:
        """Pixels of the shortest side of a program for images of any size: the coarsest map has two places at least."""
        return max(self.backbone.least_size, self.strides[-1] + 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Images (b, 3, height, width) of any size to maps (b, c, ⌈height / stride⌉, ⌈width / stride⌉).

        Maps of images that are not filled up have the sizes that the backbone gives them.
        """
        size = x.shape[-2:]
        # maps of a plain network at four sizes fit each other where its own is even
        x = fill_up(x, self.strides[-1]) if self.filled else x
        settings: dict[str, Any] = {"indices": self.indices, "intermediates_only": True}
        if self.is_plain:
            (last,) = self.backbone.forward_intermediates(x, norm=True, **settings)
            maps = [scale(last) for scale in self.scales]
        else:
            maps = self.backbone.forward_intermediates(x, **settings)[-len(self.strides) :]
            if len(self.norms):
                maps = [_normed(norm, image) for norm, image in zip(self.norms, maps, strict=True)]
        if not self.filled:
            return list(maps)
        return [
            cropped(image, *(up_to_multiple(side, stride) // stride for side in size))
            for image, stride in zip(maps, self.strides, strict=True)
        ]


def cropped(image: Tensor, height: int, width: int) -> Tensor:
    """The upper left part of a map (b, c, y, x)."""
    for dim, count in ((-2, height), (-1, width)):
        image = image if surely(image.shape[dim] == count) else first(image, count, dim)
    return image


def _normed(norm: nn.Module, image: Tensor) -> Tensor:
    y = norm(rearrange(image, "b c y x -> b y x c"))
    return rearrange(y, "b y x c -> b c y x").contiguous()


def _rescaled(width: int, factor: float) -> nn.Module:
    """(De)convolutions that make a map `factor` times finer; it is a power of two."""
    layers: list[nn.Module] = []
    while factor > 1:
        if layers:
            layers += [nn.GroupNorm(1, width), nn.GELU()]
        layers.append(nn.ConvTranspose2d(width, width, 2, stride=2))
        factor /= 2
    while factor < 1:
        layers.append(nn.MaxPool2d(2))
        factor *= 2
    if factor != 1:
        raise SubquadError("the patches of a plain backbone under dense heads have 4, 8, 16, 32 or 64 px")
    return nn.Sequential(*layers)
