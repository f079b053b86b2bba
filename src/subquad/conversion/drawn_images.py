"""Pictures without labels, and what is drawn of them in an update: a part of each, as follows from a seed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import transforms

from subquad.data import InputConfig, eval_transform, load_dataset, placing, read_image
from subquad.data.archives import is_archive, unpack
from subquad.data.dataset import PictureDataset
from subquad.data.walking import find_path, subfolders
from subquad.errors import SubquadError
from subquad.tasks.image_files import image_files
from subquad.training.order import seeded

Transform = Callable[[Image.Image], Any]

DRAWN = 7
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

    def __call__(self, update: int) -> Any:
        number = update
        while not (whole := self._whole(number)):
            if number == update:
                self.images.check_any_whole()
            number += 1
        return self.together(whole)

    def together(self, items: Sequence[Any]) -> Any:
        """A batch of what the transform gives of each image."""
        return torch.stack(list(items))

    def _whole(self, update: int) -> list[Any]:
        """The images of a batch that are not broken."""
        in_epoch = len(self.images) // self.batch_size
        epoch, place = divmod(update, in_epoch)
        chosen = self._shuffled(epoch)[place * self.batch_size : (place + 1) * self.batch_size]
        items = [self._item(int(index), epoch) for index in chosen]
        return [item for item in items if item is not None]

    def _shuffled(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng((self.seed, epoch, DRAWN))
            self._order = epoch, generator.permutation(len(self.images))
        return self._order[1]

    def _item(self, index: int, epoch: int) -> Any:
        picture = self.images.whole_picture(index)
        if picture is None:
            return None
        with seeded(self.seed, epoch, index, DRAWN):
            return self.transform(picture)
