"""Attention maps that answer a click: a place of an image, and where each layer of each network looks from there."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from PIL import Image

from subquad.analysis.small_maps import Looking
from subquad.pages.page_parts import NOTHING, data_uri, own_file, render, section, size_within

_SIDE = 224
_LEAD = (
    "Click a place of the image, or move with the arrow keys, and see where each layer looks from there: the mean over "
    "heads, each map from nothing to its own largest weight, blue where weights are negative. Local branches are not "
    "in it, and layers that attend in windows are left out."
)


def attention_viewer(
    pictures: Sequence[Image.Image],
    looks: Mapping[str, Sequence[Sequence[Looking]]],
    *,
    title: str = "Where places look",
    lead: str = _LEAD,
) -> Markup:
    """The section: `looks` has a network's layers for each picture; nothing if none looks at a whole map."""
    shown = [{name: images[place] for name, images in looks.items() if images[place]} for place in range(len(pictures))]
    viewers = [_viewer(picture, networks) for picture, networks in zip(pictures, shown, strict=True) if networks]
    if not viewers:
        return NOTHING
    return section(title, lead, render("viewer.html", viewers=viewers, script=own_file("viewer.js")))


def _viewer(picture: Image.Image, networks: Mapping[str, Sequence[Looking]]) -> dict[str, Any]:
    """What the template shows of one picture: itself, its layers, and by network the numbers of those."""
    layers: list[dict[str, Any]] = []
    captions = []
    for name, looks in networks.items():
        captions.append((name, [(len(layers) + k, f"{look.layer} {look.mechanism}") for k, look in enumerate(looks)]))
        layers += [
            {
                "queries": look.queries,
                "keys": look.keys,
                "prefix": look.has_prefix,
                "signed": bool((look.weights < 0).any()),
                "scale": look.scale,
                "weights": base64.b64encode(look.weights.tobytes()).decode(),
            }
            for look in looks
        ]
    size = size_within(_SIDE, picture)
    return {
        "source": data_uri(picture.convert("RGB").resize(size, Image.Resampling.BICUBIC), colours=128),
        # cells of large maps are averaged, so that the numbers of them are not the map's aspect
        "aspect": f"{size[0]} / {size[1]}",
        "networks": captions,
        "has_token": any(layer["prefix"] for layer in layers),
        "layers": layers,
    }
