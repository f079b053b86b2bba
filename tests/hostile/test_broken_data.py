"""Damaged, odd and hostile images: each is read rightly, or said to be broken in one line, never left out silently."""

import io
import json
import os
import re
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import worlds
from PIL import Image
from torch import nn

from subquad import SubquadError
from subquad.cli import main
from subquad.data import BrokenImageError, create_loader, find_images, load_dataset
from subquad.data.decoding import read_image, read_label_map
from subquad.tasks.accuracy import evaluate
from subquad.tasks.detection import evaluate_detection
from subquad.tasks.detection.object_data import load_objects
from subquad.tasks.detection.object_transforms import ObjectTransform, as_lists
from subquad.tasks.segmentation import load_scenes
from subquad.tasks.segmentation.intersection_over_union import evaluate_segmentation
from subquad.tasks.segmentation.scene_transforms import SceneInput, SceneTransform, leave_apart
from subquad.tasks.task_table import TASKS

SOURCE = Path(__file__).parents[2] / "src" / "subquad"
RAMP = np.linspace(0, 255, 256).astype(np.uint8).reshape(16, 16)
COLOURED = np.stack([RAMP, RAMP.T, 255 - RAMP], -1)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A $SUBQUAD_HOME of its own for every test."""
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def encoded(image, kind, **settings):
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


def coloured(mode="RGB"):
    return Image.fromarray(COLOURED).convert(mode)


def wide_ramp():
    return Image.fromarray(RAMP.astype(np.uint16) * 257)


def turned(kind, orientation=6):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(coloured(), kind, exif=exif)


def animated():
    return encoded(coloured(), "PNG", save_all=True, append_images=[Image.new("RGB", (16, 16))])


PNG = encoded(coloured(), "PNG")
FLAT = Image.fromarray(RAMP)
# files and the picture in each, None for those that must be said to be broken
ODD = {
    "rgb": (PNG, COLOURED),
    "rgba": (encoded(coloured("RGBA"), "PNG"), COLOURED),
    "turned by EXIF": (turned("PNG"), COLOURED),
    **{f"turned by {k} in TIFF": (turned("TIFF", k), COLOURED) for k in range(1, 9)},
    "animated": (animated(), COLOURED),
    "grey": (encoded(FLAT, "PNG"), RAMP),
    "grey with alpha": (encoded(FLAT.convert("LA"), "PNG"), RAMP),
    "grey of 16 bits in PNG": (encoded(wide_ramp(), "PNG"), RAMP),
    "grey of 16 bits in TIFF": (encoded(wide_ramp(), "TIFF"), RAMP),
    "grey of 16 bits in PGM": (encoded(wide_ramp(), "PPM"), RAMP),
    "floats from 0 to 1": (encoded(Image.fromarray(RAMP.astype(np.float32) / 255), "TIFF"), RAMP),
    "palette": (encoded(FLAT.convert("P"), "PNG"), RAMP),
    "palette with transparency": (encoded(FLAT.convert("P"), "PNG", transparency=bytes(range(256))), RAMP),
    "black and white": (encoded(FLAT.convert("1"), "PNG"), np.asarray(FLAT.convert("1"), np.uint8) * 255),
    "CMYK": (encoded(coloured("CMYK"), "TIFF"), COLOURED),
    "YCbCr": (encoded(coloured(), "JPEG", quality=100, subsampling=0), COLOURED),
    "floats beyond": (encoded(Image.fromarray(RAMP.astype(np.float32)), "TIFF"), None),
    "floats that are none": (encoded(Image.fromarray(np.full((4, 4), np.nan, np.float32)), "TIFF"), None),
    "grey of 32 bits": (encoded(Image.fromarray(RAMP.astype(np.int32)), "TIFF"), None),
    "cut short": (PNG[:-40], None),
    "cut in its header": (PNG[:20], None),
    "empty": (b"", None),
    "text": (b"no image", None),
    "of no pixels": (PNG[:16] + bytes(8) + PNG[24:], None),
    "a thin line": (encoded(Image.new("L", (30_000, 1)), "PNG"), None),
    "a bomb": (PNG[:16] + b"\0\1\0\0\0\1\0\0" + PNG[24:], None),
    "a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n", None),
}


def as_classes(folder, content):
    """Both splits of two classes, whose first training image is `content`."""
    for split in ("train", "val"):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
            for k in range(2):
                (folder / split / name / f"{k}.png").write_bytes(PNG)
    (folder / "train" / "a" / "0.png").write_bytes(content)
    return lambda split="train", **settings: load_dataset(str(folder), split=split, **settings)


def as_scenes(folder, content):
    worlds.scenes(folder, counts=(3, 2), size=(16, 16))
    (folder / "images/training/0.png").write_bytes(content)
    return lambda split="train", **settings: load_scenes(folder, split=split, **settings)


def as_objects(folder, content):
    worlds.objects(folder, counts=(3, 2), size=(16, 16))
    (folder / "train2017/000000.png").write_bytes(content)
    return lambda split="train", **settings: load_objects(folder, split=split, **settings)


READERS = {"classify": as_classes, "segment": as_scenes, "detect": as_objects}


def pixels_of(item):
    picture = item[0]
    assert picture.mode == "RGB"
    return np.asarray(picture)


@pytest.mark.parametrize("task", READERS)
def test_odd_images_are_read_rightly_or_said_to_be_broken_in_every_task(task, tmp_path):
    load = READERS[task](tmp_path / "data", PNG)
    file = Path(load().path(0))
    for name, (content, expected) in ODD.items():
        file.write_bytes(content)
        images = load()
        item = images[0]
        assert (item is None) == (expected is None) == (images.num_broken == 1), name
        if expected is None:
            assert images.broken_paths() == [str(file)]
            with pytest.raises(BrokenImageError) as caught:
                load(strict=True)[0]
            assert str(caught.value).startswith(f"broken image {file}: ") and "\n" not in str(caught.value)
        else:
            shown = np.broadcast_to(expected if expected.ndim == 3 else expected[..., None], (16, 16, 3))
            tolerance = 6 if name == "YCbCr" else 1
            assert np.abs(pixels_of(item).astype(int) - shown).max() <= tolerance, name


def test_every_task_with_images_is_tried():
    assert set(READERS) == set(TASKS) - {"lra"}


def test_one_function_decodes_every_image():
    files = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    opening = {path.relative_to(SOURCE).as_posix() for path, text in files.items() if re.search(r"Image\.open\(", text)}
    assert opening == {"data/decoding.py"}


class MeanColour(nn.Module):
    """Stands for a classifier, a segmenter and a detector that find what is red, green or blue, by `kind`."""

    has_masks = False

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, images):
        if self.kind == "detect":
            full = torch.tensor([[0.0, 0.0, 16.0, 16.0]])
            return [{"boxes": full, "labels": torch.ones(1).long(), "scores": torch.ones(1)} for _ in images]
        return images.mean((2, 3)) if self.kind == "classify" else images


INPUT = SceneInput((16, 16), None, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def judged(task, images):
    """What an evaluation of a task says of images."""
    if task == "classify":
        images.transform = lambda picture: torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255
        return evaluate(MeanColour(task), create_loader(images, batch_size=2), device="cpu", num_classes=3).count
    if task == "segment":
        images.transform = SceneTransform(INPUT)
        loader = create_loader(images, batch_size=1, collate=leave_apart)
        return evaluate_segmentation(MeanColour(task), loader, device="cpu", num_classes=3).confusion.sum()
    images.transform = ObjectTransform()
    loader = create_loader(images, batch_size=1, collate=as_lists)
    return evaluate_detection(MeanColour(task), loader, images.truth, device="cpu", masks=False).box["ap"]


@pytest.mark.parametrize("task", READERS)
def test_nothing_but_broken_images_is_an_error_that_names_the_first(task, tmp_path):
    load = READERS[task](tmp_path / "data", PNG)
    for split in ("train", "validation"):
        for k in range(len(load(split))):
            Path(load(split).path(k)).write_bytes(b"no image")
        images = load(split)
        reason = (
            rf"^all {len(images)} images of \S+ are broken, the first is {images.path(0)}: it is no picture [^\n]+$"
        )
        with pytest.raises(BrokenImageError, match=reason):
            judged(task, images)


def test_objects_of_broken_images_are_not_missed(tmp_path):
    load = as_objects(tmp_path / "data", PNG)
    file = tmp_path / "data/annotations/instances_train2017.json"
    content = json.loads(file.read_text())
    for annotation in content["annotations"]:
        annotation |= {"bbox": [0, 0, 16, 16], "area": 256, "category_id": 3}
    content["annotations"] = content["annotations"][::2]
    file.write_text(json.dumps(content))
    assert judged("detect", load()) == pytest.approx(100)
    Path(load().path(1)).write_bytes(b"no image")
    assert judged("detect", load()) == pytest.approx(100)


@pytest.mark.parametrize(
    ("mode", "values"), [("L", [0, 1, 3]), ("P", [0, 1, 3]), ("I;16", [0, 1, 3]), ("I", [0, 1, 3]), ("1", [0, 1, 1])]
)
def test_label_maps_hold_numbers_in_any_mode_of_whole_numbers(mode, values, tmp_path):
    file = tmp_path / "labels.png"
    array = np.array([values], {"I;16": np.uint16, "I": np.int32}.get(mode, np.uint8))
    image = Image.fromarray(array * (255 if mode == "1" else 1))
    image = image.convert(mode) if mode in ("P", "1") else image
    image.save(file, "TIFF" if mode == "I" else "PNG")
    assert read_label_map(file).tolist() == [values]


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_label_maps_whose_zero_is_white_hold_the_numbers_that_are_stored(bits, tmp_path):
    tifffile = pytest.importorskip("tifffile")
    stored = np.array([[0, 1, 1, 0], [1, 0, min(3, 2**bits - 1), 1]], np.uint16 if bits == 16 else np.uint8)
    few = {"bitspersample": bits} if bits in (2, 4) else {}
    written = stored.astype(bool) if bits == 1 else stored
    tifffile.imwrite(tmp_path / "labels.tif", written, photometric="miniswhite", **few)
    assert read_label_map(tmp_path / "labels.tif").tolist() == stored.tolist()


def test_numbers_with_a_sign_and_wide_colours_of_jpeg_2000_are_refused(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "signed.tif", np.zeros((8, 8), np.int8))
    with pytest.raises(BrokenImageError, match="its numbers have a sign"):
        read_image(tmp_path / "signed.tif")
    codecs = pytest.importorskip("imagecodecs")
    for bits in (8, 12, 16):
        white = np.full((8, 8, 3), 2**bits - 1, np.uint8 if bits == 8 else np.uint16)
        settings = {"level": 0, "bitspersample": bits, "codecformat": "jp2", "reversible": True}
        (tmp_path / "white.jp2").write_bytes(codecs.jpeg2k_encode(white, **settings))
        if bits == 8:
            assert np.asarray(read_image(tmp_path / "white.jp2")).min() == 255
            continue
        with pytest.raises(BrokenImageError, match=f"JPEG 2000 of {bits} bits a colour"):
            read_image(tmp_path / "white.jp2")


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (Image.new("RGBA", (16, 16)), "pixels are of mode RGBA"),
        (Image.new("RGB", (16, 16)), "pixels are of mode RGB"),
        (Image.new("LA", (16, 16)), "pixels are of mode LA"),
        (Image.new("F", (16, 16)), "pixels are of mode F"),
        (Image.new("I;16", (16, 16), 700), "has label 700, and there are 3 classes"),
        (Image.fromarray(np.full((16, 16), -2, np.int32)), "has label -2, and there are 3 classes"),
        (Image.new("L", (16, 15)), "has 16×15 px, its image 16×16"),
        (Image.new("L", (16, 16), 4), "has label 4, and there are 3 classes"),
    ],
)
def test_label_maps_of_colours_or_unknown_classes_are_refused(image, reason, tmp_path):
    load = as_scenes(tmp_path / "data", PNG)
    file = tmp_path / "data/annotations/training/0.png"
    file.write_bytes(encoded(image, "TIFF"))
    with pytest.raises(SubquadError, match=rf"^annotation {file} [^\n]*{reason}[^\n]*$"):
        load()[0]


def test_label_maps_in_jpeg_are_refused(tmp_path):
    Image.new("L", (16, 16), 1).save(tmp_path / "0.png", "JPEG")
    with pytest.raises(SubquadError, match="it is a JPEG, whose compression changes class numbers"):
        read_label_map(tmp_path / "0.png")


def test_links_are_followed_once_and_what_is_no_file_is_broken(tmp_path):
    load = as_classes(tmp_path / "data", PNG)
    for name in ("itself", "again"):
        (tmp_path / "data/train/a" / name).symlink_to(tmp_path / "data")
    (tmp_path / "data/train/a/deep").mkdir()
    (tmp_path / "data/train/a/deep/2.PNG").write_bytes(PNG)
    images = load()
    assert images.labels == [0, 0, 0, 1, 1] and len(find_images(tmp_path / "data")) == 9
    os.mkfifo(tmp_path / "data/train/b/2.png")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        (tmp_path / "data/train/b/3.png").symlink_to(tmp_path / "socket")
        (tmp_path / "data/train/b/4.png").symlink_to("/dev/zero")
        (tmp_path / "data/train/b/5.png").symlink_to("5.png")
        (tmp_path / "data/train/b/6.png").symlink_to("nowhere")
        images = load()
        items = [images[k] for k in range(len(images))]
    assert [item is None for item in items] == [False] * 5 + [True] * 5
    assert [Path(path).name for path in images.broken_paths()] == [f"{k}.png" for k in range(2, 7)]


def test_odd_names_are_names(tmp_path):
    load = as_classes(tmp_path / "data", PNG)
    for name in (b"\xff\xfe.png", "²3.png".encode(), b"a\nb.png", b"x" * 251 + b".png", b".hidden.png"):
        (tmp_path / "data/train/a" / os.fsdecode(name)).write_bytes(PNG)
    images = load()
    assert len(images) == 8 and all(images[k] is not None for k in range(8))
    (tmp_path / "data/train/a" / os.fsdecode(b"\xff\xfe.png")).write_bytes(b"no image")
    assert main(["predict", "--checkpoint", str(tmp_path), str(tmp_path / ("x" * 300))]) == 2
    with pytest.raises(SubquadError, match="File name too long"):
        load_dataset("y" * 300 + ".tar", split="train")
    (tmp_path / "data/train" / os.fsdecode(b"\xff")).mkdir()
    with pytest.raises(SubquadError, match="has a name that can't be written: rename it"):
        load()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_folder_is_said(tmp_path):
    load = as_classes(tmp_path / "data", PNG)
    (tmp_path / "data/train/a").chmod(0)
    with pytest.raises(SubquadError, match=r"can't read the folder .*: Permission denied"):
        load()
