"""Bricks that several mechanisms are built from: head sizes, tokens on their grids, the local branch and the gate.

Letters: b batch, h heads, n tokens, d channels of a head, y x rows and columns.
"""

import math
from typing import Any, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as every

from subquad.errors import SubquadError, shown
from subquad.grid import GridRows, TokenGrid, rows_beside
from subquad.ops import Shapes, add_local
from subquad.ops.padding import zero_padding
from subquad.ops.turning import turned_tokens as turned_tokens  # hosts take it from here
from subquad.rope import Rotation
from subquad.tracing import is_listened_to, surely

Kind = TypeVar("Kind", bound=nn.Module)
GATED = Shapes("a gate", y="b h n d", g="b h n d")


def head_dim(dim: int, num_heads: int) -> int:
    """Channels of a head."""
    if num_heads < 1 or dim < 1 or dim % num_heads:
        raise SubquadError(f"{num_heads} heads do not divide a width of {dim}: choose num_heads among its divisors")
    return dim // num_heads


def check_tokens(
    q: Tensor, k: Tensor, rotation: Rotation | None = None, *, grid: TokenGrid, kv_grid: TokenGrid
) -> None:
    """Raise a SubquadError where queries or keys are not those of their grids, or a rotation would be of two."""
    grid.check(q)
    kv_grid.check(k)
    if rotation is not None and grid != kv_grid:
        raise SubquadError(f"a rotation is of one grid, not of {grid} for queries and {kv_grid} for keys")


class LocalConv(nn.Module):
    """Depthwise convolution of the values on their map, added to tokens that it is given.

    `filters` says how many kernels there are: "channel" one for each of the h·d channels, "head_channel" d kernels
    that the heads share, "head" h kernels that a head's channels share. See `add_local`.
    """

    def __init__(
        self, num_heads: int, head_dim: int, kernel_size: int, *, filters: str = "channel", bias: bool = True
    ) -> None:
        super().__init__()
        if kernel_size % 2 == 0:
            raise SubquadError(f"the local branch needs an odd kernel_size, got {kernel_size}")
        self.num_heads, self.head_dim, self.filters = num_heads, head_dim, filters
        count = {"channel": num_heads * head_dim, "head_channel": head_dim, "head": num_heads}[filters]
        self.weight = nn.Parameter(torch.empty(count, 1, kernel_size, kernel_size))
        self.bias = nn.Parameter(torch.empty(count)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.Conv2d: uniform within ± 1/kernel_size."""
        bound = 1 / math.sqrt(self.weight[0].numel())
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def for_channels(self, parameter: Tensor) -> Tensor:
        """The weight or bias (count, …) with an entry for each of the h·d channels."""
        if self.filters == "head_channel":
            return parameter.expand(self.num_heads, *parameter.shape).flatten(0, 1)
        if self.filters == "head":
            return parameter[:, None].expand(-1, self.head_dim, *parameter.shape[1:]).flatten(0, 1)
        return parameter

    def forward(
        self,
        y: Tensor,
        v: Tensor,
        gate: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
        padding: Tensor | None = None,
    ) -> Tensor:
        """(y + the branch of v) · gate, all (b, h, n, d)."""
        weight = self.for_channels(self.weight[:, 0])
        bias = None if self.bias is None else self.for_channels(self.bias)
        return add_local(y, zero_padding(v, padding), weight, bias, gate, grid=grid, kv_grid=kv_grid)

    @property
    def reach(self) -> int:
        """Rows above and below that a token's branch sees."""
        return max(rows_beside(self.weight.shape[-1]))


def values_beside(local: LocalConv | None) -> dict[str, int]:
    """What a mechanism's answers need of the rows beside: values, where it has a local branch."""
    return {} if local is None else {"v": local.reach}


def finish(
    local: LocalConv | None,
    y: Tensor,
    v: Tensor,
    gate: Tensor | None = None,
    *,
    grid: TokenGrid,
    kv_grid: TokenGrid,
    padding: Tensor | None = None,
) -> Tensor:
    """(y + the local branch of v) · gate, all (b, h, n, d), of a mechanism that may have neither."""
    if local is not None:
        return local(y, v, gate, grid=grid, kv_grid=kv_grid, padding=padding)
    if gate is None:
        return y
    GATED.check(y, gate)
    return y * gate


def finish_rows(
    local: LocalConv | None, y: Tensor, v: Tensor | None, gate: Tensor | None = None, *, rows: GridRows
) -> Tensor:
    """`finish` of some rows of a grid, from the values that `values_beside` asks for."""
    kv_grid = rows if local is None else rows.widened(local.reach)
    return finish(local, y, y if v is None else v, gate, grid=rows, kv_grid=kv_grid)


class ConvLayer(nn.Conv2d):
    """What a class of convolutions is derived from that computes what PyTorch's does, in another way."""

    @staticmethod
    def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, **settings: Any) -> Tensor:
        """What `F.conv2d` gives of maps x (b, c, y, x), of a layer's weight and bias or some rows of them."""
        return F.conv2d(x, weight, bias, **settings)

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """W x + b of patches x (…, c), which is what a convolution computes that cuts a map into them."""
        return F.linear(x, weight, bias)


def is_conv(module: nn.Module) -> bool:
    """Whether weight, bias and its settings say all that a convolution of maps does."""
    return type(module) is nn.Conv2d or isinstance(module, ConvLayer)


def is_plain(module: nn.Module | None, kind: type[Kind]) -> TypeGuard[Kind]:
    """Whether a part of a mechanism is what its parameters say: a `kind` that nobody exchanged, or listens to by hooks.

    Only then may a kernel compute it along with what is in front of it, or anything read its parameters.
    """
    if module is None or (type(module) is not kind and not (kind is nn.Conv2d and is_conv(module))):
        return False
    return not is_heard(module)


def is_heard(module: nn.Module) -> bool:
    """Whether somebody listens to a module, or to all, or has put something in its forward's place: it is to be called.

    Who listens to gradients listens as well: none would go through it.
    """
    forward = is_listened_to(module._forward_hooks, module._forward_pre_hooks)
    own = forward or module._backward_hooks or module._backward_pre_hooks
    return bool(own or "forward" in vars(module)) or listens_to_all()


def listens_to_all() -> bool:
    """Whether somebody listens to whatever module is called, or to its gradients."""
    forward = every._global_forward_hooks or every._global_forward_pre_hooks
    return bool(forward or every._global_backward_hooks or every._global_backward_pre_hooks)


@torch.no_grad()
def silence(*parts: nn.Module | None) -> None:
    """Set all parameters of some parts of a mechanism to zero: branches and positions that add nothing, yet learn."""
    for part in parts:
        for parameter in () if part is None else part.parameters():
            parameter.zero_()


def check_answer(mechanism: nn.Module, y: Any, v: Tensor, grid: TokenGrid) -> None:
    """Raise a SubquadError where a mechanism gave something else than a host reads on, of values v (b, h, n_k, d)."""
    if isinstance(y, Tensor) and y.dim() == 4:
        wanted = (*v.shape[:2], grid.num_tokens, v.shape[3])
        # one after the other: a symbol of torch.export has no truth value
        if not any(surely(size != other) for size, other in zip(y.shape, wanted, strict=True)):
            return
    # one token would be added to all of them without a word, and heads in the channels' place be projected
    raise SubquadError(
        f"{type(mechanism).__name__} is to give tokens (b, h, n, d) of a grid of {grid}, and gave "
        f"{tuple(y.shape) if isinstance(y, Tensor) else shown(y)}"
    )
