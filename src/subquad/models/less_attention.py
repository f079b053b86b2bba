"""Less attention: scores computed once and carried on from layer to layer. The layers of LaViT.

LaViT, Zhang et al. 2024, arXiv 2406.00427, as far as it is known; docs/papers.md says what is ours. It is not
sub-quadratic: scores (b, h, n, n) live through a whole stage.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d, y x rows and columns.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.models import register_notrace_module
from torch import Tensor, nn

from subquad.errors import SubquadError, unknown_name
from subquad.grid import TokenGrid
from subquad.models.computed_again import computed_again
from subquad.models.layers import Block
from subquad.models.stages import Stage
from subquad.positions import GridTable, adaptive_means, same_prefix, stored_grid, without_autocast

TRANSFORMS = ("dense", "kron", "share")


class ScoreTransform(GridTable):
    """A' = (I + Ψ) A (I + Θ)ᵀ on scores, shared by the heads; Ψ and Θ are zero at first.

    Psi mixes queries, Theta keys. "dense" is the paper's, n × n each; "kron" (ours) a Kronecker product of maps over
    rows and over columns, which leaves prefix tokens alone; "share" changes nothing and has no parameters. On another
    grid than its own the updates act between an averaging to the own grid and an interpolation back, so that no map
    of the new size is ever made. Cost 2 h n³ (dense), 2 h n² (y + x) (kron).

    Args:
        grid: what it stands on.
        kind: one of TRANSFORMS.
        tied: Ψ = Θ, which keeps symmetric scores symmetric.
    """

    def __init__(self, grid: TokenGrid, *, kind: str = "dense", tied: bool = False) -> None:
        super().__init__()
        if kind not in TRANSFORMS:
            raise unknown_name("transform", kind, TRANSFORMS)
        self.grid, self.kind, self.tied = grid, kind, tied
        sides = ("keys",) if tied else ("keys", "queries")
        if kind == "dense":
            for side in sides:
                self.register_parameter(side, nn.Parameter(torch.zeros(grid.num_tokens, grid.num_tokens)))
        elif kind == "kron":
            for side in sides:
                self.register_parameter(f"{side}_rows", nn.Parameter(torch.zeros(grid.height, grid.height)))
                self.register_parameter(f"{side}_columns", nn.Parameter(torch.zeros(grid.width, grid.width)))

    def forward(self, scores: Tensor, grid: TokenGrid) -> Tensor:
        """Scores (b, h, n, n) to scores of the same shape."""
        same_prefix(self.grid, grid)
        if self.kind == "share":
            return scores
        scores = self._mix_last(scores, "keys", grid)
        return self._mix_last(scores.mT, "keys" if self.tied else "queries", grid).mT

    def _mix_last(self, scores: Tensor, side: str, grid: TokenGrid) -> Tensor:
        """(I + update) on the last axis."""
        if self.kind == "dense":
            update: Tensor = getattr(self, side)
            if grid.stands_on(self.grid):
                identity = torch.eye(len(update), dtype=update.dtype, device=update.device)
                return scores @ (identity + update).to(scores.dtype).mT
            inner = to_grid(scores, grid, self.grid, average=True) @ update.to(scores.dtype).mT
            return scores + to_grid(inner, self.grid, grid, average=False)
        rows = resize_map(getattr(self, f"{side}_rows"), grid.height).to(scores.dtype)
        columns = resize_map(getattr(self, f"{side}_columns"), grid.width).to(scores.dtype)
        prefix, places = scores.split([grid.prefix, grid.num_places], dim=-1)
        image = places.unflatten(-1, grid.shape)
        image = image + rows @ image
        image = image + image @ columns.mT
        return torch.cat([prefix, image.flatten(-2)], dim=-1)

    def fitted(self, name: str, tensor: Tensor, stored: TokenGrid | None = None) -> Tensor:
        if self.kind == "kron":
            return resize_map(tensor, self.grid.height if name.endswith("rows") else self.grid.width)
        return resize_grid_map(tensor, stored_grid(len(tensor), self.grid.prefix, stored), self.grid)

    def regrid(self, grid: TokenGrid) -> None:
        if self.kind != "dense":
            super().regrid(grid)
            return
        same_prefix(self.grid, grid)
        old, self.grid = self.grid, grid
        for name, parameter in list(self._parameters.items()):
            assert parameter is not None
            moved = resize_grid_map(parameter.detach(), old, grid)
            setattr(self, name, nn.Parameter(moved, requires_grad=parameter.requires_grad))


def to_grid(values: Tensor, old: TokenGrid, new: TokenGrid, *, average: bool) -> Tensor:
    """The last axis from one grid to another: averaged over adaptive bins, or interpolated; prefix tokens stay."""
    prefix, places = values.split([old.prefix, old.num_places], dim=-1)
    image = places.reshape(-1, 1, *old.shape)
    pooled = adaptive_means(image, new.shape) if average else F.interpolate(image, new.shape, mode="bilinear")
    return torch.cat([prefix, pooled.reshape(*values.shape[:-1], new.num_places)], dim=-1)


def resize_grid_map(update: Tensor, old: TokenGrid, new: TokenGrid) -> Tensor:
    """An update (n, n) of one grid as one of another: averages come in, interpolated values go out."""
    if old == new:
        return update
    all_new, all_old = (torch.eye(one.num_tokens, dtype=update.dtype, device=update.device) for one in (new, old))
    incoming, outgoing = to_grid(all_new, new, old, average=True), to_grid(all_old, old, new, average=False)
    with without_autocast(update):
        return outgoing.mT @ update @ incoming.mT


def resize_map(update: Tensor, length: int) -> Tensor:
    """As `resize_grid_map` along one axis."""
    return resize_grid_map(update, TokenGrid(1, len(update)), TokenGrid(1, length))


class ScoreAttention(nn.Module):
    """Softmax attention that can add a residual to its scores, and hand them on as they are before the softmax."""

    def __init__(self, dim: int, num_heads: int, *, keep_scores: bool = False) -> None:
        super().__init__()
        if dim % num_heads:
            raise SubquadError(f"{num_heads} heads do not divide a width of {dim}: choose num_heads among its divisors")
        self.num_heads, self.keep_scores = num_heads, keep_scores
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, scores: Tensor | None, *, grid: TokenGrid) -> tuple[Tensor, Tensor | None]:
        """Tokens (b, n, c) and a residual (b, h, n, n) or None, to tokens and this layer's scores if they are kept."""
        q, k, v = rearrange(self.qkv(x), "b n (p h d) -> p b h n d", p=3, h=self.num_heads)
        if self.keep_scores:
            own = q @ k.mT * q.shape[-1] ** -0.5
            kept = own if scores is None else own + scores
            y = weigh(kept, v)
        else:
            kept = None
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=scores)
        return self.proj(rearrange(y, "b h n d -> b n (h d)")), kept

    def scores(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """What goes into the softmax, (b, h, n, n)."""
        q, k, _ = rearrange(self.qkv(x), "b n (p h d) -> p b h n d", p=3, h=self.num_heads)
        own = q @ k.mT * q.shape[-1] ** -0.5
        return own if residual is None else own + residual

    def values(self, x: Tensor) -> Tensor:
        """What is weighed, (b, h, n, d)."""
        return rearrange(self.qkv(x), "b n (p h d) -> p b h n d", p=3, h=self.num_heads)[2]

    def regrid(self, old: TokenGrid, new: TokenGrid) -> None:
        """Nothing here stands on a grid."""


class LessAttention(nn.Module):
    """The scores of the layer before, transformed; of the three projections only the value's is left.

    Args:
        dim: channels c.
        num_heads: heads h.
        grid: what the transform stands on.
        transform, tied: see `ScoreTransform`.
        score_norm: bring each head's transformed scores back to the root mean square that they had before.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        grid: TokenGrid,
        transform: str = "dense",
        tied: bool = False,
        score_norm: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.score_norm = num_heads, score_norm
        self.transform = ScoreTransform(grid, kind=transform, tied=tied)
        self.value = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, scores: Tensor | None, *, grid: TokenGrid) -> tuple[Tensor, Tensor]:
        """Tokens (b, n, c) and the scores before (b, h, n, n), to tokens and scores."""
        if scores is None:
            raise SubquadError("a less-attention layer needs the scores of the layer before it")
        new = self.transform(scores, grid)
        if self.score_norm:
            new = new * (mean_square(scores) / mean_square(new).clamp(min=1e-12)).sqrt()
        return self.proj(rearrange(weigh(new, self.values(x)), "b h n d -> b n (h d)")), new

    def values(self, x: Tensor) -> Tensor:
        """What is weighed, (b, h, n, d)."""
        return rearrange(self.value(x), "b n (h d) -> b h n d", h=self.num_heads)

    def regrid(self, old: TokenGrid, new: TokenGrid) -> None:
        """Make the transform for another grid."""
        self.transform.regrid(new)


def weigh(scores: Tensor, v: Tensor) -> Tensor:
    """softmax(scores) v, the softmax in fp32."""
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return scores.softmax(dim=-1, dtype=dtype).to(v.dtype) @ v


def mean_square(scores: Tensor) -> Tensor:
    """Give the mean square of each head of each image, (b, h, 1, 1)."""
    return scores.square().mean(dim=(-2, -1), keepdim=True)


class ScoreBlock(Block):
    """A pre-norm block whose attention takes scores and gives scores."""

    def forward(  # type: ignore[override]
        self, x: Tensor, scores: Tensor | None, *, grid: TokenGrid
    ) -> tuple[Tensor, Tensor | None]:
        y, scores = self.attn(self.norm1(x), scores, grid=grid)
        return self.feed_forward(x + self.drop_path(y), grid), scores


class AttentionResidual(nn.Module):
    """Scores of one stage as a residual to those of the next (paper, eq. 6): LayerScale · Conv1×1(DWConv(scores)).

    A stage halves height and width, so queries and keys are both halved, by a depthwise 2×2 convolution over each of
    the two grids. Where a grid is odd its last row or column counts twice, as maps are filled up there.

    Args:
        heads_in, heads_out: of the two stages.
        prefix: tokens without a place in the new stage; they get a residual of 0.
        scale: what LayerScale starts from.
    """

    def __init__(self, heads_in: int, heads_out: int, *, prefix: int = 0, scale: float = 1e-4) -> None:
        super().__init__()
        self.prefix = prefix
        self.queries = nn.Parameter(torch.full((heads_in, 1, 2, 2), 0.25))
        self.keys = nn.Parameter(torch.full((heads_in, 1, 2, 2), 0.25))
        self.mix = nn.Conv2d(heads_in, heads_out, 1, bias=False)
        self.scale = nn.Parameter(torch.full((heads_out, 1, 1), scale))

    def forward(self, scores: Tensor, grid: TokenGrid) -> Tensor:
        """Scores (b, h, n, n) on `grid` to a residual (b, h', n', n') on half of it, rounded up."""
        scores = halve(scores, self.keys, grid)
        scores = halve(scores.mT, self.queries, grid).mT
        residual = self.mix(scores) * self.scale
        return F.pad(residual, (self.prefix, 0, self.prefix, 0)) if self.prefix else residual


def halve(scores: Tensor, weight: Tensor, grid: TokenGrid) -> Tensor:
    """The last axis of (b, h, m, n), a map on `grid`, by a depthwise 2×2 convolution of stride 2."""
    image = rearrange(scores, "b h m (y x) -> (b m) h y x", y=grid.height)
    image = F.pad(image, (0, grid.width % 2, 0, grid.height % 2), mode="replicate")
    image = F.conv2d(image, weight, stride=2, groups=len(weight))
    return rearrange(image, "(b m) h y x -> b h m (y x)", m=scores.shape[2])


LOSSES = ("centred", "probs_hinge", "printed")


def diagonality_loss(scores: Tensor, kind: str = "centred") -> Tensor:
    """How far scores (b, h, n, n) are from a symmetric matrix whose tokens are nearest to themselves; a number.

    "centred" is ours: free of scale and shift, about 0 to 1 in each of its two parts. "probs_hinge" takes the sums over
    a row of the probabilities. "printed" is the paper's formula to the letter, on probabilities: its second term has
    the wrong sign, and with it nothing is learned.
    """
    n = scores.shape[-1]
    if kind == "centred":
        size = (scores - scores.mean(dim=(-2, -1), keepdim=True)).abs().mean(dim=(-2, -1)).clamp(min=1e-12)
        above = (scores - scores.diagonal(dim1=-2, dim2=-1)[..., None]).clamp(min=0).sum(dim=(-2, -1))
        asymmetry = (scores - scores.mT).abs().mean(dim=(-2, -1))
        return (asymmetry / (2 * size) + above / (max(n - 1, 1) * n) / size.detach()).mean()
    if kind not in LOSSES:
        raise unknown_name("loss_kind", kind, LOSSES)
    return probability_loss(scores.softmax(dim=-1), kind)


def probability_loss(weights: Tensor, kind: str) -> Tensor:
    """The two losses on probabilities (b, h, n, n), see `diagonality_loss`."""
    n = weights.shape[-1]
    diagonal = weights.diagonal(dim1=-2, dim2=-1)
    asymmetry = (weights - weights.mT).abs().sum(dim=(-2, -1))
    if kind == "printed":
        return (asymmetry + (n * diagonal - weights.sum(dim=-1)).sum(dim=-1)).mean()
    return ((asymmetry + (weights - diagonal[..., None]).clamp(min=0).sum(dim=(-2, -1))) / n).mean()


@register_notrace_module
class ScoreStage(Stage):
    """A stage whose layers hand scores on: vanilla layers, then less-attention layers.

    Args:
        embed, blocks, dim, grid, positions, drop_rate: see `Stage`; blocks are `ScoreBlock`.
        residual: what makes a residual of the stage before's scores.
        loss_kind: of the loss on the less-attention layers, see `diagonality_loss`.
    """

    def __init__(
        self,
        embed: nn.Module,
        blocks: Sequence[nn.Module],
        dim: int,
        *,
        grid: TokenGrid,
        positions: str | None = None,
        drop_rate: float = 0,
        residual: AttentionResidual | None = None,
        loss_kind: str = "centred",
    ) -> None:
        super().__init__(embed, blocks, dim, grid=grid, positions=positions, drop_rate=drop_rate)
        if loss_kind not in LOSSES:
            raise unknown_name("loss_kind", loss_kind, LOSSES)
        self.residual, self.loss_kind = residual, loss_kind

    def forward(  # type: ignore[override]
        self, x: Tensor, scores: Tensor | None = None
    ) -> tuple[Tensor, TokenGrid, Tensor | None, Tensor | None]:
        """A map (b, c_in, y_in, x_in) and the scores on it, to tokens, their grid, scores, the sum of losses."""
        for last in self.score_steps(x, scores):
            tokens, grid, scores, loss = last
        return tokens, grid, scores, loss

    def score_steps(
        self, x: Tensor, scores: Tensor | None = None
    ) -> Iterator[tuple[Tensor, TokenGrid, Tensor | None, Tensor | None]]:
        """What `forward` gives, after each block."""
        if scores is not None:
            scores = None if self.residual is None else self.residual(scores, TokenGrid(x.shape[2], x.shape[3]))
        tokens, grid = self.tokens_of(x)
        loss = None
        for block in self.blocks:
            if self.grad_checkpointing and self.training:
                tokens, scores = computed_again(block, block, tokens, scores, grid=grid)
            else:
                tokens, scores = block(tokens, scores, grid=grid)
            if self.training and scores is not None and isinstance(block.attn, LessAttention):
                term = diagonality_loss(scores, self.loss_kind)
                loss = term if loss is None else loss + term
            yield tokens, grid, scores, loss
