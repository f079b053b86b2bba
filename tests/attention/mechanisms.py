"""What the contract tests share: a mechanism of the registry on a grid, and inputs for it."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from subquad import ATTENTION, SubquadError, TokenGrid
from subquad.attention import traits_of
from subquad.models.assembling import settings_of
from subquad.rope import Rotation, rope_of

DIM, HEADS, BATCH = 16, 2, 2
SEQUENCE = TokenGrid(1, 23)
GRIDS = [TokenGrid(5, 5), TokenGrid(4, 7), TokenGrid(3, 5, 1), TokenGrid(7, 4, 5), SEQUENCE, TokenGrid(1, 23, 2)]
MIXED = "q", "k", "v", "g", "x"
WITHOUT_WEIGHTS = [name for name, cls in ATTENTION.items() if traits_of(cls).no_weights]
WITH_WEIGHTS = [name for name in ATTENTION if name not in WITHOUT_WEIGHTS]


def build(name: str, grid: TokenGrid, *, local: bool = True, kv_grid: TokenGrid | None = None, **settings) -> nn.Module:
    """The mechanism in float64, its parameters drawn so that none is at its (often zero) initial value."""
    if "num_agents" in settings_of(name):
        settings.setdefault("num_agents", 9)
    if not local and "local" in settings_of(name):
        settings["local"] = False
    module = ATTENTION[name](DIM, HEADS, grid=grid, kv_grid=kv_grid or grid, **settings).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return module


def refuses(name: str, what: str) -> bool:
    """Whether a mechanism says that it can't honour padding, prefix tokens, or keys on another grid."""
    return what in traits_of(ATTENTION[name]).refuses


def without_refused_prefix(name: str, grid: TokenGrid) -> TokenGrid:
    """The grid, without its prefix tokens where the mechanism refuses them."""
    return TokenGrid(*grid.shape) if refuses(name, "prefix") else grid


def assert_refused(name: str, call: Callable[[], object], what: str) -> str:
    """What a mechanism meets and does not honour is refused in one line, with the reason that it gives; the line."""
    with pytest.raises(SubquadError, match=re.escape(traits_of(ATTENTION[name]).refuses[what])) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    return str(caught.value)


def inputs_of(
    module: nn.Module,
    grid: TokenGrid,
    *,
    kv_grid: TokenGrid | None = None,
    seed: int = 0,
    dim: int = DIM,
    rope: str | None = None,
) -> dict:
    """Float64 inputs under the names that the mechanism asks for; no padding and no mask.

    `rope` is whose rotation it gets; None for none.
    """
    generator = torch.Generator().manual_seed(seed)
    kv_grid = kv_grid or grid
    heads = HEADS + traits_of(module).extra_heads
    supply = {}
    for name in module.inputs:
        tokens = kv_grid.num_tokens if name in ("k", "v") else grid.num_tokens
        shape = (BATCH, tokens, dim) if name == "x" else (BATCH, heads, tokens, dim // HEADS)
        supply[name] = torch.randn(shape, generator=generator, dtype=torch.float64) if name in MIXED else None
    if rope is not None:
        supply["rotation"] = rotation_of(module, grid, rope, dim=dim)
    return supply


def open_gate(module: nn.Module, supply: dict) -> None:
    """Let the gate of `supply`, if there is one, let everything through."""
    if "g" in supply:
        supply["g"] = torch.full_like(supply["g"], traits_of(module).open_gate)


def rotation_of(
    module: nn.Module, grid: TokenGrid, rope: str, *, dim: int = DIM, dtype: torch.dtype = torch.float64
) -> Rotation:
    """The rotation of a network in `ROPES`, as wide as the mechanism's features."""
    wide = traits_of(module).feature_width
    return rope_of(rope, dim // HEADS, HEADS)(grid, torch.device("cpu"), dtype, feature_width=wide)


def each(supply: dict, function: Callable[[Tensor], Tensor]) -> dict:
    """The same inputs with every tensor changed; what is none stays as it is."""
    return {name: function(one) if isinstance(one, Tensor) else one for name, one in supply.items()}


def but_values(supply: dict) -> dict:
    """The arguments of `weights`: everything but v."""
    return {name: tensor for name, tensor in supply.items() if name != "v"}


def apply_weights(weights: Tensor, v: Tensor) -> Tensor:
    """(b, h, s, n_q, n_k) on v: stream t weighs the t-th part of each head's channels."""
    parts = v.chunk(weights.shape[2], dim=-1)
    return torch.cat([weights[:, :, t] @ part for t, part in enumerate(parts)], dim=-1)


def check_weights(module: nn.Module, supply: dict, *, grid: TokenGrid, kv_grid: TokenGrid) -> Tensor | None:
    """The explicit weights, once they have mixed the values as the fast form does; or that there are none, and why."""
    if reason := traits_of(module).no_weights:
        with pytest.raises(SubquadError, match=f"has no explicit weights: {reason}$"):
            module.weights(**but_values(supply), grid=grid, kv_grid=kv_grid)
        return None
    supply = dict(supply)
    open_gate(module, supply)
    weights = module.weights(**but_values(supply), grid=grid, kv_grid=kv_grid)
    fast = module(**supply, grid=grid, kv_grid=kv_grid)
    torch.testing.assert_close(fast, apply_weights(weights, supply["v"]), rtol=1e-10, atol=1e-10)
    return weights


def lent(part):
    """As accelerate offloads: the parameters of a part are there while it is called, others in their places then."""
    kept = dict(part.named_parameters(recurse=False))

    def forward(*given, **named):
        put(kept)
        try:
            return type(part).forward(part, *given, **named)
        finally:
            put({name: torch.full_like(parameter, math.nan) for name, parameter in kept.items()})

    def put(tensors):
        for name, tensor in tensors.items():
            setattr(part, name, torch.nn.Parameter(tensor))

    put({name: torch.full_like(parameter, math.nan) for name, parameter in kept.items()})
    part.forward = forward
