"""Which classes are taken for which: as text, as a table and as a picture."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.errors import SubquadError
from subquad.tasks.figures import INK, MUTED, any_letters, new_figure, save_figure
from subquad.text import columns_of, padded, shorten
from subquad.writing import replacing

MATRIX_CLASSES = 20
"""Up to so many classes the text is a matrix, and the cells of the picture have numbers."""

_PAIRS = 15
_NAMED_CLASSES = 60


def confusion_text(confusion: Tensor, classes: Sequence[str], width: int = 80) -> str:
    """The confusion matrix (rows true) in lines of at most `width` columns of a terminal.

    Of many classes only the pairs that are confused most. In a narrow space numbers are percent of a row.
    """
    _check(confusion, classes)
    if len(classes) > MATRIX_CLASSES:
        return _pairs_text(confusion, classes, width)
    heads = _row_heads(classes)
    label = max(map(columns_of, heads))
    room = (width - label) // len(classes)
    cell = max(len(str(int(confusion.max()))), len(str(len(classes) - 1))) + 1
    unit = "images"
    if cell > room:
        unit, cell = "percent of a row", max(room, 3)
        confusion = (100 * confusion / confusion.sum(1, keepdim=True).clamp(min=1)).where(confusion > 0, -1).round()
        label = min(max(width - cell * len(classes), 4), label)
    else:
        confusion = confusion.where(confusion > 0, -1)
    lines = [shorten(f"rows true, columns predicted, {unit}", width)]
    lines.append(" " * label + "".join(f"{place:>{cell}}" for place in range(len(classes))))
    for head, row in zip(heads, confusion.tolist(), strict=True):
        cells = "".join(f"{'·' if number < 0 else int(number):>{cell}}" for number in row)
        lines.append(f"{padded(shorten(head, label), label)}{cells}")
    return "\n".join(lines)


def _row_heads(classes: Sequence[str]) -> list[str]:
    """Number and name of each class; classes that are called by their numbers have only these."""
    numbers = [str(place) for place in range(len(classes))]
    if list(classes) == numbers:
        return numbers
    digits = len(numbers[-1])
    return [f"{number:>{digits}} {shorten(name, 20)}" for number, name in zip(numbers, classes, strict=True)]


def confused_pairs(confusion: Tensor, most: int) -> list[tuple[int, int, int]]:
    """(true class, predicted class, images) of the pairs that are confused most, the worst first."""
    wrong = confusion.clone()
    wrong.fill_diagonal_(0)
    counts, places = wrong.flatten().topk(min(most, wrong.numel()))
    pairs = zip(counts.tolist(), places.tolist(), strict=True)
    return [(place // len(wrong), place % len(wrong), count) for count, place in pairs if count]


def save_confusion(
    confusion: Tensor, classes: Sequence[str], path: Path | str, *, counted: str = "images"
) -> list[Path]:
    """Write the matrix as a table to `path` with the ending .csv and as a picture to `path` with .png.

    One of the two that `path` has already is exchanged; any other, as of "night.v2", is part of the name. `counted` is
    what the numbers are of.
    """
    _check(confusion, classes)
    path = Path(path)
    stem = path.stem if path.suffix.lower() in (".csv", ".png") else path.name
    table, picture = (path.with_name(f"{stem}{ending}") for ending in (".csv", ".png"))
    with replacing(table) as aside, aside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["true \\ predicted", *classes])
        writer.writerows([name, *row] for name, row in zip(classes, confusion.tolist(), strict=True))
    _save_picture(confusion, classes, picture, counted)
    return [table, picture]


def _check(confusion: Tensor, classes: Sequence[str]) -> None:
    if confusion.shape != (len(classes), len(classes)):
        raise SubquadError(f"a confusion matrix of {tuple(confusion.shape)} does not fit {len(classes)} class names")


def _pairs_text(confusion: Tensor, classes: Sequence[str], width: int) -> str:
    total, right = int(confusion.sum()), int(confusion.diagonal().sum())
    lines = [shorten(f"{len(classes)} classes, {total - right} of {total} images mistaken", width)]
    pairs = confused_pairs(confusion, _PAIRS)
    if not pairs:
        return lines[0]
    lines.append(shorten("true → predicted, images and percent of the true class:", width))
    room = (width - 21) // 2
    space = max(min(room, columns_of(classes[place])) for pair in pairs for place in pair[:2])
    for true, predicted, count in pairs:
        share = 100 * count / int(confusion[true].sum())
        names = " → ".join(padded(shorten(classes[place], room), space) for place in (true, predicted))
        lines.append(f"  {names}{count:>7}{share:>6.1f} %")
    return "\n".join(lines)


def _save_picture(confusion: Tensor, classes: Sequence[str], path: Path, counted: str) -> None:
    """Rows in shares, so that rare classes are seen as well as frequent ones."""
    many = len(classes) > MATRIX_CLASSES
    side = min(max(0.45 * len(classes), 3.0), 12.0)
    figure = new_figure(side + 1.6, side + 1.6)
    axes = figure.add_subplot()
    shares = confusion / confusion.sum(1, keepdim=True).clamp(min=1)
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xlabel("predicted", color=MUTED)
    axes.set_ylabel("true", color=MUTED)
    right, total = int(confusion.diagonal().sum()), max(int(confusion.sum()), 1)
    title = f"{100 * right / total:.1f} % of {total:,} {counted} right"
    axes.set_title(title, color=INK, loc="left", fontweight="bold")
    for spine in axes.spines.values():
        spine.set_visible(False)
    _name_ticks(axes, classes)
    if not many:
        for true, predicted in torch.nonzero(confusion).tolist():
            colour = "white" if shares[true, predicted] > 0.5 else INK
            number = str(int(confusion[true, predicted]))
            axes.text(predicted, true, number, ha="center", va="center", color=colour, fontsize=8)
    with any_letters():
        figure.tight_layout()
    save_figure(figure, path)


def _name_ticks(axes: Any, classes: Sequence[str]) -> None:
    """Names along the sides; of very many classes only numbers."""
    axes.tick_params(length=0, colors=INK, labelsize=8 if len(classes) <= MATRIX_CLASSES else 6)
    if len(classes) > _NAMED_CLASSES:
        return
    names = [shorten(name, 18).replace("$", r"\$") for name in classes]
    upright = max(map(len, names)) <= 2
    axes.set_xticks(range(len(classes)), names, rotation=0 if upright else 90)
    axes.set_yticks(range(len(classes)), names)
