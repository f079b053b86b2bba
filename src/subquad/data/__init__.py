"""Images to train on and to judge by: data sets, folders and archives, what is done to them, and batches of them."""

from subquad.data.dataset import BrokenImageError, ImageDataset, read_image
from subquad.data.loader import create_loader
from subquad.data.opening import NAMES, load_dataset
from subquad.data.transforms import Augmentation, InputConfig, eval_transform, placing, train_transform
from subquad.data.walking import find_images

__all__ = [
    "NAMES",
    "Augmentation",
    "BrokenImageError",
    "ImageDataset",
    "InputConfig",
    "create_loader",
    "eval_transform",
    "find_images",
    "load_dataset",
    "placing",
    "read_image",
    "train_transform",
]
