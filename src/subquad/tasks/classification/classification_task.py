"""Classification: an image, a class."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.data import InputConfig, eval_transform, load_dataset, train_transform
from subquad.data.opening import check_words
from subquad.data.synthetic.long_distances import DRAWN
from subquad.errors import SubquadError
from subquad.flags import Flag, file_to_write, pixels, positive, whole
from subquad.large import chunk_blocks
from subquad.models import NETWORKS, VARIANTS, create_model, load_checkpoint
from subquad.models.pretrained import source_of
from subquad.ranges import Pixels
from subquad.tasks.accuracy import evaluate
from subquad.tasks.backbone_arguments import arguments_of
from subquad.tasks.class_names import check_same_classes, check_there_are_two
from subquad.tasks.classification.class_predictions import Prediction, predicted_classes
from subquad.tasks.classification.classification_recipe import Recipe
from subquad.tasks.classification.mixed_loss import Objective
from subquad.tasks.classification.trained_classifier import ClassJudgement, check_head, judge, opened_classifier
from subquad.tasks.image_recipe import ImageRecipe
from subquad.tasks.network_costs import count_macs
from subquad.tasks.task import Column, Row, Task
from subquad.tasks.trained import ImageNetwork

OWN_RECIPES = {"digits": "digits", "cifar10": "cifar10_small"} | dict.fromkeys(DRAWN, "reach")
"""Recipes that are for data, not for a model."""


class Classification(Task):
    """Trained by cross-entropy, judged by accuracy."""

    name: ClassVar[str] = "classify"
    title: ClassVar[str] = "Classification of images: train, compare, evaluate, predict."
    noun: ClassVar[str] = "model"
    of_transformers: ClassVar[tuple[str, ...]] = ("ForImageClassification", "ForDepthEstimation", "Model")
    recipe_class: ClassVar[type[Recipe]] = Recipe
    commands: ClassVar[Mapping[str, str]] = {
        "train": "train",
        "compare": "compare",
        "evaluate": "eval",
        "predict": "predict",
    }
    evaluation_flags: ClassVar[tuple[Flag, ...]] = (
        Flag("--data", help="data set; the one trained on if left out"),
        Flag("--data-dir", help="its folder"),
        Flag("--split", choices=("validation", "train"), default="validation", help="which part of it"),
        Flag("--img-size", type=pixels, metavar="PX", help="of other images than in training: 448 or 384,640"),
        Flag("--batch-size", type=positive, default=64, help="images at a time"),
        Flag("--workers", type=whole, default=0, help="processes that load images"),
        Flag("--strict", action="store_true", help="stop at a broken image instead of skipping it"),
        Flag("--output", type=file_to_write, help="write the confusion matrix here, as .csv and .png"),
    )
    prediction_flags: ClassVar[tuple[Flag, ...]] = (
        Flag("--top-k", type=positive, default=5, help="classes to name"),
        Flag("--strict", action="store_true", help="stop at a broken image instead of skipping it"),
        Flag("--grid", type=file_to_write, help="write the picture grid here; predictions.png for a folder"),
    )
    evaluation_help: ClassVar[str] = "Accuracy, confusion matrix and throughput of trained weights."
    prediction_help: ClassVar[str] = "Class names and probabilities for images; a picture grid for a folder."
    columns: ClassVar[tuple[Column, ...]] = (Column("top1", "top-1 %"), Column("top5", "top-5 %"))
    counted: ClassVar[str] = "top-1 on the held-out images"
    has_released: ClassVar[bool] = True

    def __init__(self, recipe: Recipe) -> None:
        """Load the data and build the model; a wrong name or number ends here."""
        train_images = load_dataset(
            recipe.data,
            split="train",
            data_dir=recipe.data_dir,
            strict=recipe.strict,
            max_images=recipe.max_train_images,
        )
        eval_images = load_dataset(recipe.data, split="validation", data_dir=recipe.data_dir, strict=recipe.strict)
        check_same_classes(train_images.classes, eval_images.classes)
        check_there_are_two(str(recipe.data_dir or recipe.data), train_images.classes)
        self.num_classes = recipe.num_classes or len(train_images.classes)
        if self.num_classes < len(train_images.classes):
            raise SubquadError(
                f"num_classes {self.num_classes} is less than the {len(train_images.classes)} classes of the data"
            )
        model = build_model(recipe, self.num_classes, drop_rate=recipe.drop)
        self.input = InputConfig(
            img_size=model.img_size,
            mean=recipe.mean,
            std=recipe.std,
            interpolation=recipe.interpolation,
            crop_pct=recipe.crop_pct,
            crop_mode=recipe.crop_mode,
        )
        train_images.transform = train_transform(self.input, recipe)
        eval_images.transform = eval_transform(self.input)
        self.objective = Objective(recipe, self.num_classes)
        super().__init__(recipe, model, train_images, eval_images)

    @classmethod
    def default_recipe(cls, given: Mapping[str, Any]) -> str | None:
        """Name the recipe of the data where they have one of their own, else that of the model."""
        data, model = given.get("data", "digits").partition(":")[0], given.get("model")
        if data in OWN_RECIPES:
            return OWN_RECIPES[data]
        size = NETWORKS[model].variant if model in NETWORKS else model
        return VARIANTS[size].recipe if size in VARIANTS else "deit"

    @classmethod
    def check_data(cls, data: str | None, data_dir: str | None) -> None:
        check_words(data, data_dir)

    @classmethod
    def build(cls, **creation: Any) -> nn.Module:
        return create_model(**creation)

    @classmethod
    def check_network(cls, recipe: Recipe) -> None:
        create_model(**arguments_of(recipe), num_classes=recipe.num_classes or 10)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of the mixed images, and what a model adds of its own accord, as LaViT does."""
        images, target = self.objective.mix(*batch)
        if not len(images):
            return 0 * model(images.new_zeros(1, *images.shape[1:])).sum()
        loss = self.objective.loss(model(images), target)
        own: Any = getattr(self.model, "auxiliary_loss", None)
        return loss if own is None else loss + own()

    def judge(self, model: nn.Module, loader: Any, device: torch.device, amp_dtype: torch.dtype | None) -> Row:
        """Mean cross-entropy, top-1 and top-5 accuracy in percent."""
        accuracy = evaluate(model, loader, device=device, amp_dtype=amp_dtype, num_classes=self.num_classes)
        return {"loss": accuracy.loss, "top1": accuracy.top1, "top5": accuracy.top5}

    def macs(self) -> int:
        return count_macs(self.model, self.input.img_size)

    def metadata(self) -> dict[str, Any]:
        settings = dataclasses.asdict(self.input)
        del settings["img_size"]
        return {
            "task": Recipe.task,
            "classes": list(self.train_images.classes),
            "input": {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items()},
            "data": self.train_images.name,
        }

    @classmethod
    def opened(cls, model: nn.Module, note: Mapping[str, Any], recipe: Mapping[str, Any]) -> ImageNetwork:
        return opened_classifier(model, note, recipe)

    @classmethod
    def evaluate(cls, trained: ImageNetwork, *, img_size: Pixels | None = None, **settings: Any) -> ClassJudgement:
        """Accuracy, confusion and speed."""
        check_head(trained)
        return judge(trained.image_network(img_size), **settings)

    @classmethod
    def predict(
        cls, trained: ImageNetwork, files: Sequence[Path], log: Callable[[str], None], **settings: Any
    ) -> Iterator[Prediction]:
        """Classes with their probabilities; a grid of pictures for a folder."""
        check_head(trained)
        return predicted_classes(trained, files, log, **settings)


def build_model(recipe: ImageRecipe, num_classes: int, **more: Any) -> Any:
    """The network of a recipe, with its initial weights; `more` are further arguments of it."""
    model: Any = create_model(**arguments_of(recipe, *more), num_classes=num_classes, **more)
    if recipe.initial_checkpoint:
        # weights of other classes start everything but the head
        load_checkpoint(model, source_of(recipe.initial_checkpoint), head=None)
    if recipe.grad_checkpointing:
        model.set_grad_checkpointing()
    if recipe.chunk_tokens is not None:
        chunk_blocks(model, recipe.chunk_tokens)
    return model
