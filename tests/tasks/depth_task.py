"""A task from outside the package: how far away each part of a made-up image is, which is how dark it is.

Nothing in the package knows it. It is what docs/adding-a-task.md describes: a recipe, a network, data, and `Task`.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import nn

from subquad.data import InputConfig, create_loader
from subquad.flags import Flag, positive
from subquad.models import create_model, load_checkpoint
from subquad.tasks import Column, Gallery, ImageRecipe, Task, Trained, option
from subquad.tasks.accuracy import evaluating
from subquad.tasks.backbone_arguments import arguments_of
from subquad.tasks.image_files import image_files
from subquad.tasks.network_costs import count_macs
from subquad.weights.notes import required


@dataclass(frozen=True)
class DepthRecipe(ImageRecipe):
    """How a network that sees depth is trained."""

    task: ClassVar[str] = "depth"

    model: str = option("deit_micro", "backbone", free="`create_model` knows the networks")
    data: str = option("shades", "made-up images", choices=("shades",))
    farthest: float = option(1.0, "depth of what is black", above=0)


class Shades(torch.utils.data.Dataset):
    """Grey images (3, 16, 16) of a brightness, and a depth for each of their 16 parts."""

    num_broken = 0

    def __init__(self, count, farthest):
        self.count, self.farthest = count, farthest

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        parts = torch.arange(16).add(index).remainder(16) / 16
        image = parts.reshape(4, 4).repeat_interleave(4, 0).repeat_interleave(4, 1)
        return image.expand(3, -1, -1).clone(), self.farthest * (1 - parts)

    def broken_paths(self):
        return []


class DepthNetwork(nn.Module):
    """A depth for each of 16 parts of an image."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.creation = {"task": "depth", "backbone": backbone.creation}

    def forward(self, x):
        return self.backbone(x)


@dataclass(frozen=True)
class TrainedDepth(Trained):
    farthest: float

    def image_network(self, img_size=None):
        size = self.model.backbone.img_size if img_size is None else (img_size, img_size)
        return self.beside(self.model.backbone, InputConfig(size))


@dataclass(frozen=True)
class DepthJudgement:
    closeness: float

    @property
    def text(self):
        return f"closeness {self.closeness:.2f} %"

    def save(self, path):
        path.write_text(self.text)
        return [path]


def closeness(model, loader, device, farthest):
    errors = []
    with evaluating(model):
        for images, depth in loader:
            errors.append((model(images.to(device)).cpu() - depth).abs().flatten() / farthest)
    return 100 * (1 - float(torch.cat(errors).mean().clamp(max=1)))


class Depth(Task):
    name: ClassVar[str] = "depth"
    title: ClassVar[str] = "Depth of images: train, compare, evaluate, predict."
    noun: ClassVar[str] = "network of depth"
    recipe_class: ClassVar[type[DepthRecipe]] = DepthRecipe
    commands: ClassVar[dict[str, str]] = {
        action: f"depth {word}"
        for action, word in (("train", "train"), ("compare", "compare"), ("evaluate", "eval"), ("predict", "predict"))
    }
    evaluation_flags: ClassVar[tuple[Flag, ...]] = (Flag("--count", type=positive, default=4, help="images"),)
    columns: ClassVar[tuple[Column, ...]] = (Column("closeness", "closeness %"),)
    counted: ClassVar[str] = "closeness to the depth of the held-out images"
    has_gallery: ClassVar[bool] = True
    heads: ClassVar[tuple[str, ...]] = ("depth_map",)

    def __init__(self, recipe):
        arguments = arguments_of(recipe)
        model = self.build(backbone={"img_size": 16, "patch_size": 4, **arguments})
        if recipe.initial_checkpoint:
            load_checkpoint(model, recipe.initial_checkpoint)
        super().__init__(
            recipe, model, Shades(recipe.max_train_images or 32, recipe.farthest), Shades(4, recipe.farthest)
        )

    @classmethod
    def build(cls, **creation: Any):
        return DepthNetwork(create_model(**{**creation["backbone"], "num_classes": 16}))

    @classmethod
    def check_network(cls, recipe):
        create_model(**arguments_of(recipe), num_classes=16)

    @classmethod
    def bench_network(cls, head, backbone, px):
        return cls.build(backbone=backbone)

    def loss(self, model, batch):
        images, depth = batch
        return (model(images) - depth).abs().mean()

    def judge(self, model, loader, device, amp_dtype):
        return {"closeness": closeness(model, loader, device, self.recipe.farthest)}

    def macs(self):
        return count_macs(self.model, self.model.backbone.img_size)

    def metadata(self):
        return {"task": self.name, "data": self.recipe.data, "farthest": self.recipe.farthest}

    @classmethod
    def opened(cls, model, note, recipe):
        data, farthest = required(note, "data", "farthest")
        return TrainedDepth("depth", model, (), data, None, next(model.parameters()).device, farthest)

    @classmethod
    def evaluate(cls, trained, *, count=4):
        loader = create_loader(Shades(count, trained.farthest), batch_size=2)
        return DepthJudgement(closeness(trained.model, loader, trained.device, trained.farthest))

    @classmethod
    def predict(cls, trained, files, log, **settings):
        for path in image_files(files):
            with Image.open(path) as picture:
                shade = torch.from_numpy(np.array(picture.convert("L").resize((16, 16)))) / 255
            with evaluating(trained.model):
                away = float(trained.model(shade.expand(1, 3, -1, -1)).mean())
            yield SimpleNamespace(text=f"{path}: {away:.2f} away")

    @classmethod
    def gallery(cls, networks, count):
        image = Image.new("RGB", (16, 16), (90, 90, 90))
        return Gallery(
            [[(image, "truth"), *((image, f"depth by {label}") for label, _ in networks)]], [("near", (1, 2, 3))]
        )
