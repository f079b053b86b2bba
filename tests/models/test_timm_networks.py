"""A row that names a network of timm's is that network: the same weights, softmax, float64, the same numbers."""

import functools

import pytest
import timm
import torch
from torch import nn

import subquad
from subquad.models import VARIANTS

PYRAMID = {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4), "depths": (1, 2, 1, 1)}
TINY = {"vit": {"embed_dim": 24, "num_heads": 2, "depths": (2,)}, "pvt_v2": PYRAMID}
"""Sizes by host, under our names."""

SIZED = ("vit",)
"""Hosts that timm makes for an image's size."""

ROWS = sorted(name for name, row in VARIANTS.items() if row.timm)


def design(name):
    """What tells a row from others of tiny sizes."""
    row = VARIANTS[name]
    kept = {key: value for key, value in row.arguments.items() if key not in (*TINY[row.host], "drop_path_rate")}
    return f"{row.host} {kept!r}"


DESIGNS = sorted({design(name): name for name in reversed(ROWS)}.values())
every_design = pytest.mark.parametrize("name", DESIGNS)
FAST = [name for name in DESIGNS if "giant" not in name]
SIZES = [(4, 4), (3, 5)]
"""Patches that an image is high and wide."""


def theirs_of(name, img_size, **settings):
    """timm's network of a row at tiny sizes, with numbers everywhere, zeros and ones at first included."""
    if VARIANTS[name].timm not in timm.list_models():
        pytest.skip(f"timm {timm.__version__} has no {VARIANTS[name].timm}")
    settings = {"num_classes": 5, **TINY[host_of(name)], **settings}
    if host_of(name) in SIZED:
        settings |= {"depth": settings.pop("depths")[0], "img_size": img_size}
    try:
        model = timm.create_model(VARIANTS[name].timm, **settings)
    except TypeError as error:
        pytest.skip(f"timm {timm.__version__} takes no such argument: {error}")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    model = model.double().eval()
    if getattr(model, "rope", None) is not None:
        # angles are in fp32 there, unless the module that makes them is converted
        model.rope.float()
    return model


def ours_of(name, img_size, attention="softmax", **settings):
    settings = {"num_classes": 5, **TINY[host_of(name)], **settings}
    return subquad.create_model(name, attention=attention, img_size=img_size, **settings).double().eval()


def host_of(name):
    return VARIANTS[name].host


def patch_of(name):
    """Pixels of a plain ViT's token, or of a pyramid's last, so that whole keys are reduced in all stages."""
    return VARIANTS[name].arguments.get("patch_size", 16) if host_of(name) == "vit" else 32


def pixels(name, patches):
    return tuple(count * patch_of(name) for count in patches)


same = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-8)


@every_design
@pytest.mark.parametrize("patches", SIZES)
def test_the_same_weights_give_the_same_numbers(name, patches):
    size = pixels(name, patches)
    theirs, ours = theirs_of(name, size), ours_of(name, size)
    assert not subquad.load_checkpoint(ours, theirs.state_dict()).resized
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        same(ours(x), theirs(x))
        features = theirs.forward_features(x)
        same(ours.forward_features(x), features if host_of(name) == "vit" else features.permute(0, 2, 3, 1))
        for norm in (False, True):
            maps = ours.forward_intermediates(x, norm=norm, intermediates_only=True)
            same(maps, theirs.forward_intermediates(x, norm=norm, intermediates_only=True))
        for pool in ("avg", "token") if ours.prefix else ("avg",):
            for model in (ours, theirs):
                model.reset_classifier(0, pool)
            same(ours(x), theirs(x))


@every_design
def test_images_of_another_size_too(name, monkeypatch):
    built, called = pixels(name, (4, 4)), pixels(name, (3, 6))
    dynamic = {"dynamic_img_size": True} if host_of(name) in SIZED else {}
    theirs, ours = theirs_of(name, built, **dynamic), ours_of(name, built)
    subquad.load_checkpoint(ours, theirs.state_dict())
    # timm resamples positions in fp32
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    x = torch.randn(1, 3, *called, dtype=torch.float64)
    with torch.no_grad():
        same(ours(x), theirs(x))
        ours.set_input_size(called)
        same(ours(x), theirs(x))


@pytest.mark.parametrize("name", ["deit_tiny", "dinov2_small", "eva02_tiny"])
def test_norms_of_queries_and_keys_are_timms(name):
    size = pixels(name, (3, 5))
    theirs, ours = theirs_of(name, size, qk_norm=True), ours_of(name, size, qk_norm=True)
    subquad.load_checkpoint(ours, theirs.state_dict())
    x = torch.randn(1, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        same(ours(x), theirs(x))


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in ROWS if name not in FAST)]
)
def test_real_sizes_have_as_many_parameters_as_timms(name):
    ours = subquad.create_model(name, device="meta")
    if VARIANTS[name].timm not in timm.list_models():
        pytest.skip(f"timm {timm.__version__} has no {VARIANTS[name].timm}")
    with torch.device("meta"):
        theirs = timm.create_model(VARIANTS[name].timm, num_classes=1000)

    def count(model: nn.Module):
        return sum(parameter.numel() for parameter in model.parameters())

    assert count(ours) == count(theirs)
    assert subquad.load_checkpoint(ours, theirs.state_dict()).family == host_of(name)


@every_design
def test_weights_of_timm_load_beneath_a_mechanism_without_parameters(name):
    size = pixels(name, (2, 3))
    # keys are reduced in timm's network, and linear attention would have all of them
    reduced = {"sr_ratio": [8, 4, 2, 1]} if host_of(name) == "pvt_v2" else {}
    theirs, ours = theirs_of(name, size), ours_of(name, size, "linear", **reduced)
    subquad.load_checkpoint(ours, theirs.state_dict())
    assert torch.equal(ours.head.weight, theirs.head.weight)
    assert ours(torch.randn(1, 3, *size, dtype=torch.float64)).isfinite().all()
