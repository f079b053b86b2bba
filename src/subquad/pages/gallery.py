"""What networks make of some held-out images, beside the truth, where their task has pictures of it."""

from html import escape

from PIL import Image

from subquad.pages.page_parts import figure, section
from subquad.tasks import Gallery

_WIDTH = 300


def gallery_section(shown: Gallery) -> str:
    """A section with some held-out images, their truth and what every network makes of them."""
    swatches = "".join(
        f'<span class="swatch" style="background:rgb{colour}"></span>{escape(name)} &nbsp; '
        for name, colour in shown.legend
    )
    figures = ("".join(figure(_small(image), text, colours=128) for image, text in row) for row in shown.rows)
    return section(
        "Predictions against truth",
        "Held-out images, evenly chosen.",
        (f"<p>{swatches}</p>" if swatches else "") + "".join(f'<div class="images">{row}</div>' for row in figures),
    )


def _small(image: Image.Image) -> Image.Image:
    return image.resize((_WIDTH, max(1, round(image.height * _WIDTH / image.width))))
