"""Networks over some rows of the grid at a time give what they give of the whole, or say why they can't."""

import pytest
import torch
from torch import nn

import subquad
from subquad import ATTENTION, SubquadError, TokenGrid
from subquad.attention import traits_of
from subquad.attention.sweeps import streaming_of
from subquad.large.image_rows import TensorRows
from subquad.large.streaming import StreamedStage, embedded
from subquad.large.token_store import TokensInFiles, TokensInMemory
from subquad.models.vit import ViT

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
    model = subquad.create_model(name, attention=attention, **{"num_classes": 5} | SIZE | own | settings)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval().double()


def last_tokens(model, image, most_tokens, store=TokensInMemory):
    """The tokens behind the last block, some rows at a time."""
    stage = model.stages[0]
    grid = TokenGrid(*model.grids(tuple(image.shape[2:]))[0].shape, stage.grid.prefix)
    tokens = store(grid.num_tokens, model.num_features, image.dtype)
    with torch.inference_mode():
        steps = StreamedStage(stage, grid, tokens, image.dtype, most_tokens=most_tokens)
        for rows, part in embedded(stage, TensorRows(image, image.dtype), grid, steps.parts()):
            tokens.write(rows.tokens, part)
        tokens.turn()
        for step in steps.steps():
            step()
    return tokens.read(slice(0, grid.num_tokens))


def whole(model, image):
    with torch.no_grad():
        *_, (tokens, _) = model.walk(image)
    return tokens


def assert_same(model, image, most_tokens, tolerance=1e-10, **settings):
    expected = whole(model, image)
    found = last_tokens(model, image, most_tokens, **settings)
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


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


def test_a_local_branch_and_another_feature_map_are_the_whole():
    for settings in ({"local": True}, {"feature_map": "elu"}):
        assert_same(network("linear", **settings), torch.randn(1, 3, *IMAGE).double(), 20)


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


def test_a_host_of_another_kind_says_that_it_cant():
    model = subquad.create_model("swin_tiny", attention="linear")
    with pytest.raises(SubquadError, match="no plain host"):
        subquad.stream(model, torch.zeros(3, 64, 64))
    with pytest.raises(SubquadError, match="Sequential can't be streamed"):
        subquad.stream(nn.Sequential(), torch.zeros(3, 64, 64))
    assert issubclass(ViT, subquad.models.backbone.Backbone)
