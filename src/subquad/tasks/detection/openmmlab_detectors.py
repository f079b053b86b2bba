"""Detectors as mmdetection has them, for what the authors of the papers released: torchvision's frame, other parts.

Where they differ from those of `detectors.py` is said in docs/dense.md.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import clip_boxes_to_image
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from subquad.models.pyramid import STRIDES, Pyramid
from subquad.tasks.detection.cascade import MATCHED, CascadeHeads
from subquad.tasks.detection.feature_levels import FeatureLevels
from subquad.tasks.detection.openmmlab_parts import (
    RATIOS,
    AlignedPooler,
    ByteTransform,
    ClampedCoder,
    CoarserLevels,
    StridedAnchors,
    chosen,
)

RPN_SCALE = 8.0
"""Sides of square anchors over the stride of their level."""

RETINANET_SCALES = (4.0, 4 * 2 ** (1 / 3), 4 * 2 ** (2 / 3))

DEVIATIONS = ((0.1, 0.1, 0.2, 0.2), (0.05, 0.05, 0.1, 0.1), (0.033, 0.033, 0.067, 0.067))
"""Of the differences of boxes, by stage of a cascade; those of other box heads first."""

EMPTY = torch.finfo(torch.float32).tiny
"""What sides of proposals are at least: more than nothing."""


class AlignedHeads(RoIHeads):
    """Heads on features of boxes that are aligned to half pixels; small boxes count as well."""

    def __init__(self, box_head: nn.Module, width: int, num_classes: int, *, stage: int = 0, masks: bool) -> None:
        super().__init__(
            AlignedPooler(7),
            box_head,
            FastRCNNPredictor(1024, num_classes),
            fg_iou_thresh=MATCHED[stage],
            bg_iou_thresh=MATCHED[stage],
            batch_size_per_image=512,
            positive_fraction=0.25,
            bbox_reg_weights=None,
            score_thresh=0.05,
            nms_thresh=0.5,
            detections_per_img=100,
            mask_roi_pool=AlignedPooler(14) if masks else None,
            mask_head=MaskRCNNHeads(width, (width,) * 4, 1) if masks else None,
            mask_predictor=MaskRCNNPredictor(width, width, num_classes) if masks else None,
        )
        self.box_coder = ClampedCoder(DEVIATIONS[stage])

    def postprocess_detections(
        self, class_logits: Tensor, box_regression: Tensor, proposals: list[Tensor], image_shapes: Any
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Boxes, scores and labels of each image, of logits (n, classes) and differences (n, 4·classes)."""
        counts = [len(boxes) for boxes in proposals]
        boxes = self.box_coder.decode(box_regression, proposals).split(counts)
        scores = class_logits.softmax(-1).split(counts)
        settings = {"threshold": self.score_thresh, "overlap": self.nms_thresh, "most": self.detections_per_img}
        found = [chosen(*one, **settings) for one in zip(boxes, scores, image_shapes, strict=True)]
        kept_boxes, kept_scores, labels = zip(*found, strict=True)
        return list(kept_boxes), list(kept_scores), list(labels)


class CascadeByClass(CascadeHeads):
    """A cascade whose differences of boxes are those of a class each, and whose scores are of the mean logits."""

    def refined(
        self, heads: Any, logits: Tensor, differences: Tensor, proposals: list[Tensor], shapes: Any
    ) -> list[Tensor]:
        """The boxes of a stage, moved as its likeliest kind of object asks for."""
        by_class = differences.detach().unflatten(1, (-1, 4))
        likeliest = logits.detach()[:, 1:].argmax(1) + 1
        rows = torch.arange(len(by_class), device=by_class.device)
        decoded = heads.box_coder.decode(by_class[rows, likeliest], proposals).flatten(1)
        parts = decoded.split([len(boxes) for boxes in proposals])
        return [clip_boxes_to_image(part, shape) for part, shape in zip(parts, shapes, strict=True)]

    def averaged(self, logits: list[Tensor]) -> Tensor:
        """The mean of the stages' logits."""
        return torch.stack(logits).mean(0)


def _rpn(width: int) -> RegionProposalNetwork:
    anchors = StridedAnchors((*STRIDES, 2 * STRIDES[-1]), (RPN_SCALE,))
    most = {"training": 2000, "testing": 1000}, {"training": 1000, "testing": 1000}
    made = RegionProposalNetwork(anchors, RPNHead(width, len(RATIOS)), 0.7, 0.3, 256, 0.5, *most, nms_thresh=0.7)
    made.box_coder, made.min_size = ClampedCoder(), EMPTY
    return made


def _transform(settings: dict[str, Any]) -> ByteTransform:
    sides, statistics = ("min_size", "max_size"), ("image_mean", "image_std")
    return ByteTransform(*(settings[key] for key in (*sides, *statistics)))


def _two_stages(pyramid: Pyramid, width: int, heads: nn.Module, settings: dict[str, Any]) -> nn.Module:
    levels = FeatureLevels(pyramid, width, LastLevelMaxPool())
    return GeneralizedRCNN(levels, _rpn(width), heads, _transform(settings))


def _rcnn(pyramid: Pyramid, width: int, settings: dict[str, Any], *, masks: bool) -> nn.Module:
    box_head = TwoMLPHead(width * 7**2, 1024)
    return _two_stages(pyramid, width, AlignedHeads(box_head, width, settings["num_classes"], masks=masks), settings)


def faster_rcnn(pyramid: Pyramid, width: int, settings: dict[str, Any]) -> nn.Module:
    """Faster R-CNN."""
    return _rcnn(pyramid, width, settings, masks=False)


def mask_rcnn(pyramid: Pyramid, width: int, settings: dict[str, Any]) -> nn.Module:
    """Mask R-CNN."""
    return _rcnn(pyramid, width, settings, masks=True)


def cascade_mask_rcnn(pyramid: Pyramid, width: int, settings: dict[str, Any]) -> nn.Module:
    """Cascade Mask R-CNN."""
    stages: list[RoIHeads] = []
    for stage in range(len(MATCHED)):
        box_head = FastRCNNConvFCHead((width, 7, 7), [width] * 4, [1024], norm_layer=nn.BatchNorm2d)
        stages.append(AlignedHeads(box_head, width, settings["num_classes"], stage=stage, masks=True))
    return _two_stages(pyramid, width, CascadeByClass(stages), settings)


def retinanet(pyramid: Pyramid, width: int, settings: dict[str, Any]) -> nn.Module:
    """RetinaNet."""
    levels = FeatureLevels(pyramid, width, CoarserLevels(pyramid.channels[-1], width))
    coarsest = STRIDES[-1]
    anchors = StridedAnchors((*pyramid.strides, 2 * coarsest, 4 * coarsest), RETINANET_SCALES)
    made = RetinaNet(levels, anchor_generator=anchors, detections_per_img=100, **settings)
    made.box_coder, made.transform = ClampedCoder(), _transform(settings)
    return made
