"""Classifiers of timm: by their names, or from a folder that timm saved."""

import json
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import timm
import torch
from torch import Tensor, nn

from subquad.errors import SubquadError, unknown_name
from subquad.models import read_weights
from subquad.ranges import Pixels, height_and_width
from subquad.reading import read_yaml
from subquad.tasks import ImageNetwork, task_named
from subquad.text import one_line
from subquad.weights.files import read_note
from subquad.weights.fitting import misfits, not_finite, some
from subquad.weights.hub_access import asking_hub

CONFIG = "config.json"
"""In a folder that timm saved: the network's name, how it is made, how it takes images, its classes."""

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""What is beside it, as timm calls them."""

HEADS = ("head", "head.fc", "fc", "head.fc.fc2")
"""The last layers of classifiers, whose rows are the classes; CAFormer's has one in front of it."""


def open_timm(source: str, img_size: Pixels | None, device: torch.device) -> ImageNetwork:
    """Open a classifier, from "NAME" with timm's weights or "NAME=FILE" with those of a file.

    Args:
        source: of timm's.
        img_size: pixels of its images, one number or (height, width); timm's own if left out.
        device: where it goes.

    Raises:
        SubquadError: timm has no such network, or the weights can't be had or do not fit.
    """
    name, _, file = source.partition("=")
    if name.partition(".")[0] not in timm.list_models():
        raise unknown_name("network of timm", name, timm.list_models())
    state = read_weights(file)[0] if file else None
    arguments: dict[str, Any] = {}
    if state is not None:
        head = next((state[f"{key}.weight"] for key in HEADS if f"{key}.weight" in state), None)
        arguments["num_classes"] = 0 if head is None or not head.dim() else len(head)
    trained = trained_with(Path(file).parent / TRAINED, name) if file else {}
    kwargs, size = trained.pop("model_kwargs", None), trained.pop("img_size", None)
    arguments |= kwargs if isinstance(kwargs, dict) else {}
    hint = "" if file else "; name a file, timm/NAME=FILE"
    return _opened(name, arguments, state, img_size or size, device, f"timm/{source}", hint, taking=trained)


TRAINED = "args.yaml"
"""What timm's training script writes beside its weights."""


def trained_with(file: Path, name: str) -> dict[str, Any]:
    """What timm's training script noted of how images of network `name` were taken, beside its weights; or nothing.

    Raises:
        SubquadError: it can't be read.
    """
    if not file.is_file():
        return {}
    said = read_yaml(file)
    if not isinstance(said, dict) or str(said.get("model", "")).partition(".")[0] != name.partition(".")[0]:
        return {}
    kept = ("mean", "std", "interpolation", "crop_pct", "img_size", "model_kwargs")
    found = {key: said[key] for key in kept if said.get(key)}
    if isinstance(size := said.get("input_size"), list) and len(size) == 3 and "img_size" not in found:
        found["img_size"] = tuple(size[1:])
    # of several the one of each image is drawn in training
    return {key: value for key, value in found.items() if (key, value) != ("interpolation", "random")}


def folder_of_timm(path: Path) -> Path | None:
    """The folder that timm saved, or that was fetched from its hub, of its path or that of the weights in it.

    None for everything else, and for what `subquad.upload` wrote: that says more in its note.
    """
    folder = path.parent if path.name in WEIGHTS else path
    file = _weights_in(folder)
    return None if _config(folder) is None or (file is not None and read_note(file)) else folder


def open_timm_folder(folder: Path, img_size: Pixels | None, device: torch.device) -> ImageNetwork:
    """Open a classifier from a folder that `timm.models.save_for_hf` wrote; none of its code is run.

    Args:
        folder: with config.json and the weights.
        img_size: pixels of its images, one number or (height, width); as the folder says if left out.
        device: where it goes.

    Raises:
        SubquadError: timm has no such network, or the weights are not there or do not fit.
    """
    config = _config(folder) or {}
    name = config["architecture"].partition(".")[0]
    if name not in timm.list_models():
        raise SubquadError(f"{folder / CONFIG}: {unknown_name('network of timm', name, timm.list_models())}")
    file = _weights_in(folder)
    if file is None:
        raise SubquadError(f"{folder} holds no weights: there is neither {' nor '.join(WEIGHTS)} in it")
    state, arguments = read_weights(file)[0], config.get("model_args") or {}
    if not isinstance(arguments, dict):
        raise SubquadError(f"{folder / CONFIG}: model_args are no arguments by name")
    return _opened(f"local-dir:{folder}", arguments, state, img_size, device, str(folder), architecture=name)


def _weights_in(folder: Path) -> Path | None:
    return next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)


def _config(folder: Path) -> dict[str, Any] | None:
    """What timm wrote of the network of a folder, its architecture at least; None if it is no such folder."""
    try:
        said = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) and isinstance(said.get("architecture"), str) else None


def _opened(
    name: str,
    arguments: dict[str, Any],
    state: dict[str, Tensor] | None,
    img_size: Pixels | None,
    device: torch.device,
    called: str,
    hint: str = "",
    *,
    architecture: str | None = None,
    taking: Mapping[str, Any] = MappingProxyType({}),
) -> ImageNetwork:
    """A network of timm, with timm's weights if there are none of a file; `taking` says how it takes images."""
    try:
        if img_size is not None:
            if state is not None and arguments.get("img_size") is not None:
                state = _moved(name, arguments, state, height_and_width(img_size))
            arguments = arguments | {"img_size": img_size}
        with asking_hub() if state is None else nullcontext():
            model, made_of = _made(name, pretrained=state is None, **arguments)
        if state is not None:
            state = _fitting(state, model, resample=img_size is not None)
            if names := not_finite(state):
                raise ValueError(f"not finite: {some(names)}")
            model.load_state_dict(state)
    except (SubquadError, OSError, RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise SubquadError(f"can't load {called}: {one_line(error)}{hint}") from None
    config = timm.data.resolve_model_data_config(model)
    seen = {key: config[key] for key in ("mean", "std", "interpolation", "crop_pct", "crop_mode")}
    seen |= taking
    # of a network of any size timm's note says what its own weights had, whatever size the arguments say
    size = arguments.get("img_size")
    seen["img_size"] = config["input_size"][1:] if size is None else height_and_width(size)
    # as a note has it, which is JSON
    as_json = {key: list(value) if isinstance(value, tuple) else value for key, value in seen.items()}
    note = {"classes": list(_classes(model)), "input": as_json}
    del made_of["pretrained"]
    creation = {"task": "classify", **made_of, "num_classes": model.num_classes}
    opened = task_named("classify").opened(model.eval().to(device), note, {}).image_network()
    return replace(opened, made={"timm": architecture or name.partition(".")[0], "note": note | {"creation": creation}})


def _classes(model: Any) -> tuple[str, ...]:
    """Their names, where timm knows all of them."""
    names = model.pretrained_cfg.get("label_names") or ()
    if isinstance(names, dict):
        # by number, which gaps are left out of
        names = [names[number] for number in sorted(names, key=int)]
    return tuple(map(str, names)) if len(names) == model.num_classes else ()


ANY_SIZE = {"dynamic_img_size": True, "dynamic_img_pad": True}
"""What timm's plain networks take, by which they see images of any size; at their own one nothing changes."""


def _made(name: str, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    """A network of timm, for images of any size where it can be one; and the arguments that made it."""
    try:
        return sized(name, **{**arguments, **ANY_SIZE})
    except TypeError:
        # which others refuse before they ask for weights
        return sized(name, **arguments)


def sized(name: str, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    """A network of timm; and the arguments that made it, without `img_size` where it has none: it takes any size.

    Raises:
        TypeError, and whatever timm raises: it can't be made so.
    """
    try:
        return timm.create_model(name, **arguments), arguments
    except TypeError as error:
        if "img_size" not in arguments or not _UNKNOWN_SIZE.search(str(error)):
            raise
    unsized = {key: value for key, value in arguments.items() if key != "img_size"}
    return timm.create_model(name, **unsized), unsized


_UNKNOWN_SIZE = re.compile(r"unexpected keyword argument.*'img_size'")


def make_timm(name: str, **arguments: Any) -> nn.Module:
    """A network of timm without weights, as the note of a conversion says.

    Raises:
        SubquadError: timm has no such network.
    """
    if name not in timm.list_models():
        raise unknown_name("network of timm", name, timm.list_models())
    return timm.create_model(name, pretrained=False, **arguments)


def _moved(name: str, arguments: dict[str, Any], state: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
    """Weights whose table of positions is moved to images of a size: the arguments alone say on which map it stood."""
    model, _ = _made(name, pretrained=False, **arguments)
    if not (hasattr(model, "set_input_size") and isinstance(getattr(model, "pos_embed", None), nn.Parameter)):
        # windows would be others there
        return state
    state = _fitting(state, model, resample=False)
    model.load_state_dict(state)
    model.set_input_size(size)
    return {**state, "pos_embed": model.pos_embed.detach()}


def _fitting(state: dict[str, Tensor], model: nn.Module, *, resample: bool) -> dict[str, Tensor]:
    """Weights as a network of timm has them: of another image size, or as their authors wrote them, by its rules.

    Tables of positions are resampled only where a size was asked for, which says that it is another one.

    Raises:
        ValueError: they do not fit, says what of it.
    """
    trouble = misfits(state, model.state_dict())
    if not trouble:
        return state
    try:
        brought = sys.modules[type(model).__module__].checkpoint_filter_fn(dict(state), model)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        # no such rules, or none for these
        raise ValueError(trouble) from None
    before, after = (weights.get("pos_embed") for weights in (state, brought))
    moved = before is not None and after is not None and before.shape != after.shape
    if misfits(brought, model.state_dict()):
        raise ValueError(trouble)
    if moved and not resample:
        raise ValueError(f"{trouble}; it is resampled where an image size is asked for")
    return dict(brought)
