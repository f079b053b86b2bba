"""Every network of the table as a timm model: `timm.create_model("agent_swin_tiny", features_only=True)`.

Importing subquad registers them. Weights of the authors, converted or as released, load through the same mapping as in
`subquad.load_checkpoint`.
"""

import sys
from collections.abc import Callable
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from subquad.models.backbone import Backbone
from subquad.models.create import create_model
from subquad.models.networks import NETWORKS
from subquad.models.pretrained import checked_weights, pretrained_file
from subquad.models.timm_settings import default_cfg
from subquad.models.variants import HOSTS, VARIANTS
from subquad.weights.fitting import adapt, stored_grids
from subquad.weights.links import LINKS, TAGS, network_of


def _with_link(row: str) -> dict[str, Any]:
    """The same of a row of LINKS, which may be one of a network's files, with its link."""
    return default_cfg(network_of(row)) | {"url": LINKS[row].url}


default_cfgs = generate_default_cfgs(
    {name: _with_link(name) if name in LINKS else default_cfg(name) for name in NETWORKS}
    | {tagged: _with_link(row) for tagged, row in TAGS.items() if network_of(row) in NETWORKS}
)


SOURCES = frozenset({"file", "url", "hf_hub_id", "state_dict"})
"""Entries of a configuration that say where weights are."""


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A state dict, ours or released, under the names and at the table sizes of `model`.

    Its tables stand on the grid of the images that the configuration of the weights says.
    """
    cfg: Any = getattr(model, "pretrained_cfg", None) or {}
    size = list(cfg.get("input_size", ())[1:])
    # a network that is made for another size first is made as that of the weights was
    first = getattr(model, "creation", {}).get("built_for", size)
    said = {"creation": {"img_size": size, "built_for": first}}
    return adapt(state_dict, model, stored_grids(said, model, "the state dict")).state


def _entry_point(name: str) -> Callable[..., nn.Module]:
    is_plain = HOSTS[VARIANTS[NETWORKS[name].variant].host].is_plain

    def entry(
        pretrained: bool = False, pretrained_cfg: Any = None, pretrained_cfg_overlay: Any = None, **settings: Any
    ) -> nn.Module:
        tag = pretrained_cfg if isinstance(pretrained_cfg, str) else ""
        row = TAGS.get(f"{name}.{tag}", name)
        overlay = {} if pretrained_cfg_overlay is None else dict(pretrained_cfg_overlay)
        # whoever brings a configuration, as the hub's folders do, says there where the weights are
        if pretrained and row in LINKS and isinstance(pretrained_cfg, str | None) and not overlay.keys() & SOURCES:
            file = pretrained_file(row)
            checked_weights(file)
            overlay["file"] = str(file)

        def build(**settings: Any) -> Backbone:
            return create_model(network_of(row), **settings)

        settings |= {"pretrained_cfg": pretrained_cfg, "pretrained_cfg_overlay": overlay or None}
        features = {"out_indices": 3 if is_plain else (0, 1, 2, 3), "feature_cls": "getter"}
        return build_model_with_cfg(
            build, name, pretrained, pretrained_filter_fn=checkpoint_filter_fn, feature_cfg=features, **settings
        )

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = f"{name}, see `subquad.models.networks.NETWORKS`."
    return entry


for _name in NETWORKS:
    setattr(sys.modules[__name__], _name, register_model(_entry_point(_name)))
