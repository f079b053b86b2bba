"""Average precision is that of pycocotools, on made objects and findings of them."""

import contextlib
import io
import math

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from subquad import SubquadError
from subquad.tasks.detection.average_precision import MEASURES, as_coco, judge_objects

SIZE = 200


def made(seed, classes):
    """Objects of all sizes, some of them crowds, and findings that are near some of them."""
    rng = np.random.default_rng(seed)
    images = [{"id": k, "height": SIZE, "width": SIZE} for k in range(1, 9)]
    annotations, found = [], []
    for image in images:
        boxes, labels, scores, masks = [], [], [], []
        for _ in range(rng.integers(1, 7)):
            w, h = rng.integers(8, 120, 2)
            left, top = rng.integers(SIZE - w), rng.integers(SIZE - h)
            kind = int(rng.integers(1, classes + 1))
            polygon = [float(v) for v in (left, top, left + w, top, left + w, top + h, left, top + h)]
            own = {"id": len(annotations) + 1, "image_id": image["id"], "category_id": kind}
            own |= {"bbox": [int(left), int(top), int(w), int(h)], "area": float(w * h)}
            annotations.append({**own, "iscrowd": int(rng.random() < 0.1), "segmentation": [polygon]})
            for _ in range(rng.integers(0, 3)):
                exact = np.array([left, top, left + w, top + h])
                near = np.clip(exact + rng.normal(0, 0.15 * min(w, h), 4), 0, SIZE)
                mask = torch.zeros(1, SIZE, SIZE)
                x0, y0, x1, y1 = near.round().astype(int)
                if x1 <= x0 or y1 <= y0:
                    continue
                mask[:, y0:y1, x0:x1] = 1
                boxes.append(near), labels.append(kind), scores.append(rng.random()), masks.append(mask)
        one = {"boxes": torch.tensor(np.array(boxes)).reshape(-1, 4), "labels": torch.tensor(labels, dtype=torch.long)}
        stacked = torch.stack(masks) if masks else torch.zeros(0, 1, SIZE, SIZE)
        found += as_coco(image["id"], one | {"scores": torch.tensor(scores), "masks": stacked})
    categories = [{"id": k, "name": str(k)} for k in range(1, classes + 1)]
    for annotation in annotations:
        if annotation["iscrowd"]:
            annotation["segmentation"] = {"size": [SIZE, SIZE], "counts": counts_of(annotation["bbox"])}
    return {"info": {}, "images": images, "annotations": annotations, "categories": categories}, found


def counts_of(box):
    """Run lengths of a box, down the columns."""
    mask = np.zeros((SIZE, SIZE), int)
    mask[box[1] : box[1] + box[3], box[0] : box[0] + box[2]] = 1
    flat = mask.T.ravel()
    edges = np.flatnonzero(np.diff(flat)) + 1
    return [int(run) for run in np.diff([0, *edges, flat.size])]


def reference(truth, found, kind):
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        # with a box beside it, a mask would have the area of the box
        other = "bbox" if kind == "segm" else "segmentation"
        own = [{k: v for k, v in one.items() if k != other} for one in found]
        judge = COCOeval(coco, coco.loadRes(own), kind)
        judge.evaluate(), judge.accumulate(), judge.summarize()
    return [float(value) for value in judge.stats[:6]]


@pytest.mark.parametrize(("seed", "classes"), [(0, 1), (1, 3), (2, 5)])
def test_the_numbers_are_those_of_pycocotools(seed, classes):
    truth, found = made(seed, classes)
    result = judge_objects(truth, found, masks=True)
    for values, kind in ((result.box, "bbox"), (result.mask, "segm")):
        expected = [math.nan if value < 0 else 100 * value for value in reference(truth, found, kind)]
        assert list(values) == list(MEASURES)
        assert list(values.values()) == pytest.approx(expected, abs=1e-6, nan_ok=True)
    assert np.nanmean(result.classes) == pytest.approx(result.box["ap"], abs=1e-6)


def test_masks_are_small_or_large_by_their_own_area():
    """They were by their boxes': what is found beside objects of their size was not held against them."""

    def ring(left):
        mask = torch.zeros(1, SIZE, SIZE)
        mask[:, 20:80, left : left + 60] = 1
        mask[:, 22:78, left + 2 : left + 58] = 0
        return mask

    # a ring of 464 pixels in a box of 3,600
    corners = torch.tensor([[20.0, 20, 80, 80], [120, 20, 180, 80]])
    entries = as_coco(
        1,
        {
            "boxes": corners,
            "labels": torch.tensor([1, 1]),
            "scores": torch.tensor([0.5, 0.9]),
            "masks": torch.stack([ring(20), ring(120)]),
        },
    )
    mask = entries[0]["segmentation"]
    one = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [20, 20, 60, 60], "area": 464.0, "iscrowd": 0}
    images, categories = [{"id": 1, "height": SIZE, "width": SIZE}], [{"id": 1, "name": "ring"}]
    truth = {"info": {}, "images": images, "annotations": [one | {"segmentation": mask}], "categories": categories}
    result = judge_objects(truth, entries, masks=True)
    assert result.mask["ap"] == pytest.approx(50) and result.mask["ap_small"] == pytest.approx(50)


def test_nothing_found_is_zero_and_nothing_to_find_is_said():
    truth, found = made(0, 2)
    result = judge_objects(truth, [], masks=True)
    assert set(result.box.values()) == set(result.mask.values()) == {0.0}
    with pytest.raises(SubquadError, match="no objects to evaluate"):
        judge_objects(truth | {"annotations": []}, found, masks=False)


@pytest.mark.parametrize("masks", [False, True])
def test_what_is_not_there_has_no_precision_whether_anything_is_found_or_not(masks):
    truth, found = made(0, 2)
    small = {**truth, "annotations": [one for one in truth["annotations"] if one["area"] < 96**2]}
    crowds = {**truth, "annotations": [one | {"iscrowd": 1} for one in truth["annotations"] if one["iscrowd"]]}
    for objects in (small, crowds):
        unknown = [
            {name for name, value in judge_objects(objects, given, masks=masks).box.items() if np.isnan(value)}
            for given in ([], found)
        ]
        assert unknown[0] == unknown[1] and "ap_large" in unknown[0]
