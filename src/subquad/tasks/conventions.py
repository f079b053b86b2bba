"""Whose conventions a dense network follows where libraries differ: a setting of the network, kept in its file.

"own" are those that dense networks of this library have had from the start: heads of torchvision and of
segmentation_models_pytorch, every map of a backbone normed, images filled up to multiples of 32. "openmmlab" are those
of the networks that the authors released, which mmdetection and mmsegmentation trained.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from subquad.errors import unknown_name
from subquad.models.backbone import Backbone
from subquad.models.pyramid import STRIDES, Pyramid

OWN, OPENMMLAB = "own", "openmmlab"
CONVENTIONS = (OWN, OPENMMLAB)

IN_HOSTS: dict[str, dict[str, dict[str, Any]]] = {
    OWN: {},
    OPENMMLAB: {"pvt": {"drop_remainder": True}, "swin": {"fixed_windows": True}},
}
"""What hosts are set to under dense heads, by the host's name."""


def check_conventions(conventions: str) -> None:
    """Raise where there are none of this name."""
    if conventions not in CONVENTIONS:
        raise unknown_name("conventions", conventions, CONVENTIONS)


def pyramid_of(
    backbone: Backbone, conventions: str, *, frozen_stages: int = 0, strides: Sequence[int] = STRIDES
) -> Pyramid:
    """The maps of a backbone under dense heads, at these strides.

    In OpenMMLab a map is normed where the network norms its last one: Swin's are, PVT's are not.
    """
    if conventions == OWN:
        return Pyramid(backbone, frozen_stages=frozen_stages, strides=strides)
    normed = not isinstance(backbone.norm, nn.Identity)
    return Pyramid(backbone, frozen_stages=frozen_stages, strides=strides, normed=normed, filled=False)
