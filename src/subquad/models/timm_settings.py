"""What timm wants to know of a network, and how the papers evaluated it."""

from typing import Any

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from subquad.models.networks import NETWORKS
from subquad.models.variants import HOSTS, VARIANTS


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
