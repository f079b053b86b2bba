"""Tokens and maps are the same thing seen twice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad import SubquadError, TokenGrid

sizes = st.integers(1, 9)


@given(sizes, sizes, st.integers(0, 5), st.integers(1, 3), st.integers(1, 4))
def test_map_and_back_is_the_identity_but_for_prefix_tokens_which_become_zero(height, width, prefix, heads, channels):
    grid = TokenGrid(height, width, prefix)
    tokens = torch.randn(2, heads, grid.num_tokens, channels)
    back = grid.to_heads(grid.to_map(tokens), heads)
    assert torch.equal(back[:, :, prefix:], tokens[:, :, prefix:])
    assert (back[:, :, :prefix] == 0).all()


def test_a_token_stands_in_its_row_and_column():
    grid = TokenGrid(3, 5, 1)
    tokens = torch.arange(16.0).reshape(1, 1, 16, 1)
    assert grid.to_map(tokens)[0, 0, 2, 3] == 1 + 2 * 5 + 3


def test_too_few_tokens_are_refused_with_the_numbers():
    with pytest.raises(SubquadError, match=r"7 tokens do not fill a grid of 2×4 \(8 tokens\)"):
        TokenGrid(2, 4).to_map(torch.zeros(1, 1, 7, 2))


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (3, 3, -1)])
def test_an_empty_grid_is_refused(sizes):
    with pytest.raises(SubquadError):
        TokenGrid(*sizes)


@pytest.mark.parametrize("sizes", [(14.0, 14), (14, 2.5), ("14", 14), (14, 14, 1.0)])
def test_sizes_that_are_no_whole_numbers_are_refused(sizes):
    with pytest.raises(SubquadError, match="whole numbers of rows, columns and prefix tokens, got TokenGrid"):
        TokenGrid(*sizes)


def test_grids_are_compared_inside_compiled_code_of_changing_size():
    def same(x, one, other):
        return x if one != other else x + 1

    torch._dynamo.reset()
    for n in (3, 4, 5):
        x, grid = torch.zeros(n), TokenGrid(n, n)
        assert torch.compile(lambda x=x, grid=grid: same(x, grid, grid), backend="eager", fullgraph=True)().sum() == n
    assert TokenGrid(2, 3) != TokenGrid(3, 2) and not (TokenGrid(2, 3) != TokenGrid(2, 3))  # noqa: SIM202


def test_an_image_of_tokens_has_their_rows_and_columns():
    tokens = torch.arange(7.0).reshape(1, 7, 1)
    assert TokenGrid(2, 3, 1).to_image(tokens).tolist() == [[[[1, 2, 3], [4, 5, 6]]]]
