"""What the loop needs to know of what it trains: a network, data, a loss and a judgement."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from subquad.data.dataset import PictureDataset
from subquad.models import create_model
from subquad.tasks.common_recipe import CommonRecipe
from subquad.tasks.backbone_arguments import arguments_of

Row = dict[str, float]


class Task(ABC):
    """A recipe made into objects, checked before a run begins.

    Attributes:
        recipe: what was asked for.
        model: the network, with its initial weights and its `creation`.
        train_images, eval_images: data sets whose items are None where an image is broken.
        collate, eval_collate: make a batch of items, to train on and to judge by; pairs of images and labels are
            stacked where it is None.
    """

    collate: Callable[[list[Any]], Any] | None = None
    eval_collate: Callable[[list[Any]], Any] | None = None

    def __init__(self, recipe: Any, model: nn.Module, train_images: Any, eval_images: Any) -> None:
        self.recipe: Any = recipe
        self.model: Any = model
        self.train_images, self.eval_images = train_images, eval_images
        for images in (train_images, eval_images):
            if isinstance(images, PictureDataset):
                # before hours of training, and before anything is written
                images.check_any_whole()

    @classmethod
    def network(cls, recipe: Any) -> nn.Module:
        """A network of the recipe without its data and weights: a wrong name or setting raises here."""
        return create_model(**arguments_of(recipe), num_classes=recipe.num_classes or 10)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch; a batch without images still passes through the network, for the other processes."""

    def size(self, batch: Any) -> int:
        """How many images of a batch could be read."""
        return len(batch[0])

    @abstractmethod
    def judge(self, model: nn.Module, loader: Any, device: torch.device, amp_dtype: torch.dtype | None) -> Row:
        """What the loader's images say about a network, the recipe's metric among it; of all processes together."""

    @abstractmethod
    def macs(self) -> int:
        """Multiply-adds of one image."""

    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """What a weight file says beside the arguments of the model."""

    def describe(self) -> str:
        """What is trained on what, in a few words."""
        recipe: CommonRecipe = self.recipe
        return f"{recipe.data}, {len(self.train_images)}+{len(self.eval_images)} images"

    @abstractmethod
    def words(self, row: Row) -> str:
        """A judgement, the entries of a row that begin with eval_ and ema_, in a few words."""
