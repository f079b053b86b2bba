"""Scenes are read as they lie, and what is wrong with them is said in one line."""

import struct
import zlib

import numpy as np
import pytest
import torch
import worlds
from PIL import Image

from subquad import SubquadError
from subquad.data.dataset import BrokenImageError, DataError
from subquad.data.decoding import read_image, read_label_map, size_in_header
from subquad.tasks.segmentation import load_scenes
from subquad.tasks.segmentation.scene_data import VOID, read_class_names
from subquad.tasks.segmentation.scene_transforms import SceneInput, SceneTransform, TrainingTransform

INPUT = SceneInput((32, 48), None, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


@pytest.fixture
def folder(tmp_path):
    return worlds.scenes(tmp_path / "scenes")


def test_labels_count_from_zero_and_nothing_is_void(folder):
    images = load_scenes(folder, split="train")
    picture, labels = images[0]
    raw = np.asarray(Image.open(folder / "annotations/training/0.png"))
    assert picture.size == (56, 40) and images.classes == ("ground", "red", "green") and len(images) == 6
    assert (labels[:, :2] == VOID).all() and (labels[:, 2:] == raw[:, 2:] - 1).all()


def test_255_in_an_annotation_is_nothing_as_0_is(folder):
    file = folder / "annotations/training/0.png"
    raw = np.asarray(Image.open(file)).copy()
    raw[:, 50:] = 255
    Image.fromarray(raw).save(file)
    labels = load_scenes(folder, split="train").labels(0)
    assert (labels[:, :2] == VOID).all() and (labels[:, 50:] == VOID).all() and labels[:, 2:50].max() <= 2


def test_labels_that_a_file_counts_from_zero_are_classes_from_zero(folder):
    """As in Cityscapes and Pascal VOC: 0 is the first class, 255 alone is nothing."""
    for file in (folder / "annotations").rglob("*.png"):
        raw = np.asarray(Image.open(file))
        Image.fromarray(np.where(raw == 0, VOID, raw - 1).astype(np.uint8)).save(file)
    (folder / "objectInfo.txt").write_text("0\tground\n1\tred\n2\tgreen\n")
    scenes = load_scenes(folder, split="train")
    assert scenes.classes == ("ground", "red", "green") and scenes.first_label == 0
    raw = np.asarray(Image.open(folder / "annotations/training/0.png"))
    assert np.array_equal(scenes.labels(0), raw)
    Image.fromarray(np.where(raw == 1, 3, raw)).save(folder / "annotations/training/0.png")
    said = r"0\.png has label 3, and there are 3 classes, from 0 to 2 in objectInfo\*\.txt, and 255 for nothing"
    with pytest.raises(DataError, match=said):
        scenes.labels(0)


def grey_png(path, values, bits):
    """A PNG of grey numbers of fewer bits than Pillow writes."""
    lines = np.pad(values, ((0, 0), (0, -values.shape[1] % (8 // bits))))
    planes = (lines[..., None] >> np.arange(bits)[::-1]) & 1
    rows = b"".join(b"\0" + np.packbits(line.flatten()).tobytes() for line in planes)

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], bits, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_labels_of_a_few_bits_are_the_numbers_that_are_stored(folder, bits):
    file = folder / "annotations/training/0.png"
    stored = np.resize(np.arange(min(4, 2**bits)), (40, 56)).astype(np.uint8)
    grey_png(file, stored, bits)
    assert (read_label_map(file) == stored).all()
    labels = load_scenes(folder, split="train").labels(0, (56, 40))
    assert (labels == np.where(stored == 0, VOID, stored - 1)).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_labels_of_a_palette_are_its_places(folder, bits):
    stored = np.resize(np.arange(min(4, 2**bits)), (40, 56)).astype(np.uint8)
    for name in ("0.png", "0.tif"):
        file = folder / "annotations/training" / name
        image = Image.fromarray(stored).convert("P")
        image.putpalette([90, 80, 70, 0, 0, 0, 255, 255, 255, 1, 2, 3])
        image.save(file, **({"bits": bits} if name == "0.png" else {}))
        assert (read_label_map(file) == stored).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
def test_an_orientation_turns_neither_a_scene_nor_its_labels(tmp_path, orientation, compression):
    stored = np.arange(40 * 56, dtype=np.uint8).reshape(40, 56)
    note = Image.Exif()
    note[0x0112] = orientation
    file = tmp_path / "turned.tif"
    Image.fromarray(stored).save(file, exif=note, compression=compression)
    assert size_in_header(file) == (56, 40)
    assert (read_label_map(file) == stored).all()
    assert (np.asarray(read_image(file)) == stored[..., None]).all()
    # of one that it maps itself Pillow mixes up rows
    with file.open("rb") as stream, Image.open(stream) as image:
        assert (np.asarray(read_image(image)) == stored[..., None]).all()


def test_a_tar_of_scenes_is_unpacked(folder, tmp_path, monkeypatch):
    import tarfile

    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    with tarfile.open(tmp_path / "scenes.tar", "w") as tar:
        tar.add(folder, "scenes")
    assert len(load_scenes(tmp_path / "scenes.tar", split="validation")) == 3


def test_training_crops_are_all_of_one_size_with_void_where_there_is_no_picture(folder):
    images = load_scenes(folder, split="train")
    for scale in ((0.5, 0.5), (1.0, 1.0), (2.0, 2.0)):
        torch.manual_seed(0)
        image, labels = TrainingTransform(INPUT, scale=scale, distort=False)(*images[1])
        assert image.shape == (3, 32, 48) and labels.shape == (32, 48) and image.dtype == torch.float32
        beyond = labels[20:] if scale[0] == 0.5 else labels[:0]
        assert (beyond == VOID).all()
        known = labels != VOID
        # a red pixel is labelled red wherever it has gone
        red = (image[0] > 1) & (image[1] < -1) & known
        assert red.any() and (labels[red] == 1).float().mean() > 0.9


def test_classes_are_never_mixed_into_others():
    # between the first and the third class lies the second, which is nowhere
    labels = np.repeat(np.array([[0, 2, VOID]], np.uint8), 12, 1).repeat(24, 0)
    for seed in range(8):
        torch.manual_seed(seed)
        crop = TrainingTransform(INPUT, scale=(0.3, 1.7))(Image.new("RGB", (36, 24)), labels)[1]
        assert set(crop.unique().tolist()) <= {0, 2, VOID}


@pytest.mark.parametrize("short_side", [None, 48, 144])
@pytest.mark.parametrize("scale", [0.25, 1 / 3, 0.5, 0.75])
def test_labels_stay_on_what_they_name_where_scenes_are_resized(scale, short_side):
    """Bright squares with the labels of their pixels; those of the upper left corner were up to 0.4 px off."""
    settings = SceneInput((96, 96), short_side, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    change = TrainingTransform(settings, scale=(scale, scale), hflip=0, distort=False, most_of_one=1.0)
    generator, off = np.random.default_rng(0), []
    for _ in range(40):
        labels = np.zeros((96, 96), np.uint8)
        top, left = generator.integers(10, 50, 2)
        labels[top : top + 31, left : left + 31] = 1
        side = min(96, round((short_side or 96) * scale))
        image, mask = change(Image.fromarray(255 * labels.repeat(3).reshape(96, 96, 3)), labels)
        whole, named = image[0, :side, :side].double(), (mask[:side, :side] == 1).double()
        places = torch.arange(side).double()
        for axis in (0, 1):
            centres = [(one.sum(1 - axis) * places).sum() / one.sum() for one in (whole, named)]
            off.append(float(centres[1] - centres[0]))
    assert abs(np.mean(off)) < 0.07


def test_labels_that_count_from_zero_are_doubted(folder, tmp_path):
    def doubt(classes):
        return load_scenes(folder, split="train", num_classes=classes).counted_from_zero()

    (folder / "objectInfo.txt").unlink()
    assert doubt(3) is None
    assert "none of 6 maps of labels has 4, the last class, and 6 have 0, which is nothing: classes count" in doubt(4)
    (folder / "objectInfo.txt").write_text("0\tground\n1\tred\n2\tgreen\n3\tblue\n")
    assert doubt(None) is None  # as the file says it
    (folder / "objectInfo.txt").unlink()
    # as where a class is rare and nothing is left out
    for file in (folder / "annotations/training").iterdir():
        Image.fromarray(np.maximum(np.asarray(Image.open(file)), 1)).save(file)
    assert doubt(4) is None


def test_held_out_labels_are_looked_through(folder):
    load_scenes(folder, split="validation").check_labels()
    file = folder / "annotations/validation/1.png"
    values = np.asarray(Image.open(file)).copy()
    Image.fromarray(values[:20]).save(file)
    with pytest.raises(DataError, match=r"1\.png has 56×20 px, its image 56×40"):
        load_scenes(folder, split="validation").check_labels()
    (folder / "images/validation/1.png").write_bytes(b"no picture")
    load_scenes(folder, split="validation").check_labels()
    values[0, 0] = 9
    Image.fromarray(values).save(folder / "annotations/validation/2.png")
    with pytest.raises(DataError, match="has label 9, and there are 3 classes"):
        load_scenes(folder, split="validation").check_labels()


def test_colours_are_distorted_and_never_exchanged(folder):
    picture = Image.new("RGB", (48, 32), (200, 110, 30))
    labels = np.zeros((32, 48), np.uint8)
    settings = SceneInput((32, 48), None, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    transform = TrainingTransform(settings, scale=(1.0, 1.0), hflip=0.0)
    colours = []
    for seed in range(20):
        torch.manual_seed(seed)
        colours.append(transform(picture, labels)[0].mean((1, 2)))
    seen = torch.stack(colours)
    assert (seen[:, 0] > seen[:, 1]).all() and (seen[:, 1] > seen[:, 2]).all()
    assert (seen.amax(0) - seen.amin(0)).min() > 0.05


def test_what_is_filled_up_is_the_mean_of_the_images_for_the_network():
    settings = SceneInput((32, 48), None, (0.2, 0.5, 0.8), (0.25, 0.25, 0.25))
    transform = TrainingTransform(settings, scale=(1.0, 1.0), hflip=0.0, distort=False)
    image, labels = transform(Image.new("RGB", (20, 10), "white"), np.zeros((10, 20), np.uint8))
    # up to the rounding of bytes
    assert image[:, 10:].abs().max() < 0.01 and image[:, :, 20:].abs().max() < 0.01 and image[:, :10, :20].min() > 0.7
    assert (labels[:10, :20] == 0).all() and (labels == VOID).sum() == 32 * 48 - 200


def test_crops_are_not_all_of_one_class_where_others_are_near():
    labels = np.zeros((8, 32), np.uint8)
    labels[:, 16::2], labels[:, 17::2] = 1, 2
    settings = SceneInput((8, 8), None, INPUT.mean, INPUT.std)
    transform = TrainingTransform(settings, scale=(1.0, 1.0), distort=False, most_of_one=0.75)
    torch.manual_seed(0)
    for _ in range(20):
        crop = transform(Image.new("RGB", (32, 8)), labels)[1]
        assert crop.flatten().bincount().max() <= 0.75 * 64


def test_what_is_judged_is_resized_and_its_labels_are_not(folder):
    images = load_scenes(folder, split="validation")
    images.transform = SceneTransform(SceneInput((32, 48), 20, INPUT.mean, INPUT.std))
    image, labels = images[0]
    assert image.shape == (3, 20, 28) and labels.shape == (40, 56)


def test_a_broken_picture_is_left_out_and_counted(folder):
    (folder / "images/training/2.png").write_bytes(b"no picture")
    images = load_scenes(folder, split="train")
    assert images[2] is None and images.num_broken == 1 and images.broken_paths()[0].endswith("2.png")
    with pytest.raises(BrokenImageError, match=r"broken image .*2\.png"):
        load_scenes(folder, split="train", strict=True)[2]


def test_an_annotation_that_is_no_picture_is_said_in_words(folder):
    (folder / "annotations/training/0.png").write_text("x")
    with pytest.raises(DataError, match=r"0\.png can't be read: it is no picture of a kind that can be read$"):
        load_scenes(folder, split="train")[0]


def test_annotations_that_do_not_fit_are_said(folder):
    annotations = folder / "annotations/training"
    labels = np.full((40, 56), 4, np.uint8)
    labels[0] = VOID
    Image.fromarray(labels).save(annotations / "0.png")
    Image.fromarray(np.ones((20, 56), np.uint8)).save(annotations / "1.png")
    (annotations / "2.png").write_bytes(b"no picture")
    images = load_scenes(folder, split="train")
    for index, reason in enumerate(("has label 4, and there are 3 classes", "has 56×20 px, its image 56×40", "read")):
        with pytest.raises(DataError, match=reason):
            images[index]


def test_endings_in_upper_case_are_those_of_label_maps_too(folder):
    """Images were known by them, and each was said to have no annotation."""
    labels = load_scenes(folder, split="train").labels(0)
    for kind in ("images", "annotations"):
        for file in (folder / kind / "training").iterdir():
            file.rename(file.with_suffix(".PNG"))
    images = load_scenes(folder, split="train")
    assert len(images) == 6 and (images.labels(0, images[0][0].size) == labels).all()


def test_data_that_is_not_there_is_said(folder, tmp_path):
    with pytest.raises(SubquadError, match="there is no folder or archive"):
        load_scenes(tmp_path / "nowhere", split="train")
    (tmp_path / "data.zip").touch()
    with pytest.raises(SubquadError, match=r"zip is neither a folder nor an archive \(\.tar, .*: unpack it first"):
        load_scenes(tmp_path / "data.zip", split="train")
    with pytest.raises(SubquadError, match="has no images/testing: scenes lie in images/training"):
        load_scenes(folder, split="test")
    (folder / "annotations/validation/1.png").unlink()
    missing = r"1 of 3 images in .* have no annotation, the first: 1\.png; its labels .*annotations.*/1\.png"
    with pytest.raises(SubquadError, match=missing):
        load_scenes(folder, split="validation")
    with pytest.raises(SubquadError, match="names 3 classes, not 5"):
        load_scenes(folder, split="train", num_classes=5)
    (folder / "objectInfo.txt").unlink()
    with pytest.raises(SubquadError, match="has 300 classes, and labels of a byte tell 254 apart"):
        load_scenes(folder, split="train", num_classes=300)
    with pytest.raises(SubquadError, match=r"no objectInfo.txt with the names of classes: give --num-classes"):
        load_scenes(folder, split="train")
    assert load_scenes(folder, split="train", num_classes=3).classes == ("class 1", "class 2", "class 3")


def test_class_names_are_read_as_ade20k_writes_them(tmp_path):
    file = tmp_path / "objectInfo150.txt"
    rows = ["Idx\tRatio\tTrain\tVal\tStuff\tName", "1\t0.15\t11664\t1172\t1\twall, bulkhead"]
    file.write_text("\n".join([*rows, "2\t0.1\t6046\t612\t1\tsky"]))
    assert read_class_names(file) == (1, ["wall", "sky"])
    file.write_text("1\twall\n3\tsky\n")
    with pytest.raises(SubquadError, match="does not name classes 1, 2, 3, … or 0, 1, 2, …,"):
        read_class_names(file)


def test_class_names_tell_classes_apart(tmp_path):
    """The first name alone made two classes of one name of a road that is paved and one that is not."""
    file = tmp_path / "objectInfo.txt"
    file.write_text("1\troad, paved\n2\troad, unpaved\n3\tsky, air\n4\t, none\n")
    assert read_class_names(file) == (1, ["road, paved", "road, unpaved", "sky", ", none"])
    file.write_text("1\troad\n2\troad\n3\tsky\n")
    assert read_class_names(file) == (1, ["road (class 1)", "road (class 2)", "sky"])


def test_class_names_behind_a_mark_of_the_encoding_are_read(tmp_path):
    file = tmp_path / "objectInfo.txt"
    file.write_text("1\twall\n2\tsky\n", encoding="utf-8-sig")
    assert read_class_names(file) == (1, ["wall", "sky"])


def test_files_that_name_other_classes_are_said(folder):
    (folder / "objectInfo150.txt").write_text((folder / "objectInfo.txt").read_text())
    assert load_scenes(folder, split="train").classes == ("ground", "red", "green")
    (folder / "objectInfo150.txt").write_text("1\ta\n2\tb\n3\tc\n")
    with pytest.raises(SubquadError, match=r"objectInfo\.txt and objectInfo150\.txt beside it name other classes"):
        load_scenes(folder, split="train")


def test_scenes_in_folders_of_folders_are_seen(folder):
    (folder / "images/training/a b").mkdir()
    (folder / "annotations/training/a b").mkdir()
    labels = load_scenes(folder, split="train")[1][1]
    for kind in ("images", "annotations"):
        (folder / kind / "training/1.png").rename(folder / kind / "training/a b/1.png")
    images = load_scenes(folder, split="train")
    paths = [str(path.relative_to(folder / "images/training")) for path, _ in images.pairs]
    assert sorted(paths) == ["0.png", "2.png", "3.png", "4.png", "5.png", "a b/1.png"]
    assert (images[paths.index("a b/1.png")][1] == labels).all()
    (folder / "annotations/training/a b/1.png").unlink()
    with pytest.raises(SubquadError, match=r"1 of 6 images in .* have no annotation, the first: a b/1\.png"):
        load_scenes(folder, split="train")


def test_crops_of_nothing_but_void_are_drawn_again():
    """They counted as such in which no class has too much, and most updates learned nothing of sparse labels."""
    labels = np.full((200, 200), VOID, np.uint8)
    labels[90:110, 90:100], labels[90:110, 100:110] = 0, 1
    transform = TrainingTransform(SceneInput((64, 64), None, (0.5,) * 3, (0.2,) * 3), scale=(1.0, 1.0))
    torch.manual_seed(0)
    empty = [bool((transform(Image.new("RGB", (200, 200)), labels)[1] == VOID).all()) for _ in range(60)]
    assert sum(empty) < 15
