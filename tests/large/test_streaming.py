"""Networks over some rows of the grid at a time give what they give of the whole, or say why they can't."""

import pytest
import torch
from hosts import CLASSES, paired, small
from torch import nn

import subquad
from subquad import ATTENTION, SubquadError, TokenGrid
from subquad.attention import traits_of
from subquad.attention.sweeps import streaming_of
from subquad.large import host_of
from subquad.large.image_rows import TensorRows
from subquad.large.streaming import StreamedStage
from subquad.large.token_store import TokensInFiles, TokensInMemory

STREAMED = [name for name, cls in ATTENTION.items() if not traits_of(cls).no_streaming]
SIZE = {"embed_dim": 24, "num_heads": 2, "depths": (2,), "patch_size": 8, "img_size": 40}
IMAGE = (83, 61)
"""Pixels: 11×8 patches, the last of them filled up."""
KINDS = {
    "class token": ("deit_tiny", {}),
    "no token": ("deit_tiny", {"class_token": False}),
    "margin, norms, conditional positions": ("deit_tiny", {"image_margin": 5, "qk_norm": True, "cpe": True}),
    "rotary in fp32, registers, LayerScale": ("dinov3_small", {}),
    "rotary, SwiGLU": ("eva02_tiny", {}),
    "rotary in float64": ("deit_tiny", {"rope": "mala", "attn_norm": True}),
}


def network(attention, kind="class token", **settings):
    """A small network whose numbers are all of some size, position tables and scales too."""
    name, own = KINDS[kind]
    return loud(subquad.create_model(name, attention=attention, **{"num_classes": 5} | SIZE | own | settings))


def loud(model):
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    for norm in (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)):
        # of which several in a row would leave nothing of an image
        nn.init.ones_(norm.weight)
    return model.eval().double()


def last_tokens(model, image, most_tokens, store=TokensInMemory):
    """The tokens behind the last block, some rows at a time."""
    source = TensorRows(image, image.dtype)
    with torch.inference_mode():
        for about in host_of(model).stages(source.shape):
            tokens = store(about.grid.num_tokens, about.dim, image.dtype)
            stage = StreamedStage(about, tokens, image.dtype, most_tokens=most_tokens)
            stage.embed(source)
            for step in stage.steps():
                step()
            source = stage
        return stage.normed(stage.grid.rows(0, stage.grid.height))


def whole(model, image):
    with torch.no_grad():
        *_, (tokens, _) = model.walk(image)
    return tokens


def assert_same(model, image, most_tokens, tolerance=1e-10, **settings):
    expected = whole(model, image)
    found = last_tokens(model, image, most_tokens, **settings)
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


class Twice(nn.Linear):
    """Another's layer in a projection's place."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("name", ["linear", "pola"])
def test_what_stands_in_a_projections_place_is_called_when_it_streams_too(name):
    model = network(name)
    for block in model.blocks:
        block.attn.qkv.__class__ = Twice
    assert_same(model, torch.randn(1, 3, *IMAGE).double(), 20)


@pytest.mark.parametrize("name", ATTENTION)
def test_every_mechanism_streams_or_says_why_not(name):
    grid = TokenGrid(11, 8)
    module = ATTENTION[name](24, 2, grid=grid, kv_grid=grid)
    if name in STREAMED:
        assert streaming_of(module, grid).sums
        return
    with pytest.raises(SubquadError, match="can't be streamed: ") as refusal:
        streaming_of(module, grid)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "most_tokens", [pytest.param(1, marks=pytest.mark.slow), 20, pytest.param(32, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("attention", STREAMED)
def test_rows_at_a_time_are_the_whole(attention, most_tokens):
    kind = "no token" if "prefix" in traits_of(ATTENTION[attention]).refuses else "class token"
    assert_same(network(attention, kind), torch.randn(1, 3, *IMAGE).double(), most_tokens)


@pytest.mark.parametrize(
    ("attention", "kind"),
    [
        pytest.param(attention, kind, marks=() if (i + j) % len(KINDS) == 0 else pytest.mark.slow)
        for i, attention in enumerate(STREAMED)
        for j, kind in enumerate(KINDS)
    ],
)
def test_every_kind_of_plain_host_is_the_whole(attention, kind):
    assert_same(network(attention, kind), torch.randn(1, 3, *IMAGE).double(), 20)


SPREAD = [kind for kind, cls in CLASSES.items() if cls.spreads and not cls.is_plain]
"""Pyramids all of whose blocks see all tokens."""


@pytest.mark.parametrize(("host", "attention"), paired(SPREAD, STREAMED, whole=""))
def test_pyramids_are_the_whole(host, attention):
    assert_same(loud(small(host, attention)), torch.randn(1, 3, 139, 45).double(), 60)


@pytest.mark.parametrize("most_tokens", [pytest.param(1, marks=pytest.mark.slow), None])
@pytest.mark.parametrize("host", SPREAD)
def test_pyramids_in_other_parts_are_the_whole(host, most_tokens):
    for size in ((131, 40), (64, 33)):
        assert_same(loud(small(host, "linear")), torch.randn(1, 3, *size).double(), most_tokens)


def test_a_pyramid_that_drops_what_fills_no_patch_is_the_whole():
    model = loud(small("pvt", "linear", drop_remainder=True))
    assert_same(model, torch.randn(1, 3, 139, 45).double(), 60)
    with pytest.raises(SubquadError, match="too small"):
        subquad.stream(model, torch.zeros(3, 20, 64).double())


def test_a_local_branch_and_another_feature_map_are_the_whole():
    for settings in ({"local": True}, {"feature_map": "elu"}):
        assert_same(network("linear", **settings), torch.randn(1, 3, *IMAGE).double(), 20)


@pytest.mark.parametrize("kind", ["class token", "rotary in float64"])
def test_what_is_made_ready_for_inference_is_the_whole(kind):
    model = subquad.optimize(network("linear", kind).float())
    for parameter in model.parameters():
        parameter.data.mul_(0.3)
    assert_same(model, torch.randn(1, 3, *IMAGE), 20, tolerance=1e-5)


@pytest.mark.parametrize("kind", ["pvt_v2", "mavit", "hvit3", "mllanet"])
def test_optimized_pyramids_that_see_the_map_are_the_whole(kind):
    model = subquad.optimize(loud(small(kind, "linear")).float())
    for parameter in model.parameters():
        parameter.data.mul_(0.3)
    assert_same(model, torch.randn(1, 3, 200, 45), 60, tolerance=1e-5)


@pytest.mark.parametrize("attention", STREAMED)
def test_in_fp32_it_is_the_whole_but_for_roundings(attention):
    model = network(attention).float()
    for parameter in model.parameters():
        parameter.data.mul_(0.3)
    assert_same(model, torch.randn(1, 3, *IMAGE), 20, tolerance=1e-5)


def test_tokens_in_files_are_those_in_memory(tmp_path):
    def in_files(*sizes):
        return TokensInFiles(tmp_path, *sizes)

    for settings in ({}, {"cpe": True}):
        assert_same(network("linear", **settings), torch.randn(1, 3, *IMAGE).double(), 20, store=in_files)


def test_a_wide_image_is_the_whole():
    assert_same(network("linear", local=True), torch.randn(1, 3, 9, 150).double(), 8)


@pytest.mark.parametrize("kind", [kind for kind, cls in CLASSES.items() if not cls.spreads])
def test_hosts_whose_blocks_do_not_see_all_say_so(kind):
    with pytest.raises(SubquadError, match=r"can't be streamed: .*deit_tiny, pvt_tiny") as refusal:
        subquad.stream(small(kind, "linear"), torch.zeros(3, 64, 64))
    assert "\n" not in str(refusal.value)


def test_others_say_what_can_be_streamed():
    with pytest.raises(SubquadError, match="Sequential can't be streamed"):
        subquad.stream(nn.Sequential(), torch.zeros(3, 64, 64))
    with pytest.raises(SubquadError, match="keys that are reduced 8 times"):
        subquad.stream(small("pvt", "linear", sr_ratio=(8, 4, 2, 1)), torch.zeros(3, 64, 64))
    with pytest.raises(SubquadError, match="softmax attention can't be streamed"):
        subquad.stream(small("mavit", "linear+linear+linear+softmax"), torch.zeros(3, 64, 64))
