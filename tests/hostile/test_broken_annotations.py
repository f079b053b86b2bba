"""COCO's files with wrong entries: one line that names the file, or the same as without the mistake."""

import copy
import json

import numpy as np
import pytest
import torch
import worlds

from subquad import SubquadError
from subquad.tasks.detection.average_precision import judge_objects
from subquad.tasks.detection.coco_file import read_coco
from subquad.tasks.detection.object_data import load_objects
from subquad.tasks.detection.object_transforms import ObjectTransform

WRONG = [None, True, -1, 0, 1, 2, 2.5, 10, 1e999, 10**400, -(2**60), "", "3", "../x.png", "/etc/passwd", [], [1], {}]
WRONG += [[1, 2, 3], [1, 2, 3, 4, 5], ["1", "2", "3", "4"], [1, 2, None, 4], [1, 2, -3, 4], [[1, 2, 3]], [[]], {"a": 1}]
WRONG += [[[0, 0, 1e300, 0, 5, 5]], {"size": [48, 64], "counts": [1]}, {"size": [-1, 5], "counts": "x"}]
WRONG += [{"size": [48, 64], "counts": "zz"}, {"size": [10**9, 10**9], "counts": [5]}]


@pytest.fixture
def folder(tmp_path):
    return worlds.objects(tmp_path / "objects", counts=(2, 1))


@pytest.fixture
def file(folder):
    return folder / "annotations/instances_train2017.json"


def read_all(folder):
    """All that a training set has, in plain numbers."""
    images = load_objects(folder, split="train", masks=True)
    targets = [images[k][1] for k in range(len(images))]
    plain = [
        {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in target.items()}
        for target in targets
    ]
    return images.classes, [path.name for path in images.paths], plain, images.num_empty


def places(value, path=()):
    """The places of all values in nested lists and dicts."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def changed(content, path, change):
    """A copy with something else at a place."""
    content = copy.deepcopy(content)
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    change(parent, path[-1])
    return content


def is_harmless(path, wrong):
    """Whether a value is another right one: the outcome may be another, too."""
    kinds = {"name": str, "iscrowd": int, "area": (int, float), "supercategory": object}
    key = next((part for part in reversed(path) if isinstance(part, str)), "")
    if key in ("bbox", "segmentation") and isinstance(path[-1], int):
        return type(wrong) in (int, float) and abs(wrong) < 1000
    if key in ("width", "height"):
        return False
    if key == "segmentation" and path[-1] == key:
        return wrong in (None, [])
    if key == "id" and path[0] == "annotations":
        return type(wrong) is int
    if key in ("id", "category_id", "image_id"):
        return type(wrong) is int and abs(wrong) < 2**53
    return key in kinds and isinstance(wrong, kinds[key]) and wrong not in ("", -1)


def outcome(folder, file, text):
    """What is read, or None where it is one line that names the file."""
    file.write_text(text)
    try:
        return read_all(folder)
    except SubquadError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 400 + len(str(file)), message
        assert str(file) in message or "px" in message or "objects" in message, message
        return None


def walk(folder, file, chosen, step=1):
    content = json.loads(file.read_text())
    right = outcome(folder, file, json.dumps(content))
    assert right is not None
    said = 0
    for turn, path in enumerate(chosen(content)):
        for wrong in WRONG[turn % step :: step]:

            def put(parent, key, wrong=wrong):
                parent[key] = wrong

            found = outcome(folder, file, json.dumps(changed(content, path, put)))
            said += found is None
            assert found in (None, right) or is_harmless(path, wrong), (path, wrong)
        found = outcome(folder, file, json.dumps(changed(content, path, lambda parent, key: parent.pop(key))))
        optional = {"iscrowd", "area", "segmentation", "width", "height", "supercategory"}
        assert found in (None, right) or path[-1] in optional or isinstance(path[-1], int), path
    return said


def first_of_each(content):
    """One image, category and annotation, and all there is in them."""
    return [path for path in places(content) if len(path) < 2 or path[1] == 0]


def test_a_wrong_value_at_any_place_is_one_line_or_changes_nothing(folder, file):
    # one of each kind of place: of a polygon's numbers the first
    def chosen(content):
        return [path for path in first_of_each(content) if not (len(path) > 3 and path[-1] not in (0, 3))]

    # at each place other ones of the wrong values
    assert walk(folder, file, chosen, step=5) > 50


@pytest.mark.slow
def test_a_wrong_value_at_every_place_is_one_line_or_changes_nothing(folder, file):
    assert walk(folder, file, lambda content: list(places(content))) > 500


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not JSON"),
        ("[1, 2]", "is no object with images, annotations and categories"),
        ("3", "is no object with images"),
        ('{"images": [], "images": []}', "the key images stands twice"),
        ('{"images": [{"id": NaN}]}', "NaN is no number there"),
        ('{"images": [{"id": -Infinity}]}', "-Infinity is no number there"),
        ('{"images": 5, "annotations": [], "categories": {}}', "has no images and no categories"),
        ('{"images": [], "annotations": [], "categories": []}', "has no images"),
        ("[" * 200_000, "is nested too deeply"),
        ('{"a": ' * 200_000, "is nested too deeply"),
        ("1" * 5000, "is not JSON"),
    ],
)
def test_files_that_are_none_are_said(folder, file, text, reason):
    file.write_text(text)
    with pytest.raises(SubquadError, match=rf"^{file} [^\n]*{reason}[^\n]*$"):
        load_objects(folder, split="train")


def test_a_mark_of_its_encoding_is_passed_over(folder, file):
    file.write_text(file.read_text(), encoding="utf-8-sig")
    assert len(load_objects(folder, split="train"))


def test_a_file_that_is_no_text_is_said(folder, file):
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SubquadError, match=rf"^{file} is not JSON: [^\n]*$"):
        load_objects(folder, split="train")


CHANGES = [
    (lambda c: c["images"][1].update(id=10), r"images\[1\] has the id 10, which another"),
    (lambda c: c["annotations"][1].update(id=1), r"annotations\[1\] has the id 1, which another"),
    (lambda c: c["categories"][1].update(id=7), r"categories\[1\] has the id 7, which another"),
    (lambda c: c["annotations"][1].update(image_id=99), "annotation 2 has image 99, and the 2 images are 10, 11"),
    (lambda c: c["annotations"][1].update(category_id=4), "annotation 2 has category 4, and the 2 categories are 3, 7"),
    (lambda c: c["images"][0].update(file_name="../train2017/000000.png"), "file_name '../train2017/000000.png'"),
    (lambda c: c["images"][0].update(file_name="/etc/hostname"), "must be the name of a file in the folder"),
    (lambda c: c["images"][0].update(file_name="C:\\x.png"), "must be the name of a file in the folder"),
    (lambda c: c["images"][0].update(file_name="a\nb.png"), "must be the name of a file in the folder"),
    (lambda c: c["images"][0].update(file_name="x" * 300), "1 of 2 images that .* names are not in"),
    (lambda c: c["images"][1].update(file_name="./000000.png"), "images 10 and 11 are both '000000.png'"),
    (
        lambda c: c["annotations"][0].update(bbox=[1, 2, 3]),
        r"annotation 1 has bbox \[1, 2, 3\], which must be left, top",
    ),
    (
        lambda c: c["annotations"][0].update(segmentation=[[1, 2, 3, 4, 5, 6, 7]]),
        "must be polygons of 3 points or more",
    ),
    (lambda c: [one.update(bbox=[0, 0, 0, 0]) for one in c["annotations"]], "has no objects for its 2 images"),
    (lambda c: [one.update(iscrowd=1) for one in c["annotations"]], "has no objects but crowds for its 2 images"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_entries_that_do_not_fit_are_named(folder, file, change, reason):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(SubquadError, match=rf"^(?=.*{file})[^\n]*{reason}"):
        load_objects(folder, split="train")


def test_boxes_beside_their_image_are_counted_with_the_empty_ones(folder, file):
    content = json.loads(file.read_text())
    for annotation, box in zip(content["annotations"], ([70, 5, 9, 9], [1, 2, 0, 5], [60, 40, 9, 9]), strict=False):
        annotation["bbox"] = box
    file.write_text(json.dumps(content))
    images = load_objects(folder, split="train")
    assert images.num_empty == 2 and len(images.truth["annotations"]) == 2 and images[0][1]["boxes"].shape == (0, 4)
    assert images[1][1]["boxes"][0].tolist() == [60, 40, 64, 48]
    with pytest.raises(SubquadError, match=r"annotation 1 in .* has a box beside its image, \[70, 5, 9, 9\]"):
        load_objects(folder, split="train", strict=True)
    del content["images"][0]["width"], content["images"][0]["height"]
    file.write_text(json.dumps(content))
    assert load_objects(folder, split="train").truth == images.truth


def test_numbers_of_annotations_from_zero_on_are_judged_as_any_others():
    truth = {"info": {}, "images": [{"id": 5, "width": 64, "height": 64, "file_name": "a"}]}
    truth["categories"] = [{"id": 1, "name": "x"}]
    boxes = [[5, 5, 10, 10], [25, 5, 10, 10]]
    found = [{"image_id": 5, "category_id": 1, "bbox": box, "score": 0.9} for box in boxes]
    for numbers in ((1, 2), (0, 1), (-1, 7)):
        own = {"image_id": 5, "category_id": 1, "area": 100, "iscrowd": 0}
        truth["annotations"] = [own | {"id": k, "bbox": box} for k, box in zip(numbers, boxes, strict=True)]
        assert judge_objects(truth, found, masks=False).box["ap"] == pytest.approx(100), numbers


@pytest.mark.parametrize("number", [-5, 0, 2**52])
def test_images_of_any_number_are_judged_as_any_others(number):
    truth = {"info": {}, "images": [{"id": number + k, "width": 64, "height": 64, "file_name": "a"} for k in (1, 0)]}
    truth["categories"] = [{"id": 1, "name": "x"}]
    own = {"category_id": 1, "area": 100, "iscrowd": 0, "bbox": [5, 5, 10, 10]}
    truth["annotations"] = [own | {"id": k, "image_id": number + k} for k in (0, 1)]
    found = [{"image_id": number, "category_id": 1, "bbox": [5, 5, 10, 10], "score": 0.9}]
    assert judge_objects(truth, found, masks=False).box["ap"] == pytest.approx(100 * 51 / 101)
    with pytest.raises(SubquadError, match=f"found in image {number + 9}, which is none of the 2 images"):
        judge_objects(truth, [{**found[0], "image_id": number + 9}], masks=False)


@pytest.mark.parametrize("settings", [{"hflip": 1.0}, {"crop": 1.0}, {"hflip": 1.0, "crop": 1.0}])
def test_picture_boxes_and_masks_move_together(settings, tmp_path):
    folder = worlds.objects(tmp_path / "one", counts=(6, 1))
    file = folder / "annotations/instances_train2017.json"
    content = json.loads(file.read_text())
    # one object an image, which nothing covers
    content["annotations"] = [one for one in content["annotations"] if one["category_id"] == 7]
    file.write_text(json.dumps(content))
    images = load_objects(folder, split="train", masks=True)
    moved = 0
    for index in range(6):
        picture, target = images[index]
        for seed in range(3):
            torch.manual_seed(seed)
            image, after = ObjectTransform(**settings)(picture, target)
            green = torch.tensor(np.array(worlds.COLOURS["green"])) / 255
            shown = ((image - green[:, None, None]).abs().amax(0) < 1e-3).float()
            for box, mask in zip(after["boxes"].tolist(), after["masks"].float(), strict=True):
                # polygons of a box take a row and a column more or less than its pixels
                assert (mask - shown).abs().sum() <= shown.shape[0] + shown.shape[1]
                rows, columns = shown.any(1).nonzero()[:, 0], shown.any(0).nonzero()[:, 0]
                edges = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
                assert max(abs(float(a) - b) for a, b in zip(edges, box, strict=True)) <= 1e-3
                moved += box != target["boxes"][0].tolist()
    assert moved > 6


def test_further_keys_may_hold_anything(file):
    content = json.loads(file.read_text())
    content["annotations"][0] |= {"keypoints": [None], "attributes": {"x": [True]}}
    content["licenses"] = "none"
    file.write_text(json.dumps(content))
    assert len(read_coco(file).annotations) == 4
