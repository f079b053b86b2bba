"""What mechanisms have of their own besides the contract: tables, agents, gates, shared kernels."""

import pytest
import torch
from mechanisms import build, inputs_of
from torch.testing import assert_close

from subquad import SubquadError, TokenGrid
from subquad.attention import SoftAttention
from subquad.attention.bricks import LocalConv
from subquad.attention.mhla import pieces_of


def test_each_bias_stands_on_the_grid_of_its_tokens():
    queries, keys = TokenGrid(6, 8), TokenGrid(3, 4)
    module = build("agent", queries, kv_grid=keys)
    assert module.agent_bias.grid == keys and module.query_bias.grid == queries


def test_agents_are_means_of_the_queries_that_are_there():
    grid = TokenGrid(1, 12)
    module = build("agent", grid, num_agents=3)
    q = torch.randn(1, 2, 12, 8, dtype=torch.float64)
    padding = torch.zeros(1, 12, dtype=torch.bool)
    padding[:, 6:] = True
    agents, idle = module.pool(q, padding, grid=grid, kv_grid=grid)
    # three bins of four tokens: all there, half of them, none
    assert_close(agents[:, :, 0], q[:, :, :4].mean(dim=2))
    assert_close(agents[:, :, 1], q[:, :, 4:6].mean(dim=2))
    assert idle.tolist() == [[False, False, True]]


def test_padding_of_keys_on_another_grid_says_nothing_of_the_queries():
    queries, keys = TokenGrid(4, 4), TokenGrid(2, 2)
    module = build("agent", queries, kv_grid=keys)
    q, padding = torch.randn(1, 2, 16, 8, dtype=torch.float64), torch.tensor([[False, True, True, True]])
    agents, idle = module.pool(q, padding, grid=queries, kv_grid=keys)
    assert idle is None and torch.equal(agents, module.pool(q, None, grid=queries, kv_grid=keys)[0])


@pytest.mark.parametrize(("filters", "count"), [("channel", 64), ("head_channel", 16), ("head", 4)])
def test_the_local_branch_starts_as_a_convolution_and_shares_kernels_as_it_says(filters, count):
    branch = LocalConv(4, 16, 5, filters=filters)
    like = torch.nn.Conv2d(count, count, 5, groups=count)
    assert branch.weight.shape == like.weight.shape
    bound = 1 / 5
    assert branch.weight.abs().max() <= bound and branch.weight.abs().max() > 0.9 * bound
    channels = branch.for_channels(branch.weight).unflatten(0, (4, 16))
    owner = {"channel": lambda h, d: 16 * h + d, "head_channel": lambda h, d: d, "head": lambda h, d: h}[filters]
    assert all(torch.equal(channels[h, d], branch.weight[owner(h, d)]) for h in range(4) for d in range(16))


@pytest.mark.parametrize("local", [False, True])
def test_polaformers_gate_multiplies_what_it_mixes(local):
    grid = TokenGrid(3, 4)
    module = build("pola", grid, local=local)
    q, k, v, g = torch.randn(4, 1, 2, 12, 8, dtype=torch.float64).unbind(0)
    ungated = module(q, k, v, torch.ones_like(g), grid=grid, kv_grid=grid)
    assert_close(module(q, k, v, g, grid=grid, kv_grid=grid), ungated * g)


@pytest.mark.parametrize(("side", "window", "kernel_size"), [(56, 8, 9), (28, 4, 5), (14, 2, 3)])
def test_softs_window_and_kernel_go_with_the_grid_that_it_is_made_for(side, window, kernel_size):
    grid = TokenGrid(side, side)
    module = SoftAttention(16, 2, grid=grid, kv_grid=grid)
    assert module.window == (window, window) and module.local.weight.shape[-1] == kernel_size


def test_soft_refuses_keys_on_another_grid_as_they_are_its_queries():
    with pytest.raises(SubquadError, match=r"6×9 .*3×4"):
        build("soft", TokenGrid(6, 9), kv_grid=TokenGrid(3, 4))


def test_softmax_leaves_out_what_is_padding_and_what_is_masked():
    grid = TokenGrid(1, 5)
    module = build("softmax", grid)
    q, k = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64).unbind(0)
    padding, mask = torch.tensor([[False] * 4 + [True]]), torch.eye(5, dtype=torch.bool)
    weights = module.weights(q, k, padding, mask, grid=grid, kv_grid=grid)
    assert torch.equal(weights[:, :, 0] == 0, (padding[:, None] | mask).expand(1, 2, 5, 5))


@pytest.mark.parametrize(
    ("grid", "count", "pieces"),
    [
        (TokenGrid(14, 14), 16, (4, 4)),
        (TokenGrid(6, 10), 15, (3, 5)),
        (TokenGrid(4, 16), 16, (2, 8)),
        (TokenGrid(1, 100), 16, (1, 16)),
        (TokenGrid(9, 1), 3, (3, 1)),
    ],
    ids=str,
)
def test_mhlas_blocks_are_as_square_as_may_be(grid, count, pieces):
    assert pieces_of(grid, count) == pieces


def test_mhla_says_what_its_blocks_and_the_released_normaliser_do_not_know():
    grid, kv_grid, prefixed = TokenGrid(4, 4), TokenGrid(2, 2), TokenGrid(4, 4, 2)
    with pytest.raises(SubquadError, match=r"^built for grids without prefix tokens but called with 2"):
        module = build("mhla", grid)
        module(**inputs_of(module, prefixed), grid=prefixed, kv_grid=prefixed)
    # who was built for some and gets none goes without their block
    module = build("mhla", prefixed)
    assert module(**inputs_of(module, grid), grid=grid, kv_grid=grid).isfinite().all()
    for queries, keys, what in ((prefixed, prefixed, "2 prefix tokens"), (grid, kv_grid, "queries on 4×4 with keys")):
        with pytest.raises(SubquadError, match=f"knows no {what}"):
            build("mhla", queries, kv_grid=keys, normaliser="released")
    module = build("mhla", grid, normaliser="released")
    supply = inputs_of(module, grid) | {"padding": torch.zeros(2, 16, dtype=torch.bool)}
    with pytest.raises(SubquadError, match="knows no padding"):
        module(**supply, grid=grid, kv_grid=grid)
