"""Measures of a layer have the values that are known of layers whose nature is known."""

import pytest
import torch
from torch.testing import assert_close

from subquad import ATTENTION, TokenGrid
from subquad.analysis import ALL_MEASURES, LayerAttention, uniform_weights
from subquad.analysis.layer_quantities import feature_rank
from subquad.ops.soft_formula import gaussian_kernel

GRID = TokenGrid(4, 5)


def layer(weights, name="softmax", **inputs):
    module = ATTENTION[name](dim=16, num_heads=2, grid=GRID, kv_grid=GRID)
    return LayerAttention("a", name, weights.expand(3, 2, 1, 20, 20), GRID, GRID, module, inputs)


@pytest.mark.parametrize("measure", ["rank", "numerical"])
def test_a_uniform_map_has_one_direction_and_the_identity_all(measure):
    assert_close(
        ALL_MEASURES[measure].of(layer(uniform_weights(GRID))).double(), torch.full((3, 2, 1), 1 / 20).double()
    )
    assert_close(ALL_MEASURES[measure].of(layer(torch.eye(20))).double(), torch.ones(3, 2, 1).double())


def test_features_of_a_uniform_map_are_all_alike_and_those_of_the_identity_are_the_values():
    v, own_rank = torch.randn(3, 2, 20, 8, dtype=torch.float64), feature_rank("numerical", branch=False)
    own = torch.eye(20, dtype=torch.float64)
    assert (own_rank(layer(own, v=v)) == 1).all()
    v[..., 4:] = 0
    assert (own_rank(layer(own, v=v)) == 0.5).all()


def test_softs_weights_are_held_against_the_kernel_of_its_tokens():
    q = torch.randn(3, 2, 20, 8)
    tokens = q * 8**-0.25
    kernel = gaussian_kernel(tokens, tokens)[:, :, None]
    for share, error in ((1.0, 0.0), (0.5, 0.5), (0.0, 1.0)):
        found = ALL_MEASURES["kernel"].of(layer(share * kernel, "soft", q=q))
        assert_close(found, torch.full((3, 2, 1), error))
    assert ALL_MEASURES["kernel"].of(layer(kernel, "softmax", q=q)) is None
