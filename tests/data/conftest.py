"""Small trees of images, and a home for what is unpacked."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A $SUBQUAD_HOME of its own for every test."""
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def make_tree(tmp_path):
    """Writes a tree {"train/cat": 3, …} of images, each of another grey, and returns its root."""

    def make(counts: dict[str, int], name: str = "tree") -> Path:
        root = tmp_path / name
        root.mkdir(exist_ok=True)
        for folder, count in counts.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = np.full((10, 12, 3), 5 * i, np.uint8)
                Image.fromarray(pixels).save(root / folder / f"{i:02}.jpg")
        return root

    return make


@pytest.fixture
def break_image():
    """Cuts an image file short, within its pixels."""

    def cut(path: Path) -> Path:
        path.write_bytes(path.read_bytes()[:-40])
        return path

    return cut
