"""Linear layers of optimized networks by our kernel, where PyTorch's products leave half of a processor idle."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from hosts import SMALL, small
from torch import nn
from torch.testing import assert_close

import subquad
from subquad import kernels
from subquad.inference.quick_linear import FEWEST, QuickLinear
from subquad.kernels import multipliers
from subquad.models.layers import is_linear
from subquad.ops.branch_at_once import norm_projection, projection

QUICK = {"vit", "swin", "eva02"}


@pytest.fixture(params=[True, False], ids=["lagging", "not lagging"])
def lagging(request, monkeypatch):
    monkeypatch.setattr(multipliers, "products_lag", lambda: request.param)
    return request.param


@pytest.mark.parametrize("attention", ["softmax", "linear", "polapp"])
@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in SMALL]
)
@torch.inference_mode()
def test_a_network_gives_what_it_gave_whatever_multiplies(kind, attention, lagging):
    model, image = small(kind, attention).eval(), torch.randn(2, 3, 96, 64)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    linear = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    exact, names = copy.deepcopy(model).double()(image.double()), list(model.state_dict())
    optimized = subquad.optimize(copy.deepcopy(model))
    assert {name for name, one in optimized.named_modules() if type(one) is QuickLinear} == (
        linear if lagging else set()
    )
    assert list(optimized.state_dict()) == names
    for ready in (optimized, optimized, pickle.loads(pickle.dumps(optimized)), copy.deepcopy(optimized)):
        assert_close(ready(image).double(), exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


def test_somebodys_own_network_is_multiplied_by_our_kernel_from_some_tokens_on(monkeypatch):
    monkeypatch.setattr(multipliers, "products_lag", lambda: True)
    called = []

    def counted(*given):
        called.append(given[0].shape)
        return projection(*given)

    monkeypatch.setattr("subquad.inference.quick_linear.projection", counted)
    model = subquad.optimize(
        nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 70, bias=False), nn.Linear(70, 9))
    )
    for shape in ((3, FEWEST, 24), (2, 5, 4, 8, 24), (FEWEST, 24), (2, FEWEST // 2 - 1, 24), (24,), (0, 24)):
        x, before = torch.randn(shape), len(called)
        own = x.numel() // 24 >= FEWEST
        expected = copy.deepcopy(model).double()(x.double())
        assert_close(model(x), expected.float(), rtol=1e-4, atol=1e-4)
        # the last one has too few channels
        assert len(called) - before == 2 * own
    before, wide = len(called), torch.randn(FEWEST, 24)
    model.double()(wide.double())
    model.bfloat16()(wide.bfloat16())
    assert len(called) == before


def test_what_learns_or_is_exported_or_under_autocast_is_pytorchs(monkeypatch):
    monkeypatch.setattr(multipliers, "products_lag", lambda: True)
    layer, x = nn.Linear(24, 96), torch.randn(FEWEST, 24)
    model = subquad.optimize(nn.Sequential(layer))
    program = torch.export.export(model, (x,)).module()
    assert not [node for node in program.graph.nodes if "subquad" in str(node.target)]
    for strict in (False, True):
        changing = ({0: torch.export.Dim("n", min=2, max=9999)},)
        few = torch.export.export(model, (x,), dynamic_shapes=changing, strict=strict).module()
        assert_close(few(x[:3]), model(x[:3]))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    model.train().requires_grad_(True)(x).sum().backward()
    assert_close(layer.weight.grad, x.sum(0).expand(96, 24))
    model.eval().requires_grad_(True)(x).sum().backward()
    assert_close(layer.weight.grad, 2 * x.sum(0).expand(96, 24))
    given = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}
    assert_close(torch.func.functional_call(model, given, (x,)), 2 * model(x))
    jacobian = torch.func.jacrev(lambda x: model(x).sum(0))(x)
    assert_close(jacobian, layer.weight[:, None].expand(96, FEWEST, 24))


@pytest.mark.parametrize(("kind", "is_one_call"), [("dinov3", True), ("swin", False)])
@torch.inference_mode()
def test_halves_that_are_no_part_of_one_call_have_few_steps_in_fp32_only_where_products_lag(
    kind, is_one_call, lagging, monkeypatch
):
    called = []

    def counted(*given, **settings):
        called.append(True)
        return norm_projection(*given, **settings)

    monkeypatch.setattr("subquad.inference.halves.norm_projection", counted)
    # windows of a part of the map, of all stages' here, are cut between the steps
    sizes = {"window_size": 2} if kind == "swin" else {}
    model = subquad.optimize(small(kind, "softmax", **sizes).eval())
    for _ in range(2):
        model(torch.randn(1, 3, 128, 128))
    assert bool(called) == (lagging or is_one_call)


def test_layers_that_say_all_by_their_weights_are_told_apart():
    class Noisy(nn.Linear):
        pass

    assert is_linear(nn.Linear(2, 2)) and is_linear(QuickLinear(2, 2))
    assert not is_linear(Noisy(2, 2)) and not is_linear(nn.Identity())


@pytest.mark.skipif(bool(kernels.unavailable("native")), reason="no kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width", "rows"), [(1, 20, 60), (17, 33, 7), (197, 64, 192), (70, 21, 400)])
def test_tokens_are_projected_without_a_norm(tokens, width, rows, dtype):
    x, weight, bias = torch.randn(2, tokens, 2 * width), torch.randn(rows, width) / width**0.5, torch.randn(rows)
    x, weight, bias = (one.to(dtype) for one in (x, weight, bias))
    # tokens that lie among others
    for given, more in ((x[..., width:], bias), (x[..., width:].contiguous(), None)):
        exact = nn.functional.linear(given.double(), weight.double(), None if more is None else more.double())
        off = projection(given, weight, more).double() - exact
        rounded = exact.to(dtype).double() - exact
        assert off.norm() <= 1e-6 * exact.norm() + 1.5 * rounded.norm()
    with pytest.raises(subquad.SubquadError):
        kernels.run(kernels.norm_projection, "native", None, (x, None, None, weight, bias), (1e-6, True, "nothing"))
    assert norm_projection(x[..., width:].requires_grad_(), weight[0], weight[1], weight, bias, eps=1e-6) is None


@pytest.mark.parametrize(
    ("lines", "lags"),
    [
        (["vendor_id\t: AuthenticAMD", "cpu family\t: 26", "flags\t\t: fpu avx2 avx512f"], True),
        (["vendor_id\t: AuthenticAMD", "cpu family\t: 25", "flags\t\t: fpu avx2 avx512f"], False),
        (["vendor_id\t: AuthenticAMD", "cpu family\t: 26", "flags\t\t: fpu avx2"], False),
        (["vendor_id\t: GenuineIntel", "cpu family\t: 207", "flags\t\t: fpu avx2 avx512f"], False),
        (["CPU implementer\t: 0x41", "Features\t: fp asimd"], False),
        ([], False),
        (None, False),
    ],
)
def test_whose_multipliers_pytorch_leaves_idle(lines, lags, monkeypatch):
    def read(path):
        if lines is None:
            raise FileNotFoundError(path)
        return "\n".join([*lines, ""])

    monkeypatch.setattr(Path, "read_text", read)
    assert multipliers._products_lag.__wrapped__() == (lags and torch.backends.mkl.is_available())


def test_torch_fx_traces_layers_of_it(monkeypatch):
    monkeypatch.setattr(multipliers, "products_lag", lambda: True)
    model = subquad.optimize(nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 70)))
    traced, tokens = torch.fx.symbolic_trace(model), torch.randn(2, 100, 24)
    assert_close(traced(tokens), model(tokens))
