"""Semantic segmentation: a scene, a class at every pixel."""

from argparse import BooleanOptionalAction
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.data.opening import check_places
from subquad.errors import SubquadError
from subquad.flags import Flag, file_to_write, folder_to_write
from subquad.models import create_model
from subquad.tasks.backbone_arguments import arguments_of, backbone_arguments
from subquad.tasks.conventions import OPENMMLAB
from subquad.tasks.initial_heads import take_head
from subquad.tasks.network_costs import count_macs
from subquad.tasks.segmentation.intersection_over_union import evaluate_segmentation
from subquad.tasks.segmentation.scene_data import VOID, SceneDataset, load_scenes
from subquad.tasks.segmentation.scene_transforms import (
    SceneInput,
    SceneTransform,
    TrainingTransform,
    leave_apart,
    stack,
)
from subquad.tasks.segmentation.segmentation_recipe import SegmentRecipe
from subquad.tasks.segmentation.segmenters import AUXILIARY_WEIGHT, SEGMENTERS, build_segmenter
from subquad.tasks.segmentation.smp_segmenter import SegmenterOfSmp, is_of_smp
from subquad.tasks.segmentation.trained_segmenter import (
    SceneJudgement,
    SegmentedScene,
    TrainedSegmenter,
    judge_segmenter,
    opened_segmenter,
    scene_gallery,
    segmented_scenes,
)
from subquad.tasks.segmentation.transformers_segmenter import SegmenterOfTransformers
from subquad.tasks.task import Column, Gallery, Row, Task

_VIEW = (
    Flag(
        "--slide",
        action=BooleanOptionalAction,
        help="through windows that overlap by a third; as in training if left out",
    ),
    Flag("--strict", action="store_true", help="stop at a broken image instead of skipping it"),
)
"""How images are looked at, and what happens to broken ones."""


class Segmentation(Task):
    """Trained by cross-entropy at every pixel, judged by mean intersection over union."""

    name: ClassVar[str] = "segment"
    title: ClassVar[str] = "Semantic segmentation: train, compare, evaluate, predict."
    noun: ClassVar[str] = "segmenter"
    of_transformers: ClassVar[tuple[str, ...]] = ("ForSemanticSegmentation",)
    of_smp: ClassVar[bool] = True
    recipe_class: ClassVar[type[SegmentRecipe]] = SegmentRecipe
    commands: ClassVar[Mapping[str, str]] = {
        "train": "segment train",
        "compare": "segment compare",
        "evaluate": "segment eval",
        "predict": "segment predict",
    }
    evaluation_flags: ClassVar[tuple[Flag, ...]] = (
        Flag("--data", help="folder or archive in ADE20K's layout; the one trained on if left out"),
        Flag("--split", choices=("validation", "test", "train"), default="validation", help="which part of it"),
        *_VIEW,
        Flag("--output", type=file_to_write, help="write the confusion matrix here, as .csv and .png"),
    )
    prediction_flags: ClassVar[tuple[Flag, ...]] = (
        *_VIEW,
        Flag("--output", type=folder_to_write, default=Path("segmented"), help="folder for the pictures"),
    )
    evaluation_help: ClassVar[str] = "Mean and per-class IoU and pixel accuracy of trained weights."
    prediction_help: ClassVar[str] = "Label maps and colour overlays of images."
    columns: ClassVar[tuple[Column, ...]] = (
        Column("miou", "mIoU %"),
        Column("accuracy", "pixels %"),
        Column("class_accuracy", "classes %"),
    )
    counted: ClassVar[str] = "the mean intersection over union on the held-out images"
    has_gallery: ClassVar[bool] = True
    has_released: ClassVar[bool] = True
    released_whole: ClassVar[bool] = True
    heads: ClassVar[tuple[str, ...]] = tuple(SEGMENTERS)

    def __init__(self, recipe: SegmentRecipe) -> None:
        data = recipe.data_dir or recipe.data
        common: dict[str, Any] = {"num_classes": recipe.num_classes, "strict": recipe.strict}
        train_images = load_scenes(data, split="train", max_images=recipe.max_train_images, **common)
        eval_images = load_scenes(data, split="validation", **common)
        crop = recipe.img_size or (512, 512)
        in_bytes = recipe.conventions == OPENMMLAB
        self.input = SceneInput(crop, recipe.short_side, recipe.mean, recipe.std, in_bytes=in_bytes)
        train_images.transform = TrainingTransform(
            self.input, scale=recipe.scale, hflip=recipe.hflip, distort=recipe.distort
        )
        eval_images.transform = SceneTransform(self.input)
        self.num_classes = len(train_images.classes)
        if self.num_classes == 1:
            raise SubquadError(
                "one class alone can't be learnt, as every pixel that has one has it: let what is around it be "
                "another, with labels 1 and 2"
            )
        model = build_segmenter(
            backbone_arguments(recipe, recipe.dense_agents, recipe.conventions),
            head=recipe.head,
            num_classes=self.num_classes,
            head_channels=recipe.head_channels,
            frozen_stages=recipe.frozen_stages,
            conventions=recipe.conventions,
        )
        if recipe.initial_head:
            take_head(model, recipe, train_images.classes)
        super().__init__(recipe, model, train_images, eval_images)

    def examine(self) -> list[str]:
        self.eval_images.check_labels()
        # names of classes come with labels that count as they do
        doubt = None if self.recipe.num_classes is None else self.train_images.counted_from_zero()
        return [] if doubt is None else [doubt]

    collate = staticmethod(stack)
    eval_collate = staticmethod(leave_apart)

    @classmethod
    def check_data(cls, data: str | None, data_dir: str | None) -> None:
        check_places(data, data_dir)

    @classmethod
    def build(cls, **creation: Any) -> nn.Module:
        return build_segmenter(**creation)

    @classmethod
    def check_network(cls, recipe: SegmentRecipe) -> None:
        create_model(**arguments_of(recipe), num_classes=recipe.num_classes or 10)

    @classmethod
    def bench_network(cls, head: str, backbone: dict[str, Any], px: int) -> nn.Module:
        """A segmenter of as many classes as ADE20K has."""
        return build_segmenter(backbone, head=head, num_classes=150)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of the pixels that have a class, and that of the auxiliary head."""
        images, labels = batch
        if not len(images):
            return 0 * _sum(model(images.new_zeros(2, 3, *self.input.crop)))
        if len(images) == 1 and self.recipe.batch_size > 1:
            # what broken pictures have left of a batch: batch norms take no single image, and the loss is its own twice
            images, labels = images.repeat(2, 1, 1, 1), labels.repeat(2, 1, 1)
        found = _answer(model, images)
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
            "task": self.name,
            "classes": list(images.classes),
            "labels_from_zero": images.first_label == 0,
            "input": asdict(self.input),
            "data": images.name,
            "slide": self.recipe.slide,
        }

    def describe(self) -> str:
        return f"{self.recipe.head}; {super().describe()}"

    @classmethod
    def opened(cls, model: nn.Module, note: Mapping[str, Any], recipe: Mapping[str, Any]) -> TrainedSegmenter:
        return opened_segmenter(model, note)

    @classmethod
    def called_with_images(cls, network: Any) -> nn.Module:
        return SegmenterOfSmp(network) if is_of_smp(network) else SegmenterOfTransformers(network)

    @classmethod
    def foreign_note(cls, classes: Sequence[str], pictures: Mapping[str, Any]) -> dict[str, Any]:
        """Give scenes the whole of the image: a crop would leave pixels without a class, and is refused."""
        if pictures["crop_pct"] < 1:
            raise SubquadError("images are cropped for it, so that pixels outside would have no class")
        size, mode = list(pictures["img_size"]), pictures["crop_mode"]
        scenes = {
            "crop": size,
            "short_side": min(size) if mode == "center" else None,
            "size": size if mode == "squash" else None,
            **{name: pictures[name] for name in ("mean", "std", "interpolation")},
        }
        return {"classes": list(classes), "input": scenes, "slide": False}

    @classmethod
    def evaluate(cls, trained: TrainedSegmenter, **settings: Any) -> SceneJudgement:
        """Intersection over union and the shares of pixels that are right."""
        return judge_segmenter(trained, **settings)

    @classmethod
    def predict(
        cls, trained: TrainedSegmenter, files: Sequence[Path], log: Callable[[str], None], **settings: Any
    ) -> Iterator[SegmentedScene]:
        """Label maps and overlays in a folder."""
        return segmented_scenes(trained, files, log, **settings)

    @classmethod
    def gallery(cls, networks: Sequence[tuple[str, TrainedSegmenter]], count: int) -> Gallery:
        """Overlays, with the mean IoU of the classes that are in the image or found in it."""
        return scene_gallery(networks, count)


def _answer(model: nn.Module, images: Tensor) -> Any:
    """What a network says of scenes; raises where a batch norm has nothing to take a variance of."""
    try:
        return model(images)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
    raise SubquadError(
        f"a batch norm has one number a channel in a batch of {len(images)} scene of "
        f"{images.shape[-1]}×{images.shape[-2]} px: give --batch-size 2 or more"
    )


def _sum(found: Any) -> Tensor:
    return sum(head.sum() for head in found) if isinstance(found, tuple) else found.sum()
