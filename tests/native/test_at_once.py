"""A whole mechanism in one call of the library: what its steps give, and only where nothing needs the steps."""

import pytest
import torch
from mechanisms import inputs_of, without_refused_prefix
from native_inputs import GRIDS
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from subquad import ATTENTION, TokenGrid, spread, use_backend
from subquad.kernels import OPERATORS, unavailable
from subquad.models.assembling import settings_of
from subquad.models.layers import SelfAttention
from subquad.ops import at_once

pytestmark = pytest.mark.skipif(unavailable("native") is not None, reason=f"no kernels: {unavailable('native')}")

AT_ONCE = sorted(name for name in ATTENTION if f"{name}_mixer" in OPERATORS)


@pytest.fixture
def calls(monkeypatch):
    """The operators that computed a whole mechanism, by name."""
    names = []
    compute = at_once.kernels.compute_if_possible

    def recorded(operator, *arguments):
        result = compute(operator, *arguments)
        if result is not None and operator.name.endswith("_mixer"):
            names.append(operator.name)
        return result

    monkeypatch.setattr(at_once.kernels, "compute_if_possible", recorded)
    return names


def made(name, grid, dim=32, **settings):
    """A mechanism whose parameters are all at work, and its inputs in fp32."""
    if "num_agents" in settings_of(name):
        settings = {"num_agents": 4} | settings
    module = ATTENTION[name](dim, 2, grid=grid, kv_grid=grid, **settings)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    inputs = inputs_of(module, grid, dim=dim)
    return module, {key: None if tensor is None else tensor.float() for key, tensor in inputs.items()}


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_it_is_what_the_steps_are(name, grid, threads, calls):
    grid = without_refused_prefix(name, grid)
    module, supply = made(name, grid)
    supply["padding"] = None
    learned = {key: None if x is None else x.clone().requires_grad_() for key, x in supply.items()}
    steps = module(**learned, grid=grid, kv_grid=grid)
    assert calls == []
    with torch.no_grad():
        whole = module(**supply, grid=grid, kv_grid=grid)
        alone = module(**{key: None if x is None else x[:1] for key, x in supply.items()}, grid=grid, kv_grid=grid)
    assert calls == 2 * [f"{name}_mixer"]
    for found, expected in ((whole, steps.detach()), (alone, steps.detach()[:1])):
        assert_close(found, expected, rtol=1e-4, atol=2e-5 * steps.abs().max().item())
        assert found.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", AT_ONCE)
def test_whatever_it_does_not_know_goes_by_the_steps(name, calls):
    grid = TokenGrid(9, 8)
    module, supply = made(name, grid)
    run = torch.no_grad()(lambda **more: module(**(supply | {"padding": None} | more), grid=grid, kv_grid=grid))
    run()
    assert len(calls) == 1
    run(padding=torch.zeros(2, grid.num_tokens, dtype=torch.bool))
    with use_backend("eager"):
        run()
    if has_branch := hasattr(module, "local"):
        hook = module.local.register_forward_hook(lambda *arguments: None)
        run()
        hook.remove()

    class Alone:
        """Other processes that hold no tokens."""

        index, is_last = 0, True
        sums = staticmethod(lambda parts: tuple(parts))
        largest = staticmethod(lambda x: x)
        with_borders = staticmethod(lambda image, above, below: torch.nn.functional.pad(image, (0, 0, above, below)))

    with spread.over(Alone()):
        run()
    module.double()
    with torch.no_grad():
        wide = {key: x.double() for key, x in supply.items() if x is not None} | {"padding": None}
        module(**wide, grid=grid, kv_grid=grid)
    module.float()
    if has_branch:
        module.local = None
        run()
    assert len(calls) == 1


@pytest.mark.parametrize("name", AT_ONCE)
def test_it_is_counted_and_compiled_like_the_steps(name):
    grid = TokenGrid(8, 8)
    settings = {"num_agents": 4} if "num_agents" in settings_of(name) else {}
    layer = SelfAttention(32, 2, lambda *a, **k: ATTENTION[name](*a, **k, **settings), grid=grid).eval()
    x, graphs, counts = torch.randn(2, grid.num_tokens, 32), [], []
    # PyTorch compiles a layer's code so many times at most
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: layer(x, grid=grid), backend=lambda graph, _: graphs.append(str(graph.graph)) or graph
    )
    with torch.no_grad():
        assert_close(compiled(x), layer(x, grid=grid))
        for backend in ("native", "eager"):
            with use_backend(backend), FlopCounterMode(display=False) as counter:
                layer(x, grid=grid)
            counts.append(counter.get_total_flops())
    assert f"subquad.{name}_mixer" in graphs[0]
    assert counts[0] == pytest.approx(counts[1], rel=0.05)


def test_what_another_normaliser_gives_is_not_the_kernels(calls):
    grid = TokenGrid(8, 8)
    module, supply = made("mhla", grid, normaliser="released")
    with torch.no_grad():
        released = module(**supply | {"padding": None}, grid=grid, kv_grid=grid)
        with use_backend("eager"):
            steps = module(**supply | {"padding": None}, grid=grid, kv_grid=grid)
    assert calls == []
    assert_close(released, steps)


def test_temperatures_of_any_size_are_those_of_the_steps():
    grid = TokenGrid(5, 5)
    module, supply = made("pola", grid)
    with torch.no_grad():
        module.temperature.copy_(torch.linspace(-3, 60, module.temperature.numel()).view_as(module.temperature))
        whole = module(**supply | {"padding": None}, grid=grid, kv_grid=grid)
        with use_backend("eager"):
            steps = module(**supply | {"padding": None}, grid=grid, kv_grid=grid)
    assert_close(whole, steps, rtol=1e-4, atol=1e-5 * steps.abs().max().item())


def test_a_map_that_is_too_large_to_keep_is_computed_twice():
    grid = TokenGrid(150, 150)
    module, supply = made("soft", grid, ratio=21)
    with torch.no_grad():
        supply = {key: None if x is None else x[:1].repeat(12, 1, 1, 1) for key, x in supply.items()}
        many = module(**supply, grid=grid, kv_grid=grid)
        one = module(**{key: None if x is None else x[:1] for key, x in supply.items()}, grid=grid, kv_grid=grid)
    assert_close(many[11:], one, rtol=1e-4, atol=1e-5 * one.abs().max().item())
