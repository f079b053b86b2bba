"""The operations against the papers' formulas, written out token by token in float64."""

import math

import pytest
import torch
from torch.nn.functional import elu, gelu, softplus

from subquad import ATTENTION, TokenGrid
from subquad.attention.inline import LocalKernel
from subquad.ops import (
    agent_weights,
    focused_weights,
    gaussian_kernel,
    inline_weights,
    linear_weights,
    mlla_weights,
    newton_inverse,
    pola_weights,
    soft_weights,
    softmax_weights,
    ttt_filter,
    ttt_unit,
)
from subquad.ops.map_formulas import filter_map
from subquad.positions import GridBias
from subquad.rope import rope_of

N, D = 11, 6


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 2, N, D, generator=generator, dtype=torch.float64) for _ in range(3)]


def similarity_rows(function, q, k, *, eps=0.0):
    """Rows of similarities f(q_i, k_j) over their sum; `eps` is what is added to their mean."""
    rows = torch.stack([torch.stack([function(qi, kj) for kj in k]) for qi in q])
    return rows / (rows.sum(dim=1, keepdim=True) + eps * len(k))


def test_softmax_weights_are_exponentials_of_scaled_products(tokens):
    q, k, _ = tokens
    expected = similarity_rows(lambda a, b: math.exp(1) ** (a @ b / math.sqrt(D)), q[0, 1], k[0, 1])
    torch.testing.assert_close(softmax_weights(q, k)[0, 1], expected)


@pytest.mark.parametrize(("name", "feature"), [("relu", lambda x: x.clamp(min=0)), ("elu", lambda x: elu(x) + 1)])
def test_linear_weights_are_products_of_features(tokens, name, feature):
    q, k, _ = tokens
    expected = similarity_rows(lambda a, b: feature(a) @ feature(b), q[0, 1], k[0, 1], eps=1e-6)
    torch.testing.assert_close(linear_weights(q, k, feature_map=name)[0, 1], expected)


def test_mlla_turns_features_across_all_heads_and_normalises_by_those_that_stand_still(tokens):
    heads, grid, width = 2, TokenGrid(2, 5, 1), 6
    q, k = (x[0] for x in tokens[:2])
    rotation = rope_of("mlla", width, heads)(grid, q.device, q.dtype)
    rates = [10_000 ** -(m / (heads * width // 4)) for m in range(heads * width // 4)]

    def turned(x, token):
        """All channels of a token as one row of complex numbers: pairs of the row first, pairs of the column behind."""
        place = token - 1
        y, x_place = (0, 0) if token == 0 else (place // grid.width, place % grid.width)
        angles = torch.tensor([y * rate for rate in rates] + [x_place * rate for rate in rates], dtype=torch.float64)
        pairs = torch.view_as_complex(torch.cat([elu(x[h, token]) + 1 for h in range(heads)]).view(-1, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten()

    def expected(h, i, j):
        own = slice(h * width, (h + 1) * width)
        still = sum((elu(q[h, i]) + 1) @ (elu(k[h, m]) + 1) for m in range(N)) / N
        return turned(q, i)[own] @ turned(k, j)[own] / N / (still + 1e-6)

    weights = mlla_weights(q[None], k[None], rotation=rotation)
    for h in range(heads):
        rows = torch.stack([torch.stack([expected(h, i, j) for j in range(N)]) for i in range(N)])
        torch.testing.assert_close(weights[0, h], rows)
    assert (weights.sum(-1) - 1).abs().max() > 0.01
    torch.testing.assert_close(mlla_weights(q[None], k[None]), linear_weights(q[None], k[None], feature_map="elu"))


def test_a_gated_unit_takes_one_step_on_keys_and_values_and_answers_queries(tokens):
    q, k, v = tokens
    w1, w2 = (torch.randn(2, D, D, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def unit(x, first, second):
        return (x @ first) * torch.nn.functional.silu(x @ second)

    for h in range(2):
        loss = -sum(unit(k[0, h, j], w1[h], w2[h]) @ v[0, h, j] for j in range(N)) / (3 * N)
        first, second = (torch.autograd.grad(loss, w, retain_graph=True)[0][h] for w in (w1, w2))
        first, second = (
            w[h] - torch.stack([column / (column.norm() + 1) for column in gradient.T], dim=-1)
            for w, gradient in ((w1, first), (w2, second))
        )
        torch.testing.assert_close(ttt_unit(q, k, v, w1, w2)[0, h], unit(q[0, h], first, second))


def test_a_filter_takes_one_step_on_the_map_of_keys_and_values_and_filters_queries():
    grid, kv_grid = TokenGrid(4, 5, 2), TokenGrid(3, 7, 1)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(1, 2, grid.num_tokens if name == "q" else kv_grid.num_tokens, D, generator=generator).double()
        for name in "qkv"
    )
    w3 = torch.randn(2 * D, 1, 3, 3, dtype=torch.float64, requires_grad=True)

    def filtered(image, weight):
        return torch.nn.functional.conv2d(image, weight, padding=1, groups=len(weight))

    loss = -(filtered(kv_grid.to_map(k), w3) * kv_grid.to_map(v)).sum() / (3 * kv_grid.num_places)
    (gradient,) = torch.autograd.grad(loss, w3)
    trained = w3 - gradient / (gradient.flatten(1).norm(dim=1)[:, None, None, None] + 1)
    expected = grid.to_heads(filtered(grid.to_map(q), trained), 2)
    answer = ttt_filter(q, k, v, w3, grid=grid, kv_grid=kv_grid)
    torch.testing.assert_close(answer, expected)
    assert not answer[:, :, :2].any()


def test_focused_features_keep_the_norm_over_all_channels(tokens):
    q, k, _ = tokens
    temperature = softplus(torch.randn(2, 1, D, dtype=torch.float64))

    def focus(x):
        flat = torch.cat([(x[h].clamp(min=0) + 1e-6) / temperature[h, 0] for h in range(2)])
        return flat**3 * flat.norm() / (flat**3).norm()

    rows = torch.stack(
        [torch.stack([focus(q[0, :, i])[D:] @ focus(k[0, :, j])[D:] for j in range(N)]) for i in range(N)]
    )
    expected = rows / (rows.sum(dim=1, keepdim=True) + 1e-6 * N)
    torch.testing.assert_close(focused_weights(q, k, temperature, power=3)[0, 1], expected)


def test_inline_weights_subtract_the_mean_similarity(tokens):
    q, k, _ = tokens
    products = q[0, 1] @ k[0, 1].mT
    expected = (products - products.mean(dim=1, keepdim=True)) / (N * math.sqrt(D)) + 1 / N
    got = inline_weights(q, k)[0, 1]
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(got.sum(dim=1), torch.ones(N, dtype=torch.float64))


def test_inline_tells_collinear_queries_apart_and_linear_does_not(tokens):
    q, k, _ = tokens
    longer = 3 * q
    torch.testing.assert_close(linear_weights(q, k), linear_weights(longer, k), rtol=1e-3, atol=1e-4)
    assert (inline_weights(q, k) - inline_weights(longer, k)).abs().max() > 0.1


def test_the_four_collinear_queries_of_the_inline_paper():
    """Figure 1(a): printed to two digits."""
    keys = torch.tensor([(0.63, 1.81), (0.98, 1.00), (1.91, 0.64), (1.78, 0.30)], dtype=torch.float64)
    queries = torch.tensor([0.35, 0.59, 0.81, 0.98], dtype=torch.float64)[:, None] * torch.tensor([1.11, 2.00])
    q, k = queries[None, None], keys[None, None]
    figure = {
        softmax_weights: ["31 23 25 20", "36 22 25 17", "41 20 24 15", "44 19 23 13"],
        inline_weights: ["31 23 25 20", "35 22 26 17", "39 21 26 14", "42 21 26 12"],
        linear_weights: ["32 23 25 19"] * 4,
    }
    for function, rows in figure.items():
        printed = torch.tensor([[float(entry) / 100 for entry in row.split()] for row in rows], dtype=torch.float64)
        torch.testing.assert_close(function(q, k)[0, 0], printed, rtol=0, atol=0.00501)


def test_agent_weights_are_two_softmax_maps(tokens):
    q, k, agents = tokens[0], tokens[1], tokens[2][:, :, :4]
    key_bias = torch.randn(2, 4, N, dtype=torch.float64)
    query_bias = torch.randn(2, N, 4, dtype=torch.float64)
    collect = torch.softmax(agents[0, 1] @ k[0, 1].mT / math.sqrt(D) + key_bias[1], dim=1)
    hand_out = torch.softmax(q[0, 1] @ agents[0, 1].mT / math.sqrt(D) + query_bias[1], dim=1)
    torch.testing.assert_close(agent_weights(q, agents, k, key_bias, query_bias)[0, 1], hand_out @ collect)


def test_agents_are_means_over_pytorchs_adaptive_bins():
    grid = TokenGrid(14, 9, 1)
    module = ATTENTION["agent"](8, 2, grid=grid, kv_grid=grid, num_agents=16)
    q = torch.randn(1, 2, grid.num_tokens, 4)
    agents, idle = module.pool(q, None, grid=grid, kv_grid=grid)
    assert idle is None
    places = q[0, 1, 1:].reshape(14, 9, 4)
    for row in range(4):
        for column in range(4):
            top, bottom = row * 14 // 4, -(-(row + 1) * 14 // 4)
            left, right = column * 9 // 4, -(-(column + 1) * 9 // 4)
            expected = places[top:bottom, left:right].mean(dim=(0, 1))
            torch.testing.assert_close(agents[0, 1, 4 * row + column], expected)


def test_grid_bias_is_the_sum_of_its_block_rows_and_columns():
    bias = GridBias(2, TokenGrid(1, 3), TokenGrid(7, 7, 1))
    got = bias(TokenGrid(7, 7, 1))
    expected = bias.block[1, 2, 4, 5] + bias.rows[1, 2, 4] + bias.columns[1, 2, 5]
    torch.testing.assert_close(got[1, 2, 1 + 4 * 7 + 5], expected)
    torch.testing.assert_close(got[1, 2, 0], bias.prefix[1, 2, 0])


def test_polar_streams_are_same_sign_and_opposite_sign_similarities(tokens):
    q, k, _ = tokens
    power = 1 + 4 * torch.rand(2, 1, D, dtype=torch.float64)
    p = power[1, 0]

    def same(a, b):
        positive = ((a.clamp(min=0) * b.clamp(min=0)) ** p).sum()
        return positive + (((-a).clamp(min=0) * (-b).clamp(min=0)) ** p).sum()

    got = pola_weights(q, k, power)[0, 1]
    torch.testing.assert_close(got[0], similarity_rows(same, q[0, 1], k[0, 1], eps=1e-6))
    torch.testing.assert_close(got[1], similarity_rows(same, -q[0, 1], k[0, 1], eps=1e-6))


def test_gaussian_weights_are_the_low_rank_form(tokens):
    q, landmarks = tokens[0], tokens[1][:, :, :4]

    def kernel(a, b):
        return torch.stack([torch.stack([torch.exp(-(ai - bj).square().sum() / 2) for bj in b]) for ai in a])

    wide, square = kernel(q[0, 1], landmarks[0, 1]), kernel(landmarks[0, 1], landmarks[0, 1])
    inverse = torch.linalg.inv(square + 0.01 * torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(soft_weights(q, landmarks)[0, 1], wide @ inverse @ wide.mT)


@pytest.mark.parametrize("spread", [1.0, 0.3, 0.05])
def test_newton_steps_are_their_spectral_closed_form(spread):
    x = spread * torch.randn(3, 49, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gram = gaussian_kernel(x, x)
    values, vectors = torch.linalg.eigh(gram)
    alpha = 1.8 / gram.sum(dim=-1).amax(dim=-1).square()
    shifted = values + 0.01
    filtered = (1 - (1 - alpha[:, None] * shifted**2) ** (2**20)) / shifted
    expected = vectors @ torch.diag_embed(filtered) @ vectors.mT
    got = newton_inverse(gram)
    assert (got - expected).norm() <= 1e-7 * expected.norm()


def test_inlines_kernel_has_nine_taps_a_channel_from_the_mean_token():
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    module = LocalKernel(6, 2).double()
    kernels = module(x)
    hidden = gelu(module.fc1.weight[3:, :, 0] @ x[1].mean(dim=0)[3:] + module.fc1.bias[3:])
    channel = 4
    expected = module.fc2.weight[9 * channel : 9 * channel + 9, :, 0] @ hidden + module.fc2.bias[9 * channel :][:9]
    torch.testing.assert_close(kernels[1, channel], expected.reshape(3, 3))


def test_filtering_a_map_is_a_convolution_with_each_images_kernel():
    image, kernels = torch.randn(2, 4, 5, 7), torch.randn(2, 4, 3, 3)
    expected = torch.stack(
        [
            torch.nn.functional.conv2d(one[None], kernel[:, None], padding=1, groups=4)[0]
            for one, kernel in zip(image, kernels, strict=True)
        ]
    )
    torch.testing.assert_close(filter_map(image, kernels), expected)


@pytest.mark.parametrize("masked", [False, True])
def test_agents_maps_written_out_are_the_fused_ones(masked, monkeypatch):
    from subquad.ops import agent_formula

    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 12, 4, dtype=torch.float64, generator=generator).requires_grad_()
    agents = torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=generator)
    biases = torch.randn(3, 5, 12, dtype=torch.float64), torch.randn(3, 12, 5, dtype=torch.float64)
    padding = torch.arange(12).expand(2, -1) > torch.tensor([[8], [11]]) if masked else None
    idle = torch.tensor([[False] * 4 + [True], [False] * 5]) if masked else None
    written_out = agent_formula.agent_attention(q, agents, k, v, *biases, padding, idle)
    monkeypatch.setattr(agent_formula, "SMALL", 0)
    torch.testing.assert_close(agent_formula.agent_attention(q, agents, k, v, *biases, padding, idle), written_out)
