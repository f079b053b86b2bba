"""Images by rows: every reader gives the pixels of the file, in any rows; what it can't read it says in one line."""

from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from subquad import SubquadError, create_model, stream
from subquad.data.decoding import BrokenImageError, read_image, read_label_map, read_named_image, size_in_header
from subquad.large import png_rows
from subquad.large.array_rows import ArrayRows
from subquad.large.image_rows import NormalisedRows, TensorRows, open_image
from subquad.large.kept_bands import MOST_WHOLE, KeptBands

SHAPE = (61, 47, 3)
ROWS = [(0, 20), (20, 21), (21, 61), (19, 40), (0, 5), (10, 50), (20, 30), (25, 40), (45, 60)]


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)


def write_zarr(path, pixels):
    zarr = pytest.importorskip("zarr")
    array = zarr.open(str(path), mode="w", shape=pixels.shape, chunks=(16, 16, 3), dtype=pixels.dtype)
    array[:] = pixels


def write_tiff(path, pixels, **settings):
    pytest.importorskip("tifffile").imwrite(path, pixels, **{"photometric": "rgb"} | settings)


def write_colours_apart(path, pixels, **settings):
    write_tiff(path, np.ascontiguousarray(pixels.transpose(2, 0, 1)), planarconfig="separate", **settings)


def write_pyramid(path, pixels, thumbnail_first=False):
    levels = [pixels[::4, ::4], pixels] if thumbnail_first else [pixels, pixels[::2, ::2]]
    with pytest.importorskip("tifffile").TiffWriter(path) as file:
        for level in levels:
            file.write(level, photometric="rgb", tile=(16, 16), subfiletype=len(level) < len(pixels))


def write_sub_pictures(path, pixels):
    with pytest.importorskip("tifffile").TiffWriter(path) as file:
        file.write(pixels, subifds=1, photometric="rgb", tile=(16, 16))
        file.write(pixels[::2, ::2], subfiletype=1, photometric="rgb", tile=(16, 16))


def add_array(group, name, **settings):
    add = group.create_array if hasattr(group, "create_array") else group.create_dataset
    add(name, **settings)


def zarr_format(zarr):
    return "zarr_format" if zarr.__version__ >= "3" else "zarr_version"


def write_ome_zarr(path, pixels, version, axes):
    zarr = pytest.importorskip("zarr")
    if version == 3 and zarr.__version__ < "3":
        pytest.skip("an earlier zarr, that of Python 3.10, knows no format 3")
    group = zarr.open_group(str(path), mode="w", **{zarr_format(zarr): version})
    turned = pixels.transpose(["yxc".index(axis) for axis in axes if axis in "yxc"])
    for axis in "tz":
        if axis in axes:
            turned = np.expand_dims(turned, axes.index(axis))
    for level in range(2):
        add_array(group, f"s{level}", data=np.ascontiguousarray(turned[..., :: level + 1, :: level + 1]))
    datasets = [{"path": f"s{level}"} for level in range(2)]
    notes = {"multiscales": [{"axes": [{"name": axis} for axis in axes], "datasets": datasets}]}
    group.attrs.update(notes if version == 2 else {"ome": notes})


WRITE = {
    "image.npy": np.save,
    "image.png": lambda path, pixels: Image.fromarray(pixels).save(path),
    "image.bmp": lambda path, pixels: Image.fromarray(pixels).save(path),
    "tiled.tif": lambda path, pixels: write_tiff(path, pixels, tile=(16, 32)),
    "deflated.tif": lambda path, pixels: write_tiff(path, pixels, tile=(16, 16), compression="zlib"),
    "strips.tiff": lambda path, pixels: write_tiff(path, pixels, rowsperstrip=7),
    "deflated_strips.tif": lambda path, pixels: write_tiff(path, pixels, rowsperstrip=7, compression="zlib"),
    "one_strip.tif": lambda path, pixels: write_tiff(path, pixels, rowsperstrip=61, compression="zlib"),
    "big_endian.tif": lambda path, pixels: write_tiff(path, pixels, byteorder=">"),
    "big.tif": lambda path, pixels: write_tiff(path, pixels, bigtiff=True, tile=(16, 16)),
    "apart.tif": write_colours_apart,
    "apart_in_tiles.tif": lambda path, pixels: write_colours_apart(path, pixels, tile=(16, 32), compression="zlib"),
    "apart_in_strips.tif": lambda path, pixels: write_colours_apart(path, pixels, rowsperstrip=7, compression="zlib"),
    "pyramid.tif": write_pyramid,
    "sub_pictures.tif": write_sub_pictures,
    "thumbnail.tif": lambda path, pixels: write_pyramid(path, pixels, thumbnail_first=True),
    "image.zarr": write_zarr,
    "group.zarr": lambda path, pixels: add_array(
        pytest.importorskip("zarr").open_group(str(path), mode="w"), "0", data=pixels
    ),
    "ending of none": write_zarr,
    **{
        f"{axes}{version}.zarr": partial(write_ome_zarr, version=version, axes=axes)
        for version in (2, 3)
        for axes in ("cyx", "tczyx", "yxc")
    },
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


def rgb(fractions):
    """Grey or coloured fractions as a network's three channels."""
    return np.repeat(fractions[..., None], 3, axis=2) if fractions.ndim == 2 else fractions[..., :3]


PALETTE = np.random.default_rng(1).integers(0, 256, (3, 256), np.uint16) * 257
NUMBERS = {
    "grey": (lambda p: p[..., 0], {"photometric": "minisblack"}, lambda p: p[..., 0] / 255),
    "grey, transparent": (
        lambda p: p[..., :2],
        {"photometric": "minisblack", "extrasamples": ["unassalpha"], "planarconfig": "contig"},
        lambda p: p[..., 0] / 255,
    ),
    "black is largest": (lambda p: p[..., 0], {"photometric": "miniswhite"}, lambda p: 1 - p[..., 0] / 255),
    "bits, black is largest": (
        lambda p: p[..., 0] > 127,
        {"photometric": "miniswhite"},
        lambda p: 1.0 * (p[..., 0] <= 127),
    ),
    "palette": (
        lambda p: p[..., 0],
        {"photometric": "palette", "colormap": PALETTE},
        lambda p: (PALETTE.T // 257)[p[..., 0]] / 255,
    ),
    "transparent": (
        lambda p: np.dstack([p, p[..., :1]]),
        {"photometric": "rgb", "extrasamples": ["unassalpha"]},
        lambda p: p / 255,
    ),
    "multiplied with its transparency": (
        lambda p: np.dstack([p // 2, np.full_like(p[..., :1], 127)]),
        {"photometric": "rgb", "extrasamples": ["assocalpha"]},
        lambda p: (p // 2).astype(int) * 255 // 127 / 255,
    ),
    "16 bits": (lambda p: p.astype(np.uint16) * 257, {}, lambda p: p / 255),
    "12 bits": (
        lambda p: p[..., 0].astype(np.uint16) * 16,
        {"photometric": "minisblack", "bitspersample": 12},
        lambda p: p[..., 0] / 255.9375,
    ),
    "16 bits, black is largest": (
        lambda p: p[..., 0].astype(np.uint16) * 257,
        {"photometric": "miniswhite"},
        lambda p: 1 - p[..., 0] / 255,
    ),
    "fractions, black is largest": (
        lambda p: (p[..., 0] / 255).astype(np.float32),
        {"photometric": "miniswhite"},
        lambda p: 1 - p[..., 0] / 255,
    ),
    "16 bits, the other order of bytes": (lambda p: p.astype(np.uint16) * 257, {"byteorder": ">"}, lambda p: p / 255),
    "fractions": (lambda p: (p / 255).astype(np.float32), {}, lambda p: p / 255),
    "wide fractions, the other order of bytes": (lambda p: p / 255, {"byteorder": ">"}, lambda p: p / 255),
}


NOT_BY_PILLOW = ("fractions", "wide fractions, the other order of bytes")
"""Fractions of three colours."""


@pytest.mark.parametrize("settings", [{}, {"tile": (16, 32), "compression": "zlib"}], ids=["as they are", "in tiles"])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_numbers_of_a_tiff_are_taken_for_what_they_mean(numbers, settings, pixels, tmp_path):
    stored, how, fractions = NUMBERS[numbers]
    if "bitspersample" in how and "compression" in settings:
        pytest.skip("tifffile writes such bits as they are alone")
    write_tiff(tmp_path / "image.tif", stored(pixels), **how | settings)
    rows = NormalisedRows(open_image(tmp_path / "image.tif"), (0,) * 3, (1,) * 3, torch.float64)
    for first, behind in ROWS:
        taken = rows.rows(first, behind)[0].permute(1, 2, 0).numpy()
        assert np.allclose(taken, rgb(fractions(pixels))[first:behind], atol=1e-6)
    if numbers in NOT_BY_PILLOW:
        with pytest.raises(BrokenImageError, match="no picture of a kind that can be read"):
            read_image(tmp_path / "image.tif")
        return
    whole = read_image(tmp_path / "image.tif")
    assert np.allclose(np.asarray(whole) / 255, rgb(fractions(pixels)), atol=1.01 / 255)


@pytest.mark.parametrize(
    ("numbers", "settings", "words"),
    [
        (np.zeros((9, 9, 4), np.uint8), {"photometric": "separated"}, "colours as SEPARATED"),
        (np.zeros((9, 9, 3), np.uint8), {"photometric": "cielab"}, "colours as CIELAB"),
        (np.zeros((9, 9, 5), np.uint8), {"photometric": "minisblack", "planarconfig": "contig"}, "has 5 channels"),
        (np.zeros((2, 9, 9, 3), np.uint8), {}, "stack of 2 pictures"),
        (np.zeros((3, 9, 9), np.uint8), {"photometric": "minisblack"}, "stack of 3 pictures"),
        (np.zeros((9, 9, 3), np.int16), {}, "pixels of int16"),
        (np.zeros((9, 9, 3), np.uint32), {}, "pixels of uint32"),
    ],
)
def test_tiffs_whose_numbers_are_no_colours_are_one_line(numbers, settings, words, tmp_path):
    write_tiff(tmp_path / "image.tif", numbers, **settings)
    with pytest.raises(SubquadError, match=rf"image\.tif .*{words}") as refusal:
        open_image(tmp_path / "image.tif")
    assert "\n" not in str(refusal.value)


def test_a_compression_that_a_package_reads_is_read_or_said(pixels, tmp_path):
    pytest.importorskip("tifffile")
    Image.fromarray(pixels).save(tmp_path / "image.tif", compression="tiff_lzw")
    try:
        import imagecodecs  # noqa: F401
    except ImportError:
        with pytest.raises(SubquadError, match=r"image\.tif needs the package imagecodecs"):
            open_image(tmp_path / "image.tif").read(0, 61)
    else:
        assert np.array_equal(open_image(tmp_path / "image.tif").read(0, 61), pixels)


@pytest.mark.parametrize("cut", [0.001, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("name", [name for name in WRITE if name.endswith((".tif", ".tiff", ".npy", ".png", ".bmp"))])
def test_files_that_end_early_are_one_line_or_whole(name, cut, pixels, tmp_path):
    path = tmp_path / name
    WRITE[name](path, pixels)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(cut * len(whole))])
    try:
        assert np.array_equal(open_image(path).read(0, 61)[..., :3], pixels)
    except SubquadError as refusal:
        assert str(path) in str(refusal) and "\n" not in str(refusal)


@pytest.mark.parametrize("kind", ["damaged stream", "damaged sum"])
def test_a_png_whose_sums_do_not_fit_is_one_line(kind, pixels, tmp_path, monkeypatch):
    monkeypatch.setattr(png_rows, "PIECE", 100)
    path = tmp_path / "image.png"
    Image.fromarray(pixels).save(path)
    content = bytearray(path.read_bytes())
    content[-60 if kind == "damaged stream" else -14] ^= 1
    path.write_bytes(content)
    with pytest.raises(SubquadError, match=r"image\.png is damaged"):
        open_image(path).read(0, 61)


def pages(*several, **settings):
    """What writes pictures (height, width, channels), or grey (height, width), as the pages of a TIFF."""

    def write(path):
        with pytest.importorskip("tifffile").TiffWriter(path) as file:
            for picture in several:
                file.write(picture, photometric="rgb" if picture.ndim == 3 else "minisblack", **settings)

    return write


LARGE, SMALL = (
    np.random.default_rng(k).integers(0, 256, (h, w, 3), np.uint8) for k, h, w in ((0, 64, 80), (1, 32, 40))
)
PAGES = {
    "a small one behind": (pages(LARGE, SMALL), LARGE),
    "a small one in front": (pages(SMALL, LARGE), LARGE),
    "a small one marked so in front": (pages(SMALL, LARGE, metadata=None), LARGE),
    "small ones of one size behind": (pages(LARGE, SMALL, SMALL), LARGE),
    "another kind of one size": (pages(LARGE, LARGE[..., 0]), LARGE),
    "two of one size": (pages(LARGE, LARGE[::-1].copy()), None),
    "two of one size behind a small one": (pages(SMALL, LARGE, LARGE[::-1].copy()), None),
    "colours as pictures": (pages(*LARGE.transpose(2, 0, 1).copy()), None),
    "a stack": (lambda path: write_tiff(path, np.stack([LARGE, LARGE[::-1]])), None),
}


@pytest.mark.parametrize("name", PAGES)
def test_of_several_pictures_the_same_one_is_read_whether_it_is_streamed_or_not(name, tmp_path):
    """All but streaming took the first, whatever it was."""
    write, expected = PAGES[name]
    write(path := tmp_path / "pages.tif")
    if expected is None:
        for read in (open_image, read_named_image, size_in_header):
            with pytest.raises(SubquadError, match=r"pages\.tif.* a stack of [23] pictures .* file of its own"):
                read(path)
        with pytest.raises(SubquadError, match=r"pages\.tif can't be read: it is a stack"):
            read_label_map(path)
        return
    height, width = expected.shape[:2]
    assert np.array_equal(open_image(path).read(0, height), expected)
    assert np.array_equal(np.asarray(read_named_image(path)), expected)
    assert size_in_header(path) == (width, height)


def test_a_label_map_is_the_largest_picture_of_its_file(tmp_path):
    pages(SMALL[..., 0], LARGE[..., 0])(tmp_path / "labels.tif")
    assert np.array_equal(read_label_map(tmp_path / "labels.tif"), LARGE[..., 0])


def test_a_damaged_chain_of_pages_ends_where_it_is_damaged(tmp_path):
    """The first page of such a file was read, and still is."""
    path = tmp_path / "pages.tif"
    Image.fromarray(LARGE).save(path, save_all=True, append_images=[Image.fromarray(SMALL)])
    content = bytearray(path.read_bytes())
    first = int.from_bytes(content[4:8], "little")
    behind = first + 2 + 12 * int.from_bytes(content[first : first + 2], "little")
    content[behind : behind + 4] = (len(content) + 1000).to_bytes(4, "little")
    path.write_bytes(content)
    assert np.array_equal(np.asarray(read_named_image(path)), LARGE)


@pytest.mark.parametrize("name", ["folder", "folder.png", "folder.tif", "folder.npy", "folder.jpg", "folder.svs"])
def test_folders_are_no_images(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(SubquadError, match="is a folder"):
        open_image(tmp_path / name)


def test_groups_of_zarr_without_a_pyramid_name_their_arrays(pixels, tmp_path):
    zarr = pytest.importorskip("zarr")
    add_array(zarr.open_group(str(tmp_path / "group.zarr"), mode="w"), "photo", data=pixels)
    with pytest.raises(SubquadError, match=r"name one of its arrays \(.*group\.zarr/photo\)"):
        open_image(tmp_path / "group.zarr")
    assert np.array_equal(open_image(tmp_path / "group.zarr" / "photo").read(0, 61), pixels)
    write_ome_zarr(tmp_path / "film.zarr", pixels, 2, "tczyx")
    film = zarr.open_group(str(tmp_path / "film.zarr"))
    add_array(film, "s0", shape=(2, 3, 1, 8, 8), dtype="u1", overwrite=True)
    with pytest.raises(SubquadError, match=r"film\.zarr has 2 t × 3 c × 1 z × 8 y × 8 x"):
        open_image(tmp_path / "film.zarr")


def test_arrays_that_are_no_images_say_what_to_do(pixels, tmp_path):
    for array, words in (
        (pixels.transpose(2, 0, 1), r"move its channels behind, \.transpose"),
        (pixels[..., :2], "write grey or three colours"),
        (pixels.astype(np.int64), "pixels of int64, whose range is not known"),
        (pixels.astype(np.complex64), "pixels of complex64"),
        (pixels.astype(str), "pixels of str"),
        (np.array(3), "an image is"),
    ):
        np.save(tmp_path / "image.npy", array)
        with pytest.raises(SubquadError, match=words) as refusal:
            open_image(tmp_path / "image.npy")
        assert str(refusal.value).startswith(str(tmp_path / "image.npy"))


@pytest.mark.parametrize("wrong", [255.0, -0.5, float("nan")])
def test_fractions_beyond_0_and_1_are_refused(wrong, pixels):
    fractions = pixels / 255
    fractions[30, 3, 1] = wrong
    rows = NormalisedRows(ArrayRows(fractions), (0.5,) * 3, (0.5,) * 3, torch.float32, "image.npy")
    rows.rows(0, 30)
    with pytest.raises(SubquadError, match=r"image\.npy: fractions must go from 0 to 1.*in rows 30 to 60"):
        rows.rows(30, 61)


def test_bands_are_decoded_once(pixels):
    decoded = []

    def decode(first, behind):
        decoded.append((first, behind))
        return pixels[first:behind]

    bands = KeptBands("image", SHAPE[:2], 70, decode)
    for first in range(0, 61, 4):
        # as a convolution looks at rows above
        rows = slice(max(0, first - 2), min(first + 4, 61))
        assert np.array_equal(bands.read(rows.start, rows.stop), pixels[rows])
    assert decoded == [(0, 61)]
    with pytest.raises(SubquadError, match="stores 70,000 rows of 9,000 pixels together"):
        KeptBands("image", (100_000, 9_000), 70_000, decode)


def test_what_is_decoded_at_once_is_what_pillow_opens():
    assert Image.MAX_IMAGE_PIXELS * 2 == MOST_WHOLE or Image.MAX_IMAGE_PIXELS is None


@pytest.mark.parametrize("in_chans", [1, 4])
def test_a_picture_for_a_network_without_three_channels_says_how_to_pass_it(in_chans):
    model = create_model(
        "deit_tiny", attention="linear", img_size=16, embed_dim=16, depth=1, num_heads=1, in_chans=in_chans
    ).eval()
    wanted = rf"takes images of {in_chans} channels, and this picture is read as 3: pass it as a tensor \({in_chans}, "
    with pytest.raises(SubquadError, match=wanted):
        stream(model, np.zeros((16, 16), np.uint8))
    with pytest.raises(SubquadError, match=rf"takes images of {in_chans} channels, and this tensor has 3$"):
        stream(model, torch.zeros(3, 16, 16))
    assert stream(model, torch.zeros(in_chans, 16, 16)).logits.isfinite().all()
