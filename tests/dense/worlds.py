"""Made-up scenes and objects: coloured boxes on a grey ground, in the layouts of ADE20K and COCO."""

import json

import numpy as np
from PIL import Image

COLOURS = {"red": (200, 40, 40), "green": (40, 180, 60)}


def boxes(rng, height, width):
    """Some boxes (class, left, top, width, height) that do not leave the picture."""
    found = []
    for k in range(2):
        w, h = rng.integers(width // 4, width // 2), rng.integers(height // 4, height // 2)
        found.append((k, int(rng.integers(width - w)), int(rng.integers(height - h)), int(w), int(h)))
    return found


def picture(rng, height, width, shapes):
    image = rng.integers(90, 130, (height, width, 3)).astype(np.uint8)
    for k, left, top, w, h in shapes:
        image[top : top + h, left : left + w] = list(COLOURS.values())[k]
    return image


def scenes(folder, counts=(6, 3), size=(40, 56), names=True):
    """A folder of scenes: nothing at the left edge, then ground (1), red (2) and green (3)."""
    rng = np.random.default_rng(0)
    for part, count in zip(("training", "validation"), counts, strict=True):
        for kind in ("images", "annotations"):
            (folder / kind / part).mkdir(parents=True)
        for number in range(count):
            shapes = boxes(rng, *size)
            labels = np.ones(size, np.uint8)
            for k, left, top, w, h in shapes:
                labels[top : top + h, left : left + w] = 2 + k
            labels[:, :2] = 0
            Image.fromarray(picture(rng, *size, shapes)).save(folder / "images" / part / f"{number}.png")
            Image.fromarray(labels).save(folder / "annotations" / part / f"{number}.png")
    if names:
        (folder / "objectInfo.txt").write_text("1\tground\n2\tred\n3\tgreen\n")
    return folder


def objects(folder, counts=(6, 3), size=(48, 64)):
    """A folder of images with red (category 3) and green (category 7) boxes, with polygons, run lengths and a crowd."""
    rng = np.random.default_rng(0)
    (folder / "annotations").mkdir(parents=True)
    for part, count in zip(("train", "val"), counts, strict=True):
        (folder / f"{part}2017").mkdir()
        images, annotations = [], []
        for number in range(count):
            shapes = boxes(rng, *size)
            name = f"{number:06}.png"
            Image.fromarray(picture(rng, *size, shapes)).save(folder / f"{part}2017" / name)
            images.append({"id": 10 + number, "file_name": name, "height": size[0], "width": size[1]})
            for k, left, top, w, h in shapes:
                polygon = [left, top, left + w, top, left + w, top + h, left, top + h]
                own = {"id": len(annotations) + 1, "image_id": 10 + number, "category_id": (3, 7)[k], "iscrowd": 0}
                annotations.append({**own, "bbox": [left, top, w, h], "area": w * h, "segmentation": [polygon]})
        categories = [{"id": 7, "name": "green"}, {"id": 3, "name": "red"}]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"instances_{part}2017.json").write_text(json.dumps(content))
    return folder
