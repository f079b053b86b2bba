"""Newton's steps and their gradient where they are few and have not converged: what they start from counts there."""

import pytest
import torch
from torch.testing import assert_close

from subquad import ops
from subquad.kernels import BACKENDS, unavailable, use_backend


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton" and unavailable(name) is None])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_few_steps_and_their_gradient_are_those_of_double_precision(backend, steps):
    x, weight = 0.3 * torch.randn(2, 3, 9, 16), torch.randn(2, 3, 9, 9)

    def gradients(x, weight):
        gram = ops.gaussian_kernel(x, x).detach().requires_grad_()
        alpha = (0.5 / gram.detach().sum(-1).amax(-1)[..., None, None].square()).requires_grad_()
        inverse = ops.newton_inverse(gram, alpha, steps=steps)
        return [inverse, *torch.autograd.grad((inverse * weight).sum(), (gram, alpha))]

    expected = gradients(x.double(), weight.double())
    with use_backend(backend):
        got = gradients(x, weight)
    for one, other in zip(got, expected, strict=True):
        # the gradient of a symmetric matrix may be shared between its halves as one likes
        if one.shape[-1] > 1:
            one, other = one + one.mT, other + other.mT
        assert_close(one.double(), other, rtol=1e-3, atol=1e-4 * other.abs().max().item())
