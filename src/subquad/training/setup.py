"""What a recipe names, made and checked before a run begins: data, model, input."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from subquad.data import ImageDataset, InputConfig, eval_transform, load_dataset, train_transform
from subquad.errors import SubquadError
from subquad.models import create_model, load_checkpoint, read_weights
from subquad.training.recipe import Recipe


@dataclass(frozen=True)
class Setup:
    model: nn.Module
    train_images: ImageDataset
    eval_images: ImageDataset
    input: InputConfig
    num_classes: int

    def metadata(self) -> dict[str, Any]:
        """What a weight file says beside the arguments of the model."""
        settings = dataclasses.asdict(self.input)
        del settings["img_size"]
        return {
            "classes": list(self.train_images.classes),
            "input": {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items()},
            "data": self.train_images.name,
        }


def set_up(recipe: Recipe) -> Setup:
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
    num_classes = recipe.num_classes or len(train_images.classes)
    if num_classes < len(train_images.classes):
        raise SubquadError(
            f"num_classes {num_classes} is less than the {len(train_images.classes)} classes of the data"
        )
    model = build_model(recipe, num_classes)
    config = InputConfig(
        img_size=model.img_size,
        mean=recipe.mean,
        std=recipe.std,
        interpolation=recipe.interpolation,
        crop_pct=recipe.crop_pct,
        crop_mode=recipe.crop_mode,
    )
    train_images.transform = train_transform(config, recipe)
    eval_images.transform = eval_transform(config)
    return Setup(model, train_images, eval_images, config, num_classes)


def build_model(recipe: Recipe, num_classes: int) -> Any:
    """The model of a recipe, with its initial weights."""
    attention = recipe.attention
    given: dict[str, Any] = {
        "attention": attention.split("+") if attention and "+" in attention else attention,
        "img_size": recipe.img_size,
        "num_classes": num_classes,
        "patch_size": recipe.patch_size,
        "embed_dim": recipe.embed_dim,
        "depths": None if recipe.depth is None else (recipe.depth,),
        "num_heads": recipe.num_heads,
        "drop_rate": recipe.drop,
        "drop_path_rate": recipe.drop_path,
    }
    arguments = {key: value for key, value in given.items() if value is not None}
    # a pyramid has several numbers of these, which only settings can hold
    if twice := (given.keys() - {"depths", "num_heads"} | arguments.keys()) & recipe.settings.keys():
        raise SubquadError(f"settings are those of the mechanism, {', '.join(sorted(twice))} is a field of the recipe")
    model: Any = create_model(recipe.model, **arguments, **recipe.settings)
    if recipe.initial_checkpoint:
        # weights of other classes start everything but the head
        head = read_weights(recipe.initial_checkpoint)[0].get("head.weight")
        load_checkpoint(model, recipe.initial_checkpoint, head=head is None or len(head) == num_classes)
    if recipe.grad_checkpointing:
        model.set_grad_checkpointing()
    return model
