"""SOFT's inverses: what each name means, their gradients, and what must not depend on what."""

from functools import partial

import pytest
import torch

from subquad import ATTENTION, SubquadError, TokenGrid
from subquad.ops import INVERSES, gaussian_kernel, newton_inverse, soft_attention, soft_weights
from subquad.ops.soft_formula import halved_alpha

every_inverse = pytest.mark.parametrize("inverse", INVERSES)
EYE = torch.eye(49, dtype=torch.float64)


def grams(spread, count=3):
    generator = torch.Generator().manual_seed(0)
    tokens = spread * torch.randn(count, 49, 32, dtype=torch.float64, generator=generator)
    return gaussian_kernel(tokens, tokens)


def tokens(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def filtered(gram, alpha, ridge, steps):
    """The closed form of Newton's steps: a filter of the spectrum."""
    values, vectors = torch.linalg.eigh(gram)
    values = values + ridge
    kept = (1 - (1 - alpha.squeeze(-1) * values**2) ** (2**steps)) / values
    return vectors @ torch.diag_embed(kept) @ vectors.mT


@pytest.mark.parametrize("steps", [3, 20])
@pytest.mark.parametrize("spread", [0.5, 0.2, 0.05])
def test_newton_without_ridge_is_its_spectral_closed_form(spread, steps):
    gram = grams(spread)
    alpha = halved_alpha(gram)
    got = newton_inverse(gram, alpha, steps=steps, ridge=0)
    expected = filtered(gram, alpha, 0, steps)
    assert (got - expected).norm() <= 1e-7 * expected.norm()


def test_the_normalised_form_divides_by_the_roots_of_the_row_sums():
    gram = grams(0.2)
    root = gram.sum(-1).rsqrt().diag_embed()
    expected = root @ newton_inverse(gram, halved_alpha(gram), ridge=0) @ root
    torch.testing.assert_close(INVERSES["norm"](gram, 20, "steps")(EYE), expected)


@pytest.mark.parametrize("spread", [0.5, 0.2, 0.05])
def test_the_exact_solve_is_the_inverse_with_the_ridge(spread):
    gram = grams(spread)
    torch.testing.assert_close(INVERSES["cholesky"](gram, 20, "steps")(EYE), torch.linalg.inv(gram + 0.01 * EYE))
    single = INVERSES["cholesky"](gram.float(), 20, "steps")(EYE.float()).double()
    exact = torch.linalg.inv(gram + 0.01 * EYE)
    assert (single - exact).norm() <= 1e-4 * exact.norm()


def test_the_pseudo_inverse_is_one():
    gram = grams(0.5)
    torch.testing.assert_close(INVERSES["pinv"](gram, 20, "steps")(EYE), torch.linalg.pinv(gram))


@every_inverse
def test_all_agree_where_the_matrix_is_well_conditioned(inverse):
    gram = grams(0.5)
    exact = torch.linalg.inv(gram + (0.01 * EYE if inverse in ("ridge", "cholesky") else 0))
    if inverse == "norm":
        root = gram.sum(-1).rsqrt().diag_embed()
        exact = root @ exact @ root
    torch.testing.assert_close(INVERSES[inverse](gram, 20, "steps")(EYE), exact, rtol=1e-8, atol=1e-8)


def test_a_matrix_near_the_identity_does_not_vanish():
    # two over the squared row sum would take it to 0 in the first step
    gram = torch.eye(49, dtype=torch.float64) + 1e-9
    torch.testing.assert_close(INVERSES["norm"](gram, 20, "steps")(EYE), EYE, rtol=1e-6, atol=1e-6)


@every_inverse
def test_an_image_does_not_see_the_others_of_its_batch(inverse):
    q, v = tokens(3, 2, 20, 8), tokens(3, 2, 20, 8, seed=1)
    landmarks = torch.cat([0.01 * tokens(1, 2, 6, 8), tokens(1, 2, 6, 8), 0.3 * tokens(1, 2, 6, 8)])
    together = soft_attention(q, landmarks, v, inverse=inverse)
    alone = [soft_attention(q[i : i + 1], landmarks[i : i + 1], v[i : i + 1], inverse=inverse) for i in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-10, atol=1e-10)


@every_inverse
def test_weights_are_what_attention_applies(inverse):
    q, landmarks, v = tokens(1, 2, 20, 8), tokens(1, 2, 6, 8, seed=1), tokens(1, 2, 20, 8, seed=2)
    weights = soft_weights(q, landmarks, inverse=inverse)
    torch.testing.assert_close(weights @ v, soft_attention(q, landmarks, v, inverse=inverse))


@every_inverse
def test_gradients_are_those_of_what_is_computed(inverse):
    q, landmarks, v = tokens(1, 1, 5, 3), tokens(1, 1, 3, 3, seed=1), tokens(1, 1, 5, 3, seed=2)
    inputs = [x.requires_grad_() for x in (q, landmarks, v)]
    assert torch.autograd.gradcheck(partial(soft_attention, inverse=inverse), inputs)


def test_the_papers_gradient_is_that_of_the_exact_inverse():
    gram = grams(0.05).requires_grad_()
    inverse = newton_inverse(gram, gradient="inverse")
    torch.testing.assert_close(inverse, newton_inverse(gram), rtol=0, atol=0)
    direction = tokens(3, 49, 49, seed=3)
    (gradient,) = torch.autograd.grad(inverse, gram, direction)
    value = inverse.detach()
    torch.testing.assert_close(gradient, -value.mT @ direction @ value.mT)
    # not converged here: the gradient through the steps is another
    (true,) = torch.autograd.grad(newton_inverse(gram), gram, direction)
    assert (true - gradient).norm() > 1e-3 * true.norm()
    # converged there: the same
    gram = grams(0.5).requires_grad_()
    pair = [
        torch.autograd.grad(newton_inverse(gram, gradient=kind), gram, direction)[0] for kind in ("steps", "inverse")
    ]
    torch.testing.assert_close(*(0.5 * (each + each.mT) for each in pair), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.5, 0.2, 0.05])
def test_single_precision_is_kept_under_autocast(spread, dtype):
    generator = torch.Generator().manual_seed(0)
    x = spread * torch.randn(2, 49, 32, dtype=torch.float64, generator=generator)
    exact = newton_inverse(gaussian_kernel(x, x))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        got = newton_inverse(gaussian_kernel(x, x).float())
    assert got.dtype == torch.float32
    assert (got.double() - exact).norm() <= 1e-5 * exact.norm()


def test_unknown_names_are_answered_with_the_nearest():
    grid = TokenGrid(4, 4)
    with pytest.raises(SubquadError, match="unknown inverse 'cholesk': did you mean cholesky"):
        ATTENTION["soft"](8, 2, grid=grid, kv_grid=grid, inverse="cholesk")
    with pytest.raises(SubquadError, match="unknown gradient 'step': did you mean steps"):
        ATTENTION["soft"](8, 2, grid=grid, kv_grid=grid, gradient="step")
