"""Images without labels, in batches that follow from a seed and the number of an update alone."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

from subquad.data import InputConfig, eval_transform, load_dataset, placing, read_image
from subquad.data.archives import is_archive, unpack
from subquad.data.dataset import PictureDataset
from subquad.data.walking import find_path, subfolders
from subquad.errors import SubquadError
from subquad.tasks.image_files import image_files
from subquad.training.order import seeded

Batches = Callable[[int], Any]
"""What a network is called with in an update, by its number from 0, the same at each call: images (b, c, y, x), or
arguments by name, as networks of diffusers take them. Numbers behind those of all updates are held-out images."""

Transform = Callable[[Image.Image], Tensor]

_DRAWN = 7
"""What the random numbers here are for: the last part of their key, beside those of `training.order`."""


class ImageFiles(PictureDataset):
    """Image files and those in folders, of which nothing but the picture is known."""

    def __init__(self, paths: Sequence[Path | str]):
        self.files = image_files(paths)
        super().__init__(len(self.files), str(paths[0]))

    def picture(self, index: int) -> Image.Image:
        """Decode an image, in RGB."""
        return read_image(self.files[index])

    def path(self, index: int) -> str:
        """Name its file."""
        return str(self.files[index])


def open_images(source: Path | str, data_dir: Path | str | None = None) -> PictureDataset:
    """The training images of a data set by name, or all images below a folder or in an archive.

    Raises:
        SubquadError: there are none.
    """
    if not has_parts(source, data_dir):
        return ImageFiles([_unpacked(source)])
    return load_dataset(str(source), split="train", data_dir=data_dir)


def has_parts(source: Path | str, data_dir: Path | str | None = None) -> bool:
    """Whether images are a data set with a part to train on and a part that is held out, not photographs alone."""
    if data_dir is not None:
        return True
    path = _unpacked(source)
    if not path.is_dir() or (path / "train").is_dir():
        return True
    # of an archive with a folder for each class some are held out
    return path != Path(source) and bool(subfolders(path))


def _unpacked(source: Path | str) -> Path:
    """The folder that an archive is unpacked to, and any other path as it is."""
    path = find_path(source)
    return unpack(path) if is_archive(path) else path


def views(config: InputConfig, *, scale: tuple[float, float] = (0.5, 1.0), crop_padding: int = 0) -> Transform:
    """What is drawn of an image: a part of it, mirrored or not, as the network takes it.

    Args:
        config: how the network takes images.
        scale: shares of the image's area that a part may have; (1, 1) for the image as in evaluation.
        crop_padding: instead, shift the image as in evaluation by up to so many pixels.
    """
    whole = eval_transform(config)
    if crop_padding:
        steps = [placing(config), transforms.RandomCrop(config.img_size, padding=crop_padding)]
    elif tuple(scale) == (1.0, 1.0):
        return transforms.Compose([transforms.RandomHorizontalFlip(), whole])
    else:
        steps = [transforms.RandomResizedCrop(config.img_size, scale=scale, interpolation=_BICUBIC)]
    as_numbers = [transforms.ToTensor(), transforms.Normalize(config.mean, config.std)]
    return transforms.Compose([*steps, transforms.RandomHorizontalFlip(), *as_numbers])


_BICUBIC = transforms.InterpolationMode.BICUBIC


class Drawn:
    """Batches of a data set's images, each image once an epoch, in an order and with parts that follow from the seed.

    Args:
        images: broken ones are skipped, and counted in `images.num_broken`.
        transform: of a picture; its random numbers follow from the seed, the epoch and the image.
        batch_size: images of a batch; fewer where some are broken.
        seed: of all random numbers.
    """

    def __init__(self, images: PictureDataset, transform: Transform, *, batch_size: int, seed: int = 0):
        if len(images) < 1 or batch_size < 1:
            raise SubquadError(f"batches need at least one image each, got {batch_size} of {len(images)}")
        self.images, self.transform, self.seed = images, transform, seed
        self.batch_size = min(batch_size, len(images))
        self._order: tuple[int, np.ndarray] | None = None

    def __call__(self, update: int) -> Tensor:
        number = update
        while not (whole := self._whole(number)):
            if number == update:
                self.images.check_any_whole()
            number += 1
        return torch.stack(whole)

    def _whole(self, update: int) -> list[Tensor]:
        """The images of a batch that are not broken."""
        in_epoch = len(self.images) // self.batch_size
        epoch, place = divmod(update, in_epoch)
        chosen = self._shuffled(epoch)[place * self.batch_size : (place + 1) * self.batch_size]
        items = [self._item(int(index), epoch) for index in chosen]
        return [item for item in items if item is not None]

    def _shuffled(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng((self.seed, epoch, _DRAWN))
            self._order = epoch, generator.permutation(len(self.images))
        return self._order[1]

    def _item(self, index: int, epoch: int) -> Tensor | None:
        picture = self.images.whole_picture(index)
        if picture is None:
            return None
        with seeded(self.seed, epoch, index, _DRAWN):
            return self.transform(picture)


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
        order = np.random.default_rng((self.seed, epoch, _DRAWN)).permutation(len(self.images))
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


def as_batches(images: Any, *, batch_size: int, seed: int = 0, config: InputConfig | None = None) -> Batches:
    """Batches of what a caller calls images.

    Args:
        images: a tensor (n, c, y, x); a data set whose pictures are transformed by `views` of `config`; the path of a
            folder, or the name of a data set; or a function of an update's number, see `Batches`.
        batch_size: images of a batch.
        seed: of their order, and of the parts that are drawn of them.
        config: how the network takes pictures.

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
        transform = getattr(images, "transform", None) or views(config)
        return Drawn(images, transform, batch_size=batch_size, seed=seed)
    if callable(images):
        return _Asked(images)
    raise SubquadError(
        f"images are a tensor, a data set, a folder or a function, got a {type(images).__name__}: of batches that are "
        "there already, as of a loader, lambda update: batches[update % len(batches)]"
    )
