"""The operations against the papers' formulas, written out token by token in float64."""

import math
from functools import partial

import pytest
import torch
from torch.nn.functional import elu, gelu, softplus

from subquad import ATTENTION, TokenGrid
from subquad.attention.inline import LocalKernel
from subquad.attention.mhla import mixing_start
from subquad.ops import (
    NORMALISERS,
    agent_weights,
    circulant_formula,
    circulant_weights,
    focused_weights,
    gaussian_kernel,
    inline_weights,
    linear_weights,
    mala_weights,
    mhla_attention,
    mhla_weights,
    mlla_weights,
    nala_attention,
    nala_weights,
    newton_inverse,
    pola_weights,
    polapp_attention,
    polapp_weights,
    rala_weights,
    soft_weights,
    softmax_weights,
    ttt_filter,
    ttt_unit,
)
from subquad.ops.linear_formula import FEATURE_MAPS
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


def test_features_of_elu_are_as_exact_where_they_are_small():
    given = torch.tensor([0.0, *torch.linspace(-60, 10, 1401)]).requires_grad_()
    x = given.detach().double().requires_grad_()
    wanted, y = torch.where(x > 0, x + 1, x.exp()), FEATURE_MAPS["elu"](given)
    assert torch.all((y - wanted).abs() <= 1e-6 * wanted)
    slopes, own = (torch.autograd.grad(one.sum(), of)[0] for one, of in ((wanted, x), (y, given)))
    assert torch.all((own - slopes).abs() <= 1e-6 * slopes)


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


def test_rows_of_mhla_sum_to_one_and_with_the_released_normaliser_to_about_one():
    grid, pieces = TokenGrid(16, 16), (4, 4)
    q, k, _, _ = on_grid(grid, 64)
    tensors = q, k, mixing_start("linear", pieces), *[torch.ones(2, 1, 64, dtype=torch.float64)] * 2
    grids = {"grid": grid, "kv_grid": grid, "pieces": pieces}
    paper, released = (mhla_weights(*tensors, **grids, normaliser=each).sum(-1) for each in NORMALISERS)
    torch.testing.assert_close(paper, torch.ones_like(paper), rtol=1e-5, atol=0)
    assert released.mean().item() == pytest.approx(1, abs=0.02)
    assert released.std().item() == pytest.approx(0.15, abs=0.03) and 0.4 < released.min() < released.max() < 1.8


@pytest.mark.parametrize(
    ("kind", "settings", "row"),
    [
        # of blocks at the distances 0, 1, 2 in a row
        ("linear", {}, (1, 1 / 2, 0)),
        ("cos", {}, (1, math.cos(math.pi / 8), math.cos(math.pi / 4))),
        ("exp", {"sigma": 2}, (1, math.exp(-1 / 2), math.exp(-1))),
        ("local", {}, (1, 1, 0)),
        ("local", {"near": 0.5}, (1, 0, 0)),
        ("local", {"near": 2}, (1, 1, 1)),
        ("gaussian", {}, (1, math.exp(-9 / 8), math.exp(-9 / 2))),
    ],
)
def test_the_mixing_of_mhla_starts_from_the_distances_of_its_blocks(kind, settings, row):
    start = mixing_start(kind, (1, 3), **settings)
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


def turned_by_hand(x, places, d):
    """One feature row (d,) of the token at (row, column), pair by pair, as MAViT turns it."""
    frequencies = [10_000 ** (-m / max(d // 4 - 1, 1)) for m in range(d // 4)]
    turned = []
    for pair in range(d // 2):
        angle = places[pair // (d // 4)] * frequencies[pair % (d // 4)]
        a, b = x[2 * pair], x[2 * pair + 1]
        turned += [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
    return torch.stack(turned)


def on_grid(grid, d, *, heads=2, seed=3):
    """Queries, keys, the rotation of a network of MAViT's host, and where each token stands."""
    q, k = torch.randn(
        2, 1, heads, grid.num_tokens, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    places = [divmod(place, grid.width) for place in range(grid.num_tokens)]
    return q, k, rope_of("mala", d)(grid, torch.device("cpu"), torch.float64), places


@pytest.mark.parametrize("turns", [False, True])
def test_magnitude_aware_weights_subtract_the_mean_of_what_does_not_turn(turns):
    d = 8
    q, k, rotation, places = on_grid(TokenGrid(3, 4), d)
    got = mala_weights(q, k, None, rotation if turns else None)[0, 1]
    for i, qi in enumerate(elu(q[0, 1]) + 1):
        keys = elu(k[0, 1]) + 1
        z = torch.stack([qi @ kj for kj in keys]).mean() / math.sqrt(d)
        for j, kj in enumerate(keys):
            a, b = (turned_by_hand(x, at, d) for x, at in ((qi, places[i]), (kj, places[j]))) if turns else (qi, kj)
            expected = (a @ b / math.sqrt(d) * (1 + 1 / (z + 1e-6)) - z) / len(keys)
            torch.testing.assert_close(got[i, j], expected)


def test_rows_of_magnitude_aware_attention_sum_to_one_where_nothing_turns_and_to_anything_where_it_does():
    q, k, rotation, _ = on_grid(TokenGrid(28, 28), 64, heads=1)
    for spread, negative, turned_sum in ((0.3, 0.0, -1.55), (1.0, 0.2, -2.26), (3.0, 0.45, -6.7)):
        rows = mala_weights(spread * q, spread * k)
        torch.testing.assert_close(rows.sum(-1), torch.ones(1, 1, 784, dtype=torch.float64), rtol=1e-5, atol=0)
        assert (rows < 0).double().mean().item() == pytest.approx(negative, abs=0.02)
        turned = mala_weights(spread * q, spread * k, None, rotation)
        assert turned.sum(-1).mean().item() == pytest.approx(turned_sum, rel=0.1)
        assert (turned < 0).double().mean() > 0.8


@pytest.mark.parametrize("turns", [False, True])
def test_rank_augmented_weights_are_linear_ones_of_keys_that_the_mean_query_weighs(turns):
    d = 8
    q, k, rotation, places = on_grid(TokenGrid(3, 4), d)
    got = rala_weights(q, k, rotation=rotation if turns else None)[0, 1]
    queries, keys = elu(q[0, 1]) + 1, elu(k[0, 1]) + 1
    mean = sum(queries) / len(queries)
    shares = torch.stack([torch.exp(mean @ kj / math.sqrt(d)) for kj in keys])
    shares = shares / shares.sum()
    for i, qi in enumerate(queries):
        divisor = sum(share * (qi @ kj) for share, kj in zip(shares, keys, strict=True)) + 1e-6
        for j, kj in enumerate(keys):
            a, b = (turned_by_hand(x, at, d) for x, at in ((qi, places[i]), (kj, places[j]))) if turns else (qi, kj)
            torch.testing.assert_close(got[i, j], shares[j] * (a @ b) / divisor)


def test_rows_that_turned_products_have_sum_to_one_where_nothing_turns_and_to_three_quarters_where_it_does():
    q, k, rotation, _ = on_grid(TokenGrid(28, 28), 64, heads=4)
    for spread, most in ((0.3, 0.03), (1.0, 0.06), (3.0, 0.15)):
        for weights in (rala_weights, mlla_weights):
            still, turned = (weights(spread * q, spread * k, rotation=each).sum(-1) for each in (None, rotation))
            torch.testing.assert_close(still, torch.ones_like(still), rtol=1e-5, atol=0)
            assert turned.mean().item() == pytest.approx(0.73, abs=0.05) and turned.std() < most


def test_the_mean_query_is_of_those_that_are_there():
    q, k, _, _ = on_grid(TokenGrid(1, 9), 8)
    absent = torch.arange(9)[None] >= 6
    got = rala_weights(q, k, absent, absent)[:, :, :6, :6]
    torch.testing.assert_close(got, rala_weights(q[:, :, :6], k[:, :, :6]))


@pytest.mark.parametrize("turns", [False, True])
def test_norm_aware_weights_are_powers_of_directions_and_cubes_of_keys(turns):
    d = 8
    q, k, rotation, places = on_grid(TokenGrid(3, 4), d)
    got = nala_weights(q, k, rotation=rotation if turns else None)[0, 1]

    def halves(x):
        return [half.clamp(min=0) for half in (x, -x)]

    keys = [[half**3 for half in halves(kj)] for kj in k[0, 1]]
    for i, qi in enumerate(q[0, 1]):
        power = 3 * (0.5 + math.tanh(qi.norm()))
        query = [(half / qi.norm()) ** power for half in halves(qi)]
        divisor = sum(a @ b for key in keys for a, b in zip(query, key, strict=True)) + 12 * 1e-6
        for j, key in enumerate(keys):
            a, b = (
                [turned_by_hand(half, at, d) if turns else half for half in of]
                for of, at in ((query, places[i]), (key, places[j]))
            )
            torch.testing.assert_close(got[i, j], (a[0] @ b[0] + a[1] @ b[1]) / divisor)


@pytest.mark.parametrize("turns", [False, True])
def test_streams_of_exponentials_have_a_spikiness_each_and_turn_as_one_vector(turns):
    d, grid = 4, TokenGrid(3, 4)
    q, k, _, places = on_grid(grid, d)
    wide = rope_of("mala", d)(grid, torch.device("cpu"), torch.float64, feature_width=2)
    same, opposite = torch.rand(2, 2, 1, 2 * d, dtype=torch.float64)
    got = polapp_weights(q, k, same, opposite, None, wide if turns else None)[0, 1]

    def features(x, sign, s):
        return torch.exp(s * torch.cat([(sign * x).clamp(min=0), (-sign * x).clamp(min=0)])) - 1

    keys = [features(kj, 1, 1) for kj in k[0, 1]]
    for stream, (sign, s) in enumerate(((1, same[1, 0]), (-1, opposite[1, 0]))):
        for i, qi in enumerate(q[0, 1]):
            query = features(qi, sign, s)
            divisor = sum(query @ key for key in keys) + 12 * 1e-6
            for j, key in enumerate(keys):
                a, b = query, key
                if turns:
                    a, b = turned_by_hand(query, places[i], 2 * d), turned_by_hand(key, places[j], 2 * d)
                torch.testing.assert_close(got[stream, i, j], a @ b / divisor)


def test_streams_of_exponentials_of_hundreds_are_finite_and_what_they_are_in_double_precision():
    q, k, _, _ = on_grid(TokenGrid(4, 4), 8)
    same, opposite = torch.full((2, 2, 1, 16), 0.5, dtype=torch.float64)
    for spread in (1, 10, 60):
        exact = polapp_attention(spread * q, spread * k, k, same, opposite)
        single = polapp_attention(*(x.float() for x in (spread * q, spread * k, k, same, opposite)))
        assert single.isfinite().all()
        torch.testing.assert_close(single.double(), exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_norm_aware_attention_gives_nothing_to_a_query_of_zeros_and_has_a_gradient(dtype):
    q, k, _, _ = on_grid(TokenGrid(1, 5), 4)
    q, k = q.to(dtype), k.to(dtype)
    q[:, :, 2] = 0
    q.requires_grad_()
    y = nala_attention(q, k, k)
    y.square().sum().backward()
    assert (y[:, :, 2] == 0).all() and y[:, :, 1].abs().min() > 0 and q.grad.isfinite().all()


@pytest.mark.parametrize(
    ("function", "scales", "grows"),
    [
        (mala_weights, (1, 4), True),
        # which has all of its power from norms of about two on
        (nala_weights, (0.1, 1), True),
        (partial(linear_weights, feature_map="relu"), (1, 4), False),
    ],
    ids=["MALA", "NaLa", "linear"],
)
def test_a_longer_query_is_spikier_unless_a_division_takes_its_length_away(tokens, function, scales, grows):
    q, k, _ = tokens
    short, long = (function(scale * q.abs(), k)[0, 1].std(-1) for scale in scales)
    assert bool((long / short).mean() > 1.2) is grows


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
