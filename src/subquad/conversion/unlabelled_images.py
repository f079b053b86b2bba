"""Images without labels, in batches that follow from a seed and the number of an update alone."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from subquad.conversion.drawn_images import DRAWN, Drawn, open_images, views
from subquad.conversion.processed_images import Processed, check_processor
from subquad.data import InputConfig
from subquad.data.dataset import PictureDataset
from subquad.errors import SubquadError

Batches = Callable[[int], Any]
"""What a network is called with in an update, by its number from 0, the same at each call: images (b, c, y, x), or
arguments by name, as networks of diffusers take them. Numbers behind those of all updates are held-out images."""

Taking = InputConfig | Callable[..., Any]
"""How a network takes pictures: sizes and colours, or a processor of transformers, which is called with them."""


class InMemory:
    """Batches of images that are there as one tensor (n, c, y, x), each once an epoch."""

    def __init__(self, images: Tensor, *, batch_size: int, seed: int = 0):
        if batch_size < 1:
            raise SubquadError(f"batches need at least one image each, got batch_size={batch_size}")
        if images.dim() != 4 or len(images) < 1:
            raise SubquadError(f"images are a tensor (n, c, y, x), got one of {tuple(images.shape)}")
        if not images.is_floating_point():
            raise SubquadError(
                f"images are as the network takes them, normalized numbers, got a tensor of {images.dtype}"
            )
        self.images, self.batch_size, self.seed = images, min(batch_size, len(images)), seed

    def __call__(self, update: int) -> Tensor:
        epoch, place = divmod(update, len(self.images) // self.batch_size)
        order = np.random.default_rng((self.seed, epoch, DRAWN)).permutation(len(self.images))
        chosen = order[place * self.batch_size : (place + 1) * self.batch_size]
        return self.images[torch.from_numpy(chosen)]


class _Asked:
    """Batches of a caller's function."""

    def __init__(self, function: Batches):
        self.function = function

    def __call__(self, update: int) -> Any:
        batch = self.function(update)
        if not isinstance(batch, Tensor | Mapping):
            raise SubquadError(
                f"`images` called for update {update} gives a {type(batch).__name__}: a tensor of images "
                "(b, c, y, x) is wanted, or a mapping of arguments by name; of a loader's batch its images alone"
            )
        return batch


def fed(model: Any, inputs: Any) -> Any:
    """What a network answers to a batch."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def num_images(inputs: Any) -> int:
    """Of a batch; of arguments by name those of the tensor with the most dimensions.

    Of several such it is the shortest: a pack of patches comes with a row for each of its images.
    """
    if not isinstance(inputs, Mapping):
        return len(inputs)
    tensors = [value for value in inputs.values() if isinstance(value, Tensor) and value.dim()]
    most = max(map(Tensor.dim, tensors), default=0)
    return min((len(value) for value in tensors if value.dim() == most), default=1)


def on_device(inputs: Any, device: torch.device) -> Any:
    """A batch on a device."""
    if isinstance(inputs, Mapping):
        return {name: on_device(value, device) for name, value in inputs.items()}
    if not isinstance(inputs, Tensor):
        return inputs
    # what was made in inference mode can't be kept for gradients
    return inputs.to(device, copy=inputs.is_inference())


def as_batches(
    images: Any, *, batch_size: int, seed: int = 0, config: Taking | None = None, network: nn.Module | None = None
) -> Batches:
    """Batches of what a caller calls images.

    Args:
        images: a tensor (n, c, y, x); a data set whose pictures are transformed by `views` of `config`; the path of a
            folder, or the name of a data set; or a function of an update's number, see `Batches`.
        batch_size: images of a batch.
        seed: of their order, and of the parts that are drawn of them.
        config: how the network takes pictures: an InputConfig, or, as towers of networks of language are handed
            patches, a processor of transformers.
        network: what is called with what such a processor gives.

    Raises:
        SubquadError: it is none of these.
    """
    if isinstance(images, Tensor):
        return InMemory(images, batch_size=batch_size, seed=seed)
    if isinstance(images, str | Path):
        images = open_images(images)
    if isinstance(images, PictureDataset):
        if config is None:
            raise SubquadError("pictures need an InputConfig that says how the network takes them: give `config`")
        if not isinstance(config, InputConfig):
            check_processor(config)
            assert network is not None
            return Processed(images, config, network, batch_size=batch_size, seed=seed)
        transform = getattr(images, "transform", None) or views(config)
        return Drawn(images, transform, batch_size=batch_size, seed=seed)
    if callable(images):
        return _Asked(images)
    raise SubquadError(
        f"images are a tensor, a data set, a folder or a function, got a {type(images).__name__}: of batches that are "
        "there already, as of a loader, lambda update: batches[update % len(batches)]"
    )
