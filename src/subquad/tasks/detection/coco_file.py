"""COCO's annotation files, read strictly: what is not as it must be is said with its file, its entry and its value.

Lin et al. 2014, arXiv 1405.0312. Only what is used is looked at; further keys may hold anything.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

from subquad.errors import SubquadError, reason_without_path, shown

MOST_PIXELS = 1_000_000
"""What no coordinate of a picture comes near."""

Entry = dict[str, Any]


@dataclass(frozen=True)
class CocoFile:
    """The entries of a file, in the order of their numbers; all numbers differ, and those named elsewhere are there."""

    images: list[Entry]
    annotations: list[Entry]
    categories: list[Entry]


def read_coco(file: Path) -> CocoFile:
    """Read and check an annotation file.

    Raises:
        SubquadError: it is no JSON, or an entry is missing, of another kind, out of its range, or named twice.
    """
    content = _parsed(file)
    if not isinstance(content, dict):
        raise SubquadError(f"{file} is no object with images, annotations and categories, as COCO's annotations are")
    missing = [key for key in ("images", "annotations", "categories") if not isinstance(content.get(key), list)]
    if missing:
        raise SubquadError(f"{file} has no {' and no '.join(missing)}, as COCO's annotations have")
    for kind, single in (("images", "image"), ("categories", "category"), ("annotations", "annotation")):
        if not content[kind]:
            raise SubquadError(f"{file} has no {kind}")
        _check_entries(file, kind, single, content[kind])
    _check_names(file, content["images"])
    _check_references(file, content)
    _make_sides_whole(content)
    return CocoFile(*(sorted(content[kind], key=lambda entry: entry["id"]) for kind in CocoFile.__dataclass_fields__))


def _parsed(file: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> Entry:
        entry = dict(pairs)
        if len(entry) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)} stands twice in an entry")
        return entry

    def refused(literal: str) -> Any:
        raise ValueError(f"{literal} is no number there")

    try:
        # some editors and shells begin a file with a mark of its encoding
        return json.loads(file.read_text(encoding="utf-8-sig"), object_pairs_hook=unique, parse_constant=refused)
    except OSError as error:
        raise SubquadError(f"{file} can't be read: {reason_without_path(error)}") from None
    except RecursionError:
        raise SubquadError(f"{file} is not JSON of annotations: it is nested too deeply") from None
    except ValueError as error:
        raise SubquadError(f"{file} is not JSON: {reason_without_path(error)}") from None


def _is_number(value: Any) -> bool:
    # bool is an int of Python's, and 1e999 a float
    return type(value) in (int, float) and -MOST_PIXELS <= value <= MOST_PIXELS


def _is_side(value: Any) -> bool:
    return _is_number(value) and value >= 1 and value == int(value)


def _is_id(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**53


def _is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_is_number, value)) and min(value[2:]) >= 0


def _is_area(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_file_name(value: Any) -> bool:
    if not isinstance(value, str) or not value.strip() or any(ord(letter) < 32 for letter in value):
        return False
    path = PurePath(value)
    return not (path.is_absolute() or PureWindowsPath(value).is_absolute() or ".." in path.parts)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_crowd(value: Any) -> bool:
    return value in (0, 1) and type(value) in (int, bool)


def is_mask(value: Any) -> bool:
    """Whether a segmentation is nothing, polygons, or run lengths; whether these fit is seen where they are decoded."""
    if isinstance(value, dict):
        return _is_run_lengths(value)
    return value is None or (isinstance(value, list) and all(map(_is_polygon, value)))


def _is_polygon(value: Any) -> bool:
    # by types and extremes, which takes a hundredth of the time of looking at each number
    if not isinstance(value, list) or len(value) < 6 or len(value) % 2 or not set(map(type, value)) <= {int, float}:
        return False
    return _is_number(min(value)) and _is_number(max(value))


def _is_run_lengths(value: Entry) -> bool:
    size, counts = value.get("size"), value.get("counts")
    if not (isinstance(size, list) and len(size) == 2 and all(map(_is_side, size)) and size[0] * size[1] <= 10**9):
        return False
    if isinstance(counts, str):
        return bool(counts) and counts.isascii()
    return isinstance(counts, list) and set(map(type, counts)) <= {int} and min(counts, default=-1) >= 0


Check = tuple[Callable[[Any], bool], str]
_ID: Check = (_is_id, "a whole number, without quotes")
_SIDE: Check = (_is_side, "a number of pixels")
_NEEDED: dict[str, dict[str, Check]] = {
    "images": {"id": _ID, "file_name": (_is_file_name, "the name of a file in the folder of images")},
    "categories": {"id": _ID, "name": (_is_name, "a name")},
    "annotations": {
        "id": _ID,
        "image_id": _ID,
        "category_id": _ID,
        "bbox": (_is_box, "left, top, width and height in pixels"),
    },
}
"""What an entry must have, by what its value is seen to be right, and what that is in words."""

_POSSIBLE: dict[str, dict[str, Check]] = {
    "images": {"width": _SIDE, "height": _SIDE},
    "categories": {},
    "annotations": {
        "iscrowd": (_is_crowd, "0 or 1"),
        "area": (_is_area, "a number from 0 on"),
        "segmentation": (is_mask, "polygons of 3 points or more, or run lengths and their size"),
    },
}
"""What an entry may have."""


def _check_entries(file: Path, kind: str, single: str, entries: list[Any]) -> None:
    """Refuse entries with missing keys, wrong values, or a number that another has."""
    checks = [(key, *check, True) for key, check in _NEEDED[kind].items()]
    checks += [(key, *check, False) for key, check in _POSSIBLE[kind].items()]
    known: set[int] = set()
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise SubquadError(f"{file}: {kind}[{place}] is no entry but {shown(entry)}")
        for key, is_right, words, needed in checks:
            if key not in entry:
                if needed:
                    raise SubquadError(f"{file}: {_named(kind, single, place, entry)} has no {key}")
            elif not is_right(entry[key]):
                where = _named(kind, single, place, entry)
                raise SubquadError(f"{file}: {where} has {key} {shown(entry[key])}, which must be {words}")
        if entry["id"] in known:
            raise SubquadError(
                f"{file}: {kind}[{place}] has the id {entry['id']}, which another of its {kind} has, too"
            )
        known.add(entry["id"])


def _check_names(file: Path, images: list[Entry]) -> None:
    """Refuse images of the same file, whose objects would each miss those of the other."""
    known: dict[str, int] = {}
    for image in images:
        name = str(PurePath(image["file_name"]))
        if name in known:
            raise SubquadError(f"{file}: images {known[name]} and {image['id']} are both {shown(name)}")
        known[name] = image["id"]


def _check_references(file: Path, content: dict[str, list[Entry]]) -> None:
    """Refuse annotations of images and categories that are not there."""
    for key, kind, plural in (("image_id", "images", "images"), ("category_id", "categories", "categories")):
        known = {entry["id"] for entry in content[kind]}
        for annotation in content["annotations"]:
            if annotation[key] not in known:
                few = ", ".join(map(str, sorted(known)[:8])) + (", …" if len(known) > 8 else "")
                what = key.removesuffix("_id")
                raise SubquadError(
                    f"{file}: annotation {annotation['id']} has {what} {annotation[key]}, "
                    f"and the {len(known)} {plural} are {few}"
                )


def _make_sides_whole(content: dict[str, list[Entry]]) -> None:
    """Write 64.0 pixels as 64: what decodes and judges masks takes no other number."""
    for image in content["images"]:
        image |= {side: int(image[side]) for side in ("width", "height") if side in image}
    for annotation in content["annotations"]:
        if isinstance(shape := annotation.get("segmentation"), dict):
            shape["size"] = [int(side) for side in shape["size"]]


def _named(kind: str, single: str, place: int, entry: Entry) -> str:
    """An entry by its number, or by its place where it has none."""
    return f"{single} {entry['id']}" if _is_id(entry.get("id")) else f"{kind}[{place}]"
