"""Both halves of a block in few steps, of whatever network: what is told apart by names stands with its blocks.

Each function gives what the block's own steps give, or None where no kernel does that.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import DropPath, LayerNorm
from timm.layers.activations import GELU, GELUTanh, QuickGELU
from torch import Tensor, nn

from subquad.attention.bricks import is_conv, is_heard
from subquad.grid import TokenGrid
from subquad.kernels import may_be_replayed, multipliers, replayed
from subquad.models.layers import is_linear
from subquad.models.map_layers import PositionConv
from subquad.ops import mlp_branch
from subquad.ops.branch_at_once import map_filter, norm_projection, projection_residual
from subquad.ops.mlp_formula import ACTIVATIONS

DROPS = nn.Identity, nn.Dropout, DropPath
"""What gives what it gets, in evaluation."""

NORMS = nn.LayerNorm, LayerNorm
"""LayerNorms: PyTorch's, and timm's, which computes the same."""

NORM_OF_SMP = "segmentation_models_pytorch.encoders.mix_transformer.LayerNorm"
"""One that knows maps beside tokens, and computes the same of these."""

OF_TIMM: dict[type[nn.Module], str] = {GELU: "gelu", GELUTanh: "gelu_tanh", QuickGELU: "quick_gelu"}

Weights = tuple[Tensor, Tensor | None]
"""What projects: (m, c), and the bias (m) if there is one."""


def first_half(
    block: nn.Module,
    x: Tensor,
    norm: Any,
    projections: Sequence[Weights],
    between: Callable[[list[Tensor], Tensor], Tensor],
    proj: Any,
    scale: Tensor | None,
    *,
    keeps: bool,
) -> Tensor | None:
    """Give x + s · (P y + b) of tokens x (b, n, c), y being what lies `between` it and projections of norm(x).

    In fp32 that is faster only where all of the block is one call of the library, or where PyTorch's products lag, and
    None elsewhere.

    Args:
        block: whose half it is.
        x: its tokens.
        norm: a LayerNorm.
        projections: of norm(x), one or several.
        between: gives y (b, n, m) of what is projected and of norm(x), which is x itself unless the half `keeps` it.
        proj: the layer P.
        scale: the factors s (c), if there are some.
        keeps: whether `between` reads norm(x).
    """
    if x.dtype != torch.bfloat16 and not may_be_replayed() and not multipliers.products_lag():
        return None
    projected = []
    for place, weights in enumerate(projections):
        # the last one writes norm(x) behind what it projects
        step = partial(_projected, norm=norm, weights=weights, keeps=keeps and place == len(projections) - 1)
        part = replayed(block, f"before {place}", step, x)
        if part is None:
            return None
        projected.append(part)
    tokens, width = x, projections[-1][0].shape[0]
    if keeps:
        projected[-1], tokens = projected[-1][..., :width], projected[-1][..., width:]
    y = between(projected, tokens)
    step = partial(projection_residual, weight=proj.weight, bias=proj.bias, scale=scale)
    answers = replayed(block, "behind", step, x, y)
    return x + scaled(proj(y), scale) if answers is None else answers


def _projected(x: Tensor, norm: Any, weights: Weights, keeps: bool) -> Tensor | None:
    return norm_projection(x, norm.weight, norm.bias, *weights, eps=norm.eps, keeps=keeps)


def second_half(
    block: nn.Module, x: Tensor, norm: Any, first: Any, second: Any, scale: Tensor | None, *, activation: str
) -> Tensor:
    """Give x + s · (W' a(W norm(x) + b) + b') of tokens x (b, n, c), in one step.

    Args:
        block: whose half it is.
        x: its tokens.
        norm: a LayerNorm.
        first: the layer W, which has a bias.
        second: the layer W', which has one too.
        scale: the factors s (c), if there are some.
        activation: which of those of `subquad.ops.mlp_branch` a is.
    """
    if x.dtype == torch.float16:
        # which no kernel takes: the layers know best who multiplies it
        return x + scaled(second(ACTIVATIONS[activation](first(norm(x)))), scale)
    weights = norm.weight, norm.bias, first.weight, first.bias, second.weight, second.bias
    y = replayed(block, "second half", lambda x: mlp_branch(x, *weights, scale, activation=activation, eps=norm.eps), x)
    assert y is not None
    return y


def second_half_on_map(
    block: nn.Module,
    x: Tensor,
    norm: Any,
    first: Any,
    conv: Any,
    second: Any,
    scale: Tensor | None,
    grid: TokenGrid,
    *,
    in_front: bool,
    behind: bool,
) -> Tensor | None:
    """Give what `second_half` does where a depthwise convolution of the map stands between its projections.

    Args:
        block: whose half it is.
        x: its tokens.
        norm: a LayerNorm.
        first: the layer W.
        conv: the convolution.
        second: the layer W'.
        scale: the factors s (c), if there are some.
        grid: what tokens stand on.
        in_front: whether GELU stands in front of the convolution, which is then added to what it reads.
        behind: whether GELU stands behind it.
    """
    acts = {True: "gelu", False: "nothing"}

    def half(x: Tensor) -> Tensor | None:
        weights = norm.weight, norm.bias, first.weight, first.bias
        hidden = norm_projection(x, *weights, eps=norm.eps, activation=acts[in_front])
        if hidden is not None:
            hidden = filtered(hidden, conv, grid, adds=in_front, activation=acts[behind])
        return None if hidden is None else projection_residual(x, hidden, second.weight, second.bias, scale)

    return replayed(block, "second half", half, x, settings=grid)


def filtered(x: Tensor, conv: Any, grid: TokenGrid, *, adds: bool, activation: str = "nothing") -> Tensor | None:
    """Tokens x (b, n, c) behind a depthwise convolution of their map, and what stands around it: `ops.map_filter`."""
    return map_filter(x, conv.weight[:, 0], conv.bias, grid.shape, adds=adds, activation=activation)


def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """Tokens (b, n, c) times the factors of their channels, if there are some."""
    return x if scale is None else x * scale


def does_more(module: nn.Module) -> bool:
    """Whether a module of an evaluated block is to be called: somebody listens, or lets it alone be in training."""
    return module.training or is_heard(module)


def drops_nothing(*modules: nn.Module | None) -> bool:
    """Whether what drops elements or branches in training gives what it gets, as it does in evaluation."""
    return all(module is None or (_drops(module) and not does_more(module)) for module in modules)


def _drops(module: nn.Module) -> bool:
    """Whether this is one of those that give what they get in evaluation: others may do anything in their place."""
    cls = type(module)
    of_transformers = cls.__module__.startswith("transformers.models.") and cls.__name__.endswith("DropPath")
    return cls in DROPS or of_transformers


def drops_no_branch(block: nn.Module) -> bool:
    """Whether what drops whole branches of a block in training, ours or timm's, gives what it gets."""
    return drops_nothing(*(getattr(block, name, None) for name in ("drop_path", "drop_path1", "drop_path2")))


def is_norm(norm: nn.Module) -> bool:
    """Whether this is a LayerNorm with factors and biases, which the kernels read."""
    cls = type(norm)
    known = cls in NORMS or f"{cls.__module__}.{cls.__qualname__}" == NORM_OF_SMP
    return known and norm.weight is not None and norm.bias is not None


def is_depthwise(conv: Any) -> bool:
    """Whether a convolution gives each channel of a map of its size from that channel alone, with zeros around it."""
    sides, channels = conv.kernel_size, conv.in_channels
    own = conv.groups == conv.out_channels == channels and sides[0] == sides[1] and sides[0] % 2 == 1
    plain = conv.stride == conv.dilation == (1, 1) and conv.padding_mode == "zeros"
    whole = conv.padding == (sides[0] // 2,) * 2
    known = is_conv(conv) or type(conv) is PositionConv
    return known and own and plain and whole and not does_more(conv)


def are_mlp(first: nn.Module, second: nn.Module) -> bool:
    """Whether two layers are what the second half multiplies by: subclasses may do anything."""
    return all(is_linear(layer) and layer.bias is not None for layer in (first, second))


def activation_of(act: nn.Module) -> str | None:
    """What `subquad.ops.mlp_branch` calls this module, PyTorch's or timm's; None where it knows none like it."""
    if type(act) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(act.approximate)
    return OF_TIMM.get(type(act))
