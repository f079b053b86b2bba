"""Detectors on a pyramid of any backbone: of torchvision, or as the released ones are."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from subquad.errors import SubquadError, unknown_name
from subquad.models.assembling import as_json
from subquad.models.pyramid import STRIDES, OnBackbone, Pyramid
from subquad.ranges import AboveZero, Count, Positive, checks_arguments
from subquad.tasks.accuracy import check_finite
from subquad.tasks.backbone_arguments import build_backbone
from subquad.tasks.conventions import OPENMMLAB, OWN, check_conventions, pyramid_of
from subquad.tasks.detection import openmmlab_detectors
from subquad.tasks.detection.cascade import MATCHED, WEIGHTS, AgnosticPredictor, CascadeHeads
from subquad.tasks.detection.feature_levels import FeatureLevels
from subquad.tasks.detection.object_transforms import is_too_thin
from subquad.tracing import is_traced


def _retinanet(pyramid: Pyramid, width: int, settings: dict[str, Any]) -> nn.Module:
    levels = FeatureLevels(pyramid, width, LastLevelP6P7(width, width))
    sizes = tuple((side, int(side * 2 ** (1 / 3)), int(side * 2 ** (2 / 3))) for side in (32, 64, 128, 256, 512))
    anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
    return RetinaNet(levels, anchor_generator=anchors, **settings)


def _faster_rcnn(pyramid: Pyramid, width: int, settings: dict[str, Any]) -> nn.Module:
    return FasterRCNN(FeatureLevels(pyramid, width, LastLevelMaxPool()), **settings)


def _mask_rcnn(pyramid: Pyramid, width: int, settings: dict[str, Any]) -> nn.Module:
    return MaskRCNN(FeatureLevels(pyramid, width, LastLevelMaxPool()), **settings)


def _cascade_mask_rcnn(pyramid: Pyramid, width: int, settings: dict[str, Any]) -> nn.Module:
    made = _mask_rcnn(pyramid, width, settings)
    made.roi_heads = CascadeHeads([_stage(k, width, settings["num_classes"]) for k in range(len(MATCHED))])
    return made


def _stage(number: int, width: int, num_classes: int) -> RoIHeads:
    """Heads of one stage of a cascade: four convolutions and a linear layer for boxes, as the papers have them."""
    levels, matched = ["0", "1", "2", "3"], MATCHED[number]
    return RoIHeads(
        MultiScaleRoIAlign(levels, output_size=7, sampling_ratio=2),
        FastRCNNConvFCHead((width, 7, 7), [width] * 4, [1024], norm_layer=nn.BatchNorm2d),
        AgnosticPredictor(1024, num_classes),
        fg_iou_thresh=matched,
        bg_iou_thresh=matched,
        batch_size_per_image=512,
        positive_fraction=0.25,
        bbox_reg_weights=WEIGHTS[number],
        score_thresh=0.05,
        nms_thresh=0.5,
        detections_per_img=100,
        mask_roi_pool=MultiScaleRoIAlign(levels, output_size=14, sampling_ratio=2),
        mask_head=MaskRCNNHeads(width, (256, 256, 256, 256), 1),
        mask_predictor=MaskRCNNPredictor(256, 256, num_classes),
    )


Maker = Callable[[Pyramid, int, dict[str, Any]], nn.Module]

DETECTORS: dict[str, Maker] = {
    "retinanet": _retinanet,
    "faster_rcnn": _faster_rcnn,
    "mask_rcnn": _mask_rcnn,
    "cascade_mask_rcnn": _cascade_mask_rcnn,
}
"""Detectors by name, made for a pyramid, a width of the levels, and torchvision's settings.

RetinaNet: Lin et al. 2017, arXiv 1708.02002; Faster R-CNN: Ren et al. 2015, arXiv 1506.01497; Mask R-CNN: He et al.
2017, arXiv 1703.06870; Cascade R-CNN: cascade.py.
"""

BY_CONVENTIONS: dict[str, dict[str, Maker]] = {
    OWN: DETECTORS,
    OPENMMLAB: {
        "retinanet": openmmlab_detectors.retinanet,
        "faster_rcnn": openmmlab_detectors.faster_rcnn,
        "mask_rcnn": openmmlab_detectors.mask_rcnn,
        "cascade_mask_rcnn": openmmlab_detectors.cascade_mask_rcnn,
    },
}
"""Detectors by whose conventions they follow."""

FINEST = {"retinanet": 1}
"""The first of a pyramid's maps that a detector stands on, where it is not the finest."""

WITH_MASKS = frozenset({"mask_rcnn", "cascade_mask_rcnn"})


ANSWERING = (RPNHead, RetinaNetHead, FastRCNNPredictor, AgnosticPredictor, MaskRCNNPredictor)
"""Modules that give scores, differences of boxes, and masks."""


def _refuse_what_is_not_finite(module: nn.Module, args: Any, answer: Any) -> None:
    """Hook of a module that answers: NaN is above no threshold, and would be taken for an image without objects."""
    if module.training or is_traced():
        return
    if isinstance(answer, Tensor):
        check_finite(answer, "an image")
        return
    for part in answer.values() if isinstance(answer, dict) else answer:
        _refuse_what_is_not_finite(module, args, part)


class Detector(OnBackbone):
    """Boxes, and masks where the head has them, of objects in images of any size.

    Args:
        network: of `DETECTORS`.
        head: its name.
        num_classes: kinds of objects, whose labels go from 1 to it; labels are not checked if left out.
        one_by_one: whether images are looked at alone, so that what is found in one does not depend on how far others
            make it be filled up.
    """

    takes_lists = True
    """Of images of any sizes, and gives a dict for each."""

    no_streaming = (
        "boxes are chosen among those of the whole image; the backbone can be, model.pyramid.backbone, for its features"
    )
    """Why an image can't go through it some rows at a time."""

    def __init__(
        self, network: nn.Module, head: str, *, num_classes: int | None = None, one_by_one: bool = False
    ) -> None:
        super().__init__()
        self.network, self.has_masks = network, head in WITH_MASKS
        self.highest_label, self.one_by_one = num_classes, one_by_one
        for part in network.modules():
            if isinstance(part, ANSWERING):
                part.register_forward_hook(_refuse_what_is_not_finite)

    @property
    def pyramid(self) -> Pyramid:
        """The maps that it stands on."""
        levels: Any = self.network.backbone
        return levels.pyramid

    @property
    def mean(self) -> tuple[float, ...]:
        """What is subtracted from pixels, which are numbers from 0 to 1, by channel."""
        transform: Any = self.network.transform
        return tuple(transform.image_mean)

    @property
    def std(self) -> tuple[float, ...]:
        """What they are divided by then."""
        transform: Any = self.network.transform
        return tuple(transform.image_std)

    def forward(self, images: Any, targets: list[dict[str, Tensor]] | None = None) -> Any:
        """Give the losses by name in training; else for each image a dict of boxes, labels, scores, and perhaps masks.

        Images are a sequence of (3, height, width) of bytes as numbers from 0 to 1, of any sizes.

        Raises:
            SubquadError: there are no images, or one is none; one is so thin that nothing is left of it at the longer
                side there may be; training lacks targets, or labels are not those of its classes; or, in evaluation,
                scores or boxes are not finite.
        """
        if not len(images):
            raise SubquadError("a detector takes one image or more, got none")
        if self.training:
            self._check_labels(targets)
        resize: Any = self.network.transform
        for image in images:
            _check_image(image)
            if is_too_thin(image.shape[-2:], resize.max_size):
                raise SubquadError(
                    f"an image of {image.shape[-1]}×{image.shape[-2]} px is less than a pixel thin "
                    f"at a long_side of {resize.max_size}: leave it out"
                )
        if self.one_by_one and not self.training:
            return [self.network([image])[0] for image in images]
        return self.network(list(images), targets)

    def _check_labels(self, targets: list[dict[str, Tensor]] | None) -> None:
        """Raise where there is nothing to train on, or a label is no class: 0 would be trained as no object."""
        if targets is None:
            raise SubquadError("a detector in training takes targets, boxes and labels of each image: .eval() asks it")
        most = self.highest_label
        if most is None or is_traced():
            return
        for labels in (target["labels"] for target in targets):
            low, high = (int(end) for end in labels.aminmax()) if len(labels) else (1, 1)
            if not 1 <= low <= high <= most:
                raise SubquadError(f"labels of {most} classes go from 1 to {most}, got some from {low} to {high}")


def _check_image(image: Tensor) -> None:
    """Raise for what is no (3, height, width) of numbers with a point."""
    if image.dim() != 3 or image.shape[0] != 3:
        raise SubquadError(f"a detector takes a list of images (3, height, width), got one of {tuple(image.shape)}")
    if not image.is_floating_point():
        raise SubquadError(f"a detector takes images of numbers from 0 to 1, got {image.dtype}: divide bytes by 255")


@checks_arguments
def build_detector(
    backbone: dict[str, Any],
    *,
    head: str,
    num_classes: Positive,
    short_side: Sequence[Positive] = (800,),
    long_side: Positive = 1333,
    head_channels: Positive = 256,
    frozen_stages: Count = 0,
    mean: Sequence[float] = (0.485, 0.456, 0.406),
    std: Sequence[AboveZero] = (0.229, 0.224, 0.225),
    conventions: str = OWN,
) -> Detector:
    """A detector on `create_model(**backbone)`; its `creation` holds the arguments of this call.

    Args:
        backbone: as `build_backbone` takes it.
        head: a name of `DETECTORS`.
        num_classes: kinds of objects, nothing not counted.
        short_side: what shorter sides of images are resized to: one of these in training, the last one else.
        long_side: what longer sides may have at most.
        head_channels: width of the feature pyramid.
        frozen_stages: of the backbone, not trained.
        mean: of the channels.
        std: of the channels, their deviation.
        conventions: whose they are where libraries differ, one of `CONVENTIONS`.
    """
    check_conventions(conventions)
    makers = BY_CONVENTIONS[conventions]
    if head not in makers:
        raise unknown_name("head", head, makers)
    network = build_backbone(backbone)
    pyramid = pyramid_of(network, conventions, frozen_stages=frozen_stages, strides=STRIDES[FINEST.get(head, 0) :])
    given: dict[str, Any] = {"head": head, "num_classes": num_classes, "short_side": list(short_side)}
    given |= {"long_side": long_side, "head_channels": head_channels, "frozen_stages": frozen_stages}
    given |= {"mean": list(mean), "std": list(std), "conventions": conventions}
    settings = {"num_classes": num_classes + 1, "min_size": tuple(short_side), "max_size": long_side}
    settings |= {"image_mean": list(mean), "image_std": list(std)}
    detector = makers[head](pyramid, head_channels, settings)
    made = Detector(detector, head, num_classes=num_classes, one_by_one=conventions == OPENMMLAB)
    made.creation = as_json({"task": "detect", **given})
    return made
