"""A trained network with what it was trained on, as `subquad.open_trained` gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from subquad.data import InputConfig
from subquad.data.dataset import PictureDataset
from subquad.errors import SubquadError
from subquad.ranges import Pixels, height_and_width
from subquad.tasks.held_out import HeldOut


@dataclass(frozen=True)
class Trained:
    """A network of any task; each task has a class of its own where it knows more.

    Attributes:
        task: the name of the task that it was trained for.
        model: in evaluation mode, on `device`.
        classes: their names, in the order of the answers; none where they are not known.
        data, data_dir: what it was trained on; None where the file does not say.
        device: where it is.
        made: how it is made again with weights that mean nothing, as JSON can hold it; see `subquad.runs.made_again`.
    """

    task: str
    model: Any
    classes: tuple[str, ...]
    data: str | None
    data_dir: str | None
    device: torch.device
    made: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def fingerprint(self) -> str:
        """A few digits that networks with other weights do not have."""
        total = torch.zeros((), dtype=torch.float64)
        for place, parameter in enumerate(self.model.parameters(), start=1):
            total += place * parameter.detach().double().cpu().abs().mean()
        return f"{float(total):.12g}"

    def data_to_judge(self, data: str | None = None) -> str:
        """`data`, or else what it was trained on.

        Raises:
            SubquadError: neither is known, or `data` is empty, as a variable may be that is not set.
        """
        if data is not None and not str(data).strip():
            raise SubquadError("data is empty: leave it out, or name them")
        name = self.data if data is None else data
        if name is None:
            raise SubquadError("the weight file does not say what it was trained on: name the data by --data")
        return name

    def image_network(self, img_size: Pixels | None = None) -> ImageNetwork:
        """What there is to look into: a network that takes images, and how they are brought to it.

        Args:
            img_size: pixels, one number or (height, width); as in training, or as is affordable, if left out.

        Raises:
            SubquadError: it takes no images.
        """
        raise SubquadError(f"there are no images to show to a network of `subquad {self.task}`")

    def held_out(self, *, data_dir: str | None = None, most: int | None = None) -> HeldOut | None:
        """Give the held-out data that it is judged on; None where it has no data of its own.

        Args:
            data_dir: where they are, if not where they were in training.
            most: images at most, evenly chosen.

        Raises:
            SubquadError: they can't be opened.
        """
        return None

    def knows_as_data(self, source: str) -> bool:
        """Whether this folder or archive can be its data, with labels and a held-out part, where its file says none."""
        return False

    def training_images(self, *, data_dir: str | None = None) -> PictureDataset | None:
        """Give the pictures that it was trained on; None where its data are opened by their name like any others.

        Args:
            data_dir: where they are, if not where they were in training.

        Raises:
            SubquadError: they can't be opened.
        """
        return None

    def beside(self, model: nn.Module, config: InputConfig) -> ImageNetwork:
        """A part of this network that takes images, with no classes and no data of its own."""
        return ImageNetwork(self.task, model.eval(), (), None, None, self.device, config)


@dataclass(frozen=True)
class ImageNetwork(Trained):
    """A network that takes one batch of images of a size.

    Attributes:
        input: how images are brought to it.
        released: what is known of the authors' file that its weights are from; empty for others.
    """

    input: InputConfig
    released: Mapping[str, Any] = field(default_factory=dict)

    def image_network(self, img_size: Pixels | None = None) -> ImageNetwork:
        """This network, at another size where one is asked for."""
        if img_size is None:
            return self
        return replace(self, input=replace(self.input, img_size=height_and_width(img_size)))
