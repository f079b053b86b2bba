"""Networks for images of any size whose weights do not matter: what is timed, not asked."""

from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch import nn

from subquad.errors import SubquadError, unknown_name
from subquad.models import NETWORKS, VARIANTS, create_model
from subquad.runs.opened_networks import TIMM, open_trained
from subquad.runs.timm_classifiers import open_timm, sized
from subquad.text import one_line

Maker = Callable[[tuple[int, int]], nn.Module]
"""A network for images of (height, width)."""


def maker_of(source: str) -> Maker:
    """What makes a network for images of a size: timm/NAME, a network of ours by name, or a trained one.

    Raises:
        SubquadError: there is none of this name; and, when it is called, for a size that the network can't have.
    """
    if source.startswith(TIMM):
        name, _, file = source.removeprefix(TIMM).partition("=")
        if file:
            return lambda px: open_timm(f"{name}={file}", px, torch.device("cpu")).model
        if name.partition(".")[0] not in timm.list_models():
            raise unknown_name("network of timm", name, timm.list_models())
        return lambda px: _timms(name, px)
    if source in NETWORKS or source in VARIANTS:
        return lambda px: create_model(source, img_size=px)
    if not Path(source).exists():
        raise unknown_name("network", source, {*NETWORKS, *VARIANTS})
    # what can't be opened is said before anything is timed
    open_trained(source, device="cpu")
    return lambda px: open_trained(source, img_size=px, device="cpu").model


def _timms(name: str, px: tuple[int, int]) -> nn.Module:
    try:
        return sized(name, img_size=px)[0]
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise SubquadError(f"timm/{name} can't be made for {px[0]}×{px[1]} px: {one_line(error)}") from None
