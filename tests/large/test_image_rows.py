"""Images by rows: every reader gives the pixels of the file, in any rows; what it can't read it says in one line."""

import numpy as np
import pytest
import torch
from PIL import Image

from subquad import SubquadError
from subquad.large import png_rows
from subquad.large.image_rows import ArrayRows, NormalisedRows, TensorRows, open_image

SHAPE = (61, 47, 3)
ROWS = [(0, 20), (20, 21), (21, 61), (19, 40), (0, 5)]


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)


def write_zarr(path, pixels):
    zarr = pytest.importorskip("zarr")
    array = zarr.open(str(path), mode="w", shape=pixels.shape, chunks=(16, 16, 3), dtype=pixels.dtype)
    array[:] = pixels


def write_tiff(path, pixels, **settings):
    pytest.importorskip("tifffile").imwrite(path, pixels, photometric="rgb", **settings)


WRITE = {
    "image.npy": np.save,
    "image.png": lambda path, pixels: Image.fromarray(pixels).save(path),
    "image.bmp": lambda path, pixels: Image.fromarray(pixels).save(path),
    "tiled.tif": lambda path, pixels: write_tiff(path, pixels, tile=(16, 32)),
    "deflated.tif": lambda path, pixels: write_tiff(path, pixels, tile=(16, 16), compression="zlib"),
    "strips.tiff": lambda path, pixels: write_tiff(path, pixels, rowsperstrip=7),
    "image.zarr": write_zarr,
}


@pytest.mark.parametrize("name", WRITE)
def test_rows_of_a_file_are_its_pixels(name, pixels, tmp_path):
    WRITE[name](tmp_path / name, pixels)
    image = open_image(tmp_path / name)
    assert image.shape == SHAPE[:2]
    for first, behind in ROWS:
        assert np.array_equal(image.read(first, behind)[..., :3], pixels[first:behind])


@pytest.mark.parametrize("mode", ["L", "P", "LA", "RGBA"])
def test_png_of_every_colour_type_are_what_pillow_reads(mode, pixels, tmp_path):
    path = tmp_path / "image.png"
    Image.fromarray(pixels).convert(mode).save(path)
    expected = np.asarray(Image.open(path).convert("RGB"))
    image = open_image(path)
    assert isinstance(image, png_rows.PngRows)
    for first, behind in ROWS:
        assert np.array_equal(image.read(first, behind), expected[first:behind])


def test_rows_are_inflated_in_pieces(pixels, tmp_path, monkeypatch):
    monkeypatch.setattr(png_rows, "PIECE", 100)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    assert np.array_equal(open_image(tmp_path / "image.png").read(3, 50), pixels[3:50])


def test_a_png_that_ends_early_is_one_line(pixels, tmp_path):
    path = tmp_path / "image.png"
    Image.fromarray(pixels).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SubquadError, match=r"image\.png is damaged") as refusal:
        open_image(path).read(0, 61)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["none.png", "text.npy", "text.tif", "text.svs", "text.jpg"])
def test_what_is_no_image_is_one_line(name, tmp_path):
    if name.startswith("text"):
        (tmp_path / name).write_text("no image")
    with pytest.raises(SubquadError, match=name.replace(".", r"\.")) as refusal:
        open_image(tmp_path / name)
    assert "\n" not in str(refusal.value)


def test_pixels_are_normalised_as_by_the_transform_of_evaluation(pixels):
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    expected = (torch.from_numpy(pixels).permute(2, 0, 1).double() / 255 - torch.tensor(mean)[:, None, None]) / (
        torch.tensor(std)[:, None, None]
    )
    rows = NormalisedRows(ArrayRows(pixels), mean, std, torch.float32).rows(5, 20)
    assert torch.allclose(rows[0].double(), expected[:, 5:20], atol=1e-6)
    sixteen = NormalisedRows(ArrayRows(pixels.astype(np.uint16) * 257), mean, std, torch.float32).rows(5, 20)
    assert torch.allclose(sixteen, rows, atol=1e-6)
    grey = NormalisedRows(ArrayRows(pixels[..., 0] / 255), mean, std, torch.float64).rows(0, 2)
    assert grey.shape == (1, 3, 2, 47) and torch.allclose(grey[0, 0], expected[0, :2], atol=1e-6)


@pytest.mark.parametrize("image", [torch.zeros(2, 3, 8, 8), torch.zeros(8, 8), torch.zeros(3, 8, 8, dtype=torch.uint8)])
def test_tensors_that_are_no_image_are_refused(image):
    with pytest.raises(SubquadError, match="one image at a time"):
        TensorRows(image, torch.float32)


def test_pixels_that_are_not_writable_are_taken_without_a_warning(pixels, recwarn):
    pixels = np.broadcast_to(pixels, pixels.shape)
    taken = NormalisedRows(ArrayRows(pixels), (0.5,) * 3, (0.25,) * 3, torch.float32).rows(0, 2)
    assert taken.shape[:2] == (1, 3) and not recwarn
