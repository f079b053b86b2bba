"""Detection and instance segmentation: an image, boxes of objects, and perhaps their masks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.data.opening import check_places
from subquad.errors import SubquadError
from subquad.flags import Flag, folder_to_write, share
from subquad.models import create_model
from subquad.ranges import Pixels
from subquad.tasks.backbone_arguments import arguments_of, backbone_arguments
from subquad.tasks.class_names import check_same_classes
from subquad.tasks.detection.average_precision import evaluate_detection
from subquad.tasks.detection.detection_recipe import DetectRecipe
from subquad.tasks.detection.detectors import DETECTORS, WITH_MASKS, Detector, build_detector
from subquad.tasks.detection.object_data import ObjectDataset, load_objects
from subquad.tasks.detection.object_transforms import ObjectTransform, as_lists, is_too_thin
from subquad.tasks.detection.query_detector import opened_query_detector
from subquad.tasks.detection.trained_detector import (
    FoundObjects,
    ObjectJudgement,
    TrainedDetector,
    detected_objects,
    judge_detector,
    object_gallery,
    opened_detector,
)
from subquad.tasks.detection.transformers_detectors import (
    AROUND_OBJECTS,
    DETECTOR,
    KNOWN,
    DetectorOfTransformers,
    sizes_of_detector,
)
from subquad.tasks.initial_heads import take_head
from subquad.tasks.network_costs import count_macs
from subquad.tasks.task import Column, Gallery, Row, Task


class Detection(Task):
    """Trained by the detector's own losses, judged by COCO's average precision."""

    name: ClassVar[str] = "detect"
    title: ClassVar[str] = "Detection and instance segmentation: train, compare, evaluate, predict."
    noun: ClassVar[str] = "detector"
    of_transformers: ClassVar[tuple[str, ...]] = (DETECTOR,)
    foreign_steps: ClassVar[frozenset[str]] = AROUND_OBJECTS
    recipe_class: ClassVar[type[DetectRecipe]] = DetectRecipe
    commands: ClassVar[Mapping[str, str]] = {
        "train": "detect train",
        "compare": "detect compare",
        "evaluate": "detect eval",
        "predict": "detect predict",
    }
    evaluation_flags: ClassVar[tuple[Flag, ...]] = (
        Flag("--data", help="folder or archive in COCO's layout; the one trained on if left out"),
        Flag("--split", choices=("validation", "test", "train"), default="validation", help="which part of it"),
        Flag("--strict", action="store_true", help="stop at a broken image or an empty box"),
    )
    prediction_flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "--threshold",
            type=share,
            default=0.5,
            help="show what has at least this score; of our own detectors below 0.05 there is nothing",
        ),
        Flag("--strict", action="store_true", help="stop at a broken image instead of skipping it"),
        Flag("--output", type=folder_to_write, default=Path("detected"), help="folder for the pictures"),
    )
    evaluation_help: ClassVar[str] = "Average precision of trained weights, as COCO has it."
    prediction_help: ClassVar[str] = "Objects of images, drawn with their boxes and masks."
    columns: ClassVar[tuple[Column, ...]] = (
        Column("box_ap", "box AP %"),
        Column("box_ap50", "box AP50 %"),
        Column("mask_ap", "mask AP %"),
    )
    counted: ClassVar[str] = "the average precision of boxes on the held-out images"
    has_gallery: ClassVar[bool] = True
    judged_alone: ClassVar[bool] = True
    has_released: ClassVar[bool] = True
    released_whole: ClassVar[bool] = True
    heads: ClassVar[tuple[str, ...]] = tuple(DETECTORS)

    def __init__(self, recipe: DetectRecipe) -> None:
        data, self.masks = recipe.data_dir or recipe.data, recipe.head in WITH_MASKS
        common: dict[str, Any] = {"masks": self.masks, "strict": recipe.strict}
        train_images = load_objects(data, split="train", max_images=recipe.max_train_images, **common)
        # what is judged is compared with the annotations themselves
        eval_images = load_objects(data, split="validation", masks=False, strict=recipe.strict)
        if self.masks:
            eval_images.check_masks(crowds=True)
        check_same_classes(train_images.classes, eval_images.classes)
        for images in (train_images, eval_images):
            _check_thinness(images, recipe.long_side)
        if recipe.num_classes not in (None, len(train_images.classes)):
            raise SubquadError(f"{data} has {len(train_images.classes)} classes, not {recipe.num_classes}")
        train_images.transform = ObjectTransform(hflip=recipe.hflip, crop=recipe.crop, long_side=recipe.long_side)
        eval_images.transform = ObjectTransform()
        model = build_detector(
            backbone_arguments(recipe, recipe.dense_agents, recipe.conventions),
            head=recipe.head,
            num_classes=len(train_images.classes),
            short_side=recipe.short_side,
            long_side=recipe.long_side,
            head_channels=recipe.head_channels,
            frozen_stages=recipe.frozen_stages,
            mean=recipe.mean,
            std=recipe.std,
            conventions=recipe.conventions,
        )
        if recipe.initial_head:
            take_head(model, recipe, train_images.classes)
        super().__init__(recipe, model, train_images, eval_images)

    def examine(self) -> list[str]:
        self.eval_images.check_sizes()
        return super().examine()

    collate = staticmethod(as_lists)
    eval_collate = staticmethod(as_lists)

    @classmethod
    def check_data(cls, data: str | None, data_dir: str | None) -> None:
        check_places(data, data_dir)

    @classmethod
    def build(cls, **creation: Any) -> nn.Module:
        return build_detector(**creation)

    @classmethod
    def check_network(cls, recipe: DetectRecipe) -> None:
        create_model(**arguments_of(recipe), num_classes=recipe.num_classes or 10)

    @classmethod
    def bench_network(cls, head: str, backbone: dict[str, Any], px: int) -> nn.Module:
        """A detector of as many classes as COCO has."""
        return build_detector(backbone, head=head, num_classes=80, short_side=[px], long_side=2 * px)

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
        """Count those of an image with sides of 5 to 8, as papers do; proposals are an untrained network's."""
        side = self.recipe.short_side[-1]
        return count_macs(self.model, (side, min(round(side * 1.6), self.recipe.long_side)))

    def metadata(self) -> dict[str, Any]:
        images: ObjectDataset = self.train_images
        return {"task": self.name, "classes": list(images.classes), "data": images.name}

    def describe(self) -> str:
        images = self.train_images
        counts = (images.num_empty, "empty boxes"), (images.num_undrawn, "objects without a pixel of their mask")
        left_out = "".join(f", {count} {what} left out" for count, what in counts if count)
        return f"{self.recipe.head}; {super().describe()}{left_out}"

    def words(self, row: Row) -> str:
        masks = f", mask {row['eval_mask_ap']:.1f}" if "eval_mask_ap" in row else ""
        average = f" (EMA {row['ema_box_ap']:.1f})" if "ema_box_ap" in row else ""
        return f"AP {row['eval_box_ap']:.1f}, AP50 {row['eval_box_ap50']:.1f}{masks}{average}"

    @classmethod
    def opened(cls, model: Detector, note: Mapping[str, Any], recipe: Mapping[str, Any]) -> TrainedDetector:  # type: ignore[override]
        # our own detectors bring images to their size themselves
        return opened_query_detector(model, note) if "input" in note else opened_detector(model, note)

    @classmethod
    def called_with_images(cls, network: Any) -> nn.Module:
        return DetectorOfTransformers(network)

    @classmethod
    def unlike_foreign(cls, name: str) -> str:
        known = name.removesuffix(DETECTOR) in KNOWN
        return "" if known else f"detectors whose queries are objects ({', '.join(sorted(KNOWN))})"

    @classmethod
    def foreign_sizes(cls, said: Mapping[str, Any], img_size: Pixels | None) -> dict[str, Any] | None:
        return sizes_of_detector(said, img_size)

    @classmethod
    def foreign_note(cls, classes: Sequence[str], pictures: Mapping[str, Any]) -> dict[str, Any]:
        """Give sizes as a fixed one or by both sides of the image, all of which is shown."""
        names = ("mean", "std", "interpolation", "short_side", "long_side", "multiple_of", "antialias")
        seen = {name: pictures[name] for name in names if name in pictures}
        fixed = {} if "short_side" in pictures else {"size": list(pictures["img_size"])}
        return {"classes": list(classes), "input": seen | fixed}

    @classmethod
    def evaluate(cls, trained: TrainedDetector, **settings: Any) -> ObjectJudgement:
        """Average precision as COCO has it."""
        return judge_detector(trained, **settings)

    @classmethod
    def predict(
        cls, trained: TrainedDetector, files: Sequence[Path], log: Callable[[str], None], **settings: Any
    ) -> Iterator[FoundObjects]:
        """Pictures with objects in a folder."""
        return detected_objects(trained, files, log, **settings)

    @classmethod
    def gallery(cls, networks: Sequence[tuple[str, TrainedDetector]], count: int) -> Gallery:
        """Boxes and masks that are found with some certainty."""
        return object_gallery(networks, count)


def _check_thinness(images: ObjectDataset, long_side: int) -> None:
    """Raise where nothing is left of images at the longer side there may be, before training meets one of them."""
    sizes = [(image.get("height", 1), image.get("width", 1)) for image in images.images]
    thin = [place for place, size in enumerate(sizes) if is_too_thin(size, long_side)]
    if thin:
        height, width = sizes[thin[0]]
        raise SubquadError(
            f"{len(thin)} of {len(sizes)} images of {images.file} are less than a pixel thin at a long_side of "
            f"{long_side}, the first is {images.paths[thin[0]]} of {width}×{height} px: leave them out"
        )
