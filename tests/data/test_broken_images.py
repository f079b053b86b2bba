"""Broken images: skipped and counted, whoever meets them, or fatal."""

import pytest
import torch

from subquad.data import BrokenImageError, InputConfig, create_loader, eval_transform, load_dataset
from subquad.errors import SubquadError

# torch waits five seconds for a loader process that raised an error
WORKERS = [0, pytest.param(1, marks=pytest.mark.slow)]
TREE = {"train/a": 4, "train/b": 4, "val/a": 1, "val/b": 1}


@pytest.fixture
def damaged(make_tree, break_image):
    """A function that loads a tree with one image cut short and one that is none."""
    root = make_tree(TREE)
    break_image(root / "train/a/01.jpg")
    (root / "train/b/02.jpg").write_bytes(b"not an image")

    def load(strict=False):
        images = load_dataset(str(root), split="train", strict=strict)
        images.transform = eval_transform(InputConfig((8, 8)))
        return images

    return load


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_are_left_out_of_batches_and_counted(damaged, workers):
    images = damaged()
    batches = list(create_loader(images, batch_size=4, workers=workers))
    assert [len(labels) for _, labels in batches] == [3, 3]
    assert all(len(pixels) == len(labels) for pixels, labels in batches)
    assert images.num_broken == 2
    assert [path[-8:] for path in images.broken_paths()] == ["a/01.jpg", "b/02.jpg"]


@pytest.mark.parametrize("workers", WORKERS)
def test_strict_names_the_first_broken_image_in_one_line(damaged, workers):
    with pytest.raises(SubquadError) as caught:
        list(create_loader(damaged(strict=True), batch_size=4, workers=workers))
    message = str(caught.value)
    assert message.startswith("broken image ") and "a/01.jpg" in message and "\n" not in message


def test_a_batch_of_broken_images_is_empty_but_has_their_shape(damaged):
    batches = list(create_loader(damaged(), batch_size=1))
    assert [len(labels) for _, labels in batches] == [1, 0, 1, 1, 1, 1, 0, 1]
    pixels, labels = batches[1]
    assert pixels.shape == (0, 3, 8, 8) and labels.dtype == torch.long


@pytest.mark.parametrize("workers", WORKERS)
def test_nothing_but_broken_images_is_an_error_in_one_line(make_tree, workers):
    root = make_tree(TREE)
    for path in (root / "train").rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(
        SubquadError,
        match=r"^all 8 images of .* are broken, the first is .*/a/00\.jpg: it is no picture [^\n]*$",
    ):
        list(create_loader(load_dataset(str(root), split="train"), batch_size=4, workers=workers))


def test_an_image_that_vanished_counts_as_broken(make_tree):
    root = make_tree(TREE)
    images = load_dataset(str(root), split="train")
    (root / "train/a/00.jpg").unlink()
    assert images[0] is None and images.num_broken == 1


def test_the_error_survives_the_way_out_of_a_loader_process():
    wrapped = "Caught in worker\nTraceback:\n  line\nsubquad.data.dataset.BrokenImageError: broken image x.jpg: cut\n"
    assert str(BrokenImageError(wrapped)) == "broken image x.jpg: cut"
