"""Cascade R-CNN: three heads, each trained on the boxes of the one before, to be matched more closely.

Cai & Vasconcelos 2018, arXiv 1712.00726, section 4; its masks as in Mask R-CNN, one head a stage.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import clip_boxes_to_image

MATCHED = (0.5, 0.6, 0.7)
"""From which intersection over union on a box counts as its object's, by stage."""

WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
"""Of the differences of boxes, by stage."""

IN_LOSS = (1.0, 0.5, 0.25)


class AgnosticPredictor(nn.Module):
    """Logits of classes, and one difference of boxes for all of them, repeated as if each had its own."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.classes, self.box = nn.Linear(width, num_classes), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.classes(x)
        return logits, self.box(x).repeat(1, logits.shape[1])


class CascadeHeads(nn.Module):
    """In place of torchvision's RoIHeads: `stages` are RoIHeads with or without masks, each matched more closely."""

    def __init__(self, stages: list[RoIHeads]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Give what torchvision's heads give: detections in evaluation, losses by name in training."""
        if self.training:
            assert targets is not None
            return [], self._losses(features, proposals, image_shapes, targets)
        return self._detections(features, proposals, image_shapes), {}

    def _losses(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        for number, (stage, weight) in enumerate(zip(self.stages, IN_LOSS, strict=True)):
            heads: Any = stage
            proposals, matched, labels, wanted = heads.select_training_samples(proposals, targets)
            logits, boxes = _box(heads, features, proposals, shapes)
            classes, places = fastrcnn_loss(logits, boxes, labels, wanted)
            losses |= {f"classes_{number}": weight * classes, f"boxes_{number}": weight * places}
            if heads.has_mask():
                positive = [torch.where(label > 0)[0] for label in labels]
                chosen = [boxes_of[at] for boxes_of, at in zip(proposals, positive, strict=True)]
                truth = [index[at] for index, at in zip(matched, positive, strict=True)]
                masks, classes_of = [t["masks"] for t in targets], [t["labels"] for t in targets]
                found = _masks(heads, features, chosen, shapes)
                losses[f"masks_{number}"] = weight * maskrcnn_loss(found, chosen, masks, classes_of, truth)
            proposals = self.refined(heads, logits, boxes, proposals, shapes)
        return losses

    def _detections(
        self, features: dict[str, Tensor], proposals: list[Tensor], shapes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        """The last stage's boxes with the mean of all stages' scores and masks."""
        answers: list[Tensor] = []
        for number, stage in enumerate(self.stages):
            heads: Any = stage
            logits, boxes = _box(heads, features, proposals, shapes)
            answers.append(logits)
            if number < len(self.stages) - 1:
                proposals = self.refined(heads, logits, boxes, proposals, shapes)
        found = heads.postprocess_detections(self.averaged(answers), boxes, proposals, shapes)
        result = [{"boxes": b, "scores": s, "labels": k} for b, s, k in zip(*found, strict=True)]
        if heads.has_mask():
            places, labels = [r["boxes"] for r in result], [r["labels"] for r in result]
            several = [maskrcnn_inference(_masks(stage, features, places, shapes), labels) for stage in self.stages]
            for number, one in enumerate(result):
                one["masks"] = torch.stack([masks[number] for masks in several]).mean(0)
        return result

    def refined(
        self, heads: Any, logits: Tensor, differences: Tensor, proposals: list[Tensor], shapes: Any
    ) -> list[Tensor]:
        """The boxes of a stage, which the next one starts from, of differences that are the same for all classes."""
        decoded = heads.box_coder.decode(differences.detach(), proposals)[:, 0]
        parts = decoded.split([len(p) for p in proposals])
        return [clip_boxes_to_image(part, shape) for part, shape in zip(parts, shapes, strict=True)]

    def averaged(self, logits: list[Tensor]) -> Tensor:
        """Logits of the mean of the stages' scores."""
        return torch.stack([answer.softmax(-1) for answer in logits]).mean(0).clamp(min=1e-12).log()


def _box(heads: Any, features: Any, proposals: list[Tensor], shapes: Any) -> tuple[Tensor, Tensor]:
    logits, boxes = heads.box_predictor(heads.box_head(heads.box_roi_pool(features, proposals, shapes)))
    return logits, boxes


def _masks(heads: Any, features: Any, proposals: list[Tensor], shapes: Any) -> Tensor:
    return heads.mask_predictor(heads.mask_head(heads.mask_roi_pool(features, proposals, shapes)))
