"""Networks to look inside: trained classifiers, and what segmenters and detectors stand on."""

from pathlib import Path

from subquad.data import InputConfig
from subquad.dense import restore_dense
from subquad.errors import SubquadError
from subquad.evaluation.scenes import input_of
from subquad.evaluation.trained import Trained, load_trained, trained_on
from subquad.models import read_note, weight_file
from subquad.models.pretrained import source_of

MOST_SIDE = 512
"""Of the images that a detector's backbone is shown: at those it was trained on, maps do not fit into memory."""


def load_looked_at(source: Path | str, *, img_size: int | None = None) -> Trained:
    """What `load_trained` reads; of a segmenter or a detector the backbone with the norms of its maps.

    Those look at images of `img_size`, else of a segmenter's crops, or of the size that a detector's backbone was made
    for, which is cut to 512 px a side.
    """
    task = _task_of(source)
    if task not in ("segment", "detect"):
        return load_trained(source, img_size=img_size)
    network, note = restore_dense(source, task)
    if task == "segment":
        scenes = input_of(note, weight_file(source))
        mean, std, (height, width) = scenes.mean, scenes.std, scenes.crop
    else:
        mean, std = network.creation["mean"], network.creation["std"]
        height, width = (min(side, MOST_SIDE) for side in network.pyramid.backbone.img_size)
    size = (height, width) if img_size is None else (img_size, img_size)
    return trained_on(network.pyramid, InputConfig(size, mean=mean, std=std))


def _task_of(source: Path | str) -> str | None:
    """What the weights of a run folder or a file are for, None where they do not say."""
    if str(source).startswith("timm/"):
        return None
    file = weight_file(source_of(source))
    task = (read_note(file).get("creation") or {}).get("task")
    if task == "lra":
        raise SubquadError(f"{file} is of `subquad lra`: it reads sequences, there are no images to show it")
    return task
