"""Attention maps that answer a click: a place of an image, and where each layer of each network looks from there."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from PIL import Image

from subquad.analysis.small_maps import Looking
from subquad.pages.page_parts import data_uri, section
from subquad.writing import json_text

_LEAD = (
    "Click a place of the image, or move with the arrow keys, and see where each layer looks from there: the mean over "
    "heads, each map from nothing to its own largest weight, blue where weights are negative. Local branches are not "
    "in it, and layers that attend in windows are left out."
)
_SIDE = 224


def attention_viewer(pictures: Sequence[Image.Image], looks: Mapping[str, Sequence[Sequence[Looking]]]) -> str:
    """Markup of the section: `looks` has a network's layers for each picture; nothing if none looks at a whole map."""
    parts = [
        _viewer(picture, {name: images[place] for name, images in looks.items() if images[place]})
        for place, picture in enumerate(pictures)
    ]
    if not any(parts):
        return ""
    script = (files("subquad.pages") / "viewer.js").read_text(encoding="utf-8")
    return section("Where places look", _LEAD, f"{''.join(parts)}<script>{script}</script>")


def _viewer(picture: Image.Image, networks: Mapping[str, Sequence[Looking]]) -> str:
    if not networks:
        return ""
    layers: list[dict[str, Any]] = []
    rows = []
    for name, looks in networks.items():
        cells = []
        for look in looks:
            cells.append(
                f'<figure><canvas data-layer="{len(layers)}"></canvas>'
                f"<figcaption>{look.layer} {escape(look.mechanism)}</figcaption></figure>"
            )
            layers.append(
                {
                    "queries": look.queries,
                    "keys": look.keys,
                    "prefix": look.has_prefix,
                    "signed": bool((look.weights < 0).any()),
                    "scale": look.scale,
                    "weights": base64.b64encode(look.weights.tobytes()).decode(),
                }
            )
        rows.append(f'<div class="looks"><h3>{escape(name)}</h3><div class="cells">{"".join(cells)}</div></div>')
    source = data_uri(picture.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BICUBIC), colours=128)
    token = (
        '<button type="button" class="token">class token</button>' if any(layer["prefix"] for layer in layers) else ""
    )
    return (
        '<div class="viewer"><div class="side">'
        '<div class="query" tabindex="0" role="application" aria-label="click a place of the image">'
        f'<img src="{source}" alt=""><span class="mark"></span></div>{token}</div>'
        f'<div class="maps">{"".join(rows)}</div>'
        f'<script type="application/json">{json_text({"layers": layers})}</script></div>'
    )
