"""Classifiers and encoders of images from folders that transformers' `save_pretrained` wrote."""

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.errors import SubquadError, reason_without_path
from subquad.models.pretrained import HUB_CONFIG, HUB_PICTURES, HUB_WEIGHTS
from subquad.ranges import Pixels, height_and_width
from subquad.tasks import ImageNetwork, task_named
from subquad.text import one_line
from subquad.weights.files import read_note
from subquad.weights.fitting import some

WEIGHTS = (HUB_WEIGHTS, "model.safetensors.index.json")
"""The weights, or which of several files holds which."""

CLASSIFIER = "ForImageClassification"
UNASKED = "pooler."
"""What gives nothing to the tokens that an encoder answers with, and is missing in files of some that never had it."""

RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers, of those that our transforms have."""


class NetworkOfTransformers(nn.Module):
    """A network of transformers that is called with images alone, as ours are: it answers with classes or features.

    Attributes:
        network: transformers' own.
        num_classes: of its answers (b, classes); 0 where it has none, and answers with its last tokens (b, n, c).
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.num_classes = network.config.num_labels if type(network).__name__.endswith(CLASSIFIER) else 0
        # networks whose tables are for one size resample them where they are asked to
        self.is_asked_to_resample = "interpolate_pos_encoding" in inspect.signature(network.forward).parameters

    def forward(self, x: Tensor) -> Tensor:
        """Scores of classes (b, classes), or the last tokens (b, n, c), of images (b, c, height, width)."""
        answered = self._answered(x)
        answers: Tensor = answered.logits if self.num_classes else answered.last_hidden_state
        return answers

    def features_and_logits(self, x: Tensor) -> dict[str, Tensor]:
        """What is compared with another network's: "features", the last tokens, and "logits" where there are some."""
        if not self.num_classes:
            return {"features": self(x)}
        with _heard(self.network.base_model) as heard:
            logits = self(x)
        return {"features": heard[0].last_hidden_state, "logits": logits}

    def _answered(self, x: Tensor) -> Any:
        more = {"interpolate_pos_encoding": True} if self.is_asked_to_resample else {}
        return self.network(pixel_values=x, **more)


@contextmanager
def _heard(module: nn.Module) -> Iterator[list[Any]]:
    """What a module answers inside this context."""
    answers: list[Any] = []
    hook = module.register_forward_hook(lambda _, arguments, answer: answers.append(answer))
    try:
        yield answers
    finally:
        hook.remove()


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


def open_transformers_folder(folder: Path, img_size: Pixels | None, device: torch.device) -> ImageNetwork:
    """Open a classifier or an encoder of images; none of the folder's code is run, and weights are safetensors alone.

    Args:
        folder: with config.json, the weights and, of networks that were saved with it, preprocessor_config.json.
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
    cls = _class_named(str(names[0]), str(folder / HUB_CONFIG))
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
    model = NetworkOfTransformers(network)
    lost = sorted(str(name) for kind in ("missing_keys", "mismatched_keys") for name in about[kind])
    if asked := [name for name in lost if model.num_classes or not name.startswith(UNASKED)]:
        raise SubquadError(f"{folder} holds no weights for {some(asked)} of a {cls.__name__}")
    for name in lost:
        # drawn anew they would be another network each time
        nn.init.zeros_(network.get_parameter(name))
    seen = _pictures(folder, img_size)
    note = {"classes": list(_classes(network.config, model.num_classes)), "input": seen}
    opened = task_named("classify").opened(model.eval().to(device), note, {}).image_network()
    creation = {"task": "classify", "config": _of_making(network.config), "num_classes": model.num_classes}
    return replace(opened, made={"transformers": cls.__name__, "note": note | {"creation": creation}})


def make_transformers(name: str, *, config: Any = None, num_classes: int = 0, **more: Any) -> nn.Module:
    """A network of transformers without weights, as the note of a conversion says.

    Raises:
        SubquadError: transformers is not there, or has no such network.
    """
    cls = _class_named(name, "its note")
    if not isinstance(config, Mapping) or more:
        raise SubquadError("its note does not say how the network was made")
    labels = {"num_labels": num_classes} if num_classes else {}
    return NetworkOfTransformers(cls(cls.config_class.from_dict({**config, **labels})))


NAMING = ("id2label", "label2id", "transformers_version", "architectures", "_name_or_path", "auto_map")
"""What is not about how a network is made; names of classes are in the note itself."""


def _of_making(config: Any) -> dict[str, Any]:
    """What a configuration says otherwise than its class, of how the network is made."""
    return {key: value for key, value in config.to_diff_dict().items() if key not in NAMING}


def _class_named(name: str, where: str) -> Any:
    """A class of transformers' own for images: one that tells classes apart, or gives tokens.

    Raises:
        SubquadError: there is none of this name, or it does something else.
    """
    try:
        import transformers
    except ImportError:
        raise SubquadError(
            f"{where} is of a network of transformers, which is not installed: pip install transformers"
        ) from None
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise SubquadError(f"{where}: transformers {transformers.__version__} has no network '{one_line(name, 60)}'")
    ends = name.endswith((CLASSIFIER, "Model"))
    if cls.main_input_name != "pixel_values" or not ends:
        raise SubquadError(
            f"{where} is of a {name}: commands take classifiers and encoders of images; others are opened by "
            "transformers and given to subquad.convert(network, …)"
        )
    return cls


def _classes(config: Any, count: int) -> tuple[str, ...]:
    """Their names, unless they are those that transformers makes up."""
    names = [str(config.id2label[number]) for number in sorted(config.id2label)] if count else []
    made_up = names == [f"LABEL_{number}" for number in range(count)]
    return () if made_up or len(names) != count else tuple(names)


def _pictures(folder: Path, img_size: Pixels | None) -> dict[str, Any]:
    """How images are brought to a network, as a note has it: as its processor does it.

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
        return _as_note(said, img_size)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise SubquadError(
            f"{folder / HUB_PICTURES} brings images to the network in another way than by resizing, a crop of the "
            "middle, division by 255, mean and std: open it with transformers, and give subquad.convert the network"
        ) from None


def _as_note(said: Mapping[str, Any], img_size: Pixels | None) -> dict[str, Any]:
    """The settings of a processor of transformers, with all that its class fills in, as a note has them.

    Raises:
        KeyError, and others of its kind: they are of another form.
    """
    if not (said["do_resize"] and said["do_rescale"]) or abs(255 * said["rescale_factor"] - 1) > 1e-6:
        raise ValueError("other steps")
    size, crops = said["size"], said.get("do_center_crop")
    # by the shorter side, as it is, and cut; or both sides, whatever the aspect
    keeps_aspect = "shortest_edge" in size
    resized = [size["shortest_edge"]] * 2 if keeps_aspect else [size["height"], size["width"]]
    seen = [said["crop_size"]["height"], said["crop_size"]["width"]] if crops else resized
    normalises = said["do_normalize"]
    return {
        "img_size": list(seen if img_size is None else height_and_width(img_size)),
        "mean": list(said["image_mean"]) if normalises else [0.0, 0.0, 0.0],
        "std": list(said["image_std"]) if normalises else [1.0, 1.0, 1.0],
        "interpolation": RESAMPLING[int(said["resample"])],
        # ConvNeXt's has the share itself, and crops by it
        "crop_pct": min(min(seen) / min(resized), 1.0) if crops else said.get("crop_pct") or 1.0,
        "crop_mode": "center" if keeps_aspect else "squash",
    }


def _json(file: Path) -> dict[str, Any]:
    """What a file says; nothing where it is not there, or none of JSON's mappings."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
