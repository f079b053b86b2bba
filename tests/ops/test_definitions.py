"""The operations against the papers' formulas, written out token by token in float64."""

import math

import pytest
import torch
from torch.nn.functional import elu, gelu, softplus

from subquad import ATTENTION, TokenGrid
from subquad.attention.inline import LocalKernel
from subquad.attention.mhla import mixing_start
from subquad.ops import (
    agent_weights,
    circulant_formula,
    circulant_weights,
    focused_weights,
    gaussian_kernel,
    inline_weights,
    linear_weights,
    mhla_attention,
    mhla_weights,
    newton_inverse,
    pola_weights,
    soft_weights,
    softmax_weights,
)
from subquad.ops.map_formulas import filter_map
from subquad.positions import GridBias

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


@pytest.mark.parametrize("grid", [TokenGrid(2, 3), TokenGrid(3, 3), TokenGrid(1, 5), TokenGrid(4, 1)], ids=str)
def test_circulant_weights_are_those_of_offsets_on_the_torus(grid):
    height, width = grid.shape
    places = [(y, x) for y in range(height) for x in range(width)]
    q, k = torch.randn(2, 1, 2, len(places), 3, dtype=torch.float64)
    got = circulant_weights(q, k, grid=grid)
    for head in range(2):
        for channel in range(3):
            score = dict.fromkeys(places, 0.0)
            for i, (y, x) in enumerate(places):
                for down, right in places:
                    j = places.index(((y + down) % height, (x + right) % width))
                    score[down, right] += q[0, head, i, channel] * k[0, head, j, channel] / math.sqrt(len(places))
            kernel = dict(zip(places, torch.stack(list(score.values())).softmax(dim=0), strict=True))
            rows = [[kernel[(b[0] - a[0]) % height, (b[1] - a[1]) % width] for b in places] for a in places]
            torch.testing.assert_close(got[0, head, channel], torch.stack([torch.stack(row) for row in rows]))
    for axis in (-1, -2):
        torch.testing.assert_close(got.sum(axis), torch.ones_like(got.sum(axis)))


@pytest.mark.parametrize("grid", [TokenGrid(6, 10), TokenGrid(5, 7), TokenGrid(1, 23)], ids=str)
def test_correlations_by_products_of_matrices_are_those_by_fourier_transforms(grid):
    x, y = torch.randn(2, 2, 3, grid.num_tokens, 4, dtype=torch.float64)
    by_transforms = circulant_formula._by_transforms(x, y, grid)
    torch.testing.assert_close(circulant_formula._by_products(x, y, grid), by_transforms)


def mhla_features(x, scale):
    """Of tokens (h, n, d): normed over all channels of all heads, and what is positive of them."""
    flat = x.transpose(0, 1).flatten(1)
    normed = flat / (flat.square().mean(dim=1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()
    return (normed * scale.flatten()).clamp(min=0).unflatten(1, (len(x), -1)).transpose(0, 1) + 1e-6


def mhla_tokens(grid, kv_grid, pieces):
    generator = torch.Generator().manual_seed(7)
    counts = [math.prod(pieces) + min(one.prefix, 1) for one in (grid, kv_grid)]
    shapes = [(1, 2, grid.num_tokens, 4), *[(1, 2, kv_grid.num_tokens, 4)] * 2, counts, (2, 1, 4), (2, 1, 4)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [*tensors[:3], tensors[3].abs(), *tensors[4:]]


@pytest.mark.parametrize(
    ("grid", "kv_grid", "pieces"),
    [
        (TokenGrid(4, 6), TokenGrid(4, 6), (2, 3)),
        (TokenGrid(5, 7), TokenGrid(5, 7), (2, 3)),
        (TokenGrid(2, 5, 3), TokenGrid(2, 5, 3), (3, 2)),
        (TokenGrid(5, 5, 1), TokenGrid(2, 3), (2, 2)),
        (TokenGrid(1, 7), TokenGrid(1, 7), (1, 3)),
    ],
    ids=str,
)
def test_mhla_mixes_the_products_of_blocks(grid, kv_grid, pieces):
    q, k, v, mixing, q_scale, k_scale = mhla_tokens(grid, kv_grid, pieces)

    def block(one, token):
        place = token - one.prefix
        if place < 0:
            return 0
        # the block r of m whose rows are those from ⌊rH/m⌋ on
        row, column = (
            max(r for r in range(m) if r * side // m <= at)
            for at, side, m in zip(divmod(place, one.width), one.shape, pieces, strict=True)
        )
        return row * pieces[1] + column + min(one.prefix, 1)

    head = 1
    queries, keys = mhla_features(q[0], q_scale)[head], mhla_features(k[0], k_scale)[head]
    rows = torch.stack(
        [
            torch.stack([mixing[block(grid, i), block(kv_grid, j)] * (queries[i] @ keys[j]) for j in range(len(keys))])
            for i in range(len(queries))
        ]
    )
    expected = rows / (rows.sum(dim=1, keepdim=True) + 1e-6)
    grids = {"grid": grid, "kv_grid": kv_grid, "pieces": pieces}
    weights = mhla_weights(q, k, mixing, q_scale, k_scale, **grids)
    torch.testing.assert_close(weights[0, head], expected)
    torch.testing.assert_close(mhla_attention(q, k, v, mixing, q_scale, k_scale, **grids), weights @ v)


@pytest.mark.parametrize("sides", [(4, 6), (5, 7), (1, 5)])
def test_the_released_normaliser_of_mhla_is_of_the_queries_at_the_same_position_of_all_blocks(sides):
    grid, pieces = TokenGrid(*sides), (2, 3)
    q, k, v, mixing, q_scale, k_scale = mhla_tokens(grid, grid, pieces)
    grids = {"grid": grid, "kv_grid": grid, "pieces": pieces, "normaliser": "released"}
    weights = mhla_weights(q, k, mixing, q_scale, k_scale, **grids)
    torch.testing.assert_close(mhla_attention(q, k, v, mixing, q_scale, k_scale, **grids), weights @ v)
    if sides != (4, 6):
        return
    queries, keys = mhla_features(q[0], q_scale)[0], mhla_features(k[0], k_scale)[0]
    i = 3 * 6 + 3  # in block (1, 1), which begins at (2, 2), the place (1, 1)
    total = 0.0
    for r in range(2):
        for c in range(3):
            inside = [(2 * r + y) * 6 + 2 * c + x for y in range(2) for x in range(2)]
            total = total + mixing[4, 3 * r + c] * (queries[inside[3]] @ keys[inside].sum(dim=0))
    first = mixing[4, 0] * (queries[i] @ keys[0]) / (total + 1e-6)
    torch.testing.assert_close(weights[0, 0, i, 0], first)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        # of blocks at the distances 0, 1, 2 in a row
        ("linear", (1, 1 / 2, 0)),
        ("cos", (1, math.cos(math.pi / 8), math.cos(math.pi / 4))),
        ("exp", (1, math.exp(-1 / 2), math.exp(-1))),
        ("local", (1, 1, 0)),
        ("gaussian", (1, math.exp(-9 / 8), math.exp(-9 / 2))),
    ],
)
def test_the_mixing_of_mhla_starts_from_the_distances_of_its_blocks(kind, row):
    start = mixing_start(kind, (1, 3), sigma=2)
    near = torch.tensor([row, (row[1], row[0], row[1]), row[::-1]], dtype=torch.float64)
    torch.testing.assert_close(start, near if kind == "gaussian" else near / near.sum(dim=0))


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
