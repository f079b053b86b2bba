"""Folders of images: which images belong to which split and class, and what is said about a wrong tree."""

import shutil

import pytest
from PIL import Image, features

from subquad.data import BrokenImageError, find_images, load_dataset
from subquad.data.decoding import _FORMATS, IMAGE_ENDINGS
from subquad.errors import SubquadError
from subquad.tasks.detection.object_data import load_objects
from subquad.tasks.image_files import image_files, plan_outputs
from subquad.tasks.segmentation.scene_data import load_scenes

SPLIT_TREE = {"train/cat": 3, "train/dog": 2, "val/cat": 1, "val/dog": 1}


def complaint(*args, **settings):
    with pytest.raises(SubquadError) as caught:
        load_dataset(*args, **{"split": "train"} | settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_classes_have_the_same_indices_in_both_splits(make_tree):
    root = str(make_tree(SPLIT_TREE))
    train, validation = (load_dataset(root, split=split) for split in ("train", "validation"))
    assert train.classes == validation.classes == ("cat", "dog")
    assert train.labels == [0, 0, 0, 1, 1] and validation.labels == [0, 1]
    image, label = train[4]
    assert image.size == (12, 10) and image.mode == "RGB" and label == 1
    assert train.path(4).endswith("train/dog/01.jpg") and train.name == root


@pytest.mark.parametrize("name", ["val", "validation", "valid", "test"])
def test_the_validation_folder_may_have_any_usual_name(make_tree, name):
    root = make_tree({"train/a": 1, "train/b": 1, f"{name}/a": 2, f"{name}/b": 2})
    assert len(load_dataset("imagenet", data_dir=root, split="validation")) == 4


@pytest.mark.parametrize(("train", "val"), [("Train", "Val"), ("Training", "Testing"), ("TRAIN", "test")])
def test_splits_are_known_however_they_are_written(make_tree, train, val):
    root = make_tree({f"{train}/a": 1, f"{train}/b": 1, f"{val}/a": 2, f"{val}/b": 2})
    images = load_dataset(str(root), split="validation")
    assert images.classes == ("a", "b") and len(images) == 4


def test_splits_that_differ_in_their_case_are_taken_by_the_usual_name(make_tree):
    root = make_tree(SPLIT_TREE | {"Train/cat": 9, "Train/dog": 9, "Val/cat": 9, "Val/dog": 9})
    assert len(load_dataset(str(root), split="train")) == 5


@pytest.mark.parametrize("name", ["@eaDir", "#recycle", "@Recycle", "$RECYCLE.BIN", "System Volume Information"])
def test_what_disks_put_beside_images_is_none_of_them(make_tree, name):
    root = make_tree({"a": 4, "b": 4, f"a/{name}/0.jpg": 3, name: 2, "lost+found": 0})
    parts = [load_dataset(str(root), split=split) for split in ("train", "validation")]
    assert parts[0].classes == ("a", "b") and sum(map(len, parts)) == 8
    assert len(find_images(root)) == 8


def test_val_is_taken_before_test(make_tree):
    root = make_tree(SPLIT_TREE | {"test/cat": 5, "test/dog": 5})
    assert len(load_dataset("folder", data_dir=root, split="validation")) == 2


def test_without_splits_a_tenth_of_every_class_is_held_out(make_tree):
    root = str(make_tree({"a": 40, "b": 20, "c": 10}))
    train, validation = (load_dataset(root, split=split) for split in ("train", "validation"))
    paths = [{images.path(i) for i in range(len(images))} for images in (train, validation)]
    assert not paths[0] & paths[1] and len(paths[0] | paths[1]) == 70
    assert [validation.labels.count(label) for label in range(3)] == [4, 2, 1]
    again = load_dataset(root, split="validation")
    assert {again.path(i) for i in range(len(again))} == paths[1]


def test_what_is_held_out_are_the_images_that_are_named(make_tree):
    images = load_dataset(str(make_tree({"a": 20, "b": 20})), split="validation")
    for index in range(len(images)):
        with Image.open(images.path(index)) as file:
            assert images[index][0].tobytes() == file.convert("RGB").tobytes()


def test_every_class_is_held_out_however_few_images_there_are(make_tree):
    images = load_dataset(str(make_tree({"a": 2, "b": 3, "c": 2})), split="validation")
    assert images.labels == [0, 1, 2]


def test_a_class_may_be_called_train(make_tree):
    root = str(make_tree({"car": 4, "train": 4, "test": 4}))
    assert load_dataset(root, split="train").classes == ("car", "test", "train")


def test_classes_are_in_natural_order_and_hidden_folders_are_none(make_tree):
    root = str(make_tree({"train/n10": 1, "train/n9": 1, "train/.cache": 1, "val/n9": 1, "val/n10": 1}))
    assert load_dataset(root, split="train").classes == ("n9", "n10")


def test_fewer_images_keep_the_classes_in_proportion(make_tree):
    root = str(make_tree({"train/a": 20, "train/b": 10, "val/a": 1, "val/b": 1}))
    images = load_dataset(root, split="train", max_images=9)
    assert [images.labels.count(label) for label in range(2)] == [6, 3]
    assert len(load_dataset(root, split="train", max_images=1000)) == 30


def test_a_folder_that_has_moved_is_read_where_it_is_now(make_tree, tmp_path):
    """data_dir was passed over: `eval run --data-dir elsewhere` judged by what lay where the run was trained."""
    root = make_tree({"train/a": 2, "train/b": 2, "val/a": 1, "val/b": 1})
    before = str(tmp_path / "gone/before")
    assert len(load_dataset(before, data_dir=root, split="train")) == 4
    other = shutil.copytree(root, tmp_path / "other")
    assert load_dataset(str(root), data_dir=other, split="validation").path(0).startswith(str(other))


def test_a_missing_folder_is_named(tmp_path, monkeypatch):
    assert complaint(str(tmp_path / "nowhere")) == f"there is no folder {tmp_path / 'nowhere'}"
    assert "nowhere" in complaint("cifar10", data_dir=tmp_path / "nowhere")
    # as of a run that was begun in another folder
    monkeypatch.chdir(tmp_path)
    assert complaint("no/where") == f"there is no folder no/where in {tmp_path}"
    (tmp_path / "file").touch()
    assert complaint("torch/cifar10", data_dir=tmp_path / "file") == f"{tmp_path / 'file'} is no folder, but a file"


def test_a_class_folder_without_images_is_named(make_tree):
    root = make_tree(SPLIT_TREE | {"train/bird": 0, "val/bird": 1})
    assert str(root / "train" / "bird") in complaint(str(root))


def test_class_folders_that_are_all_empty_are_said_to_be(make_tree):
    assert "hold no images (.jpg .jpeg" in complaint(str(make_tree({"a": 0, "b": 0})))


def test_a_folder_of_images_without_class_folders_is_told_how_to_sort(make_tree):
    assert "3 images but no class folders" in complaint(str(make_tree({".": 3})))
    root = make_tree({"train/a": 2, "train/b": 2, "val": 3}, "unsorted")
    assert f"{root / 'val'} has 3 images but no class folders" in complaint(str(root))


def test_classes_of_one_split_alone_are_named(make_tree):
    root = make_tree(SPLIT_TREE | {"train/bird": 1, "val/fish": 1})
    assert f"bird only in {root / 'train'}; fish only in {root / 'val'}" in complaint(str(root))


def test_a_missing_split_is_named_but_the_other_can_be_had(make_tree):
    root = str(make_tree({"val/a": 1, "val/b": 1}))
    assert "no images for train: it needs a folder train/" in complaint(root)
    assert len(load_dataset(root, split="validation")) == 2


@pytest.mark.parametrize("drawn", ["annotations", "labels", "masks"])
def test_label_maps_beside_images_are_no_class_and_no_pictures(make_tree, drawn):
    """A segmenter's own data, named with --data, were photographs of two classes, label maps among them."""
    root = make_tree({"images/training": 12, f"{drawn}/training": 12})
    said = f"has images/ and {drawn}/ beside it, whose label maps are neither pictures nor a class"
    assert said in complaint(str(root)) and said in complaint("folder", data_dir=root, split="validation")
    assert image_files([root]) == image_files([root / "images"]) and len(image_files([root])) == 12
    assert load_dataset(str(make_tree({f"{drawn}/a": 12, "faces/b": 12})), split="train").classes


def test_one_image_may_be_named_by_itself(make_tree):
    """The letters of its name were taken for paths."""
    file = make_tree({"a": 1}) / "a/00.jpg"
    assert image_files(str(file)) == image_files(file) == image_files([str(file)]) == [file]
    assert [image.path for image in plan_outputs(str(file), file.parent / "out", (".png",))] == [file]


def test_a_class_with_a_single_image_can_not_be_split(make_tree):
    assert "1 of 2 classes have a single image" in complaint(str(make_tree({"a": 5, "b": 1})))


def test_an_unknown_name_suggests_the_nearest():
    assert "did you mean cifar10" in complaint("cifar")
    assert "did you mean digits" in complaint("digit")


def test_named_data_say_when_they_need_a_folder_or_take_none(tmp_path):
    assert "needs data_dir" in complaint("imagenet")
    assert "'folder'" in complaint("digits", data_dir=tmp_path)
    assert "unknown split 'eval'" in complaint("digits", split="eval")


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "data.zip").write_bytes(b"PK")
    said = complaint(str(tmp_path / "data.zip"))
    assert "neither a folder of images nor an archive" in said and said.endswith("unpack it first")


def test_grey_and_transparent_images_come_in_rgb(make_tree):
    root = make_tree(SPLIT_TREE)
    Image.new("L", (4, 4), 7).save(root / "train/cat/grey.png")
    Image.new("RGBA", (4, 4)).save(root / "train/cat/clear.png")
    Image.new("1", (4, 4)).save(root / "train/cat/bits.png")
    images = load_dataset(str(root), split="train")
    assert {images.picture(i).mode for i in range(len(images))} == {"RGB"}


@pytest.mark.parametrize("ending", [ending for endings in _FORMATS.values() for ending in endings])
def test_what_the_decoder_reads_is_found_in_folders(tmp_path, ending):
    format = next(name for name, endings in _FORMATS.items() if ending in endings)
    if {"AVIF": "avif", "JPEG2000": "jpg_2000", "WEBP": "webp"}.get(format, "zlib") not in features.get_supported():
        pytest.skip(f"this Pillow has no {format}")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name in (f"1{ending}", f"2{ending.upper()}", f".hidden{ending}", "notes.txt", "3.svg"):
            Image.new("RGB", (8, 8), 90).save(tmp_path / folder / name, format)
    train, validation = (load_dataset(str(tmp_path), split=split, strict=True) for split in ("train", "validation"))
    assert len(train) == len(validation) == 2 and len(find_images(tmp_path)) == 4
    assert all(images[index] is not None for images in (train, validation) for index in range(2))


def test_photographs_that_nobody_decodes_are_named_and_not_passed_over(make_tree):
    root = make_tree({"a": 4, "b": 4})
    heic = root / "a" / "00.HEIC"
    heic.write_bytes(b"\0\0\0\x18ftypheic")
    assert heic in find_images(root) and ".heic" in IMAGE_ENDINGS
    with pytest.raises(BrokenImageError, match=r"00\.HEIC: it is no picture of a kind"):
        images = load_dataset(str(root), split="train", strict=True)
        list(images)


@pytest.mark.parametrize("load", [load_dataset, load_scenes, load_objects])
def test_a_folder_that_the_locale_can_not_name_is_not_said_to_be_missing(load, monkeypatch):
    # as in a locale of ASCII with PYTHONUTF8=0
    monkeypatch.setattr("os.fsencode", lambda path: str(path).encode("ascii"))
    with pytest.raises(SubquadError, match="file names are ascii, which can't name data/größe: set PYTHONUTF8=1"):
        load("data/größe", split="train")
