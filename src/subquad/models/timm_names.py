"""Every network of the table as a timm model: `timm.create_model("agent_swin_tiny", features_only=True)`.

Importing subquad registers them. Weights of the authors, converted or as released, load through the same mapping as in
`subquad.load_checkpoint`.
"""

import sys
from collections.abc import Callable
from typing import Any

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from subquad.models.backbone import Backbone
from subquad.models.create import create_model
from subquad.models.networks import NETWORKS
from subquad.models.variants import HOSTS, VARIANTS
from subquad.weights.fitting import adapt


def default_cfg(name: str) -> dict[str, Any]:
    """What timm wants to know of a network: its input, how it is evaluated, the names of its ends."""
    network = NETWORKS[name]
    variant = VARIANTS[network.variant]
    size = network.settings.get("img_size", variant.arguments.get("img_size", 224))
    height, width = (size, size) if isinstance(size, int) else size
    cells = -(-height // 32), -(-width // 32)
    published_crop = {"soft": 0.9}.get(variant.recipe, 0.875)
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, height, width),
        "pool_size": None if HOSTS[variant.host].is_plain else cells,
        # where the papers' scripts resize without a crop
        "crop_pct": 1.0 if variant.recipe == "swin" and height > 224 else published_crop,
        "crop_mode": "center" if variant.recipe == "soft" else "squash",
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": HOSTS[variant.host].first_conv,
        "classifier": "head",
        **variant.evaluation,
    }


default_cfgs = generate_default_cfgs({name: default_cfg(name) for name in NETWORKS})


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A state dict, ours or released, under the names and at the table sizes of `model`."""
    return adapt(state_dict, model).state


def _entry_point(name: str) -> Callable[..., nn.Module]:
    is_plain = HOSTS[VARIANTS[NETWORKS[name].variant].host].is_plain

    def build(**settings: Any) -> Backbone:
        return create_model(name, **settings)

    def entry(pretrained: bool = False, **settings: Any) -> nn.Module:
        features = {"out_indices": 3 if is_plain else (0, 1, 2, 3), "feature_cls": "getter"}
        return build_model_with_cfg(
            build, name, pretrained, pretrained_filter_fn=checkpoint_filter_fn, feature_cfg=features, **settings
        )

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = f"{name}, see `subquad.models.networks.NETWORKS`."
    return entry


for _name in NETWORKS:
    setattr(sys.modules[__name__], _name, register_model(_entry_point(_name)))
