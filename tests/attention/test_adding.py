"""The mechanism that docs/adding-a-mechanism.md adds works as written there."""

from dataclasses import fields

import pytest
import timm
import torch
from mechanisms import apply_weights, build, but_values, inputs_of
from outside import PAGE, SOURCE
from torch import nn

import subquad
from subquad import ATTENTION, SubquadError, TokenGrid
from subquad.attention import Traits
from subquad.models.layers import SelfAttention
from subquad.rope import ROPES, rope_of


def test_the_mechanism_of_the_page_keeps_the_contract_and_trains(monkeypatch):
    room: dict = {}
    exec(compile(SOURCE, str(PAGE), "exec"), room)
    monkeypatch.setitem(ATTENTION, "mean", room["MeanAttention"])

    grid = TokenGrid(1, 9, 1)
    module = build("mean", grid)
    supply = inputs_of(module, grid)
    supply["padding"] = torch.arange(10).ge(7).expand(2, -1)
    weights = module.weights(**but_values(supply), grid=grid, kv_grid=grid)
    fast = module(**supply, grid=grid, kv_grid=grid)
    torch.testing.assert_close(fast, apply_weights(weights, supply["v"]))

    model = subquad.create_model("deit_micro", attention="mean", num_classes=10)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_page_names_every_trait():
    text = PAGE.read_text()
    assert [one.name for one in fields(Traits) if f"`{one.name}`" not in text] == []


class Seeing(torch.nn.Module):
    """Three heads more than the host has, and no word of rotation: it keeps what it is handed."""

    inputs = ("q", "k", "v", "padding")
    traits = Traits(label="seeing", extra_heads=3)

    def __init__(self, dim, num_heads, *, grid, kv_grid):
        super().__init__()

    def forward(self, q, k, v, padding=None, *, grid, kv_grid):
        self.seen = q, k
        return v


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_heads_of_a_mechanisms_own_are_not_turned_by_any_hosts_rotation(rope):
    grid = TokenGrid(3, 5, 1)
    layer, x = SelfAttention(16, 2, Seeing, grid=grid), torch.randn(2, 16, 16)
    rotation = rope_of(rope, 8, 2)(grid, x.device)
    layer(x, grid=grid, rotation=rotation)
    bare = layer.heads(x)
    for seen, name in zip(layer.inner.seen, ("q", "k"), strict=True):
        torch.testing.assert_close(seen[:, :2], rotation.turn(bare[name][:, :2]))
        torch.testing.assert_close(seen[:, 2:], bare[name][:, 2:])


GIVEN = {
    "nothing": lambda v: None,
    "one token": lambda v: v.mean(dim=2, keepdim=True),
    "three axes": lambda v: v.flatten(0, 1),
    "channels in the heads' place": lambda v: v.transpose(1, 3),
    "one image": lambda v: v[:1],
}


@pytest.mark.parametrize("given", GIVEN)
def test_what_a_mechanism_gives_is_tokens_of_its_grid(given):
    layer = SelfAttention(16, 2, Seeing, grid=TokenGrid(3, 5, 1))
    layer.inner.forward = lambda q, k, v, padding=None, **grids: GIVEN[given](v)
    with pytest.raises(SubquadError, match=r"Seeing is to give tokens \(b, h, n, d\) of a grid of 3×5 after 1 prefix"):
        layer(torch.randn(2, 16, 16), grid=TokenGrid(3, 5, 1))


class Giving(nn.Module):
    """Gives what `given` makes of values."""

    inputs = ("q", "k", "v", "padding")
    given = "nothing"

    def __init__(self, dim, num_heads, *, grid, kv_grid):
        super().__init__()

    def forward(self, q, k, v, padding=None, *, grid, kv_grid):
        return GIVEN[self.given](v)

    def weights(self, q, k, padding=None, *, grid, kv_grid):
        raise NotImplementedError


@pytest.mark.parametrize("given", GIVEN)
def test_what_a_mechanism_gives_in_a_converted_network_is_tokens_of_its_grid(given, monkeypatch):
    """One token was added to all of them, and heads in the channels' place projected, without a word."""
    monkeypatch.setitem(ATTENTION, "giving", Giving)
    monkeypatch.setattr(Giving, "given", given)
    teacher = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=1, num_heads=2, num_classes=3)
    student = subquad.convert(teacher, "giving")
    with pytest.raises(SubquadError, match=r"Giving is to give tokens \(b, h, n, d\) of a grid of 2×2 after 1 prefix"):
        student(torch.randn(2, 3, 32, 32))
