"""Segmenters from folders that the `save_pretrained` of segmentation_models_pytorch wrote.

Such a folder says how the network is made, and neither its classes' names nor how images are brought to it: classes
have numbers, and images what the package's own preprocessing does to them, that of timm's encoders (`tu-…`), else
ImageNet's.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn
from torch.overrides import TorchFunctionMode

from subquad.errors import SubquadError, naming, reason_of, unknown_name
from subquad.models import read_weights
from subquad.models.pretrained import HUB_CONFIG, HUB_WEIGHTS
from subquad.ranges import Pixels, height_and_width
from subquad.tasks import TASKS, Trained
from subquad.tasks.class_names import numbered
from subquad.text import one_line
from subquad.weights.files import read_note
from subquad.weights.fitting import misfits, not_finite, some

USUAL_SIZE = (512, 512)
"""Height and width of crops, where nothing is said."""

BINARY = ("background", "foreground")


def folder_of_smp(path: Path) -> Path | None:
    """The folder that the package wrote, of its path or that of the weights in it; None for everything else."""
    folder = path.parent if path.name == HUB_WEIGHTS else path
    try:
        said = json.loads((folder / HUB_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(said, dict) or not isinstance(said.get("_model_class"), str) or "encoder_name" not in said:
        return None
    file = folder / HUB_WEIGHTS
    # what `subquad.upload` wrote says more in its note
    return None if file.is_file() and read_note(file).keys() - {"format"} else folder


def open_smp_folder(folder: Path, img_size: Pixels | None, device: torch.device) -> Trained:
    """Open a segmenter, without running any of the folder's code.

    Args:
        folder: with config.json and the weights in safetensors.
        img_size: pixels of crops for fits, one number or (height, width); 512 if left out. Scenes stay as they are.
        device: where it goes.

    Raises:
        SubquadError: the package is not there or has no such network, it takes other images than of three colours, or
            its weights are not there or do not fit.
    """
    config = json.loads((folder / HUB_CONFIG).read_text(encoding="utf-8"))
    name = config.pop("_model_class")
    if config.get("in_channels", 3) != 3:
        raise SubquadError(
            f"{folder / HUB_CONFIG} is of a network of {config['in_channels']} channels: commands take images of three "
            "colours; subquad.convert takes the network, of segmentation_models_pytorch.from_pretrained"
        )
    if not (folder / HUB_WEIGHTS).is_file():
        raise SubquadError(f"{folder} holds no {HUB_WEIGHTS}: the save_pretrained of the network writes it")
    with naming(folder / HUB_CONFIG):
        model = make_smp(name, config=config)
    state = {f"network.{key}": tensor for key, tensor in read_weights(folder / HUB_WEIGHTS)[0].items()}
    if trouble := misfits(state, model.state_dict()):
        raise SubquadError(f"can't load {folder}: {trouble}")
    if names := not_finite(state):
        raise SubquadError(f"can't load {folder}: not finite: {some(names)}")
    model.load_state_dict(state)
    kind = task_of_smp()
    note = _note(model, config, USUAL_SIZE if img_size is None else height_and_width(img_size))
    opened: Trained = kind.opened(model.eval().to(device), note, {})
    return replace(opened, made={"smp": name, "note": note | {"creation": {"task": kind.name, "config": config}}})


def task_of_smp() -> Any:
    """The task that the package's networks are for."""
    return next(task for task in TASKS.usable() if task.of_smp)


def make_smp(name: str, *, config: Any = None, **more: Any) -> nn.Module:
    """A segmenter of the package without weights, as the note of a conversion says.

    Raises:
        SubquadError: the package is not there, or has no such network.
    """
    try:
        import segmentation_models_pytorch as smp
    except ImportError:
        raise SubquadError(
            "it is of segmentation_models_pytorch, which is not installed: pip install 'subquad[dense]'"
        ) from None
    whole = smp.base.SegmentationModel
    known = {key: cls for key, cls in vars(smp).items() if isinstance(cls, type) and issubclass(cls, whole)}
    if name not in known:
        raise unknown_name("network of segmentation_models_pytorch", name, known)
    if not isinstance(config, Mapping) or more:
        raise SubquadError("its note does not say how the network was made")
    # scores are compared and fitted, and what a network makes of them is no score; no weights are fetched
    settings = {key: value for key, value in config.items() if not key.startswith("_")}
    settings |= {"encoder_weights": None, "activation": None}
    try:
        with RatesOnCpu():
            network = known[name](**settings)
    except Exception as error:
        # of the package, of timm and of PyTorch
        raise SubquadError(f"a {name} can't be made so: {one_line(reason_of(error), 200)}") from None
    model: nn.Module = task_of_smp().called_with_images(network)
    return model


class RatesOnCpu(TorchFunctionMode):
    """Lets encoders read the rates of their stochastic depth where they are sketched on the device meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Put ranges on the CPU."""
        return func(*args, **({"device": "cpu"} if func is torch.linspace else {}) | (kwargs or {}))


def _note(model: Any, config: Mapping[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    """What a note says of a network: classes by number, and how scenes are brought to it, as they are."""
    classes = BINARY if model.is_binary else numbered(model.num_classes)
    encoder = str(config.get("encoder_name", ""))
    about = timm.get_pretrained_cfg(encoder.removeprefix("tu-")) if encoder.startswith("tu-") else None
    mean, std = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD) if about is None else (about.mean, about.std)
    pictures = {"img_size": size, "mean": list(mean), "std": list(std), "interpolation": "bilinear"}
    note: dict[str, Any] = task_of_smp().foreign_note(classes, pictures | {"crop_pct": 1.0, "crop_mode": "none"})
    return note
