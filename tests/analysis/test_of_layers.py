"""Measures of a layer have the values that are known of layers whose nature is known."""

import math

import pytest
import torch
from torch.testing import assert_close

import subquad
from subquad import ATTENTION, TokenGrid
from subquad.analysis import ALL_MEASURES, LayerAttention, Removal, measure_network, removing, uniform_weights
from subquad.analysis.layer_quantities import feature_rank
from subquad.analysis.small_maps import looking
from subquad.ops.soft_formula import INVERSES, gaussian_kernel

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


@pytest.mark.parametrize("inverse", INVERSES)
def test_what_newton_leaves_is_of_the_inverse_that_a_layer_has(inverse):
    module = ATTENTION["soft"](dim=16, num_heads=2, grid=GRID, kv_grid=GRID, inverse=inverse, newton_steps=4, ratio=1)
    q = torch.randn(3, 2, 20, 8)
    seen = LayerAttention("a", "soft", torch.zeros(3, 2, 1, 20, 20), GRID, GRID, module, {"q": q})
    found = ALL_MEASURES["inverse"].of(seen)
    if inverse in ("cholesky", "pinv"):
        assert found is None
        return
    landmarks, _ = module.landmarks(q, None, GRID)
    gram, identity = gaussian_kernel(landmarks, landmarks), torch.eye(20)
    solved = INVERSES[inverse](gram, 4, "steps")(identity)
    if inverse == "norm":
        root = gram.sum(-1, keepdim=True).sqrt()
        solved = root * solved * root.mT
    whole = gram + (0.01 if inverse == "ridge" else 0) * identity
    left = torch.linalg.matrix_norm(identity - whole @ solved, ord=2)
    assert_close(found[..., 0].float(), left, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("measure", ["local", "distance"])
def test_maps_of_one_row_are_measured_as_those_of_one_column(measure):
    weights = torch.rand(2, 3, 1, 7, 7).softmax(-1)
    row, column = (LayerAttention("a", "softmax", weights, grid, grid) for grid in (TokenGrid(1, 7), TokenGrid(7, 1)))
    assert_close(ALL_MEASURES[measure].of(row), ALL_MEASURES[measure].of(column))
    # not so where nothing tells where tokens stand, and the row is none
    unplaced = LayerAttention("a", "softmax", weights, row.grid, row.grid, placed=False)
    assert ALL_MEASURES[measure].of(unplaced) is None


def test_wide_stripes_lose_keys_as_high_ones_do():
    model = subquad.create_model("cswin_tiny", attention="softmax", img_size=64, num_classes=2, depths=(1, 1, 1, 1))
    images = torch.randn(1, 3, 64, 64)
    with removing(model, Removal("local", 3), images):
        seen = {}
        for module in model.eval().stages[0].blocks[0].attn.branches:
            module.register_forward_hook(lambda module, given, y: seen.setdefault(module, y))
        model(images)
        removed = list(seen.values())
        seen.clear()
    model(images)
    assert len(removed) == 2
    assert all(not torch.allclose(one, other) for one, other in zip(removed, seen.values(), strict=True))


def test_wide_images_show_the_maps_that_high_ones_show():
    sizes = ((32, 64), (64, 32))
    models = [subquad.create_model("pvt_tiny", num_classes=2, img_size=size, depths=(1, 1, 1, 1)) for size in sizes]
    wide, high = (looking(model, torch.randn(1, 3, *size))[0] for model, size in zip(models, sizes, strict=True))
    assert [look.keys for look in wide] == [look.keys[::-1] for look in high] == [(1, 2)] * 4


@pytest.mark.parametrize("name", ["softmax", "pola", "soft"])
def test_a_network_whose_weights_have_run_away_is_measured_as_far_as_there_are_numbers(name):
    """LAPACK gives no singular values of NaN, so that one such layer ended the analysis of all networks."""
    sizes = {"img_size": 16, "patch_size": 4, "depths": (2,), "embed_dim": 16, "num_heads": 2, "num_classes": 0}
    model = subquad.create_model("deit_tiny", attention=name, **sizes).eval()
    with torch.no_grad():
        for parameter in model.blocks[1].attn.parameters():
            parameter.mul_(1e30)
    rows = [row for row in measure_network(model, [torch.randn(2, 3, 16, 16)]) if row.head == 0]
    assert all(math.isfinite(row.mean) for row in rows if row.layer == 1)
    broken = {row.measure for row in rows if row.layer == 2 and not math.isfinite(row.mean)}
    assert {"rank", "numerical", "features", "global", "directions"} <= broken
