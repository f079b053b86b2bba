"""The mechanism that docs/adding-a-mechanism.md adds works as written there."""

import pytest
import torch
from mechanisms import apply_weights, build, but_values, inputs_of
from outside import PAGE, SOURCE

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


@pytest.mark.parametrize("given", [None, 1, 4], ids=["nothing", "one token", "three axes"])
def test_what_a_mechanism_gives_is_tokens_of_its_grid(given):
    layer = SelfAttention(16, 2, Seeing, grid=TokenGrid(3, 5, 1))
    results = {None: lambda v: None, 1: lambda v: v.mean(dim=2, keepdim=True), 4: lambda v: v.flatten(0, 1)}
    layer.inner.forward = lambda q, k, v, padding=None, **grids: results[given](v)
    with pytest.raises(SubquadError, match=r"Seeing is to give tokens \(b, h, n, d\) of a grid of 3×5 after 1 prefix"):
        layer(torch.randn(2, 16, 16), grid=TokenGrid(3, 5, 1))
