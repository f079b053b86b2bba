"""A grid of pictures with what a model took them for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subquad.data.decoding import read_named_image
from subquad.errors import SubquadError
from subquad.tasks.figures import INK, MUTED, WRONG, new_figure, save_figure
from subquad.text import shorten

_CELL = 1.6
_CAPTION = 0.5
_HEADER = 0.6


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of an image, the first the likeliest; `true` is the class whose folder it lies in."""

    path: Path
    probabilities: list[tuple[str, float]]
    true: str | None

    @property
    def name(self) -> str:
        """Name the likeliest class."""
        return self.probabilities[0][0]

    @property
    def text(self) -> str:
        """The likeliest classes in a line."""
        best = ", ".join(f"{name} {100 * share:.1f} %" for name, share in self.probabilities)
        return f"{self.path}: {best}" + (f"  (true: {self.true})" if self.true is not None else "")

    @property
    def is_wrong(self) -> bool:
        """Whether the true class is known and another."""
        return self.true is not None and self.true != self.name


def save_picture_grid(
    predictions: Sequence[Prediction], path: Path | str, columns: int = 6, max_images: int = 36
) -> None:
    """Write the pictures, as they are stored, with predicted and true names; wrong ones in red.

    Of more than `max_images` predictions some are shown, evenly spaced.
    """
    if not predictions or columns < 1 or max_images < 1:
        raise SubquadError(f"{len(predictions)} predictions in {columns} columns make no picture")
    shown = _evenly(predictions, max_images)
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    # a caption of its own width stays readable over a single picture
    width, height = max(columns * _CELL, 3.2), rows * (_CELL + _CAPTION) + _HEADER
    figure = new_figure(width, height)
    _header(figure, predictions, shown, height)
    grid = figure.add_gridspec(
        rows,
        columns,
        left=0.01,
        right=0.99,
        top=1 - (_HEADER + _CAPTION) / height,
        bottom=0.08 / height,
        wspace=0.08,
        hspace=_CAPTION / _CELL + 0.05,
    )
    for place, prediction in enumerate(shown):
        _draw(figure.add_subplot(grid[divmod(place, columns)]), prediction)
    save_figure(figure, Path(path))


def _draw(axes: Any, prediction: Prediction) -> None:
    """One picture under its caption."""
    image = read_named_image(prediction.path)
    # pixels of tiny pictures stay sharp squares
    axes.imshow(image, interpolation="nearest" if max(image.size) < 96 else "antialiased")
    axes.set_xticks([])
    axes.set_yticks([])
    colour = WRONG if prediction.is_wrong else INK
    for spine in axes.spines.values():
        spine.set(color=WRONG if prediction.is_wrong else "#d5dbe1", linewidth=2.0 if prediction.is_wrong else 0.6)
    name, probability = prediction.probabilities[0]
    second = f"true: {shorten(str(prediction.true), 14)}" if prediction.is_wrong else f"{100 * probability:.0f} %"
    for text, height, style in (
        (shorten(name, 16), 15, {"color": colour, "fontsize": 9.5, "fontweight": "bold"}),
        (second, 4, {"color": colour if prediction.is_wrong else MUTED, "fontsize": 8.5}),
    ):
        above = {"xytext": (0, height), "textcoords": "offset points", "ha": "center", "va": "bottom"}
        # names are no mathematics, even with a $ in them
        axes.annotate(text, (0.5, 1), xycoords="axes fraction", parse_math=False, **above, **style)


def _header(figure: Any, predictions: Sequence[Prediction], shown: Sequence[Prediction], height: float) -> None:
    """How many are right, where that is known, and how many are shown."""
    judged = [prediction for prediction in predictions if prediction.true is not None]
    right = sum(not prediction.is_wrong for prediction in judged)
    title = f"{right} of {len(judged)} right" if judged else f"{len(predictions)} pictures"
    figure.text(0.015, 1 - 0.22 / height, title, color=INK, fontsize=13, fontweight="bold", va="center")
    if len(shown) < len(predictions):
        note = f"{len(shown)} of {len(predictions)} shown"
        figure.text(0.985, 1 - 0.22 / height, note, color=MUTED, fontsize=9.5, ha="right", va="center")
    legend = "predicted class and its probability" + ("; wrong ones in red" if right < len(judged) else "")
    figure.text(0.015, 1 - 0.47 / height, legend, color=MUTED, fontsize=8, va="center")


def _evenly(predictions: Sequence[Prediction], most: int) -> list[Prediction]:
    if len(predictions) <= most:
        return list(predictions)
    return [predictions[place * len(predictions) // most] for place in range(most)]
