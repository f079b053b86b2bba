"""Data known by name: the digits, torchvision's, the Hugging Face library's."""

import numpy as np
import pytest

from subquad.data import load_dataset
from subquad.errors import SubquadError


def test_the_digits_are_split_the_same_way_every_time():
    train, validation = (load_dataset("digits", split=split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (1437, 360)
    assert train.classes == validation.classes == tuple("0123456789")
    assert all(34 <= validation.labels.count(label) <= 38 for label in range(10))
    again = load_dataset("digits", split="validation")
    assert all(np.array_equal(validation[i][0], again[i][0]) for i in range(360))


def test_the_digits_fill_the_range_of_rgb_images():
    digits = load_dataset("digits", split="train")
    image, label = digits[0]
    assert image.size == (8, 8) and image.mode == "RGB" and digits.classes[label] == str(label)
    assert max(np.asarray(digits.picture(i)).max() for i in range(20)) == 255


def test_the_splits_of_the_digits_share_no_image():
    train, validation = (load_dataset("digits", split=split) for split in ("train", "validation"))
    paths = {images.path(i) for images in (train, validation) for i in range(len(images))}
    assert len(paths) == 1797


@pytest.mark.parametrize("name", ["cifar10", "torch/cifar10"])
def test_a_failed_download_says_what_to_give_instead(monkeypatch, name):
    def refuse(*args, **settings):
        raise OSError("no route\nto host")

    monkeypatch.setattr("subquad.data.named_sets.create_dataset", refuse)
    with pytest.raises(SubquadError, match=r"can't download cifar10 .*no route to host.*train/<class>/.*val/<class>/"):
        load_dataset(name, split="train")


def test_the_files_of_torchvision_are_read(monkeypatch, home):
    class Pictures:
        classes, targets = ["zero", "one"], [1, 0]

        def __getitem__(self, index):
            return load_dataset("digits", split="train").picture(index).convert("L"), self.targets[index]

    asked = {}
    monkeypatch.setattr(
        "subquad.data.named_sets.create_dataset",
        lambda name, **settings: asked.update(settings, name=name) or Pictures(),
    )
    images = load_dataset("torch/mnist", split="validation")
    assert asked == {"name": "torch/mnist", "root": str(home / "data"), "split": "validation", "download": True}
    assert images.classes == ("zero", "one") and images[0][1] == 1 and images[0][0].mode == "RGB"


def test_an_unknown_name_of_torchvision_suggests_the_nearest():
    with pytest.raises(SubquadError, match="did you mean cifar10"):
        load_dataset("torch/cifar", split="train")


# the Hugging Face library is slow to import
@pytest.mark.slow
def test_a_folder_is_read_through_the_hugging_face_library(make_tree, break_image, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    root = make_tree({"train/a": 20, "train/b": 20})
    break_image(root / "train/a/00.jpg")
    settings = {"data_dir": tmp_path / "cache"}
    train, validation = (load_dataset(f"hfds/{root}", split=split, **settings) for split in ("train", "validation"))
    assert (len(train), len(validation), train.classes) == (36, 4, ("a", "b"))
    pairs = [images[i] for images in (train, validation) for i in range(len(images))]
    assert pairs.count(None) == train.num_broken + validation.num_broken == 1
    assert (train.broken_paths() + validation.broken_paths())[0].endswith("00.jpg")
    with pytest.raises(SubquadError, match="can't load hfds/"):
        load_dataset(f"hfds/{tmp_path / 'nowhere'}", split="train", **settings)
