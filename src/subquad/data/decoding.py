"""From a file to a picture in RGB, or to the numbers of a label map: every image of the library is decoded here.

Pixels are taken as they are stored, as timm, torchvision and COCO's annotations take them: an orientation in EXIF is
not applied, transparency is left out, and of an animation the first picture is shown. Of a TIFF with several pictures
the largest is taken, as where it is streamed (large/tiff_rows.py), and a stack of equal ones is refused.
"""

import io
import itertools
import re
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from subquad.errors import SubquadError, reason_without_path

# Pillow's remarks about odd headers would stand between our own lines
warnings.filterwarnings("ignore", module=r"PIL\.")

_FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "AVIF": (".avif",),
    "JPEG2000": (".jp2", ".j2k", ".jpx"),
    "MPO": (".mpo",),
}
"""What is decoded, with the endings of its files: others run programs (EPS), or are no photographs."""

_NOT_DECODED = (".heic", ".heif")
"""Photographs that Pillow does not decode: they are named as broken, and not passed over as what is no image."""

IMAGE_ENDINGS = (*(ending for endings in _FORMATS.values() for ending in endings), *_NOT_DECODED)
"""Of the files in a folder, those with one of these endings are its images, upper case or lower."""

_MOST_ASPECT = 200
"""The longer side over the shorter: beyond it, a picture resized by its shorter side does not fit into memory."""

_LABEL_MODES = frozenset({"1", "L", "P", "I", "I;16", "I;16L", "I;16B"})
"""Pillow's modes of images whose pixels are whole numbers and no colours."""

_STRETCHED = {stored + end: 255 // most for stored, most in (("L;2", 3), ("L;4", 15)) for end in ("", "I")}
"""By what Pillow multiplies grey levels of fewer than 8 bits, so that the highest is white, by what it decodes."""

_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
"""TIFF's tags of how its numbers are stored, and what they mean."""

_WHITE_IS_ZERO, _SIGNED = 0, 2
"""What the last two of these may say."""

_HEAD_OF_JPEG2000 = 2**16
"""Bytes of a file within which its colours are described, but for colour profiles that are larger."""

_ORIENTATION = 0x0112
"""EXIF's tag of how a picture is to be turned before it is shown."""

_TURNED_BACK = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""What undoes an orientation."""


class DataError(SubquadError):
    """Data that is not as it must be; its message is one line."""

    def __init__(self, message: str):
        lines = message.strip().splitlines() or [""]
        if lines[0].startswith("Caught "):
            # a loader process hands its errors over inside a traceback: the message is its last line
            lines = [re.sub(r"^[\w.]+Error: ", "", lines[-1])]
        super().__init__(" ".join(lines))


class BrokenImageError(DataError):
    """An image that can't be read.

    Attributes:
        missing: the file, where it is not there.
    """

    missing: str | None = None


def read_image(file: Path | BinaryIO | Image.Image) -> Image.Image:
    """Decode a picture to its end, in RGB of 8 bits.

    Grey levels of 16 bits and floats from 0 to 1 are brought to 8 bits; numbers without a known range are refused.

    Raises:
        BrokenImageError: if it can't be.
    """
    try:
        if isinstance(file, Image.Image):
            return _as_rgb(file)
        with _opened_picture(file) as image:
            _check_size(image)
            return _as_rgb(image)
    except Exception as error:
        # of a damaged or hostile file Pillow raises anything, down to MemoryError
        broken = BrokenImageError(_reason(error))
        if isinstance(error, FileNotFoundError):
            broken.missing = str(error.filename)
        raise broken from None


def read_named_image(path: Path) -> Image.Image:
    """Decode a picture as `read_image` does; the error names its file."""
    try:
        return read_image(path)
    except BrokenImageError as error:
        raise BrokenImageError(f"broken image {path}: {error}") from None


def size_in_header(path: Path) -> tuple[int, int]:
    """Width and height of a picture of whatever size, which is not decoded.

    Raises:
        BrokenImageError: it is no picture, with its name.
    """
    limit = Image.MAX_IMAGE_PIXELS
    try:
        # how much may be decoded is for the caller to say
        Image.MAX_IMAGE_PIXELS = None
        with _opened_picture(path) as image:
            # of a TIFF with an orientation Pillow says the sides that the turned picture has
            return (image.tag_v2[256], image.tag_v2[257]) if isinstance(image, TiffImageFile) else image.size
    except Exception as error:
        raise BrokenImageError(f"broken image {path}: {_reason(error)}") from None
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def decode_png(content: bytes) -> Image.Image:
    """A PNG in memory, in the mode that it has.

    Raises:
        BrokenImageError: it can't be decoded to its end.
    """
    try:
        image = Image.open(io.BytesIO(content), formats=("PNG",))
        image.load()
    except Exception as error:
        raise BrokenImageError(reason_without_path(error)) from None
    return image


def read_label_map(path: Path) -> NDArray[Any]:
    """Decode a map of class numbers (height, width), of whole numbers as they are stored.

    Raises:
        DataError: it can't be read, or holds colours or fractions.
    """
    try:
        with _opened_picture(path) as image:
            _check_size(image)
            if image.mode not in _LABEL_MODES:
                raise SubquadError(f"its pixels are of mode {image.mode}, class numbers are of L, P, I;16 or 1")
            if image.format in ("JPEG", "MPO"):
                raise SubquadError("it is a JPEG, whose compression changes class numbers: write it as PNG")
            # Pillow shows white as zero by turning numbers round, those of up to 8 bits
            factor, is_turned = _stretched_by(image), _has_white_as_zero(image) and image.mode in ("1", "L")
            values = np.asarray(_as_stored(image))
            if is_turned:
                values = ~values if values.dtype == bool else 255 - values
            values = values // factor if factor > 1 else values
    except Exception as error:
        raise DataError(f"annotation {path} can't be read: {_reason(error)}") from None
    return values.astype(np.uint8) if values.dtype == bool else values


def _reason(error: Exception) -> str:
    """What is wrong with a file, in words: Pillow shows an open file as Python writes it."""
    if isinstance(error, UnidentifiedImageError):
        return "it is no picture of a kind that can be read"
    return reason_without_path(error)


def _stretched_by(image: Image.Image) -> int:
    """By what the numbers of an image are multiplied when it is decoded, which it must not be yet."""
    # the fourth of a tile is its decoder's arguments, of which the first or only one is how numbers are stored
    arguments = [tile[3] if isinstance(tile[3], tuple) else (tile[3],) for tile in getattr(image, "tile", ())]
    return max((_STRETCHED.get(stored, 1) for stored, *_ in arguments), default=1)


def _opened(file: Path | str | BinaryIO) -> BinaryIO:
    file = Path(file) if isinstance(file, str) else file
    if not isinstance(file, Path):
        return file
    # to open a pipe or a terminal would wait for ever
    if not stat.S_ISREG(file.stat().st_mode):
        raise BrokenImageError("it is no regular file")
    return file.open("rb")


@lru_cache
def _formats() -> tuple[str, ...]:
    """Those of `_FORMATS` that this Pillow has."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _check_size(image: Image.Image) -> None:
    """Refuse pictures that are none; Pillow itself refuses those of more than 179 million pixels."""
    width, height = image.size
    if min(width, height) < 1:
        raise BrokenImageError(f"it has {width}×{height} pixels")
    if max(width, height) > _MOST_ASPECT * min(width, height):
        raise BrokenImageError(f"it has {width}×{height} pixels, more than {_MOST_ASPECT} to 1")


@contextmanager
def _opened_picture(file: Path | BinaryIO) -> Iterator[Image.Image]:
    """An image that is not decoded yet: of a TIFF with several, as with a thumbnail, the largest."""
    with _opened(file) as stream, Image.open(stream, formats=_formats()) as image:
        if not (isinstance(image, TiffImageFile) and image.is_animated):
            yield image
            return
        page = _largest_page(image)
        assert image.fp is not None
        # anew: a page that is damaged leaves Pillow's image damaged
        with Image.open(image.fp, formats=("TIFF",)) as again:
            again.seek(page)
            yield again


def _largest_page(image: TiffImageFile) -> int:
    """The place of the largest of a TIFF's pictures.

    Raises:
        BrokenImageError: which is meant is not known, as several are as large and of one kind.
    """
    kinds = list(_pages(image))
    largest = max(kinds, key=lambda kind: kind[0] * kind[1])
    if (count := kinds.count(largest)) > 1:
        raise BrokenImageError(
            f"it is a stack of {count} pictures of {largest[0]}×{largest[1]} px: write the one that is meant as a "
            "file of its own"
        )
    return kinds.index(largest)


def _pages(image: TiffImageFile) -> Iterator[tuple[int, int, str]]:
    """Width, height and mode of the pictures of a TIFF, up to where the chain of them ends or is damaged."""
    for page in itertools.count():
        try:
            image.seek(page)
        except Exception:
            # Pillow says that it ends by an EOFError, and that it is damaged by anything
            return
        yield (*image.size, image.mode)


def _as_stored(image: Image.Image) -> Image.Image:
    """An image as it lies in its file: where Pillow turned it as an orientation said, which it does of TIFF, back."""
    said = image.getexif().get(_ORIENTATION) if isinstance(image, TiffImageFile) else None
    image.load()
    # an orientation that Pillow has applied it takes away
    if said in _TURNED_BACK and _ORIENTATION not in image.getexif():
        return image.transpose(_TURNED_BACK[said])
    return image


def _said_by_tiff(image: Image.Image, tag: int) -> Any:
    """What a TIFF says of its numbers by a tag, of the first channel; None where it says nothing, or is none."""
    said = image.tag_v2.get(tag) if isinstance(image, TiffImageFile) else None
    return said[0] if isinstance(said, tuple) and said else said


def _has_white_as_zero(image: Image.Image) -> bool:
    return _said_by_tiff(image, _PHOTOMETRIC) == _WHITE_IS_ZERO


def _as_rgb(image: Image.Image) -> Image.Image:
    if _said_by_tiff(image, _SAMPLE_FORMAT) == _SIGNED:
        raise BrokenImageError("its numbers have a sign, so that their range is not known: write them without")
    if (bits := _bits_of_jpeg2000(image)) > 8 and image.mode in ("RGB", "RGBA"):
        raise BrokenImageError(
            f"it is a JPEG 2000 of {bits} bits a colour, whose white Pillow makes black: write 8 bits"
        )
    most, is_turned = 2 ** (_said_by_tiff(image, _BITS) or 16) - 1, _has_white_as_zero(image)
    image, kind = _as_stored(image), image.format
    mode = image.mode
    if mode == "F" or mode.startswith("I"):
        values = _eight_bits(image, kind, most)
        return Image.fromarray(255 - values if is_turned else values).convert("RGB")
    if mode == "P" and isinstance(image.info.get("transparency"), bytes):
        # Pillow warns of a shorter way
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def _bits_of_jpeg2000(image: Image.Image) -> int:
    """Of the first colour of such a file, which is not decoded yet; 0 of others."""
    if image.format != "JPEG2000" or (file := getattr(image, "fp", None)) is None:
        return 0
    place = file.tell()
    file.seek(0)
    head = file.read(_HEAD_OF_JPEG2000)
    file.seek(place)
    sizes = head.find(b"\xff\x4f\xff\x51")
    # what holds it: two markers, a length, a profile, eight numbers of four bytes, the count of colours
    depth = sizes + 2 + 2 + 2 + 2 + 8 * 4 + 2
    return (head[depth] & 0x7F) + 1 if sizes >= 0 and depth < len(head) else 0


def _eight_bits(image: Image.Image, kind: str | None, most: int) -> NDArray[np.uint8]:
    """Grey levels up to `most`, or from 0 to 1, of a file of this kind, as those from 0 to 255."""
    values = np.asarray(image)
    if image.mode == "F":
        lowest, highest = float(values.min()), float(values.max())
        if not (lowest >= 0 and highest <= 1):
            raise BrokenImageError(f"floats must go from 0 to 1, and go from {lowest:g} to {highest:g}")
        return np.rint(values * 255).astype(np.uint8)
    # in mode I Pillow gives 16 bits of PNG and PGM, and whatever there is of other formats
    if image.mode == "I" and kind not in ("PNG", "PPM"):
        raise BrokenImageError("it has grey levels of 32 bits, whose range is not known: write them with 8 or 16")
    return ((values.astype(np.uint32) * 255 + most // 2) // most).astype(np.uint8)
