"""Small Hieras of timm and transformers: maps of 16×16 to 2×2, in whose last two stages blocks see all of the map."""

import pytest
import timm
from torch import nn

SIZES = {"embed_dim": 16, "mlp_ratio": 2.0}


def timms_hiera(**more):
    """For images of one size."""
    sizes = {"img_size": 64, "num_classes": 5, "stages": (1, 1, 3, 2), **SIZES}
    return timm.create_model("hiera_tiny_224", **sizes | more)


def hiera_of_transformers(model="HieraModel", **more):
    transformers = pytest.importorskip("transformers")
    config = transformers.HieraConfig(image_size=[64, 64], depths=[1, 1, 3, 2], num_heads=[1, 2, 4, 8], **SIZES | more)
    return getattr(transformers, model)(config)


class Resampled(nn.Module):
    """transformers' Hiera, told to resample its positions, so that it takes images of other sizes."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x, interpolate_pos_encoding=True)


# as the rows of `foreign_more.MORE`
HIERAS = {
    "timm Hiera": (timms_hiera, []),
    "transformers Hiera": (lambda: Resampled(hiera_of_transformers()), [(64, 96), (128, 64)]),
}
