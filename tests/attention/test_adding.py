"""The mechanism that docs/adding-a-mechanism.md adds works as written there."""

import torch
from mechanisms import apply_weights, build, but_values, inputs_of
from outside import PAGE, SOURCE

import subquad
from subquad import ATTENTION, TokenGrid


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
