"""Objects are read as COCO has them, and what is wrong with them is said in one line."""

import json

import numpy as np
import pytest
import torch
import worlds
from faster_coco_eval.core import mask as coding
from PIL import Image

from subquad import SubquadError
from subquad.data.dataset import BrokenImageError, DataError
from subquad.tasks.detection.average_precision import judge_objects
from subquad.tasks.detection.object_data import decode_mask, load_objects
from subquad.tasks.detection.object_transforms import ObjectTransform, as_lists


@pytest.fixture
def folder(tmp_path):
    return worlds.objects(tmp_path / "objects")


@pytest.fixture
def change(folder):
    """Change the training annotations."""
    file = folder / "annotations/instances_train2017.json"

    def changed(what):
        content = json.loads(file.read_text())
        what(content)
        file.write_text(json.dumps(content))

    return changed


def test_categories_with_gaps_are_numbered_from_one(folder):
    images = load_objects(folder, split="train", masks=True)
    picture, target = images[0]
    assert images.classes == ("red", "green") and len(images) == 6 and picture.size == (64, 48)
    assert target["labels"].tolist() == [1, 2] and target["image_id"] == 10
    assert target["boxes"].shape == (2, 4) and target["masks"].shape == (2, 48, 64)
    red = np.asarray(picture)[..., 0] == 200
    assert (target["masks"][0].bool().numpy() >= red).mean() > 0.99
    for box, mask in zip(target["boxes"].int().tolist(), target["masks"], strict=True):
        rows, places = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
        edges = [places[0], rows[0], places[-1] + 1, rows[-1] + 1]
        assert max(abs(int(a) - b) for a, b in zip(edges, box, strict=True)) <= 1


def test_a_flip_and_a_crop_move_boxes_and_masks_with_the_picture(folder):
    images = load_objects(folder, split="train", masks=True)
    for settings in ({"hflip": 1.0}, {"crop": 1.0}, {"hflip": 1.0, "crop": 1.0}):
        torch.manual_seed(1)
        image, target = ObjectTransform(**settings)(*images[2])
        assert image.shape[-2:] == target["masks"].shape[-2:] and image.min() >= 0 and image.max() <= 1
        for box, mask, label in zip(target["boxes"].round().int(), target["masks"], target["labels"], strict=True):
            left, top, right, bottom = box.tolist()
            assert mask[top:bottom, left:right].sum() >= 0.95 * mask.sum() > 0
            part = image[:, top:bottom, left:right].flatten(1).mean(1)
            assert part.argmax() == label - 1 or len(target["labels"]) > 1


def test_boxes_of_a_crop_are_those_of_what_is_left_of_their_objects(folder):
    images, counts = load_objects(folder, split="train", masks=True), set()
    for seed in range(30):
        torch.manual_seed(seed)
        image, left = ObjectTransform(crop=1.0)(*images[seed % 6])
        assert len(left["boxes"]) == len(left["labels"]) == len(left["masks"])
        counts.add(len(left["boxes"]))
        for box, mask in zip(left["boxes"].int().tolist(), left["masks"], strict=True):
            assert mask.shape == image.shape[-2:]
            rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
            edges = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            assert max(abs(int(a) - b) for a, b in zip(edges, box, strict=True)) <= 1
    # in some crops an object is lost with its label and its mask
    assert counts == {1, 2}


def by_hand(picture, target, crop, hflip):
    """What `ObjectTransform` makes of a picture, in plain indices."""
    image = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
    boxes, labels, masks = (target[name].clone() for name in ("boxes", "labels", "masks"))
    full = list(image.shape[-2:])
    if crop and torch.rand(()) < crop:
        size = [int(torch.randint(side // 2, side + 1, ())) for side in full]
        top, left = (int(torch.randint(side - part + 1, ())) for side, part in zip(full, size, strict=True))
        moved = boxes - torch.tensor([left, top, left, top])
        moved = moved.clamp(min=0).minimum(torch.tensor([size[1], size[0], size[1], size[0]]))
        kept = (moved[:, 2] - moved[:, 0] > 1) & (moved[:, 3] - moved[:, 1] > 1)
        if kept.any() or not len(kept):
            image, boxes, labels = image[:, top:, left:][:, : size[0], : size[1]], moved[kept], labels[kept]
            masks = masks[kept][:, top:, left:][:, : size[0], : size[1]]
    if hflip and torch.rand(()) < hflip:
        image, masks, width = image.flip(-1), masks.flip(-1), image.shape[-1]
        boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)
    return image, {"boxes": boxes, "labels": labels, "masks": masks}


@pytest.mark.parametrize(("crop", "hflip"), [(0.0, 1.0), (1.0, 0.0), (0.5, 0.5)])
def test_crops_and_flips_draw_the_same_numbers_and_move_as_they_do_by_hand(folder, crop, hflip):
    """Runs of before go on with the same images. Boxes end on pixels here, and some parts are one pixel wide."""
    images = load_objects(folder, split="train", masks=True)
    sizes = set()
    for seed in range(24):
        picture, target = images[seed % 6]
        target = target | {"boxes": target["boxes"].round()}
        torch.manual_seed(seed)
        image, after = ObjectTransform(crop=crop, hflip=hflip)(picture, target)
        next_number = torch.rand(())
        torch.manual_seed(seed)
        expected, objects = by_hand(picture, target, crop, hflip)
        torch.testing.assert_close(image, expected, rtol=0, atol=1e-6)
        assert next_number == torch.rand(())
        assert after["image_id"] == target["image_id"]
        for name, tensor in objects.items():
            assert torch.equal(after[name], tensor) and type(after[name]) is torch.Tensor, name
        sizes.add(len(after["boxes"]))
    assert sizes == ({2} if not crop else {1, 2})


@pytest.mark.parametrize("least", [1.0, 1.5])
def test_what_is_left_of_an_object_is_wider_and_higher_than_a_pixel(least):
    """Of one that reaches just into the crop, beside one that stays."""
    picture, kept = Image.new("RGB", (64, 64)), []
    for seed in range(40):
        torch.manual_seed(seed)
        boxes = torch.tensor([[24.0, 24.0, 40.0, 40.0], [0.0, 0.0, 5.0, 5.0]])
        torch.rand(())
        height, width = (int(torch.randint(32, 65, ())) for _ in range(2))
        top, left = (int(torch.randint(64 - part + 1, ())) for part in (height, width))
        boxes[1, 2:] = torch.tensor([left + least, top + 9.0])
        torch.manual_seed(seed)
        _, after = ObjectTransform(crop=1.0)(picture, {"boxes": boxes, "labels": torch.tensor([1, 2])})
        kept += [label for label in after["labels"].tolist() if label == 2 and left > 0]
    assert bool(kept) == (least > 1)


def test_images_without_objects_are_cropped_too():
    torch.manual_seed(0)
    target = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
    image, after = ObjectTransform(crop=1.0, hflip=1.0)(Image.new("RGB", (64, 64)), target)
    assert image.shape != (3, 64, 64) and after["boxes"].shape == (0, 4) and after["labels"].shape == (0,)


def test_a_crop_leaves_a_pixel_of_an_image_that_is_one_thin():
    """It could leave none, and training ended in a division by zero."""
    target = {"image_id": 1, "boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
    for seed in range(8):
        torch.manual_seed(seed)
        image, _ = ObjectTransform(crop=1.0)(Image.new("RGB", (9, 1)), target)
        assert image.shape[1] == 1 and 4 <= image.shape[2] <= 9


def test_no_crop_is_thinner_than_a_detector_takes():
    target = {"image_id": 1, "boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
    sides = set()
    for seed in range(16):
        torch.manual_seed(seed)
        image, _ = ObjectTransform(crop=1.0, long_side=96)(Image.new("RGB", (180, 2)), target)
        sides.add(image.shape[1:])
    assert len(sides) > 2 and all(96 * height >= width for height, width in sides)


def test_an_object_without_its_area_has_that_of_its_box(folder, change):
    change(lambda content: content["annotations"][0].pop("area"))
    first = load_objects(folder, split="train").truth["annotations"][0]
    assert first["area"] == first["bbox"][2] * first["bbox"][3]


def test_batches_keep_images_of_any_size_and_leave_out_broken_ones(folder):
    Image.new("RGB", (10, 10)).save(folder / "train2017/000001.png")
    (folder / "train2017/000002.png").write_bytes(b"no picture")
    images = load_objects(folder, split="train")
    images.transform = ObjectTransform()
    batch, targets = as_lists([images[0], images[2]])
    assert len(batch) == len(targets) == 1 and images.num_broken == 1
    with pytest.raises(DataError, match="has 10×10 px, its annotations are for 64×48"):
        images[1]
    with pytest.raises(BrokenImageError, match=r"broken image .*000002\.png"):
        load_objects(folder, split="train", strict=True)[2]


def test_empty_boxes_are_left_out_and_counted(folder, change):
    change(lambda content: content["annotations"][0].update(bbox=[3, 3, 0, 5]))
    images = load_objects(folder, split="train")
    assert images.num_empty == 1 and images[0][1]["labels"].tolist() == [2]
    with pytest.raises(SubquadError, match=r"annotation 1 in .* has an empty box \[3, 3, 0, 5\]"):
        load_objects(folder, split="train", strict=True)


def test_boxes_as_thin_as_rounding_are_empty(folder, change):
    """Flipped or resized, their edges fall together, at which a detector ended in the midst of training."""
    change(lambda content: content["annotations"][0].update(bbox=[0.0, 5.0, 1e-6, 3.0]))
    change(lambda content: content["annotations"][2].update(bbox=[3.0, 20.0, 5.0, 2e-6]))
    images = load_objects(folder, split="train")
    assert images.num_empty == 2
    with pytest.raises(SubquadError, match="has an empty box"):
        load_objects(folder, split="train", strict=True)


def test_boxes_that_are_kept_stay_boxes_whatever_is_done_to_them(folder, change):
    lefts = torch.linspace(0, 63.9, 2000, dtype=torch.float64).tolist()

    def thin(content):
        image, category = content["images"][0]["id"], content["categories"][0]["id"]
        content["annotations"] = [
            {"id": 1 + place, "image_id": image, "category_id": category, "bbox": [left, 5.0, wide, 30.0]}
            for place, (left, wide) in enumerate((left, wide) for left in lefts for wide in (3.2e-5, 4e-5))
        ]

    change(thin)
    images = load_objects(folder, split="train", max_images=1)
    picture, target = images[0]
    assert len(target["boxes"]) >= 2000
    for hflip in (0.0, 1.0):
        boxes = ObjectTransform(hflip=hflip)(picture, target)[1]["boxes"]
        for ratio in torch.rand(50) * 3 + 0.01:
            assert (boxes[:, 2] * ratio > boxes[:, 0] * ratio).all()


def test_crowds_are_not_trained_on(folder, change):
    change(lambda content: content["annotations"][1].update(iscrowd=1))
    images = load_objects(folder, split="train")
    assert images[0][1]["labels"].tolist() == [1] and len(images.truth["annotations"]) == 12


def test_masks_are_read_as_polygons_and_as_run_lengths_and_others_are_said(folder, change):
    counts = [0, 48 * 32, 48 * 32]
    change(lambda content: content["annotations"][0].update(segmentation={"size": [48, 64], "counts": counts}))
    masks = load_objects(folder, split="train", masks=True)[0][1]["masks"]
    assert masks[0, :, :32].all() and not masks[0, :, 32:].any()
    change(lambda content: content["annotations"][0].update(segmentation={"size": [40, 64], "counts": counts}))
    with pytest.raises(DataError, match="the mask of annotation 1 has 64×40 px, its image 64×48"):
        load_objects(folder, split="train", masks=True)[0]
    change(lambda content: content["annotations"][0].pop("segmentation"))
    with pytest.raises(DataError, match="annotation 1 has no mask: take a head without masks"):
        load_objects(folder, split="train", masks=True)[0]


BESIDE = [[100, 30, 120, 30, 120, 50, 100, 50]]


@pytest.mark.parametrize(
    "shape", [BESIDE, [[5.1, 5.1, 5.2, 5.1, 5.2, 5.2]], [[0, 0, 10, 10, 20, 20]], {"size": [48, 64], "counts": [3072]}]
)
def test_objects_without_a_pixel_of_their_mask_are_no_targets_and_counted(folder, change, shape):
    """A polygon beside its image was trained as an object of a mask of nothing, without a word."""
    change(lambda content: content["annotations"][0].update(segmentation=shape))
    images = load_objects(folder, split="train", masks=True)
    target = images[0][1]
    assert images.num_undrawn == 1 and target["labels"].tolist() == [2] and target["masks"].any((1, 2)).all()
    # which is no fault where boxes alone are trained
    assert load_objects(folder, split="train")[0][1]["labels"].tolist() == [1, 2]
    with pytest.raises(DataError, match=r"2017\.json: the mask of annotation 1 has no pixel in its image"):
        load_objects(folder, split="train", masks=True, strict=True)


def test_masks_that_reach_beyond_their_image_have_pixels(folder, change):
    change(lambda content: content["annotations"][0].update(segmentation=[*BESIDE, [50, 30, 90, 30, 90, 60, 50, 60]]))
    change(lambda content: content["annotations"][1].update(segmentation=[[5, 5, 9, 9, 9, 5, 5, 9]]))
    images = load_objects(folder, split="train", masks=True)
    assert images.num_undrawn == 0 and images[0][1]["labels"].tolist() == [1, 2]


@pytest.mark.parametrize("counts", [[100, 20], "T3d0", [100, 20, 3072], "abc"])
def test_run_lengths_that_do_not_fill_their_image_are_said_before_they_are_judged_by(folder, change, counts):
    """Judged by some that end early, the library went on for ever, where no Ctrl-C ends it."""
    change(lambda content: content["annotations"][0].update(segmentation={"size": [48, 64], "counts": counts}))
    images = load_objects(folder, split="train")
    with pytest.raises(DataError, match=r"2017\.json: the mask of annotation 1 can't be read: "):
        images.check_masks(crowds=True)
    with pytest.raises(DataError, match=r"2017\.json: the mask of annotation 1 can't be read: "):
        load_objects(folder, split="train", masks=True)


def test_categories_of_one_name_are_told_apart(folder, change):
    """As those of Roboflow's files, whose first is what the others are kinds of: both were called alike."""
    change(lambda content: content["categories"].append({"id": 0, "name": "red", "supercategory": "none"}))
    assert load_objects(folder, split="train").classes == ("red (category 0)", "red (category 3)", "green")


def test_sides_that_are_written_with_a_point_are_whole_numbers(folder, change):
    """As JSON of JavaScript or pandas has them: they were taken, and failed where masks were decoded or judged."""

    def pointed(content):
        for image in content["images"]:
            image.update(width=64.0, height=48.0)
        content["annotations"][0]["segmentation"] = {"size": [48.0, 64.0], "counts": [0, 48 * 32, 48 * 32]}

    change(pointed)
    images = load_objects(folder, split="train", masks=True)
    masks = images[0][1]["masks"]
    assert masks[0, :, :32].all() and not masks[0, :, 32:].any()
    assert judge_objects(images.truth, [], masks=True).mask["ap"] == 0


@pytest.mark.parametrize("shape", [None, []])
def test_an_object_without_a_mask_is_said_before_anything_is_trained_or_judged(folder, change, shape):
    """An empty mask would be judged as one that nobody finds."""
    change(lambda content: content["annotations"][-1].update(segmentation=shape))
    with pytest.raises(DataError, match=r"instances_train2017\.json: annotation 12 has no mask"):
        load_objects(folder, split="train", masks=True)
    change(lambda content: content["annotations"][-1].update(iscrowd=1))
    images = load_objects(folder, split="train", masks=True)
    with pytest.raises(DataError, match="annotation 12 has no mask: take a head without masks"):
        images.check_masks(crowds=True)
    load_objects(folder, split="validation", masks=True).check_masks(crowds=True)


def test_images_without_their_size_have_that_of_their_files(folder, change):
    named = load_objects(folder, split="train", masks=True)

    def drop(content):
        for image in content["images"]:
            image.pop("width")
        content["images"][0].pop("height")
        content["annotations"][0]["bbox"] = [500, 500, 10, 10]

    change(drop)
    images = load_objects(folder, split="train", masks=True)
    # beside the image, which is known without decoding it
    assert images.num_empty == 1 and images[0][1]["labels"].tolist() == [2]
    assert images.images == named.images and images.truth["images"] == named.truth["images"]
    # masks are judged by the sizes of their images
    found = [
        {"image_id": one["image_id"], "category_id": one["category_id"], "bbox": one["bbox"], "score": 1.0}
        | {"segmentation": coding.encode(np.asfortranarray(decode_mask(one, 48, 64)))}
        for one in images.truth["annotations"]
    ]
    assert judge_objects(images.truth, found, masks=True).mask["ap"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (
            lambda content: content["annotations"][0].update(category_id=5),
            "has category 5, and the 2 categories are 3, 7",
        ),
        (
            lambda content: content["images"][0].update(file_name="a.png"),
            r"1 of 6 images that .* names are not in .*a\.png",
        ),
        (
            lambda content: content["images"][0].update(file_name="train2017/000000.png"),
            r"are not in .*train2017: train2017/000000\.png",
        ),
        (lambda content: content.pop("categories"), "has no categories, as COCO's annotations have"),
    ],
)
def test_annotations_that_do_not_fit_together_are_said(folder, change, what, reason):
    change(what)
    with pytest.raises(SubquadError, match=reason):
        load_objects(folder, split="train")


def test_of_several_annotation_files_that_of_2017_is_read(folder):
    """That of 2014, or of a part, came first by its name."""
    annotations = folder / "annotations"
    content = json.loads((annotations / "instances_train2017.json").read_text())
    (annotations / "instances_train2014.json").write_text(json.dumps({**content, "images": []}))
    assert len(load_objects(folder, split="train")) == 6
    (annotations / "instances_train2017.json").rename(annotations / "instances_train.json")
    with pytest.raises(SubquadError, match=r"has instances_train\.json and instances_train2014\.json: which of them"):
        load_objects(folder, split="train")
    (annotations / "instances_train2014.json").unlink()
    (folder / "train2017").rename(folder / "train")
    assert len(load_objects(folder, split="train")) == 6


def test_data_that_is_not_there_is_said(folder, tmp_path):
    with pytest.raises(SubquadError, match="there is no folder or archive"):
        load_objects(tmp_path / "nowhere", split="train")
    (tmp_path / "data.zip").touch()
    with pytest.raises(SubquadError, match=r"zip is neither a folder nor an archive \(\.tar, .*: unpack it first"):
        load_objects(tmp_path / "data.zip", split="train")
    with pytest.raises(SubquadError, match=r"has no annotations/instances_test2017\.json"):
        load_objects(folder, split="test")
    (folder / "annotations/instances_train2017.json").write_text("{")
    with pytest.raises(SubquadError, match="is not JSON"):
        load_objects(folder, split="train")
    (folder / "val2017").rename(folder / "elsewhere")
    with pytest.raises(SubquadError, match="has no folder val2017 with the images"):
        load_objects(folder, split="validation")


def test_a_crop_keeps_no_object_without_a_pixel_of_its_mask():
    """Of an L its box was left where no part of it was, and masks learned to be empty there."""
    mask = torch.zeros(1, 40, 40, dtype=torch.uint8)
    mask[0, :3], mask[0, :, :3] = 1, 1
    target = {"image_id": 1, "boxes": torch.tensor([[0.0, 0, 40, 40]]), "labels": torch.tensor([1]), "masks": mask}
    for seed in range(40):
        torch.manual_seed(seed)
        _, left = ObjectTransform(crop=1.0)(Image.new("RGB", (40, 40)), target)
        assert len(left["boxes"]) == len(left["labels"]) == len(left["masks"]) == 1
        assert left["masks"].any()
