"""Classification: an image, a class."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from subquad.data import InputConfig, eval_transform, load_dataset, train_transform
from subquad.errors import SubquadError
from subquad.evaluation import evaluate
from subquad.models import classes_in, create_model, load_checkpoint, read_weights
from subquad.models.pretrained import source_of
from subquad.training.common import CommonRecipe
from subquad.training.cost import count_macs
from subquad.training.networks import arguments_of
from subquad.training.optim import Objective
from subquad.training.recipe import Recipe
from subquad.training.task import Row, Task


class Classification(Task):
    """Trained by cross-entropy, judged by accuracy."""

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
        if eval_images.classes != train_images.classes:
            differing = sorted(set(eval_images.classes) ^ set(train_images.classes))
            raise SubquadError(f"training and validation data differ in their classes: {', '.join(differing[:5])}")
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
        found = evaluate(model, loader, device=device, amp_dtype=amp_dtype, num_classes=self.num_classes)
        return {"loss": found.loss, "top1": found.top1, "top5": found.top5}

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

    def words(self, row: Row) -> str:
        average = f" (EMA {row['ema_top1']:.2f})" if "ema_top1" in row else ""
        return f"top-1 {row['eval_top1']:.2f}{average}"


def build_model(recipe: CommonRecipe, num_classes: int, **more: Any) -> Any:
    """The network of a recipe, with its initial weights; `more` are further arguments of it."""
    model: Any = create_model(**arguments_of(recipe, *more), num_classes=num_classes, **more)
    if recipe.initial_checkpoint:
        # weights of other classes start everything but the head
        source = source_of(recipe.initial_checkpoint)
        classes = classes_in(read_weights(source)[0])
        load_checkpoint(model, source, head=classes in (None, num_classes))
    if recipe.grad_checkpointing:
        model.set_grad_checkpointing()
    return model
