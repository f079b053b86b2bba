"""Pictures as a processor of transformers hands them to a tower: patches and their numbers, arguments by name."""

import inspect
from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor, nn
from torchvision import transforms

from subquad.conversion.drawn_images import Drawn
from subquad.data.dataset import PictureDataset
from subquad.errors import SubquadError, shown

BEFORE_NAMES = ("image_", "pixel_")
"""What processors and towers put before one name, as in `image_grid_thw`, which towers take as `grid_thw`."""


class Processed(Drawn):
    """Batches of a data set's pictures through a processor, in what a network is called with.

    Args:
        images: broken ones are skipped, and counted in `images.num_broken`.
        processor: of transformers, of images alone or with one of them (`image_processor`).
        network: the tower; what its `forward` does not take of what the processor gives is left out.
        batch_size: pictures of a batch; fewer where some are broken.
        seed: of their order, and of the parts that are drawn of them.
    """

    def __init__(self, images: PictureDataset, processor: Any, network: nn.Module, *, batch_size: int, seed: int = 0):
        super().__init__(images, part_of, batch_size=batch_size, seed=seed)
        self.processor = getattr(processor, "image_processor", processor)
        self.taken = list(inspect.signature(network.forward).parameters)

    def together(self, items: Sequence[Any]) -> dict[str, Tensor]:
        given = self.processor(images=list(items), return_tensors="pt")
        tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        found = {name: value for key, value in tensors.items() if (name := self._name_of(key))}
        if not found:
            raise SubquadError(
                f"{type(self.processor).__name__} gives {', '.join(given)}, and the network takes "
                f"{', '.join(self.taken)}: hand over a function of an update that names what the network takes"
            )
        return found

    def _name_of(self, key: str) -> str:
        """What the network calls this; nothing where it does not take it."""
        bare = next((key.removeprefix(one) for one in BEFORE_NAMES if key.startswith(one)), key)
        names = [key, bare, *(f"{one}{bare}" for one in BEFORE_NAMES)]
        if key == "pixel_values":
            # some call it hidden_states
            names.append(self.taken[0])
        return next((name for name in names if name in self.taken), "")


def part_of(picture: Image.Image) -> Image.Image:
    """A random part of a picture, of half its area or more, of nearly its sides' ratio, as many pixels as it has."""
    ratio = picture.width / picture.height
    sides = transforms.RandomResizedCrop.get_params(picture, [0.5, 1.0], [0.75 * ratio, ratio / 0.75])
    top, left, height, width = sides
    return picture.crop((left, top, left + width, top + height))


def check_processor(config: Any) -> None:
    """Raise a SubquadError where something is no processor of images."""
    processor = getattr(config, "image_processor", config)
    if not callable(processor) or not hasattr(processor, "preprocess"):
        raise SubquadError(
            f"config says how the network takes pictures: an InputConfig, or a processor of transformers, got "
            f"{shown(config)}"
        )
