"""SOFT's Newton steps follow their closed form, and landmarks approximate the kernel as well as they can at most."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad import SubquadError
from subquad.analysis import (
    best_error,
    half_correlation,
    newton_convergence,
    newton_filter,
    nystrom_error,
    usual_alpha,
)
from subquad.ops.soft_formula import gaussian_kernel, newton_inverse


def gram_of(count, width, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = spread * torch.randn(count, width, dtype=torch.float64, generator=generator)
    return gaussian_kernel(x, x)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 30), st.integers(0, 10_000), st.integers(0, 24), st.floats(0.2, 1.5))
def test_newtons_steps_are_a_filter_of_eigenvalues(count, seed, steps, spread):
    gram = gram_of(count, 8, seed, spread)
    values, vectors = torch.linalg.eigh(gram + 0.01 * torch.eye(count))
    filtered = vectors * newton_filter(values, usual_alpha(gram)[0, 0], steps) @ vectors.T
    # a step doubles what is small, its rounding error with it
    assert (newton_inverse(gram, steps=steps) - filtered).norm() < 1e-6 * filtered.norm()


def test_the_residual_squares_in_every_step():
    found = newton_convergence(gram_of(49, 32, spread=0.5), 12)
    far = found.identity
    assert far.shape == (13,) and far[0] < 1
    # until it is lost in rounding
    for before, after in zip(far.tolist(), far[1:].tolist(), strict=False):
        if before > 1e-5:
            assert after == pytest.approx(before**2, rel=1e-4)
    assert (found.relative <= far + 1e-12).all()


def test_small_eigenvalues_are_damped_and_not_inverted():
    # 49 landmarks that are all alike: row sums of 49, and the ridge is all that the others have
    share = newton_filter(torch.tensor([0.01, 0.1], dtype=torch.float64), 1.8 / 49**2, 20) * torch.tensor([0.01, 0.1])
    assert share.tolist() == pytest.approx([0.076, 0.9996], abs=1e-3)
    for rows, expected in ((10, 0.85), (3, 1.0)):
        found = newton_filter(torch.tensor(0.01, dtype=torch.float64), 1.8 / rows**2, 20) * 0.01
        assert found == pytest.approx(expected, abs=5e-3)


def smooth_field(side, width):
    """Tokens of a map that change slowly over it."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(1, width, 5, 5, dtype=torch.float64, generator=generator)
    field = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic")
    return 0.5 * field[0].flatten(1).T, field * 0.5


def test_landmarks_approximate_no_better_than_the_best_matrix_of_their_rank():
    tokens, field = smooth_field(20, 16)
    errors = []
    for side in (2, 4, 6, 10):
        pooled = torch.nn.functional.adaptive_avg_pool2d(field, side)[0].flatten(1).T
        chance = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))[: side**2]]
        best = best_error(tokens, side**2)
        assert nystrom_error(tokens, pooled) >= best and nystrom_error(tokens, chance) >= best
        errors.append(float(nystrom_error(tokens, pooled)))
    assert errors == sorted(errors, reverse=True)
    assert nystrom_error(tokens, tokens) < 1e-6


def test_planted_correlations_of_gates_are_found_by_head():
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(500, 2, 1, generator=generator)
    first = common + 0.1 * torch.randn(500, 2, 4, generator=generator)
    second = -common + 0.1 * torch.randn(500, 2, 4, generator=generator)
    independent = torch.randn(500, 2, 4, generator=generator)
    found = half_correlation(torch.cat([first, second], -1).flatten(1), 2)
    assert found["same"].min() > 0.95 and found["opposite"].min() > 0.95 and found["cross"].max() < -0.95
    mixed = half_correlation(torch.cat([first, independent], -1).flatten(1), 2)
    assert mixed["opposite"].abs().max() < 0.1 and mixed["cross"].abs().max() < 0.1
    with pytest.raises(SubquadError, match="10 channels are not two halves of 2 heads"):
        half_correlation(torch.randn(5, 10), 2)


def test_a_number_of_steps_that_is_none_is_said():
    with pytest.raises(SubquadError, match="there are no -1 Newton steps"):
        newton_convergence(torch.eye(3), -1)
