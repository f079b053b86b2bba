"""Learned tables on grids: resampling against the libraries' own."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.positions import GridBias, PositionTable, RelativeBias, resampled


@pytest.mark.parametrize("old, new", [((14, 14), (25, 38)), ((14, 9), (4, 9)), ((7, 16), (8, 5)), ((1, 3), (2, 2))])
def test_smooth_bicubic_resampling_is_torchs(old, new):
    image = torch.randn(2, 3, *old, dtype=torch.float64)
    expected = F.interpolate(image, new, mode="bicubic", antialias=True)
    assert_close(resampled(image, new, "bicubic", antialias=True), expected, rtol=1e-12, atol=1e-12)
    assert resampled(image.bfloat16(), new, "bicubic", antialias=True).dtype == torch.bfloat16


@pytest.mark.slow
def test_resampling_to_changing_sizes_compiles_with_its_gradient():
    compiled = torch.compile(resampled, fullgraph=True, backend="aot_eager", dynamic=True)
    image = torch.randn(1, 2, 7, 7, requires_grad=True)
    for shape in ((9, 12), (14, 10)):
        (expected,) = torch.autograd.grad(resampled(image, shape, "bicubic", antialias=True).square().sum(), image)
        (grad,) = torch.autograd.grad(compiled(image, shape, "bicubic", antialias=True).square().sum(), image)
        assert_close(grad, expected)


GRID, OTHER, AGENTS = TokenGrid(6, 7, prefix=1), TokenGrid(9, 5, prefix=1), TokenGrid(3, 3)
TABLES = {
    "bilinear": lambda: PositionTable(2, 8, GRID, std=1),
    "bicubic": lambda: PositionTable(2, 8, GRID, std=1, mode="bicubic"),
    "for agents": lambda: GridBias(2, AGENTS, GRID),
    "of offsets": lambda: RelativeBias(2, TokenGrid(6, 7)),
}


@pytest.mark.parametrize("some_rows", [False, True], ids=["all rows", "some rows"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_are_resampled_in_fp32_under_autocast(name, some_rows):
    table = TABLES[name]()
    grid = OTHER if table.grid.prefix else OTHER.without_prefix
    if some_rows and name == "of offsets":
        pytest.skip("windows have all of their rows")
    grid = grid.rows(2, 6) if some_rows else grid
    expected = table(grid)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(table(grid), expected)


def test_a_shorter_sequence_has_the_first_places_and_a_map_the_whole_picture():
    row = PositionTable(2, 3, TokenGrid(1, 6, prefix=1), std=1)
    assert torch.equal(row(TokenGrid(1, 4, prefix=1)), row.table[:, :5])
    assert row(TokenGrid(1, 9, prefix=1)).shape == (2, 10, 3)
    picture = PositionTable(1, 1, TokenGrid(2, 6), std=1)
    assert not torch.equal(picture(TokenGrid(2, 3))[:, :3], picture.table[:, :3])


@pytest.mark.parametrize("grid", [TokenGrid(4, 4), TokenGrid(2, 3), TokenGrid(1, 4)], ids=str)
def test_a_relative_bias_on_a_smaller_grid_keeps_the_numbers_of_its_offsets(grid):
    bias = RelativeBias(2, TokenGrid(4, 4))
    given = bias(grid)
    for query in range(grid.num_places):
        for key in range(grid.num_places):
            down = query // grid.width - key // grid.width
            right = query % grid.width - key % grid.width
            assert torch.equal(given[:, query, key], bias.table[:, 3 + down, 3 + right])


@pytest.mark.parametrize("called", [0, 2])
def test_another_number_of_prefix_tokens_is_refused_whether_more_or_fewer(called):
    with pytest.raises(SubquadError, match=f"built for 1 prefix tokens but called with {called}"):
        PositionTable(2, 4, TokenGrid(3, 3, 1))(TokenGrid(3, 3, called))


@pytest.mark.parametrize("shape", [(2, 3), (4, 4), (6, 3), (7, 6)])
def test_a_relative_bias_that_is_moved_gives_what_it_gave_when_called(shape):
    bias, grid = RelativeBias(2, TokenGrid(4, 5)), TokenGrid(*shape)
    wanted, loaded = bias(grid), RelativeBias(2, grid)
    with torch.no_grad():
        loaded.table.copy_(loaded.fitted("table", bias.table))
    bias.regrid(grid)
    assert bias.table.shape == loaded.table.shape
    for moved in (bias, loaded):
        torch.testing.assert_close(moved(grid), wanted)
