"""Learned tables on grids: resampling against the libraries' own."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from subquad.grid import TokenGrid
from subquad.positions import PositionTable, resampled


@pytest.mark.parametrize("old, new", [((14, 14), (25, 38)), ((14, 9), (4, 9)), ((7, 16), (8, 5)), ((1, 3), (2, 2))])
def test_smooth_bicubic_resampling_is_torchs(old, new):
    image = torch.randn(2, 3, *old, dtype=torch.float64)
    expected = F.interpolate(image, new, mode="bicubic", antialias=True)
    assert_close(resampled(image, new, "bicubic", antialias=True), expected, rtol=1e-12, atol=1e-12)
    assert resampled(image.bfloat16(), new, "bicubic", antialias=True).dtype == torch.bfloat16


def test_resampling_to_changing_sizes_compiles_with_its_gradient():
    compiled = torch.compile(resampled, fullgraph=True, backend="aot_eager", dynamic=True)
    image = torch.randn(1, 2, 7, 7, requires_grad=True)
    for shape in ((9, 12), (14, 10)):
        (expected,) = torch.autograd.grad(resampled(image, shape, "bicubic", antialias=True).square().sum(), image)
        (grad,) = torch.autograd.grad(compiled(image, shape, "bicubic", antialias=True).square().sum(), image)
        assert_close(grad, expected)


def test_a_shorter_sequence_has_the_first_places_and_a_map_the_whole_picture():
    row = PositionTable(2, 3, TokenGrid(1, 6, prefix=1), std=1)
    assert torch.equal(row(TokenGrid(1, 4, prefix=1)), row.table[:, :5])
    assert row(TokenGrid(1, 9, prefix=1)).shape == (2, 10, 3)
    picture = PositionTable(1, 1, TokenGrid(2, 6), std=1)
    assert not torch.equal(picture(TokenGrid(2, 3))[:, :3], picture.table[:, :3])
