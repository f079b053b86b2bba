"""A small network of every host, with a mechanism of choice."""

import subquad
from subquad.models import HOSTS

SMALL = {
    "vit": ("deit_tiny", {"embed_dim": 24, "num_heads": 2, "depths": (3,), "patch_size": 8}),
    "pvt": ("pvt_tiny", {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4), "depths": (1, 2, 1, 1)}),
    "swin": ("swin_tiny", {"embed_dim": 12, "num_heads": (1, 2, 3, 4), "depths": (2, 1, 2, 1)}),
    "cswin": ("cswin_tiny", {"embed_dim": 16, "num_heads": (2, 2, 4, 4), "depths": (1, 1, 2, 1)}),
    "softnet": ("softnet_tiny", {"embed_dims": (32, 32, 64, 64), "depths": (1, 2, 1, 1)}),
    "lavit": ("lavit_tiny", {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4), "depths": (1, 1, 3, 3)}),
    "lavit_vit": ("lavit_deit_tiny", {"embed_dim": 24, "num_heads": 2, "depths": (4,), "patch_size": 8}),
}
assert SMALL.keys() == HOSTS.keys()


def small(host, attention="softmax", **changes):
    name, sizes = SMALL[host]
    if not HOSTS[host].takes_mechanisms:
        attention = None
    return subquad.create_model(name, attention=attention, **{"img_size": 64, "num_classes": 5, **sizes, **changes})
