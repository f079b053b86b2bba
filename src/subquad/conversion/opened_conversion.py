"""Networks that `subquad convert` left in a folder, opened for every command that takes a trained network."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from subquad.conversion.conversion_record import REPORT, read_record
from subquad.conversion.conversion_run import DELTA
from subquad.conversion.delta_files import load_converted
from subquad.errors import SubquadError
from subquad.runs import open_trained
from subquad.tasks import Trained


def open_folder(path: Path, *, task: str | None, img_size: int | None, device: torch.device) -> Any:
    """The teacher of a conversion, opened as it was then, with the student in its place.

    Args:
        path: the folder, or one of the two weight files in it.
        task: what it must be for; anything if None.
        img_size: pixels of both sides of its images; as it was converted if None.
        device: where it goes.

    Raises:
        SubquadError: the record or the weights are damaged, or the teacher is no longer where it was.
    """
    folder, file = (path, path / DELTA) if path.is_dir() else (path.parent, path)
    if not (folder / REPORT).is_file():
        raise SubquadError(
            f"{path} is of a converted network, and no {REPORT} beside it says of which teacher: "
            "subquad.load_converted(file, teacher) reads it"
        )
    record = read_record(folder)
    plan = record.plan
    try:
        opened = open_trained(record.teacher(folder), task=task, img_size=plan.get("img_size"), device=device)
    except SubquadError as error:
        raise SubquadError(f"{folder} is a conversion of {plan['source']}, which can't be opened: {error}") from None
    opened = replace(opened, model=load_converted(file, opened.model, in_place=True).eval())
    if img_size is None:
        return opened
    check_size(opened, img_size, folder)
    return opened.image_network(img_size)


def check_size(opened: Trained, px: int, folder: Path) -> None:
    """Raise where a network, as timm's Swin, takes images of the one size that it was converted for."""
    embedding = getattr(opened.model, "patch_embed", None)
    height, width = opened.image_network().input.img_size
    if getattr(embedding, "strict_img_size", False) and (px, px) != (height, width):
        raise SubquadError(
            f"{folder} was converted for images of {height}×{width} and takes no others: convert the network again "
            f"with --img-size {px}"
        )
