"""Every measure of attention has the values that are known of maps whose nature is known."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad import SubquadError, TokenGrid
from subquad.analysis import (
    attention_distance,
    centred,
    confused_queries,
    diagonality,
    drift,
    entropy,
    local_mass,
    map_similarity,
    negative_mass,
    ranks,
    symmetry,
    token_similarity,
    uniform_weights,
)

N = 196


def gaussian_softmax(deviation, seed=0, count=N):
    torch.manual_seed(seed)
    return (deviation * torch.randn(8, count, count, dtype=torch.float64)).softmax(-1)


def linear_weights(count=N, channels=64, seed=0):
    torch.manual_seed(seed)
    q, k = torch.randn(2, count, channels, dtype=torch.float64).relu()
    scores = q @ k.T
    return scores / scores.sum(-1, keepdim=True)


# rows


def test_entropy_goes_from_nothing_to_that_of_the_uniform_row():
    assert entropy(uniform_weights(TokenGrid(14, 14)), normalised=True) == pytest.approx(torch.ones(N), abs=1e-12)
    assert entropy(torch.eye(7)).abs().max() == 0


@pytest.mark.parametrize(("deviation", "expected"), [(0.5, 5.154), (1.0, 4.789), (2.0, 3.52)])
def test_entropy_of_gaussian_logits(deviation, expected):
    assert entropy(gaussian_softmax(deviation)).mean() == pytest.approx(expected, abs=0.02)


def test_signed_rows_are_measured_by_their_absolute_values():
    rows = torch.tensor([[0.5, -0.5, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert negative_mass(rows).tolist() == [0.25, 0]
    expected = -(2 * 0.25 * math.log(0.25) + 0.5 * math.log(0.5))
    assert entropy(rows).tolist() == pytest.approx([expected, 0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=30), st.floats(1, 7))
def test_a_power_above_one_never_raises_the_entropy_of_a_row_of_numbers(values, power):
    row = torch.tensor([values], dtype=torch.float64)
    assert entropy(row**power) <= entropy(row) + 1e-9


def test_growing_ever_faster_is_not_enough_to_lower_entropy():
    # PolaFormer's theorem asks for a positive first and second derivative, which the exponential has
    row = torch.tensor([[0.1, 0.2, 0.5]], dtype=torch.float64)
    assert entropy(row) == pytest.approx(0.900, abs=1e-3) and entropy(row.exp()) == pytest.approx(1.083, abs=1e-3)


@pytest.mark.parametrize(
    ("grid", "window", "expected"),
    [
        (TokenGrid(14, 14), 3, 8.1633 / 196),
        (TokenGrid(14, 14), 5, 20.898 / 196),
        (TokenGrid(14, 14), 7, 37.735 / 196),
        (TokenGrid(14, 14, prefix=1), 3, 8.1633 / 197),
        (TokenGrid(7, 7), 3, 0.1504),
        (TokenGrid(28, 28), 3, 0.01094),
    ],
)
def test_local_mass_of_attention_that_looks_everywhere(grid, window, expected):
    found = local_mass(uniform_weights(grid), grid, window)
    assert found.shape == (grid.num_places,) and found.mean() == pytest.approx(expected, rel=1e-3)
    if grid.shape == (14, 14) and grid.prefix and window == 3:
        assert found.view(14, 14)[1:-1, 1:-1].flatten().tolist() == pytest.approx([9 / 197] * 144)


def test_local_mass_may_leave_out_oneself_and_the_prefix():
    grid = TokenGrid(4, 5, prefix=2)
    assert local_mass(torch.eye(22), grid).tolist() == [1.0] * 20
    assert local_mass(torch.eye(22), grid, with_self=False).abs().max() == 0
    half = torch.eye(22) / 2
    half[:, 0] += 0.5
    assert local_mass(half, grid).tolist() == [0.5] * 20
    assert local_mass(half, grid, renormalise=True).tolist() == [1.0] * 20
    with pytest.raises(SubquadError, match="has an odd side, got 4"):
        local_mass(half, grid, 4)
    with pytest.raises(SubquadError, match="weights of 22×22 are not those of the 12 tokens of 3×4"):
        local_mass(half, TokenGrid(3, 4))


@pytest.mark.parametrize(("side", "expected"), [(7, 3.610), (14, 7.281), (28, 14.590)])
def test_distance_of_attention_that_looks_everywhere(side, expected):
    grid = TokenGrid(side, side)
    assert attention_distance(uniform_weights(grid), grid).mean() == pytest.approx(expected, abs=1e-3)
    assert attention_distance(torch.eye(side**2), grid).abs().max() == 0


# ranks


def test_ranks_of_maps_that_are_known():
    identity, uniform = ranks(torch.eye(N)), ranks(uniform_weights(TokenGrid(14, 14)))
    assert (identity.numerical, identity.effective, identity.stable, identity.most) == (
        N,
        pytest.approx(N),
        pytest.approx(N),
        195,
    )
    assert (uniform.numerical, uniform.most) == (1, 1) and uniform.effective == pytest.approx(1, abs=1e-6)
    linear, softmax = ranks(linear_weights(), tolerance=1e-6), ranks(gaussian_softmax(1.0)[0], tolerance=1e-6)
    assert linear.numerical == 64 and softmax.numerical == N
    assert linear.effective < softmax.effective and linear.stable < softmax.stable


def test_ranks_do_not_know_how_large_a_matrix_is():
    values = torch.tensor([1.0, 0.5, 2e-3, 5e-4])
    for size in (1e-4, 1.0, 1e4):
        found = ranks(torch.diag(size * values))
        assert (found.numerical, found.most) == (3, 2)
        assert found.stable == pytest.approx(1.25, abs=1e-3) and found.effective == pytest.approx(1.91, abs=0.03)
    assert ranks(torch.diag(values), tolerance=1e-4).numerical == 4


def test_a_depthwise_branch_brings_the_rank_back():
    # a 3×3 neighbourhood with weights of its own, as a matrix on a 14×14 map
    grid, torch_weights = TokenGrid(14, 14), linear_weights()
    place = torch.arange(N)
    y, x = place // 14, place % 14
    near = ((y[:, None] - y).abs() <= 1) & ((x[:, None] - x).abs() <= 1)
    branch = near * torch.where(place[:, None] == place, 1.0, 0.1)
    assert grid.num_places == N
    assert ranks(torch_weights, tolerance=1e-6).numerical == 64
    assert ranks(torch_weights + branch, tolerance=1e-6).numerical == N


def test_tokens_that_are_all_alike():
    tokens = torch.randn(1, 8).expand(50, 8)
    assert token_similarity(tokens) == pytest.approx(1, abs=1e-5) and centred(tokens).abs().max() < 1e-6
    torch.manual_seed(0)
    unlike = torch.randn(4, 300, 64)
    by_hand = torch.nn.functional.normalize(unlike, dim=-1)
    cosines = by_hand @ by_hand.mT
    expected = (cosines.sum((-2, -1)) - 300) / (300 * 299)
    torch.testing.assert_close(token_similarity(unlike), expected, atol=1e-5, rtol=0)


# confusion


def test_queries_on_one_line_are_confused_by_linear_attention_only():
    """InLine's figure 1, all 48 numbers to the two decimals that it prints."""
    keys = torch.tensor([(0.63, 1.81), (0.98, 1.00), (1.91, 0.64), (1.78, 0.30)], dtype=torch.float64)
    queries = torch.tensor([0.35, 0.59, 0.81, 0.98], dtype=torch.float64)[:, None] * torch.tensor([1.11, 2.00])
    scores = queries @ keys.T / 2**0.5
    softmax = scores.softmax(-1)
    inline = (1 + scores - scores.mean(-1, keepdim=True)) / 4
    linear = scores / scores.sum(-1, keepdim=True)
    printed = {
        "softmax": (softmax, ".31 .23 .25 .20 .36 .22 .25 .17 .41 .20 .24 .15 .44 .19 .23 .13"),
        "inline": (inline, ".31 .23 .25 .20 .35 .22 .26 .17 .39 .21 .26 .14 .42 .21 .26 .12"),
        "linear": (linear, ".32 .23 .25 .19 " * 4),
    }
    for weights, text in printed.values():
        assert [f"{value:.2f}" for value in weights.flatten().tolist()] == [f"0{word}" for word in text.split()]
    assert confused_queries(linear, queries) == 6
    assert confused_queries(softmax, queries) == confused_queries(inline, queries) == 0


def test_planted_pairs_are_counted_and_chance_makes_none():
    torch.manual_seed(0)
    q, k = torch.randn(2, 50, 16, dtype=torch.float64)
    q[10], q[20] = 3 * q[0], 0.5 * q[1]

    def weights(q):
        scores = q.relu() @ k.relu().T
        return scores / scores.sum(-1, keepdim=True)

    assert confused_queries(weights(q), q) == 2 and confused_queries(weights(q), q, relative=True) == 2
    assert confused_queries((q @ k.T).softmax(-1), q) == 0
    # the same query twice is one query
    q[30] = q[2]
    assert confused_queries(weights(q), q) == 2


def test_queries_differ_by_a_share_of_the_shorter_one():
    queries = torch.tensor([[1.0, 0.0], [1.105, 0.0]])
    assert confused_queries(torch.ones(2, 3) / 3, queries) == 1
    assert confused_queries(torch.ones(2, 3) / 3, queries, other_query=0.11) == 0


# maps


@pytest.mark.parametrize("columns", [True, False])
def test_similarity_of_maps(columns):
    first, second = gaussian_softmax(0.5, 0), gaussian_softmax(0.5, 1)
    assert map_similarity(first, first, columns=columns) == pytest.approx(torch.ones(8), abs=1e-9)
    assert map_similarity(first, -first, columns=columns) == pytest.approx(-torch.ones(8), abs=1e-9)
    assert map_similarity(first, second, columns=columns).mean().abs() < 0.01
    # without centring, independent maps are as like as their deviation makes them
    assert map_similarity(first, second, columns=columns, centre=False).mean() == pytest.approx(
        math.exp(-0.25), abs=0.01
    )
    assert drift(first, first).max() == 0 and drift(torch.eye(4), torch.eye(4).roll(1, 0)) == 1


def test_columns_that_hardly_anybody_looks_at_are_compared_as_others():
    logits = torch.randn(20, 20, dtype=torch.float64)
    logits[:, 10:] -= 40
    weights = logits.softmax(-1)
    assert map_similarity(weights, weights) == pytest.approx(1, abs=1e-9)
    assert map_similarity(weights, weights * 1e-30) == pytest.approx(1, abs=1e-9)
    # what is constant but for rounding is like nothing
    flat = torch.full((20, 20), 1 / 20, dtype=torch.float64) * (1 + 1e-16 * torch.randn(20, 20, dtype=torch.float64))
    assert map_similarity(flat, flat) == 0


def test_similarity_is_of_columns_or_of_rows():
    first, second = torch.eye(2), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert map_similarity(first, second, columns=True, centre=False) == pytest.approx(0.5)
    assert map_similarity(first, second, columns=False, centre=False) == pytest.approx(0.5**0.5 / 2)


def test_diagonality():
    identity, uniform = diagonality(torch.eye(N)), diagonality(uniform_weights(TokenGrid(14, 14)))
    assert (identity.ratio, identity.rank, identity.highest) == (N, 1, 1)
    assert (uniform.ratio, uniform.rank) == (pytest.approx(1), 0.5)
    chance = diagonality(gaussian_softmax(1.0))
    assert chance.rank.mean() == pytest.approx(0.5, abs=0.02) and chance.highest.mean() < 0.02


@pytest.mark.parametrize("measure", [diagonality, symmetry])
def test_a_map_of_tokens_on_themselves_is_square(measure):
    with pytest.raises(SubquadError, match=r"is square, \(…, n, n\): got \(2, 3, 4\)"):
        measure(torch.rand(2, 3, 4))
    with pytest.raises(SubquadError, match=r"have one shape: got \(3, 4\) and \(3, 3\)"):
        map_similarity(torch.rand(3, 4), torch.rand(3, 3))


def test_symmetry():
    torch.manual_seed(0)
    scores = torch.randn(8, N, N, dtype=torch.float64)
    assert symmetry(scores + scores.mT) == pytest.approx(torch.ones(8))
    assert symmetry(scores - scores.mT) == pytest.approx(-torch.ones(8))
    assert symmetry(torch.eye(N)) == pytest.approx(1) and symmetry(scores).mean().abs() < 0.02
    softmax = gaussian_softmax(1.0)
    assert symmetry(softmax).mean().abs() < 0.02
    assert symmetry(softmax, centre=False).mean() == pytest.approx(0.35, abs=0.05)
    # attention that looks everywhere alike has nothing that could be mirrored
    assert torch.equal(symmetry(torch.full((2, 16, 16), 1 / 16)), torch.zeros(2))
