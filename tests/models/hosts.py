"""A small network of every host, and of every kind of plain ViT, with a mechanism of choice."""

import pytest
import torch

import subquad
from subquad import ATTENTION
from subquad.attention import traits_of
from subquad.models import HOSTS, VARIANTS
from subquad.models.vit import Plain

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
    "mavit": (
        "mavit_tiny",
        {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4), "depths": (1, 2, 1, 1), "head_width": 40},
    ),
    "hvit3": ("hvit3_tiny", {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4), "depths": (1, 2, 1, 1)}),
    "vit3": ("vit3_tiny", PLAIN),
    "deit3": ("deit3_small", PLAIN),
    "dinov2": ("dinov2_small", PLAIN),
    "dinov2_reg4": ("dinov2_small_reg4", PLAIN),
    "eva02": ("eva02_tiny", PLAIN),
    "dinov3": ("dinov3_small", PLAIN),
}
CLASSES = {kind: HOSTS[VARIANTS[name].host] for kind, (name, _) in SMALL.items()}
OF_LAST_STAGE = ("softnet",)
"""Pyramids with a class token in their last stage."""
assert set(CLASSES.values()) == set(HOSTS.values())


FEWEST = {"swin": (2, 1), "lavit": (2, 2), "lavit_vit": (2,)}
"""Where a stage has blocks of more than one kind: windows are shifted, LaViT's later blocks take scores over."""


def fewest(kind):
    """What makes a host as shallow as it can be, a way down included: compiling and exporting take seconds a block."""
    if len(SMALL[kind][1]["depths"]) == 1:
        return {"depths": FEWEST.get(kind, (1,))}
    two_stages = {key: value[:2] for key, value in SMALL[kind][1].items() if isinstance(value, tuple)}
    return two_stages | {"depths": FEWEST.get(kind, (1, 1))}


def paired(hosts, mechanisms, *, whole="vit"):
    """Every host with every mechanism: the host `whole` with all, and each with a quarter of them, in the fast tests.

    Networks whose design is the idea take no mechanism, and stand there once.
    """
    return [
        pytest.param(host, attention, marks=() if host == whole or (i + j) % 4 == 0 else pytest.mark.slow)
        for i, host in enumerate(hosts)
        for j, attention in enumerate(mechanisms)
        if host not in CLASSES or CLASSES[host].takes_mechanisms or (i + j) % 4 == j // 4 == 0
    ]


def without_prefix(attention):
    """The settings of a plain network in which this mechanism can stand: no prefix tokens where it refuses them."""
    return {"class_token": False, "reg_tokens": 0, "global_pool": "avg"} if refuses_prefix(attention) else {}


def refuses_prefix(attention):
    names = [attention] if isinstance(attention, str) else attention or ()
    return any(name in ATTENTION and "prefix" in traits_of(ATTENTION[name]).refuses for name in names)


def small(kind, attention="softmax", **changes):
    name, sizes = SMALL[kind]
    if not CLASSES[kind].takes_mechanisms:
        attention = None
    elif issubclass(CLASSES[kind], Plain):
        changes = without_prefix(attention) | changes
    elif kind in OF_LAST_STAGE and refuses_prefix(attention):
        stages = len((sizes | changes)["depths"])
        attention = [*[attention] * (stages - 1), "softmax"]
    return subquad.create_model(name, attention=attention, **{"img_size": 64, "num_classes": 5, **sizes, **changes})


def drawn(model):
    """The network with no parameter at its initial value, which may be zero."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return model.eval()
