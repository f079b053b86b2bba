"""Images that fill a part of a map are mixed on their own."""

import pytest
import torch

from subquad import ATTENTION, TokenGrid
from subquad.conversion.filled_images import mixed_apart, rectangles

HEADS, WIDTH = 2, 8


def supply_of(grid, present):
    """Heads of images of which so many rows and columns are there."""
    tokens = {name: torch.randn(len(present), HEADS, grid.num_tokens, WIDTH) for name in "qkv"}
    padding = torch.ones(len(present), *grid.shape, dtype=torch.bool)
    for number, (height, width) in enumerate(present):
        padding[number, :height, :width] = False
    prefix = torch.zeros(len(present), grid.prefix, dtype=torch.bool)
    return {**tokens, "x": None, "mask": None, "padding": torch.cat([prefix, padding.flatten(1)], 1)}


def agents(grid):
    torch.manual_seed(0)
    return ATTENTION["agent"](HEADS * WIDTH, HEADS, grid=grid, kv_grid=grid, num_agents=4).eval()


@torch.no_grad()
@pytest.mark.parametrize("prefix", [0, 2])
def test_each_is_answered_as_alone(prefix):
    grid, present = TokenGrid(5, 6, prefix), [(5, 6), (3, 4), (2, 6), (3, 4)]
    mechanism, supply = agents(grid), supply_of(grid, present)
    mixed = mixed_apart(mechanism, supply, grid)
    for number, (height, width) in enumerate(present):
        there, own = ~supply["padding"][number], TokenGrid(height, width, prefix)
        alone = {name: supply[name][number : number + 1, :, there] for name in "qkv"}
        expected = mechanism(**alone, padding=None, grid=own, kv_grid=own)
        torch.testing.assert_close(mixed[number : number + 1, :, there], expected)
        assert not mixed[number][:, ~there].any()


@torch.no_grad()
def test_of_no_image_there_are_zeros_and_prefix_tokens_alone_stay_where_they_are():
    grid = TokenGrid(3, 4)
    mixed = mixed_apart(agents(grid), supply_of(grid, [(0, 0), (2, 2)]), grid)
    assert not mixed[0].any() and mixed[1].any()
    grid = TokenGrid(3, 4, 1)
    assert mixed_apart(agents(grid), supply_of(grid, [(0, 0), (2, 2)]), grid) is None


def test_what_is_no_rectangle_in_the_first_corner_is_not_taken_apart():
    grid = TokenGrid(3, 4)
    padding = supply_of(grid, [(2, 3)])["padding"]
    assert rectangles(padding, grid) == {(2, 3): [0]}
    padding[0, 5] = True
    assert rectangles(padding, grid) is None
    assert rectangles(supply_of(grid, [(2, 3)])["padding"].flip(1), grid) is None
    # a mask for all images of a batch at once
    supply = supply_of(grid, [(2, 3), (2, 3)])
    assert mixed_apart(agents(grid), {**supply, "padding": supply["padding"][:1]}, grid) is None
