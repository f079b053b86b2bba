"""What networks, ours and others', say of the images that they are made for: height and width, and channels."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from subquad.ranges import fits

OF_IMAGES = ("img_size", "image_size")
"""How networks call the size of their images."""


def said_size(holder: Any, names: tuple[str, ...] = OF_IMAGES) -> tuple[int, int] | None:
    """(height, width) that a network, a part of it or its configuration has under one of these names."""
    for name in names:
        size: Any = getattr(holder, name, None)
        if fits(size, int):
            return int(size), int(size)
        if isinstance(size, tuple | list) and len(size) == 2 and all(fits(side, int) for side in size):
            return int(size[0]), int(size[1])
    return _size_of_patches(holder)


def _size_of_patches(holder: Any) -> tuple[int, int] | None:
    """The same of timm's Hiera, which says how many rows and columns of patches it has, and how far they lie apart."""
    places, stride = (getattr(holder, name, None) for name in ("tokens_spatial_shape", "patch_stride"))
    if not (isinstance(places, tuple | list) and isinstance(stride, tuple | list) and len(places) == len(stride) == 2):
        return None
    return int(places[0] * stride[0]), int(places[1] * stride[1])


def size_of_weights(model: Any) -> tuple[int, int] | None:
    """(height, width) that timm says of the weights of a network, which itself may take any."""
    about = getattr(model, "pretrained_cfg", None)
    size = about.get("input_size") if isinstance(about, Mapping) else None
    return (int(size[1]), int(size[2])) if isinstance(size, tuple | list) and len(size) == 3 else None


def stated_size(model: nn.Module) -> tuple[int, int] | None:
    """(height, width) of the images that a network, or the first part of it to do so, says it is made for."""
    parts = list(model.modules())
    return next(_said_by(parts), None) or next(filter(None, map(size_of_weights, parts)), None)


def _said_by(parts: list[nn.Module]) -> Iterator[tuple[int, int]]:
    for part in parts:
        # last what `convert` was told of a network that says nothing
        for holder in (part, *(getattr(part, name, None) for name in ("patch_embed", "config", "subquad_conversion"))):
            if (size := said_size(holder)) is not None:
                yield size


def image_channels(model: nn.Module) -> int:
    """Of the images that a network is timed on: as it or its backbone says, or its first convolution; else 3."""
    modules = list(model.modules())
    said = next((channels for one in modules if isinstance(channels := getattr(one, "in_chans", None), int)), None)
    # of images, or of films as towers of language models have it
    first = next((one for one in modules if isinstance(one, nn.Conv2d | nn.Conv3d)), None)
    if said is None:
        return 3 if first is None else first.in_channels
    # a backbone behind a convolution of somebody's own says what that one gives; convolutions of heads give others
    in_front = first is not None and first.out_channels == said and not hasattr(model, "in_chans")
    return first.in_channels if first is not None and in_front else said


def possible_channels(model: nn.Module) -> list[int]:
    """Channels that the images of a network may have: as it or its backbone says, or as its first convolution does."""
    said = (channels for module in model.modules() if isinstance(channels := getattr(module, "in_chans", None), int))
    convolutions = (module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d))
    # a backbone behind a convolution of somebody's own says what that one gives
    channels = [number for number in (next(said, None), next(convolutions, None)) if number is not None]
    return list(dict.fromkeys(channels)) or [3]
