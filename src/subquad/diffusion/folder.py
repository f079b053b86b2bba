"""A folder of images that a pipeline made: each is there, with a row on it, once it is made, and none is made twice."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from subquad.data.decoding import BrokenImageError, read_named_image
from subquad.errors import SubquadError, shown
from subquad.holding import LOCK
from subquad.writing import json_text, replacing, write_json, write_text

SAID_LATER = ("weights",)
"""Settings that folders of earlier versions do not name."""


@dataclass(frozen=True)
class ImageRow:
    """One image.

    Attributes:
        file: its name in the folder.
        seconds: from the prompt to the picture.
        psnr: how near it is to the first method's image of the same noise, in decibels; None for that one, and where
            there is none or both are equal.
        difference: the mean absolute difference of a colour, which goes from 0 to 255.
    """

    prompt: str
    seed: int
    method: str
    file: str
    seconds: float
    psnr: float | None = None
    difference: float | None = None


class ImageFolder:
    """The images, images.jsonl with a row on each, and settings.json with what they were made by.

    Raises:
        SubquadError: the folder has images of other settings, or something else.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, json.loads(json_text(settings))
        self.rows: list[ImageRow] = []
        self.peaks: dict[str, float] = {}
        check_folder(folder)
        if (folder / "settings.json").exists():
            self._go_on()

    def _go_on(self) -> None:
        theirs = self._theirs()
        self.rows = [row for row in self._whole_rows() if (self.folder / row.file).is_file()]
        # folders of earlier versions do not say these
        known = {key: theirs.get(key, value if key in SAID_LATER else None) for key, value in self.settings.items()}
        other = [key for key in {**theirs, **known} if {**theirs, **known}.get(key) != self.settings.get(key)]
        if other and self.rows:
            raise SubquadError(f"{self.folder} has images of other {' and '.join(other)}: name another --output")
        if other:
            # broken off before its first image
            self.peaks = {}

    def _theirs(self) -> dict[str, Any]:
        file = self.folder / "settings.json"
        try:
            theirs = json.loads(file.read_text(encoding="utf-8"))
            self.peaks = {name: float(peak) for name, peak in theirs.pop("peaks_mb").items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SubquadError(f"{file} is damaged ({_words(error)}): name another --output") from None
        return theirs

    def _whole_rows(self) -> list[ImageRow]:
        file = self.folder / "images.jsonl"
        if not file.exists():
            return []
        try:
            # not splitlines, which also divides where a prompt has a line end of Unicode's, U+2028 or U+0085
            lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
            return [_row_of(json.loads(line)) for line in lines if line]
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise SubquadError(f"{file} is damaged ({_words(error)}): name another --output") from None

    def find(self, prompt: str, seed: int, method: str) -> ImageRow | None:
        """The row of an image that was made before."""
        return next((row for row in self.rows if (row.prompt, row.seed, row.method) == (prompt, seed, method)), None)

    def image(self, row: ImageRow) -> Image.Image:
        """As it was written.

        Raises:
            SubquadError: it is no picture any more.
        """
        try:
            return read_named_image(self.folder / row.file)
        except BrokenImageError as error:
            raise SubquadError(f"{error}; where it is removed it is made again") from None

    def add(self, image: Image.Image, first: Image.Image | None, row: ImageRow) -> ImageRow:
        """Write an image and its row, which gets a file's name and how far it is from `first`."""
        numbers = {row.prompt: int(row.file.split("-")[0]) for row in self.rows}
        number = numbers.get(row.prompt, max(numbers.values(), default=-1) + 1)
        done = asdict(row) | {"file": f"{number:03}-{row.seed}-{row.method}.png"}
        done |= {} if first is None else difference_of(image, first)
        self._write_settings()
        with replacing(self.folder / done["file"]) as aside:
            image.save(aside, "PNG")
        self.rows.append(ImageRow(**done))
        write_text(self.folder / "images.jsonl", "".join(json_text(asdict(row)) + "\n" for row in self.rows))
        return self.rows[-1]

    def keep_peak(self, method: str, peak_mb: float) -> None:
        """Keep what was measured once."""
        self.peaks[method] = peak_mb
        self._write_settings()

    def _write_settings(self) -> None:
        write_json(self.folder / "settings.json", {**self.settings, "peaks_mb": self.peaks}, indent=2)


def check_folder(folder: Path) -> None:
    """Raise where a folder has something else in it."""
    is_ours = (folder / "settings.json").exists()
    if not is_ours and folder.is_dir() and any(entry.name != LOCK for entry in folder.iterdir()):
        raise SubquadError(f"{folder} is not empty, and no folder of `subquad diffuse`: name another --output")


def _row_of(content: Any) -> ImageRow:
    """A row that was written before.

    Raises:
        ValueError or TypeError: it is none.
    """
    row = ImageRow(**content)
    texts, numbers = (row.prompt, row.method, row.file), (row.seed, row.seconds)
    measured = [value for value in (row.psnr, row.difference) if value is not None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"a text is none in {shown(content)}")
    if not all(isinstance(number, int | float) for number in (*numbers, *measured)) or not row.seconds > 0:
        raise ValueError(f"a number is none in {shown(content)}")
    # numbers of prompts follow from the names of files
    if int(row.file.split("-")[0]) < 0 or Path(row.file).name != row.file:
        raise ValueError(f"no name of an image: {shown(row.file)}")
    return row


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:100]


def check_sizes(image: Image.Image, other: Image.Image) -> None:
    """Raise where two images of the same noise are not of one size, as where one was replaced."""
    if image.size != other.size:
        one, two = (f"{each.width}×{each.height}" for each in (image, other))
        raise SubquadError(
            f"images of the same noise are {one} and {two} px, which don't compare: where files that something else "
            "wrote are removed they are made again"
        )


def difference_of(image: Image.Image, other: Image.Image) -> dict[str, float | None]:
    """Peak signal to noise in decibels, None where both are equal, and the mean absolute difference of a colour."""
    check_sizes(image, other)
    a, b = (np.asarray(each.convert("RGB"), dtype=np.float64) for each in (image, other))
    error = float(np.mean((a - b) ** 2))
    return {"psnr": 10 * float(np.log10(255**2 / error)) if error else None, "difference": float(np.mean(abs(a - b)))}
