"""Bricks that several hosts are built from: projections around a mechanism, and blocks.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels, p projections, y x rows and columns.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import DropPath, GluMlp, Mlp
from torch import Tensor, nn

from subquad.attention.bricks import check_answer, is_heard, turned_tokens
from subquad.attention.traits import traits_of
from subquad.errors import SubquadError, unknown_name
from subquad.grid import TokenGrid
from subquad.models.map_layers import ConvPosition, MapMlp
from subquad.models.windows import Windows
from subquad.positions import GridTable, start_normal
from subquad.rope import Rotation
from subquad.tracing import is_exporting
from subquad.weights.fitting import rename_earlier

Mechanism = Callable[..., Any]
"""A class of `subquad.attention`, or a `functools.partial` of one that fixes its settings."""

PROJECTED = frozenset({"q", "k", "v", "g"})
OF_KEYS = frozenset({"k", "v"})
QUERIES_AND_KEYS = ("q", "k")


class SelfAttention(nn.Module):
    """All tokens attend to all: project, mix, project back. x (b, n, c) -> (b, n, c).

    A mechanism with heads of its own (`Traits.extra_heads`) has them projected and read like the others.

    Args:
        dim: channels c.
        num_heads: heads h, a divisor of `dim`.
        attention: the mechanism.
        grid: the grid that position parameters are made for; a call may bring another one.
        kv_grid: that of keys and values, if not the same.
        qkv_bias: whether the fused projection has a bias.
        key_bias: whether keys have one, too.
        gate_bias: whether gates have one; as `qkv_bias` says if left out.
        qk_norm: whether queries and keys have a LayerNorm, shared by the heads.
        eps: of these norms.
        pre_norm: whether the layer starts with a LayerNorm of its own, beside that of the block.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        attention: Mechanism,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid | None = None,
        qkv_bias: bool = True,
        key_bias: bool = True,
        gate_bias: bool | None = None,
        qk_norm: bool = False,
        eps: float = 1e-6,
        pre_norm: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.pre_norm = nn.LayerNorm(dim) if pre_norm else None
        self.inner = attention(dim, num_heads, grid=grid, kv_grid=kv_grid or grid)
        self.projected = self.projections()
        self.all_heads, width = all_heads_of(self.inner, dim, num_heads)
        own = {"k": qkv_bias and key_bias, "g": qkv_bias if gate_bias is None else gate_bias}
        self.qkv = fused_projection(dim, width, [own.get(name, qkv_bias) for name in self.projected])
        for name in QUERIES_AND_KEYS:
            has_norm = qk_norm and name in self.projected
            self.add_module(f"{name}_norm", nn.LayerNorm(dim // num_heads, eps=eps) if has_norm else None)
        self.proj = nn.Linear(width, dim)

    def projections(self) -> tuple[str, ...]:
        """What is projected, by name, in the order of the fused projection: what the mechanism asks for."""
        return projected_by(self.inner)

    def forward(
        self,
        x: Tensor,
        *,
        grid: TokenGrid,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """`padding` (b, n) is True for tokens that are not there; their own outputs mean nothing.

        `mask`, broadcastable to (b, h, n, n), is True for pairs that must not attend. `rotation` turns queries and
        keys by where they stand, in front of the mechanism, or in it, if that is among its inputs.
        """
        grid.check(x)
        x = x if self.pre_norm is None else self.pre_norm(x)
        supply = {"x": x, "padding": padding, "mask": mask, "rotation": rotation}
        return self.mix(supply | self.heads(x), grid, grid)

    def is_plain_on(self, grid: TokenGrid) -> bool:
        """Whether a call on `grid` does what this class does: hosts' layers may gather windows or reduce keys there.

        Each class says it for itself: of one that does not, nothing is known.
        """
        return True

    def windows_on(self, grid: TokenGrid) -> Windows | None:
        """The windows of `grid` in which tokens attend, each as on its own grid; None where there is none."""
        return None

    def heads(self, x: Tensor, keys: Tensor | None = None) -> dict[str, Any]:
        """What the mechanism has projected, by name, each (b, h, n, d); keys and values of other tokens, if given."""
        if keys is None:
            return self.parts(self.qkv(x))
        of_keys = tuple(name for name in self.projected if name in OF_KEYS)
        others = tuple(name for name in self.projected if name not in OF_KEYS)
        return self.some_heads(x, others) | self.some_heads(keys, of_keys)

    def parts(self, projected: Tensor) -> dict[str, Tensor]:
        """What tokens are projected to (b, n, p·h·d), by name, each (b, h, n, d)."""
        # not unflatten, which is a dozen calls of Python: narrow layers wait for those
        fused = self.in_heads(projected)
        if fused.requires_grad and not is_exporting():
            # the parts' gradients are put together as they lie, without a copy more
            parts = tuple(part.transpose(1, 2) for part in fused.unbind(2))
        else:
            parts = fused.permute(2, 0, 3, 1, 4).unbind(0)
        return dict(zip(self.projected, parts, strict=True))

    def some_heads(self, x: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Some of what is projected, by name, each (b, h, n, d)."""
        if not (is_linear(self.qkv) or type(self.qkv) is PartlyBiased) or is_heard(self.qkv):
            # what others make of it, low-rank changes for instance, is not in its weight, or wants to see it called
            parts = dict(zip(self.projected, self.in_heads(self.qkv(x)).permute(2, 0, 3, 1, 4), strict=True))
            return {name: parts[name] for name in self.projected if name in names}
        parts = {}
        bias = whole_bias(self.qkv)
        width = self.qkv.out_features // len(self.projected)
        wanted = [name for name in self.projected if name in names]
        # neighbours in one product, which reads the tokens once
        for run in _runs([self.projected.index(name) for name in wanted]):
            rows = slice(run[0] * width, (run[-1] + 1) * width)
            product = self.qkv.product if isinstance(self.qkv, LinearLayer) else F.linear
            fused = product(x, self.qkv.weight[rows], None if bias is None else bias[rows])
            heads = rearrange(fused, "b n (p h d) -> p b h n d", p=len(run), h=self.all_heads)
            parts |= {self.projected[place]: own for place, own in zip(run, heads, strict=True)}
        return parts

    def in_heads(self, fused: Tensor) -> Tensor:
        """(b, n, p·h·d) to (b, n, p, h, d)."""
        parts = len(self.projected)
        # the width by its number: there may be no image at all
        return fused.view(*fused.shape[:2], parts, self.all_heads, fused.shape[2] // (parts * self.all_heads))

    def between(self, supply: dict[str, Any]) -> dict[str, Any]:
        """What queries and keys go through between projection and mechanism: their norms, and the host's rotation."""
        rotation = None if "rotation" in self.inner.inputs else supply["rotation"]
        if rotation is None and self._modules["q_norm"] is None and self._modules["k_norm"] is None:
            return supply
        for name in QUERIES_AND_KEYS:
            if name in supply and (norm := getattr(self, f"{name}_norm")) is not None:
                supply = supply | {name: norm(supply[name])}
            if rotation is not None and name in supply:
                supply = supply | {name: self._turned(supply[name], rotation)}
        return supply

    def _turned(self, tokens: Tensor, rotation: Rotation) -> Tensor:
        """Queries or keys (b, h, n, d) of the host's heads turned; a mechanism's own have no tables, and stay."""
        if self.all_heads == self.num_heads:
            return turned_tokens(rotation, tokens)
        own, others = tokens.split([self.num_heads, self.all_heads - self.num_heads], dim=1)
        return torch.cat([turned_tokens(rotation, own), others], dim=1)

    @property
    def reads_tokens(self) -> bool:
        """Whether the mechanism reads tokens, and not only what is projected of them."""
        return "x" in self.inner.inputs

    def mixed_of(
        self, projected: Tensor, x: Tensor, grid: TokenGrid, rotation: Rotation | None, mask: Tensor | None = None
    ) -> Tensor:
        """What stands in front of the output projection, of what tokens x are projected to: (b, n, h·d)."""
        supply = {"x": x, "padding": None, "mask": mask, "rotation": rotation}
        return self.mixed(supply | self.parts(projected), grid, grid)

    def mix(self, supply: dict[str, Any], grid: TokenGrid, kv_grid: TokenGrid) -> Tensor:
        """What the mechanism makes of its inputs, projected back: (b, n, c)."""
        return self.proj(self.mixed(supply, grid, kv_grid))

    def mixed(self, supply: dict[str, Any], grid: TokenGrid, kv_grid: TokenGrid) -> Tensor:
        """What stands in front of the output projection: (b, n, h·d)."""
        return self.answers(supply, grid, kv_grid).transpose(1, 2).flatten(2)

    def answers(self, supply: dict[str, Any], grid: TokenGrid, kv_grid: TokenGrid) -> Tensor:
        """What the mechanism makes of its inputs: (b, h, n, d)."""
        supply = self.between(supply)
        y: Tensor = self.inner(**{name: supply[name] for name in self.inner.inputs}, grid=grid, kv_grid=kv_grid)
        check_answer(self.inner, y, supply["v"], grid)
        return y

    def regrid(self, old: TokenGrid, new: TokenGrid) -> None:
        """Make position parameters for `new`, a grid of queries, instead of `old`."""
        move_tables(self.inner, {old: new})


def _runs(places: Sequence[int]) -> list[list[int]]:
    """Rising numbers, cut where one is left out."""
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def fused_projection(dim: int, width: int, with_bias: Sequence[bool]) -> nn.Linear:
    """A projection of `dim` channels to one part of `width` channels for each entry, which says if it has a bias."""
    if any(with_bias) and not all(with_bias):
        return PartlyBiased(dim, width, with_bias)
    return nn.Linear(dim, width * len(with_bias), bias=any(with_bias))


class PartlyBiased(nn.Linear):
    """A fused projection, (b, n, c) to (b, n, p·width), where some of the p parts have a bias, as `with_bias` says.

    The parameter holds the numbers of those alone: where a network has none, there is none to train.
    """

    def __init__(self, dim: int, width: int, with_bias: Sequence[bool]) -> None:
        super().__init__(dim, width * len(with_bias), bias=False)
        self.width, self.with_bias = width, tuple(with_bias)
        self.bias = nn.Parameter(torch.zeros(width * sum(with_bias)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, whole_bias(self))


class LinearLayer(nn.Linear):
    """What a class of linear layers is derived from that computes what PyTorch's does, in another way: by `product`.

    In training, and where a network is exported, it is PyTorch's.
    """

    def forward(self, x: Tensor) -> Tensor:
        product = F.linear if self.training or is_exporting() else self.product
        return product(x, self.weight, self.bias)

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """W x + b of tokens x (…, c), of a layer's weight W and its bias b or some rows of them."""
        return F.linear(x, weight, bias)


def is_linear(module: nn.Module) -> bool:
    """Whether weight and bias say all that a linear layer does, as plain numbers.

    Other classes may do anything in their calls, and quantized weights are tensors of other classes.
    """
    is_one = type(module) is nn.Linear or isinstance(module, LinearLayer)
    return is_one and type(module.weight) in (nn.Parameter, Tensor)


def whole_bias(qkv: nn.Linear) -> Tensor | None:
    """The bias of all parts of a fused projection (p·width,), zeros where a part has none."""
    if not isinstance(qkv, PartlyBiased):
        return qkv.bias
    own = iter(qkv.bias.split(qkv.width))
    return torch.cat([next(own) if has_one else qkv.bias.new_zeros(qkv.width) for has_one in qkv.with_bias])


def projected_by(mechanism: nn.Module) -> tuple[str, ...]:
    """Those of a mechanism's inputs that a fused projection supplies, in its order."""
    return tuple(name for name in mechanism.inputs if name in PROJECTED)  # type: ignore[union-attr]


def all_heads_of(mechanism: nn.Module, dim: int, num_heads: int) -> tuple[int, int]:
    """The heads of a host's layer and of its mechanism together, and their channels."""
    count = num_heads + traits_of(mechanism).extra_heads
    return count, count * (dim // num_heads)


class AttentionSteps(NamedTuple):
    """What computes the first half of a block in two steps, given by `subquad.inference`; each may give None.

    Attributes:
        sums: of a block and tokens (b, n, c), what its mechanism sums up of them.
        answers: of a block, tokens, such sums and over how many tokens they are, the tokens behind the first half.
    """

    sums: Callable[["Block", Tensor], Tensor | None]
    answers: Callable[["Block", Tensor, Tensor, int], Tensor | None]


Again = Callable[..., Tensor]
"""`subquad.inference.rotations.replayed_turning`."""


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        dim: channels c.
        attn: the attention layer, called with `grid`, and with `rotation` where the network has one.
        mlp_ratio: hidden channels over `dim`.
        mlp: what kind it is, see `make_mlp`.
        drop, drop_path: dropout in the MLP, stochastic depth.
        eps: of the norms.
        act_layer: of a plain MLP.
        init_values: what LayerScale, a factor for each channel of both branches, starts from; None for none.
        cpe: whether a `ConvPosition` comes first.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        *,
        mlp_ratio: float = 4,
        mlp: str = "plain",
        drop: float = 0,
        drop_path: float = 0,
        eps: float = 1e-6,
        act_layer: Callable[[], nn.Module] = nn.GELU,
        init_values: float | None = None,
        cpe: bool = False,
    ) -> None:
        super().__init__()
        self.cpe = ConvPosition(dim) if cpe else None
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = attn
        self.ls1 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        if int(dim * mlp_ratio) < 1:
            raise SubquadError(f"an MLP of {mlp_ratio} times a width of {dim} has no channels: take a larger mlp_ratio")
        self.mlp = make_mlp(mlp, dim, int(dim * mlp_ratio), drop=drop, eps=eps, act_layer=act_layer)
        self.ls2 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        # what computes the first half in two steps, or in few around the mechanism, and the second in one or few, given
        # by subquad.inference: they look at the block at each call, as parts may be others since
        self.fused_attention: AttentionSteps | None = None
        self.fused_edges: Callable[[Block, Tensor, TokenGrid, Rotation | None], Tensor | None] | None = None
        self.fused: Callable[[Block, Tensor, TokenGrid], Tensor | None] | None = None

    again: Again | None = None
    """What makes steps again without looking at them anew, given by `subquad.inference`."""

    def forward(self, x: Tensor, *, grid: TokenGrid, rotation: Rotation | None = None) -> Tensor:
        if self.again is None or self.training or grid.whole is not grid:
            return self._steps(x, grid, rotation)
        # patches that a convolution makes lie channel by channel
        return self.again(self, lambda x, rotation: self._steps(x, grid, rotation), x.contiguous(), rotation, grid)

    def _steps(self, x: Tensor, grid: TokenGrid, rotation: Rotation | None) -> Tensor:
        x = self.in_front(x, grid)
        y = None if self.training else self._attended(x, grid, rotation)
        if y is None:
            turned = {} if rotation is None else {"rotation": rotation}
            y = x + self.drop_path(self.ls1(self.attn(self.norm1(x), grid=grid, **turned)))
        return self.feed_forward(self.in_between(y, grid), grid)

    def in_front(self, x: Tensor, grid: TokenGrid) -> Tensor:
        """What goes into the first half: tokens with a position, if the block has one."""
        return x if self.cpe is None else self.cpe(x, grid=grid)

    def in_between(self, x: Tensor, grid: TokenGrid) -> Tensor:
        """What goes into the second half, of what comes out of the first."""
        return x

    def _attended(self, x: Tensor, grid: TokenGrid, rotation: Rotation | None) -> Tensor | None:
        """The first half by `fused_attention`, where nothing is turned, or by `fused_edges`; None where neither can."""
        is_plain_on = getattr(self.attn, "is_plain_on", None)
        if self.fused_edges is None or is_plain_on is None:
            return None
        if self.fused_attention is not None and rotation is None and grid.whole is grid and is_plain_on(grid):
            grid.check(x)
            sums = self.fused_attention.sums(self, x)
            y = None if sums is None else self.fused_attention.answers(self, x, sums, grid.num_tokens)
            if y is not None:
                return y
        return self.fused_edges(self, x, grid, rotation)

    def feed_forward(self, x: Tensor, grid: TokenGrid) -> Tensor:
        """The second half: x + mlp(norm(x))."""
        y = None if self.fused is None or self.training else self.fused(self, x, grid)
        if y is not None:
            return y
        seen = {"grid": grid} if isinstance(self.mlp, MapMlp) else {}
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x), **seen)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        # here, as a network that blocks are a part of, a detector say, may know no names but today's
        rename_earlier(state_dict, prefix, {name for name, _ in self.named_parameters()})
        super()._load_from_state_dict(state_dict, prefix, *more)


class LayerScale(nn.Module):
    """A learned factor for each channel of a branch. CaiT, Touvron et al. 2021, arXiv 2103.17239, eq. 4."""

    def __init__(self, dim: int, init_values: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), float(init_values)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


MLPS = ("plain", "swiglu", "swiglu_norm")


def make_mlp(
    kind: str, dim: int, hidden: int, *, drop: float, eps: float, act_layer: Callable[[], nn.Module] = nn.GELU
) -> nn.Module:
    """The MLP of a block: "plain", "swiglu" (gated, arXiv 2002.05202), or that with a norm of its hidden channels."""
    if kind not in MLPS:
        raise unknown_name("mlp", kind, MLPS)
    if kind == "plain":
        return Mlp(dim, hidden, act_layer=act_layer, drop=drop)
    norm = partial(nn.LayerNorm, eps=eps) if kind == "swiglu_norm" else None
    return GluMlp(dim, 2 * hidden, act_layer=nn.SiLU, norm_layer=norm, gate_last=False, drop=drop)


def move_tables(module: nn.Module, moves: dict[TokenGrid, TokenGrid]) -> None:
    """Tables in `module` that stand on a grid of `moves` now stand on the one it names."""
    for table in module.modules():
        if isinstance(table, GridTable) and table.grid in moves:
            table.regrid(moves[table.grid])


def init_linear(module: nn.Module) -> None:
    """Weights of a linear layer: truncated normal, std 0.02; its bias zero."""
    if isinstance(module, nn.Linear):
        start_normal(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
