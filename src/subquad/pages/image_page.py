"""The page of `subquad diffuse --compare`: every prompt with each method's image, and where they differ."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image

from subquad.benchmarks import MethodRow
from subquad.data.decoding import read_named_image
from subquad.diffusion.folder import ImageRow
from subquad.pages.page_parts import figure, section, short_command, write_page

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
    header = (
        f'<header><p class="kicker">subquad diffuse</p><h1>{escape(title)}</h1>'
        f'<p class="facts">{escape(note)}</p></header>'
    )
    lead = (
        "The median time from prompt to picture, and how many times faster than the first method on the same image; "
        "the most memory beyond what the pipeline itself holds. PSNR (higher is nearer) and the mean difference of a "
        "colour, of 255, say how far images are from the first method's: not which is better."
    )
    last = f"<footer><h2>How it was made</h2><pre>{escape(short_command(command))}</pre></footer>" if command else ""
    costs = section("What it costs", lead, _table(methods))
    lead = f"Differences are shown {AMPLIFIED} times stronger than they are."
    write_page(path, title, [header, costs, section("Images", lead, _pictures(path, rows, names)), last])


def _table(methods: Sequence[MethodRow]) -> str:
    heads = ("method", "s/image", "times faster", "peak MB", "PSNR dB", "mean difference")
    head = "".join(f'<th scope="col"><button type="button">{name}</button></th>' for name in heads)
    body = ""
    for row in methods:
        numbers = ((row.seconds, 2), (row.gain, 2), (row.peak_mb, 0), (row.psnr, 1), (row.difference, 1))
        cells = "".join(f"<td>{_number(value, digits)}</td>" for value, digits in numbers)
        body += f'<tr><th scope="row">{escape(row.method)}</th>{cells}</tr>'
    table = f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _pictures(path: Path, rows: Sequence[ImageRow], names: Sequence[str]) -> str:
    groups: dict[tuple[str, int], dict[str, ImageRow]] = {}
    for row in rows:
        groups.setdefault((row.prompt, row.seed), {})[row.method] = row
    blocks = []
    for (prompt, seed), found in groups.items():
        images = {name: read_named_image(path.parent / found[name].file) for name in names if name in found}
        figures = [figure(image, f"{name}, {found[name].seconds:.2f} s") for name, image in images.items()]
        figures += [
            figure(_difference(image, images[names[0]]), f"difference of {name}")
            for name, image in images.items()
            if name != names[0] and names[0] in images
        ]
        blocks.append(f"<h3>{escape(prompt)} <small>seed {seed}</small></h3>")
        blocks.append(f'<div class="images">{"".join(figures)}</div>')
    return "".join(blocks)


def _difference(image: Image.Image, other: Image.Image) -> Image.Image:
    a, b = (np.asarray(each, dtype=np.int16) for each in (image, other))
    return Image.fromarray(np.minimum(AMPLIFIED * abs(a - b), 255).astype(np.uint8))
