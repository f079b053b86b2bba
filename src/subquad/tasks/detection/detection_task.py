"""Detection and instance segmentation: an image, boxes of objects, and perhaps their masks."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.tasks.detection.detectors import DETECTORS, WITH_MASKS, build_detector
from subquad.tasks.detection.object_transforms import ObjectTransform, as_lists
from subquad.tasks.detection.object_data import ObjectDataset, load_objects
from subquad.errors import SubquadError
from subquad.tasks.detection.average_precision import evaluate_detection
from subquad.tasks.common_recipe import CommonRecipe
from subquad.training.cost import count_macs
from subquad.tasks.recipe_fields import option
from subquad.tasks.backbone_arguments import backbone_arguments
from subquad.tasks.task import Row, Task


@dataclass(frozen=True)
class DetectRecipe(CommonRecipe):
    """How a detector is trained."""

    task: ClassVar[str] = "detect"
    command: ClassVar[str] = "detect train"
    metric: ClassVar[str] = "box_ap"
    metric_title: ClassVar[str] = "box AP %"

    model: str = option("pvt_tiny", "backbone, see `subquad list`", free="`create_model` knows the networks")
    data: str = option("coco", "folder or archive in COCO's layout", free="a path")
    img_size: tuple[int, int] | None = option(
        None, "height,width that the backbone's position tables are made for", at_least=1, at_most=2**16
    )
    initial_checkpoint: str | None = option(
        None, "weights of a classifier that the backbone starts from: file or run", free="a path"
    )
    batch_size: int = option(2, "images a step and process", at_least=1)

    head: str = option("mask_rcnn", f"detector: {', '.join(DETECTORS)}", choices=DETECTORS)
    head_channels: int = option(256, "width of the feature pyramid", at_least=1, at_most=2**16)
    frozen_stages: int = option(
        0, "stages of the backbone, from the first, that are not trained", at_least=0, at_most=4
    )
    dense_agents: bool = option(False, "as many agents in a stage as the paper's dense networks have")
    short_side: tuple[int, ...] = option(
        (800,), "pixels of shorter sides: one of these in training, the last one else", at_least=1, at_most=2**16
    )
    long_side: int = option(1333, "pixels that longer sides have at most", at_least=1, at_most=2**16)
    hflip: float = option(0.5, "probability of a horizontal flip", at_least=0, at_most=1)
    crop: float = option(0.0, "probability of a random crop of at least half of each side", at_least=0, at_most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.short_side) > self.long_side:
            sides = ", ".join(map(str, self.short_side))
            raise SubquadError(f"short_side goes from 1 to long_side {self.long_side}, got {sides}")


class Detection(Task):
    """Trained by the detector's own losses, judged by COCO's average precision."""

    def __init__(self, recipe: DetectRecipe) -> None:
        data, self.masks = recipe.data_dir or recipe.data, recipe.head in WITH_MASKS
        common: dict[str, Any] = {"masks": self.masks, "strict": recipe.strict}
        train_images = load_objects(data, split="train", max_images=recipe.max_train_images, **common)
        # what is judged is compared with the annotations themselves
        eval_images = load_objects(data, split="validation", masks=False, strict=recipe.strict)
        if eval_images.classes != train_images.classes:
            differing = sorted(set(eval_images.classes) ^ set(train_images.classes))
            raise SubquadError(f"training and validation data differ in their classes: {', '.join(differing[:5])}")
        if recipe.num_classes not in (None, len(train_images.classes)):
            raise SubquadError(f"{data} has {len(train_images.classes)} classes, not {recipe.num_classes}")
        train_images.transform = ObjectTransform(hflip=recipe.hflip, crop=recipe.crop)
        eval_images.transform = ObjectTransform()
        model = build_detector(
            backbone_arguments(recipe, recipe.dense_agents),
            head=recipe.head,
            num_classes=len(train_images.classes),
            short_side=recipe.short_side,
            long_side=recipe.long_side,
            head_channels=recipe.head_channels,
            frozen_stages=recipe.frozen_stages,
            mean=recipe.mean,
            std=recipe.std,
        )
        super().__init__(recipe, model, train_images, eval_images)

    collate = staticmethod(as_lists)
    eval_collate = staticmethod(as_lists)

    def loss(self, model: nn.Module, batch: tuple[list[Tensor], list[dict[str, Any]]]) -> Tensor:
        """The sum of the detector's losses."""
        images, targets = batch
        if not images:
            return 0 * sum(model(*self._nothing()).values(), start=torch.zeros(()))
        found = model(images, [{key: value for key, value in t.items() if key != "image_id"} for t in targets])
        own: Any = getattr(self.model.pyramid.backbone, "auxiliary_loss", None)
        total: Tensor = sum(found.values()) + (0 if own is None else own())
        return total

    def _nothing(self) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """An image without objects, for a process that has none but broken ones."""
        device = next(self.model.parameters()).device
        target = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
        target["masks"] = torch.zeros(0, 64, 64, dtype=torch.uint8)
        return [torch.zeros(3, 64, 64, device=device)], [{key: value.to(device) for key, value in target.items()}]

    def judge(self, model: nn.Module, loader: Any, device: torch.device, amp_dtype: torch.dtype | None) -> Row:
        """Average precision in percent, 0 where there are no objects of a size."""
        images: ObjectDataset = self.eval_images
        found = evaluate_detection(model, loader, images.truth, device=device, masks=self.masks, amp_dtype=amp_dtype)
        row = {f"box_{name}": value for name, value in found.box.items()}
        row |= {f"mask_{name}": value for name, value in found.mask.items()}
        return {name: 0.0 if math.isnan(value) else value for name, value in row.items()}

    def macs(self) -> int:
        """Of an image with sides of 5 to 8, as papers count; proposals are those of an untrained network."""
        side = self.recipe.short_side[-1]
        return count_macs(self.model, (side, min(round(side * 1.6), self.recipe.long_side)))

    def metadata(self) -> dict[str, Any]:
        images: ObjectDataset = self.train_images
        return {"task": DetectRecipe.task, "classes": list(images.classes), "data": images.name}

    def describe(self) -> str:
        empty = self.train_images.num_empty
        left_out = f", {empty} empty boxes left out" if empty else ""
        return f"{self.recipe.head}; {super().describe()}{left_out}"

    def words(self, row: Row) -> str:
        masks = f", mask {row['eval_mask_ap']:.1f}" if "eval_mask_ap" in row else ""
        average = f" (EMA {row['ema_box_ap']:.1f})" if "ema_box_ap" in row else ""
        return f"AP {row['eval_box_ap']:.1f}, AP50 {row['eval_box_ap50']:.1f}{masks}{average}"
