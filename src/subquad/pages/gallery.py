"""What networks make of some held-out images, beside the truth, where their task has pictures of it."""

from markupsafe import Markup
from PIL import Image

from subquad.pages.page_parts import NOTHING, figure, render, section
from subquad.tasks import Gallery

_WIDTH = 300


def gallery_section(shown: Gallery) -> Markup:
    """A section with some held-out images, their truth and what every network makes of them."""
    legend = [(str(colour), name) for name, colour in shown.legend]
    figures = [[figure(_small(image), text, colours=128) for image, text in row] for row in shown.rows]
    swatches = render("legend.html", legend=legend) if legend else NOTHING
    pictures = render("images.html", blocks=[("", "", row) for row in figures])
    return section("Predictions against truth", "Held-out images, evenly chosen.", swatches + pictures)


def _small(image: Image.Image) -> Image.Image:
    return image.resize((_WIDTH, max(1, round(image.height * _WIDTH / image.width))))
