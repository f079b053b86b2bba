"""Less attention: what the transforms, the residual and the loss are, against their definitions in float64."""

import copy

import pytest
import torch
from hosts import small
from torch import nn

import subquad
from subquad import SubquadError, TokenGrid
from subquad.models.less_attention import (
    AttentionResidual,
    LessAttention,
    ScoreAttention,
    ScoreTransform,
    diagonality_loss,
    probability_loss,
    resize_grid_map,
    to_grid,
)

GRIDS = [TokenGrid(4, 4), TokenGrid(3, 5), TokenGrid(4, 4, 1), TokenGrid(2, 3, 2)]
every_grid = pytest.mark.parametrize("grid", GRIDS, ids=str)


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def drawn(module):
    """Every parameter drawn, since many are zero at first."""
    generator = torch.Generator().manual_seed(1)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


@every_grid
def test_a_dense_transform_is_linear_transpose_linear_transpose(grid):
    n = grid.num_tokens
    transform = drawn(ScoreTransform(grid))
    theta, psi = nn.Linear(n, n, bias=False).double(), nn.Linear(n, n).double()
    with torch.no_grad():
        theta.weight.copy_(torch.eye(n) + transform.keys)
        psi.weight.copy_(torch.eye(n) + transform.queries)
    scores = draw(2, 3, n, n)
    literal = psi(theta(scores).mT).mT
    # the bias of the second map, which we leave out, is the same for a whole row
    torch.testing.assert_close(transform(scores, grid).softmax(-1), literal.softmax(-1))


@pytest.mark.parametrize("kind", ["dense", "kron", "share"])
@every_grid
def test_a_fresh_transform_shares_the_scores(grid, kind):
    scores = draw(1, 2, grid.num_tokens, grid.num_tokens)
    transform = ScoreTransform(grid, kind=kind).double()
    torch.testing.assert_close(transform(scores, grid), scores, rtol=0, atol=0)
    larger = TokenGrid(2 * grid.height, grid.width + 1, grid.prefix)
    scores = draw(1, 2, larger.num_tokens, larger.num_tokens)
    torch.testing.assert_close(transform(scores, larger), scores, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["dense", "kron"])
@every_grid
def test_a_tied_transform_keeps_symmetric_scores_symmetric(grid, kind):
    half = draw(1, 2, grid.num_tokens, grid.num_tokens)
    y = drawn(ScoreTransform(grid, kind=kind, tied=True))(half + half.mT, grid)
    torch.testing.assert_close(y, y.mT)
    untied = drawn(ScoreTransform(grid, kind=kind))(half + half.mT, grid)
    assert not torch.allclose(untied, untied.mT)


def test_kron_is_the_dense_map_of_the_kronecker_product():
    grid = TokenGrid(3, 4)
    kron, dense = drawn(ScoreTransform(grid, kind="kron")), ScoreTransform(grid).double()
    with torch.no_grad():
        for side in ("keys", "queries"):
            rows, columns = getattr(kron, f"{side}_rows"), getattr(kron, f"{side}_columns")
            product = torch.kron(torch.eye(3) + rows, torch.eye(4) + columns)
            getattr(dense, side).copy_(product - torch.eye(12))
    scores = draw(2, 2, 12, 12)
    torch.testing.assert_close(kron(scores, grid), dense(scores, grid))


@every_grid
def test_on_another_grid_the_cheap_form_is_the_resized_map(grid):
    new = TokenGrid(grid.height + 2, 2 * grid.width, grid.prefix)
    transform = drawn(ScoreTransform(grid))
    scores = draw(2, 2, new.num_tokens, new.num_tokens)
    identity = torch.eye(new.num_tokens, dtype=torch.float64)
    theta = identity + resize_grid_map(transform.keys, grid, new)
    psi = identity + resize_grid_map(transform.queries, grid, new)
    torch.testing.assert_close(transform(scores, new), psi @ scores @ theta.mT)
    rows = to_grid(transform.keys.sum(-1), grid, new, average=False)
    torch.testing.assert_close(resize_grid_map(transform.keys, grid, new).sum(-1), rows)
    transform.regrid(new)
    torch.testing.assert_close(transform(scores, new), psi @ scores @ theta.mT)


def test_less_attention_with_a_fresh_transform_weighs_its_values_with_the_scores_before():
    grid = TokenGrid(3, 3)
    layer, x, scores = LessAttention(8, 2, grid=grid).double(), draw(2, 9, 8), draw(2, 2, 9, 9, seed=1)
    y, kept = layer(x, scores, grid=grid)
    v = layer.value(x).reshape(2, 9, 2, 4).transpose(1, 2)
    torch.testing.assert_close(y, layer.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))
    assert torch.equal(kept, scores)
    with pytest.raises(SubquadError, match="needs the scores of the layer before"):
        layer(x, None, grid=grid)


def test_score_norm_brings_scores_back_to_their_size():
    grid = TokenGrid(3, 3)
    layer = drawn(LessAttention(8, 2, grid=grid, score_norm=True))
    scores = draw(2, 2, 9, 9)
    _, kept = layer(draw(2, 9, 8), scores, grid=grid)
    torch.testing.assert_close(kept.square().mean((2, 3)), scores.square().mean((2, 3)))


def test_vanilla_layers_give_the_same_with_and_without_keeping_their_scores():
    layer, x, residual = ScoreAttention(8, 2).double(), draw(2, 9, 8), draw(2, 2, 9, 9, seed=1)
    fused, nothing = layer(x, residual, grid=TokenGrid(3, 3))
    layer.keep_scores = True
    y, kept = layer(x, residual, grid=TokenGrid(3, 3))
    torch.testing.assert_close(y, fused)
    assert nothing is None and kept.shape == (2, 2, 9, 9)


@pytest.mark.parametrize(("prefix", "size"), [(0, (4, 6)), (1, (4, 6)), (0, (3, 5))])
def test_the_residual_between_stages_is_a_convolution_over_queries_and_over_keys(prefix, size):
    residual, grid = drawn(AttentionResidual(2, 3, prefix=prefix)), TokenGrid(*size)
    scores = draw(1, 2, grid.num_tokens, grid.num_tokens)
    height, width = -(-size[0] // 2), -(-size[1] // 2)
    six = scores.reshape(1, 2, *size, *size)
    expected = torch.zeros(1, 3, height, width, height, width, dtype=torch.float64)
    for qy in range(height):
        for qx in range(width):
            for ky in range(height):
                for kx in range(width):
                    for a in range(4):
                        for b in range(4):
                            y, x = min(2 * qy + a // 2, size[0] - 1), min(2 * qx + a % 2, size[1] - 1)
                            v, u = min(2 * ky + b // 2, size[0] - 1), min(2 * kx + b % 2, size[1] - 1)
                            weight = residual.queries[:, 0, a // 2, a % 2] * residual.keys[:, 0, b // 2, b % 2]
                            mixed = residual.mix.weight[:, :, 0, 0] @ (weight * six[0, :, y, x, v, u])
                            expected[0, :, qy, qx, ky, kx] += mixed * residual.scale[:, 0, 0]
    got = residual(scores, grid)
    torch.testing.assert_close(got[..., prefix:, prefix:].flatten(), expected.flatten())
    assert not got[..., :prefix, :].any() and not got[..., :, :prefix].any()
    assert got.shape == (1, 3, height * width + prefix, height * width + prefix)


def test_a_residual_of_scale_zero_changes_nothing():
    with_residual = small("lavit").eval()
    without = small("lavit", attention_residual=False).eval()
    state = with_residual.state_dict()
    without.load_state_dict({key: tensor for key, tensor in state.items() if ".residual." not in key})
    x = torch.randn(1, 3, 64, 64)
    assert not torch.equal(with_residual(x), without(x))
    nn.init.zeros_(with_residual.stages[3].residual.scale)
    assert torch.equal(with_residual(x), without(x))


def test_the_losses_are_what_they_are_said_to_be():
    n = 7
    identity, uniform = torch.eye(n, dtype=torch.float64)[None, None], torch.full((1, 1, n, n), 1 / n).double()
    assert probability_loss(identity, "printed") == n * (n - 1)
    assert abs(probability_loss(uniform, "printed")) < 1e-12
    assert probability_loss(identity, "probs_hinge") == 0
    half = draw(2, 3, n, n)
    symmetric = half + half.mT + 20 * identity
    assert diagonality_loss(symmetric) == 0 and diagonality_loss(half) > 0.1
    torch.testing.assert_close(diagonality_loss(3 * half + 5), diagonality_loss(half))
    weights = half.softmax(-1)
    rows = [
        sum(abs(w[i, j] - w[j, i]) + max(0, w[i, j] - w[i, i]) for j in range(n))
        for w in weights.flatten(0, 1)
        for i in range(n)
    ]
    torch.testing.assert_close(diagonality_loss(half, "probs_hinge"), sum(rows) / len(rows))


@pytest.mark.parametrize("host", ["lavit", "lavit_vit"])
def test_the_loss_is_of_the_last_forward_in_training_and_reaches_queries_and_keys(host):
    model = small(host, attention=None).train()
    assert model.auxiliary_loss() == 0
    model(torch.randn(2, 3, 64, 64))
    loss = model.auxiliary_loss()
    loss.backward()
    layers = [module for module in model.modules() if isinstance(module, ScoreAttention) and module.keep_scores]
    assert loss > 0 and layers[0].qkv.weight.grad[: 2 * layers[0].proj.in_features].abs().sum() > 0
    copy.deepcopy(model)
    model.eval()
    assert model.auxiliary_loss() == 0
    model(torch.randn(2, 3, 64, 64))
    model.train()
    assert model.auxiliary_loss() == 0


@pytest.mark.parametrize("host", ["lavit", "lavit_vit"])
def test_the_loss_is_the_weighed_mean_over_the_layers_that_carry_scores_on(host):
    model, found = small(host, attention=None, loss_weight=0.3).train(), []
    for module in model.modules():
        if isinstance(module, LessAttention):
            module.register_forward_hook(lambda _, __, output: found.append(diagonality_loss(output[1])))
    model(torch.randn(2, 3, 64, 64))
    torch.testing.assert_close(model.auxiliary_loss(), 0.3 * sum(found) / len(found))
    assert len(found) > 1


@pytest.mark.parametrize(("residual", "last"), [(True, [True, False]), (False, [False, False])])
def test_scores_are_kept_where_a_later_layer_needs_them(residual, last):
    whole = small("lavit", less_from=[None] * 4, attention_residual=residual)
    assert [stage.blocks[-1].attn.keep_scores for stage in whole.stages[2:]] == last
    half = small("lavit", attention_residual=residual)
    for stage in half.stages[2:]:
        kept = [block.attn.keep_scores for block in stage.blocks if isinstance(block.attn, ScoreAttention)]
        assert kept == [False] * (len(kept) - 1) + [True]


@pytest.mark.parametrize(
    "settings", [{"transform": "kron"}, {"transform": "share"}, {"tied": True}, {"class_token": True}]
)
def test_the_options_train(settings):
    model = small("lavit", **settings).train()
    (model(torch.randn(2, 3, 75, 50)).square().mean() + model.auxiliary_loss()).backward()
    assert not [key for key, parameter in model.named_parameters() if parameter.grad is None]


def test_less_from_says_where_scores_end():
    def kinds(**settings):
        model = small("lavit", depths=(1, 1, 4, 2), **settings)
        return ["".join(type(block.attn).__name__[0] for block in stage.blocks) for stage in model.stages[2:]]

    assert kinds() == ["SSLL", "SL"]
    assert kinds(less_from=[None, None, 1, None]) == ["SLLL", "SS"]
    with pytest.raises(SubquadError, match="less_from is between 1 and the stage's 4 blocks"):
        kinds(less_from=[None, None, 0, None])
    with pytest.raises(SubquadError, match="less_from has 2 entries for 4 stages"):
        kinds(less_from=[1, 1])
    with pytest.raises(SubquadError, match="unknown transform 'kronn': did you mean kron"):
        kinds(transform="kronn")
    with pytest.raises(SubquadError, match="unknown loss_kind 'center"):
        kinds(loss_kind="center")
    with pytest.raises(SubquadError, match="has attention of its own and takes no other, got 'agent'"):
        subquad.create_model("lavit_deit_tiny", attention="agent")


def test_transforms_move_to_another_grid_in_their_own_precision_under_autocast():
    update, old, new = draw(6, 6).float(), TokenGrid(2, 3), TokenGrid(3, 4)
    expected = resize_grid_map(update, old, new)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(resize_grid_map(update, old, new), expected)
