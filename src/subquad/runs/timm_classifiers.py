"""Classifiers of timm, to be looked into beside ours."""

import sys
from typing import Any

import timm
import torch
from torch import Tensor, nn

from subquad.data import InputConfig
from subquad.errors import SubquadError, unknown_name
from subquad.models import read_weights
from subquad.tasks import ImageNetwork
from subquad.text import one_line
from subquad.weights.fitting import misfits, not_finite, some


def open_timm(source: str, img_size: int | None, device: torch.device) -> ImageNetwork:
    """Open a classifier, from "NAME" with timm's weights or "NAME=FILE" with those of a file.

    Args:
        source: of timm's.
        img_size: pixels of both sides of its images; timm's own if left out.
        device: where it goes.

    Raises:
        SubquadError: timm has no such network, or the weights can't be had or do not fit.
    """
    name, _, file = source.partition("=")
    if name.partition(".")[0] not in timm.list_models():
        raise unknown_name("network of timm", name, timm.list_models())
    state = read_weights(file)[0] if file else None
    arguments: dict[str, Any] = {} if img_size is None else {"img_size": img_size}
    if state is not None:
        head = next((state[key] for key in ("head.weight", "head.fc.weight", "fc.weight") if key in state), None)
        arguments["num_classes"] = 0 if head is None or not head.dim() else len(head)
    try:
        model = _made(name, pretrained=state is None, **arguments)
        if state is not None:
            state = _fitting(state, model, resample=img_size is not None)
            if names := not_finite(state):
                raise ValueError(f"not finite: {some(names)}")
            model.load_state_dict(state)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        hint = "" if file else "; name a file, timm/NAME=FILE"
        raise SubquadError(f"can't load timm/{source}: {one_line(error)}{hint}") from None
    config = timm.data.resolve_model_data_config(model)
    size = tuple(config["input_size"][1:]) if img_size is None else (img_size, img_size)
    same = {key: config[key] for key in ("mean", "std", "interpolation", "crop_pct", "crop_mode")}
    shown = InputConfig(img_size=(size[0], size[1]), **same)
    return ImageNetwork("classify", model.eval().to(device), (), None, None, device, shown)


ANY_SIZE = {"dynamic_img_size": True, "dynamic_img_pad": True}
"""What timm's plain networks take, by which they see images of any size; at their own one nothing changes."""


def _made(name: str, **arguments: Any) -> Any:
    """A network of timm, for images of any size where it can be one."""
    try:
        return timm.create_model(name, **arguments, **ANY_SIZE)
    except TypeError:
        # which others refuse before they ask for weights
        return timm.create_model(name, **arguments)


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
