"""Networks that `subquad convert` left in a folder, opened for every command that takes a trained network."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from subquad.conversion.conversion_card import model_card
from subquad.conversion.conversion_record import REPORT, read_record
from subquad.conversion.conversion_run import MADE
from subquad.conversion.delta_files import DELTA, STUDENT, load_converted
from subquad.errors import SubquadError, naming
from subquad.ranges import Pixels, fits, height_and_width
from subquad.runs import made_again, open_trained
from subquad.tasks import ImageNetwork, Trained
from subquad.weights.files import read_note, read_weights


def open_folder(path: Path, *, task: str | None, img_size: Pixels | None, device: torch.device) -> Any:
    """The teacher of a conversion, opened as it was then, with the student in its place.

    A student's whole file says how its teacher is made, and needs nothing else of it.

    Args:
        path: the folder, or one of the two weight files in it; the whole one may lie alone, anywhere.
        task: what it must be for; anything if None.
        img_size: pixels of its images, one number or (height, width); as it was converted if None.
        device: where it goes.

    Raises:
        SubquadError: the record or the weights are damaged, or the teacher is no longer where it was.
    """
    folder = path if path.is_dir() else path.parent
    if path.is_file() and MADE in read_note(path):
        opened = _alone(path, task, device)
    elif not (folder / REPORT).is_file():
        raise SubquadError(
            f"{path} is of a converted network, and no {REPORT} beside it says of which teacher: "
            "subquad.load_converted(file, teacher) reads it"
        )
    else:
        opened = _beside_teacher(folder, folder / DELTA if path.is_dir() else path, task, device)
    if img_size is None:
        return opened
    check_size(opened, img_size, folder)
    # what answers for places or objects brings images to its size itself, and is not what is looked into
    return opened.image_network(img_size) if isinstance(opened, ImageNetwork) else opened


def _beside_teacher(folder: Path, file: Path, task: str | None, device: torch.device) -> Any:
    """The student of a folder, by its teacher; by its own weights alone where that is gone."""
    record = read_record(folder)
    plan = record.plan
    try:
        opened = open_trained(record.teacher(folder), task=task, img_size=plan.get("img_size"), device=device)
    except SubquadError as error:
        whole = folder / STUDENT
        if whole.is_file() and MADE in read_note(whole):
            return _alone(whole, task, device)
        raise SubquadError(
            f"{folder} is a conversion of {plan['source']}, which can't be opened: {error}; of a network that you "
            f"hold, subquad.load_converted('{file}', teacher) makes the student"
        ) from None
    return replace(opened, model=load_converted(file, opened.model, in_place=True).eval())


def _alone(file: Path, task: str | None, device: torch.device) -> Any:
    """The student of a file that holds all of its weights, and how its teacher is made."""
    state, note = read_weights(file)
    with naming(file):
        made = note[MADE] if isinstance(note[MADE], dict) else {}
        opened = made_again(made, state, task=task, device=device)
        size = made.get("img_size")
        if fits(size, Pixels) and isinstance(opened, ImageNetwork):
            opened = opened.image_network(size)
    return replace(opened, model=load_converted(file, opened.model, in_place=True).eval())


def for_hub(folder: Path) -> tuple[Path, str]:
    """What a repository of the Hugging Face hub gets of a conversion: the student's whole file, and the model card.

    Raises:
        SubquadError: the record is damaged, or the file is not there or does not say how its teacher is made.
    """
    record, file = read_record(folder), folder / STUDENT
    if MADE not in read_note(file):
        raise SubquadError(
            f"{file} does not say how its teacher is made: it is of a network that was handed over in Python, which "
            "nobody else could make, or of a version before, which did not say: convert the network again then"
        )
    return file, model_card(record)


def check_size(opened: Trained, pixels: Pixels, folder: Path) -> None:
    """Raise where a network, as timm's Swin, takes images of the one size that it was converted for."""
    embedding = getattr(opened.model, "patch_embed", None)
    height, width = opened.image_network().input.img_size
    if getattr(embedding, "strict_img_size", False) and (asked := height_and_width(pixels)) != (height, width):
        raise SubquadError(
            f"{folder} was converted for images of {height}×{width} and takes no others: convert the network again "
            f"with --img-size {','.join(map(str, dict.fromkeys(asked)))}"
        )
