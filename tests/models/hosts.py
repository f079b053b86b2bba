"""A small network of every host, and of every kind of plain ViT, with a mechanism of choice."""

import subquad
from subquad.models import HOSTS, VARIANTS

PLAIN = {"embed_dim": 24, "num_heads": 2, "depths": (2,), "patch_size": 8}
SMALL = {
    "vit": ("deit_tiny", {"embed_dim": 24, "num_heads": 2, "depths": (3,), "patch_size": 8}),
    "pvt": ("pvt_tiny", {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4), "depths": (1, 2, 1, 1)}),
    "pvt_v2": ("pvt_v2_b0", {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4), "depths": (1, 2, 1, 1)}),
    "swin": ("swin_tiny", {"embed_dim": 12, "num_heads": (1, 2, 3, 4), "depths": (2, 1, 2, 1)}),
    "cswin": ("cswin_tiny", {"embed_dim": 16, "num_heads": (2, 2, 4, 4), "depths": (1, 1, 2, 1)}),
    "softnet": ("softnet_tiny", {"embed_dims": (32, 32, 64, 64), "depths": (1, 2, 1, 1)}),
    "lavit": ("lavit_tiny", {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4), "depths": (1, 1, 3, 3)}),
    "lavit_vit": ("lavit_deit_tiny", {"embed_dim": 24, "num_heads": 2, "depths": (4,), "patch_size": 8}),
    "mllanet": ("mllanet_tiny", {"embed_dim": 8, "num_heads": (1, 2, 2, 4), "depths": (1, 2, 1, 1)}),
    "hvit3": ("hvit3_tiny", {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4), "depths": (1, 2, 1, 1)}),
    "vit3": ("vit3_tiny", PLAIN),
    "deit3": ("deit3_small", PLAIN),
    "dinov2": ("dinov2_small", PLAIN),
    "dinov2_reg4": ("dinov2_small_reg4", PLAIN),
    "eva02": ("eva02_tiny", PLAIN),
    "dinov3": ("dinov3_small", PLAIN),
}
CLASSES = {kind: HOSTS[VARIANTS[name].host] for kind, (name, _) in SMALL.items()}
assert set(CLASSES.values()) == set(HOSTS.values())


def small(kind, attention="softmax", **changes):
    name, sizes = SMALL[kind]
    if not CLASSES[kind].takes_mechanisms:
        attention = None
    return subquad.create_model(name, attention=attention, **{"img_size": 64, "num_classes": 5, **sizes, **changes})
