"""Networks of images from folders that transformers' `save_pretrained` wrote: see `transformers_network` of tasks."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from subquad.errors import SubquadError, naming, reason_without_path
from subquad.models.pretrained import HUB_CONFIG, HUB_PICTURES, HUB_WEIGHTS
from subquad.ranges import Pixels, height_and_width
from subquad.runs.transformers_classes import class_named, of_making, task_of
from subquad.tasks import ImageNetwork, Trained
from subquad.tasks.class_names import numbered
from subquad.tasks.transformers_network import DEPTH, DenseOfTransformers, NetworkOfTransformers
from subquad.text import one_line
from subquad.weights.files import read_note
from subquad.weights.fitting import some

WEIGHTS = (HUB_WEIGHTS, "model.safetensors.index.json")
"""The weights, or which of several files holds which."""

UNASKED = "pooler."
"""What gives nothing to the tokens that an encoder answers with, and is missing in files of some that never had it."""

KNOWN_STEPS = frozenset(
    {"do_resize", "do_rescale", "do_normalize", "do_center_crop", "do_convert_rgb", "do_reduce_labels"}
)
"""What a processor may do to images, and what is about labels alone."""

ASPECT = "keep_aspect_ratio"
OTHER_STEPS = frozenset({ASPECT, "rescale_offset", "include_top"})
"""What changes numbers and sizes in processors of some networks."""

RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers, of those that our transforms have."""


@contextmanager
def _without_bars() -> Iterator[None]:
    """Transformers shows none of its bars, nor its table of weights that do not fit, inside this context."""
    from transformers.utils import logging

    shows, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()


def folder_of_transformers(path: Path) -> Path | None:
    """The folder that transformers wrote, of its path or that of a file of weights in it; None for everything else."""
    folder = path.parent if path.name in WEIGHTS else path
    config = _json(folder / HUB_CONFIG)
    if not isinstance(config.get("model_type"), str) or "architecture" in config:
        return None
    file = folder / WEIGHTS[0]
    # what `subquad.upload` wrote says more in its note
    return None if file.is_file() and read_note(file).keys() - {"format"} else folder


def open_transformers_folder(folder: Path, img_size: Pixels | None, device: torch.device) -> Trained:
    """Open a network of images of any of the kinds that commands take, without running any of the folder's code.

    Args:
        folder: with config.json, the weights in safetensors, and preprocessor_config.json.
        img_size: pixels of its images, one number or (height, width); as the folder says if left out.
        device: where it goes.

    Raises:
        SubquadError: transformers is not there, or has no such network; it is for another task; or its weights are not
            there or do not fit.
    """
    config = _json(folder / HUB_CONFIG)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise SubquadError(f"{folder / HUB_CONFIG} does not say which class the network has (architectures)")
    cls = class_named(str(names[0]), str(folder / HUB_CONFIG))
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise SubquadError(f"{folder} holds no {WEIGHTS[0]}: transformers' save_pretrained writes it")
    try:
        with _without_bars():
            network, about = cls.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                dtype=torch.float32,
            )
    except Exception as error:
        # its library has many, and those of the libraries below it
        raise SubquadError(f"can't load {folder}: {one_line(reason_without_path(error), 200)}") from None
    kind = task_of(cls.__name__)
    model = kind.called_with_images(network)
    lost = sorted(str(name) for kind in ("missing_keys", "mismatched_keys") for name in about[kind])
    if asked := [name for name in lost if model.num_classes or not name.startswith(UNASKED)]:
        raise SubquadError(f"{folder} holds no weights for {some(asked)} of a {cls.__name__}")
    for name in lost:
        # drawn anew they would be another network each time
        nn.init.zeros_(network.get_parameter(name))
    with naming(folder):
        note = kind.foreign_note(_classes(network.config, model), _pictures(folder, img_size, cls.__name__))
    opened: Trained = kind.opened(model.eval().to(device), note, {})
    creation = {"task": kind.name, "config": of_making(network.config), "num_classes": model.num_classes}
    opened = replace(opened, made={"transformers": cls.__name__, "note": note | {"creation": creation}})
    return opened.image_network() if isinstance(opened, ImageNetwork) else opened


def _classes(config: Any, model: NetworkOfTransformers) -> tuple[str, ...]:
    """Their names; where transformers made them up none, or, of places and objects, their numbers."""
    count = model.num_classes
    # a configuration of PVT says none of its labels' names where nobody gave it any
    labels = (config.id2label or {}) if count else {}
    names = [str(labels[number]) for number in sorted(labels)]
    if len(names) == count and names != [f"LABEL_{number}" for number in range(count)]:
        return tuple(names)
    return numbered(count) if isinstance(model, DenseOfTransformers) else ()


def _pictures(folder: Path, img_size: Pixels | None, name: str) -> dict[str, Any]:
    """How images are brought to a network of the class `name`, as a note has it: as its processor does it.

    Those of depth, which are told nothing by labels, are shown the middle of images where whole ones differ in size.

    Raises:
        SubquadError: the folder does not say it, or it is done in a way that our transforms have not.
    """
    if not (folder / HUB_PICTURES).is_file():
        raise SubquadError(
            f"{folder} does not say how images are brought to the network, in a {HUB_PICTURES}: the network's "
            "AutoImageProcessor writes it, by save_pretrained"
        )
    from transformers import AutoImageProcessor

    try:
        # which knows what its class does where the file is silent
        said = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    except Exception as error:
        # its library has many, and those of the libraries below it
        raise SubquadError(f"can't read {folder / HUB_PICTURES}: {one_line(reason_without_path(error), 200)}") from None
    try:
        kind = task_of(name)
        if (sizes := kind.foreign_sizes(said, img_size)) is not None:
            return _as_seen(said, kind.foreign_steps) | sizes
        return _as_note(said, img_size, may_crop=name.endswith(DEPTH))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise SubquadError(
            f"{folder / HUB_PICTURES} brings images to the network in another way than by resizing, a crop of the "
            "middle, division by 255, mean and std: open it with transformers, and give subquad.convert the network"
        ) from None


def _as_note(said: Mapping[str, Any], img_size: Pixels | None, *, may_crop: bool) -> dict[str, Any]:
    """The settings of a processor of transformers, with all that its class fills in, as a note has them.

    Raises:
        KeyError, and others of its kind: they are of another form.
    """
    seen_as = _as_seen(said, frozenset({ASPECT} if may_crop else ()))
    size, crops = {side: px for side, px in said["size"].items() if px is not None}, said.get("do_center_crop")
    if size.keys() not in ({"shortest_edge"}, {"height", "width"}):
        raise ValueError("another size")
    # by the shorter side, as it is, and cut; or both sides, whatever the aspect
    keeps_aspect = "shortest_edge" in size or bool(said.get(ASPECT))
    resized = [size["shortest_edge"]] * 2 if "shortest_edge" in size else [size["height"], size["width"]]
    seen = [said["crop_size"]["height"], said["crop_size"]["width"]] if crops else resized
    return seen_as | {
        "img_size": list(seen if img_size is None else height_and_width(img_size)),
        # ConvNeXt's has the share itself, and crops by it
        "crop_pct": min(min(seen) / min(resized), 1.0) if crops else said.get("crop_pct") or 1.0,
        "crop_mode": "center" if keeps_aspect else "squash",
    }


def _as_seen(said: Mapping[str, Any], also: frozenset[str]) -> dict[str, Any]:
    """How pixels become numbers, and are resized; `also` are steps that do nothing to what a network is shown here.

    Raises:
        KeyError, and others of its kind: there are other steps.
    """
    if not (said["do_resize"] and said["do_rescale"]) or abs(255 * said["rescale_factor"] - 1) > 1e-6:
        raise ValueError("other steps")
    others = {name for name in said.keys() - KNOWN_STEPS if name.startswith("do_")} | OTHER_STEPS
    if any(said.get(name) for name in others - also):
        raise ValueError("other steps")
    normalises = said["do_normalize"]
    return {
        "mean": list(said["image_mean"]) if normalises else [0.0, 0.0, 0.0],
        "std": list(said["image_std"]) if normalises else [1.0, 1.0, 1.0],
        "interpolation": RESAMPLING[int(said["resample"])],
    }


def _json(file: Path) -> dict[str, Any]:
    """What a file says; nothing where it is not there, or none of JSON's mappings."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
