"""What later ViTs add to the plain host: scales, gates, biases, norms and positions, each where it belongs."""

import copy

import pytest
import torch
from hosts import small
from torch import nn

import subquad
from subquad import SubquadError
from subquad.grid import TokenGrid
from subquad.models.layers import Block, SelfAttention
from subquad.models.map_layers import ConvPosition
from subquad.models.pvt import SpatialReductionAttention
from subquad.models.pyramid import Pyramid


class Nothing(nn.Module):
    def forward(self, x, *, grid):
        return x


def test_layer_scale_weighs_both_branches():
    plain, scaled = Block(8, Nothing()).eval(), Block(8, Nothing(), init_values=0.5).eval()
    scaled.load_state_dict(plain.state_dict(), strict=False)
    assert scaled.ls1.gamma.tolist() == [0.5] * 8
    x, grid = torch.randn(1, 3, 8), TokenGrid(1, 3)
    middle = x + 0.5 * plain.norm1(x)
    torch.testing.assert_close(scaled(x, grid=grid), middle + 0.5 * plain.mlp(plain.norm2(middle)))


def test_a_conditional_position_adds_a_convolution_of_the_map_to_its_tokens():
    position, grid = ConvPosition(6), TokenGrid(4, 5, 2)
    x = torch.randn(3, 22, 6)
    y = position(x, grid=grid)
    assert torch.equal(y[:, :2], x[:, :2])
    window = x[:, 2:].unflatten(1, (4, 5))[:, 1:4, 2:5]
    expected = x[:, 2 + 2 * 5 + 3] + torch.einsum("bijc,cij->bc", window, position.conv.weight[:, 0])
    torch.testing.assert_close(y[:, 2 + 2 * 5 + 3], expected + position.conv.bias)
    corner = torch.einsum("bijc,cij->bc", x[:, 2:].unflatten(1, (4, 5))[:, :2, :2], position.conv.weight[:, 0, 1:, 1:])
    torch.testing.assert_close(y[:, 2], x[:, 2] + corner + position.conv.bias)


def test_conditional_positions_come_first_in_their_block():
    plain, placed = Block(8, Nothing()).eval(), Block(8, Nothing(), cpe=True).eval()
    placed.load_state_dict(plain.state_dict(), strict=False)
    x, grid = torch.randn(1, 20, 8), TokenGrid(4, 5)
    torch.testing.assert_close(placed(x, grid=grid), plain(placed.cpe(x, grid=grid), grid=grid))


def test_a_network_with_conditional_positions_has_one_for_each_block():
    plain, placed = small("vit", pos_embed="none"), small("vit", pos_embed="none", cpe=True)
    added = {f"stages.0.blocks.{i}.cpe.conv.{name}" for i in range(3) for name in ("weight", "bias")}
    assert set(placed.state_dict()) == set(plain.state_dict()) | added
    assert placed(torch.randn(1, 3, 40, 24)).shape == (1, 5)


@pytest.mark.parametrize("kind", ["swiglu", "swiglu_norm"])
def test_a_gated_mlp_multiplies_its_hidden_channels(kind):
    mlp = Block(6, Nothing(), mlp=kind, mlp_ratio=2, eps=1e-3).mlp.eval()
    x = torch.randn(4, 6)
    gate, value = mlp.fc1(x).chunk(2, dim=-1)
    hidden = nn.functional.silu(gate) * value
    if kind == "swiglu_norm":
        hidden = nn.functional.layer_norm(hidden, (12,), eps=1e-3)
    torch.testing.assert_close(mlp(x), mlp.fc2(hidden))


@pytest.mark.parametrize("attention", ["softmax", "soft", "pola"])
def test_keys_without_bias_have_none_to_train(attention):
    layer = small("eva02", attention).blocks[0].attn
    parts = len(layer.projected) - ("k" in layer.projected)
    assert layer.qkv.bias.shape == (24 * parts,)
    nn.init.normal_(layer.qkv.bias)
    zero = torch.zeros(1, 5, 24)
    heads = layer.heads(zero)
    assert [name for name, tokens in heads.items() if not tokens.any()] == [n for n in ("k",) if n in layer.projected]
    for name, tokens in layer.heads(zero, zero).items():
        torch.testing.assert_close(tokens, heads[name])


@pytest.mark.parametrize(
    ("settings", "biased"),
    [
        ({}, "qkvg"),
        ({"key_bias": False}, "qvg"),
        ({"gate_bias": False}, "qkv"),
        ({"qkv_bias": False}, ""),
        ({"qkv_bias": False, "gate_bias": True}, "g"),
        ({"key_bias": False, "gate_bias": False}, "qv"),
    ],
)
def test_each_part_of_a_projection_has_a_bias_or_none_as_it_is_told(settings, biased):
    layer = small("vit", "pola", **settings).blocks[0].attn
    assert layer.projected == ("q", "k", "v", "g")
    assert [tuple(p.shape) for name, p in layer.qkv.named_parameters() if name == "bias"] == (
        [(24 * len(biased),)] if biased else []
    )
    if biased:
        # 1 for the first part that has one, 2 for the second, …
        layer.qkv.bias.data = torch.arange(1.0, 1 + len(biased)).repeat_interleave(24)
    zero = torch.zeros(1, 5, 24)
    for heads in (layer.heads(zero), layer.heads(zero, zero)):
        found = {name: tokens.unique().tolist() for name, tokens in heads.items()}
        assert found == {name: [1 + biased.index(name) if name in biased else 0] for name in "qkvg"}


@pytest.mark.parametrize("make", [SelfAttention, SpatialReductionAttention])
def test_norms_of_queries_and_keys_stand_between_projection_and_mechanism(make):
    grid, x = TokenGrid(4, 4), torch.randn(1, 16, 8)
    more = {"sr_ratio": 2} if make is SpatialReductionAttention else {}
    layer = make(8, 2, subquad.ATTENTION["softmax"], grid=grid, **more)
    seen = {}
    layer.inner.register_forward_pre_hook(lambda _, __, supply: seen.update(supply), with_kwargs=True)
    layer(x, grid=grid)
    bare = seen["k"]
    layer.k_norm = nn.LayerNorm(4)
    layer(x, grid=grid)
    torch.testing.assert_close(seen["k"], layer.k_norm(bare))


@pytest.mark.parametrize(("pos_embed", "rows"), [("all", 3 + 16), ("patches", 16)])
def test_positions_are_of_all_tokens_or_of_patches(pos_embed, rows):
    model = small("vit", img_size=32, reg_tokens=2, pos_embed=pos_embed)
    stage = model.stages[0].eval()
    assert stage.pos_embed.table.shape[1] == rows
    tokens = stage.tokens_of(torch.zeros(1, 3, 40, 24))[0]
    assert torch.equal(tokens[:, :3], stage.prefix_tokens) == (pos_embed == "patches")
    model.set_input_size((40, 24))
    assert stage.pos_embed.table.shape[1] == rows - 16 + 15
    torch.testing.assert_close(stage.tokens_of(torch.zeros(1, 3, 40, 24))[0], tokens)


def test_a_margin_of_zeros_around_the_image_is_as_an_image_that_has_one():
    framed, plain = small("vit", img_size=(32, 48), image_margin=8), small("vit", img_size=(48, 64))
    assert framed.img_size == (32, 48) and framed.grids((32, 48)) == plain.grids((48, 64))
    plain.load_state_dict(framed.state_dict())
    image = torch.randn(2, 3, 32, 48)
    torch.testing.assert_close(framed.eval()(image), plain.eval()(nn.functional.pad(image, (8, 8, 8, 8))))
    framed.set_input_size((64, 40))
    assert framed.stages[0].pos_embed.grid == TokenGrid(10, 7, 1)


@pytest.mark.parametrize("size", [(32, 48), (35, 41)])
def test_maps_of_the_levels_lie_on_the_image_without_its_margin(size):
    framed, plain = small("vit", img_size=(32, 48), image_margin=8).eval(), small("vit", img_size=(48, 64)).eval()
    plain.load_state_dict(framed.state_dict())
    image = torch.randn(2, 3, *size)
    whole = plain.forward_intermediates(nn.functional.pad(image, (8, 8, 8, 8)), intermediates_only=True)
    rows, columns = (-(-side // 8) for side in size)
    for fmt, axes in (("NCHW", (0, 1, 2, 3)), ("NHWC", (0, 2, 3, 1))):
        for of_image, of_all in zip(
            framed.forward_intermediates(image, intermediates_only=True, output_fmt=fmt), whole, strict=True
        ):
            expected = of_all[:, :, 1 : 1 + rows, 1 : 1 + columns].permute(axes)
            torch.testing.assert_close(of_image, expected)
    tokens = framed.forward_intermediates(image, intermediates_only=True, output_fmt="NLC")[-1]
    assert tokens.shape == (2, rows * columns, 24)
    (last,) = Pyramid(framed, strides=[8], filled=False).eval()(image)
    assert last.shape[-2:] == (rows, columns)


def test_attention_layers_may_start_with_a_norm_of_their_own():
    model = small("vit", attn_norm=True).double().eval()
    layer, x, grid = model.blocks[0].attn, 3 + torch.randn(1, 65, 24).double(), TokenGrid(8, 8, 1)
    bare = copy.deepcopy(layer)
    bare.pre_norm = None
    torch.testing.assert_close(layer(x, grid=grid), bare(nn.functional.layer_norm(x, (24,)), grid=grid))
    student = subquad.convert(model, "softmax")
    torch.testing.assert_close(student.blocks[0].attn(x, grid=grid), layer(x, grid=grid))


def test_networks_without_positions_have_no_table():
    model = small("dinov3")
    assert model.stages[0].pos_embed is None and not model.no_weight_decay() - {"stages.0.prefix_tokens"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pos_embed": "patch"}, "unknown pos_embed 'patch': did you mean patches"),
        ({"rope": "eva2"}, "unknown rope 'eva2': did you mean eva02"),
        ({"mlp": "swiglue"}, "unknown mlp 'swiglue': did you mean swiglu"),
        ({"init_values": 0}, "init_values must be a number above 0"),
        ({"rope": "eva02", "embed_dim": 20, "num_heads": 2}, "heads of a multiple of 4 channels, got 10"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(settings, message):
    with pytest.raises(SubquadError, match=message) as caught:
        small("vit", **settings)
    assert "\n" not in str(caught.value)
