"""What networks make of some held-out images, beside the truth, where their task has pictures of it."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from PIL import Image

from subquad.errors import SubquadError
from subquad.pages.page_parts import figure, section
from subquad.runs import open_trained
from subquad.runs.run_records import Group
from subquad.tasks import Gallery, task_named

_WIDTH = 300
_COUNT = 4


def gallery(groups: Sequence[Group], log: Callable[[str], None]) -> str:
    """A section with some held-out images, their truth and what every group predicts; nothing without pictures."""
    task = task_named(groups[0].first.task)
    if not task.has_gallery:
        return ""
    networks: list[tuple[str, Any]] = []
    for group in groups:
        try:
            networks.append((group.label, open_trained(group.first.path, task=task.name)))
        except SubquadError as error:
            log(f"no pictures of {group.label}: {error}")
    if not networks:
        return ""
    try:
        shown = task.gallery(networks, _COUNT)
    except SubquadError as error:
        log(f"no pictures: {error}")
        return ""
    return _markup(shown)


def _markup(shown: Gallery) -> str:
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
