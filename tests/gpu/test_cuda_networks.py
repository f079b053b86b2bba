"""Every host with every mechanism on a CUDA device: as on the CPU, in half precision, and as a CUDA graph."""

import pytest
import torch
from hosts import SMALL, paired, small
from kernels_here import relative_error

from subquad import ATTENTION
from subquad.kernels import use_backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture(scope="module", autouse=True)
def convolutions_in_fp32():
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


def trained(model, image, backend):
    """The result, and all gradients in a row."""
    model.zero_grad()
    with use_backend(backend):
        result = model(image)
        result.square().sum().backward()
    return result.detach(), torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])


@pytest.mark.parametrize(("kind", "attention"), paired(SMALL, ATTENTION))
def test_networks_are_what_they_are_on_the_cpu(kind, attention):
    model, image = small(kind, attention).eval(), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
        with use_backend("eager"):
            expected = model(image)
    model, image = model.cuda(), image.cuda()
    (found, grads), (_, eager_grads) = (trained(model, image, backend) for backend in ("auto", "eager"))
    assert relative_error(found.cpu(), expected) < 1e-5 and relative_error(grads, eager_grads) < 1e-4
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        half = model(image)
        with use_backend("eager"):
            near = model(image)
    # what rounding does is a matter of chance: of networks of few channels more so
    assert relative_error(half.cpu(), expected) < 2 * max(relative_error(near.cpu(), expected), 5e-3)


@pytest.mark.parametrize(("kind", "attention"), paired(SMALL, ATTENTION))
def test_networks_are_recorded_as_cuda_graphs(kind, attention):
    model, image = small(kind, attention).cuda().bfloat16().eval(), torch.randn(2, 3, 64, 64).cuda().bfloat16()
    with torch.inference_mode():
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            model(image)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = model(image)
        image.copy_(torch.randn_like(image))
        graph.replay()
        assert torch.equal(result, model(image))
