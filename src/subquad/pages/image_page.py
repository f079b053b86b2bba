"""The page of `subquad diffuse --compare`: every prompt with each method's image, and where they differ."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup
from PIL import Image

from subquad.benchmarks import MethodRow
from subquad.data.decoding import read_named_image
from subquad.diffusion.folder import ImageRow, check_sizes
from subquad.pages.page_parts import Cell, figure, footer, header, render, section, sortable_table, write_page

AMPLIFIED = 4
"""How many times stronger than they are differences are shown."""


def write_images_page(
    path: Path, rows: Sequence[ImageRow], methods: Sequence[MethodRow], *, command: str = "", note: str = ""
) -> None:
    """Write the page about images that lie beside it to `path`.

    Args:
        path: the HTML file, in the folder of the images.
        rows: what was made.
        methods: what it comes to.
        command: that made it.
        note: where and with what it was measured.
    """
    names = [method.method for method in methods]
    title = f"{' and '.join(names[1:]) or names[0]} against {names[0]}, of the same noise"
    lead = (
        "The median time from prompt to picture, and how many times faster than the first method on the same image; "
        "the most memory beyond what the pipeline itself holds. PSNR (higher is nearer) and the mean difference of a "
        "colour, of 255, say how far images are from the first method's: not which is better."
    )
    costs = section("What it costs", lead, _table(methods))
    lead = f"Differences are shown {AMPLIFIED} times stronger than they are."
    images = section("Images", lead, _pictures(path, rows, names))
    write_page(path, title, [header("subquad diffuse", title, note), costs, images, footer([command])])


def _table(methods: Sequence[MethodRow]) -> Markup:
    titles = ("method", "s/image", "times faster", "peak MB", "PSNR dB", "mean difference")
    rows = []
    for row in methods:
        numbers = ((row.seconds, 2), (row.gain, 2), (row.peak_mb, 0), (row.psnr, 1), (row.difference, 1))
        rows.append([Cell(row.method), *(Cell(_number(value, digits)) for value, digits in numbers)])
    return sortable_table(titles, rows)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _pictures(path: Path, rows: Sequence[ImageRow], names: Sequence[str]) -> Markup:
    groups: dict[tuple[str, int], dict[str, ImageRow]] = {}
    for row in rows:
        groups.setdefault((row.prompt, row.seed), {})[row.method] = row
    blocks = []
    for (prompt, seed), made in groups.items():
        images = {name: read_named_image(path.parent / made[name].file) for name in names if name in made}
        figures = [figure(image, f"{name}, {made[name].seconds:.2f} s") for name, image in images.items()]
        figures += [
            figure(_difference(image, images[names[0]]), f"difference of {name}")
            for name, image in images.items()
            if name != names[0] and names[0] in images
        ]
        blocks.append((prompt, f"seed {seed}", figures))
    return render("images.html", blocks=blocks)


def _difference(image: Image.Image, other: Image.Image) -> Image.Image:
    check_sizes(image, other)
    a, b = (np.asarray(each, dtype=np.int16) for each in (image, other))
    return Image.fromarray(np.minimum(AMPLIFIED * abs(a - b), 255).astype(np.uint8))
