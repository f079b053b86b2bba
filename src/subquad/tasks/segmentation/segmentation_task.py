"""Semantic segmentation: a scene, a class at every pixel."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.dense import SEGMENTERS, SceneDataset, build_segmenter, load_scenes
from subquad.tasks.segmentation.segmenters import AUXILIARY_WEIGHT
from subquad.tasks.segmentation.scene_transforms import SceneInput, SceneTransform, TrainingTransform, leave_apart, stack
from subquad.tasks.segmentation.scene_data import VOID
from subquad.tasks.segmentation.intersection_over_union import evaluate_segmentation
from subquad.tasks.common_recipe import CommonRecipe
from subquad.training.cost import count_macs
from subquad.tasks.recipe_fields import option
from subquad.tasks.backbone_arguments import backbone_arguments
from subquad.tasks.task import Row, Task


@dataclass(frozen=True)
class SegmentRecipe(CommonRecipe):
    """How a segmenter is trained."""

    task: ClassVar[str] = "segment"
    command: ClassVar[str] = "segment train"
    metric: ClassVar[str] = "miou"
    metric_title: ClassVar[str] = "mIoU %"

    model: str = option("pvt_tiny", "backbone, see `subquad list`", free="`create_model` knows the networks")
    data: str = option("ade20k", "folder or archive in ADE20K's layout", free="a path")
    img_size: tuple[int, int] | None = option(
        (512, 512), "height,width of training crops, one number for a square", at_least=1, at_most=2**16
    )
    initial_checkpoint: str | None = option(
        None, "weights of a classifier that the backbone starts from: file or run", free="a path"
    )
    batch_size: int = option(16, "scenes a step and process", at_least=1)

    head: str = option("fpn", f"decoder: {', '.join(SEGMENTERS)}", choices=SEGMENTERS)
    head_channels: int | None = option(
        None, "width of the decoder; the published one if left out", at_least=1, at_most=2**16
    )
    frozen_stages: int = option(
        0, "stages of the backbone, from the first, that are not trained", at_least=0, at_most=4
    )
    dense_agents: bool = option(False, "as many agents in a stage as the paper's dense networks have")
    scale: tuple[float, float] = option(
        (0.5, 2.0), "factors between which training scenes are resized", above=0, rising=True
    )
    hflip: float = option(0.5, "probability of a horizontal flip", at_least=0, at_most=1)
    distort: bool = option(True, "change brightness, contrast, saturation and hue in training")
    short_side: int | None = option(
        None, "pixels that shorter sides are resized to, in training before the scale", at_least=1, at_most=2**16
    )
    slide: bool = option(False, "evaluate through windows of img_size that overlap by a third")


class Segmentation(Task):
    """Trained by cross-entropy at every pixel, judged by mean intersection over union."""

    def __init__(self, recipe: SegmentRecipe) -> None:
        data = recipe.data_dir or recipe.data
        common: dict[str, Any] = {"num_classes": recipe.num_classes, "strict": recipe.strict}
        train_images = load_scenes(data, split="train", max_images=recipe.max_train_images, **common)
        eval_images = load_scenes(data, split="validation", **common)
        crop = recipe.img_size or (512, 512)
        self.input = SceneInput(crop, recipe.short_side, recipe.mean, recipe.std)
        train_images.transform = TrainingTransform(
            self.input, scale=recipe.scale, hflip=recipe.hflip, distort=recipe.distort
        )
        eval_images.transform = SceneTransform(self.input)
        self.num_classes = len(train_images.classes)
        model = build_segmenter(
            backbone_arguments(recipe, recipe.dense_agents),
            head=recipe.head,
            num_classes=self.num_classes,
            head_channels=recipe.head_channels,
            frozen_stages=recipe.frozen_stages,
        )
        super().__init__(recipe, model, train_images, eval_images)

    collate = staticmethod(stack)
    eval_collate = staticmethod(leave_apart)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of the pixels that have a class, and that of the auxiliary head."""
        images, labels = batch
        if not len(images):
            return 0 * _sum(model(images.new_zeros(2, 3, *self.input.crop)))
        found = model(images)
        heads = found if isinstance(found, tuple) else (found,)
        # a crop of nothing but void would have a mean over no pixels
        known = (labels != VOID).sum().clamp(min=1)
        losses = [F.cross_entropy(head, labels, ignore_index=VOID, reduction="sum") / known for head in heads]
        own: Any = getattr(self.model.pyramid.backbone, "auxiliary_loss", None)
        return losses[0] + AUXILIARY_WEIGHT * sum(losses[1:]) + (0 if own is None else own())

    def judge(self, model: nn.Module, loader: Any, device: torch.device, amp_dtype: torch.dtype | None) -> Row:
        """Mean intersection over union, and the shares of pixels that are right, in percent."""
        window = self.input.crop if self.recipe.slide else None
        found = evaluate_segmentation(
            model, loader, device=device, num_classes=self.num_classes, window=window, amp_dtype=amp_dtype
        )
        return {"miou": found.miou, "accuracy": found.accuracy, "class_accuracy": found.class_accuracy}

    def macs(self) -> int:
        return count_macs(self.model, self.input.crop)

    def metadata(self) -> dict[str, Any]:
        images: SceneDataset = self.train_images
        return {
            "task": SegmentRecipe.task,
            "classes": list(images.classes),
            "input": asdict(self.input),
            "data": images.name,
            "slide": self.recipe.slide,
        }

    def describe(self) -> str:
        return f"{self.recipe.head}; {super().describe()}"

    def words(self, row: Row) -> str:
        average = f" (EMA {row['ema_miou']:.2f})" if "ema_miou" in row else ""
        return f"mIoU {row['eval_miou']:.2f}{average}"


def _sum(found: Any) -> Tensor:
    return sum(head.sum() for head in found) if isinstance(found, tuple) else found.sum()
