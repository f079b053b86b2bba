"""InLine attention: linear, injective, normalised by subtraction; and a local branch whose kernel the image predicts.

Cost 2 n d² a head and 9 n c for the branch. Han et al. 2024, arXiv 2412.06590, eq. 5-6.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import spread
from subquad.attention.bricks import check_tokens, head_dim, is_plain, silence
from subquad.attention.key_removal import recentred
from subquad.attention.sweeps import State, Streaming, Sweep
from subquad.attention.traits import Traits
from subquad.grid import GridRows, TokenGrid
from subquad.ops import add_local, inline_attention, inline_weights
from subquad.ops.at_once import inline_at_once
from subquad.ops.inline_formula import inline_answers, inline_sums, merge_inline
from subquad.ops.padding import mean_present, zero_padding
from subquad.ranges import Positive, checks_arguments


class InLineAttention(nn.Module):
    """`local` adds to the map's tokens a depthwise 3×3 of the values whose taps an MLP predicts for each image."""

    inputs = ("q", "k", "v", "x", "padding")
    traits = Traits(
        label="InLine",
        key_removal=recentred,
        start_quietly=lambda new: silence(new.local and new.local.fc2),
        spreads=True,
        colour="#009e73",
    )

    @checks_arguments
    def __init__(
        self, dim: Positive, num_heads: Positive, *, grid: TokenGrid, kv_grid: TokenGrid, local: bool = True
    ) -> None:
        super().__init__()
        head_dim(dim, num_heads)
        self.local = LocalKernel(dim, num_heads) if local else None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        grid.check(q, x)
        kv_grid.check(k)
        if padding is None and grid == kv_grid and is_plain(self.local, LocalKernel) and self.local.is_mlp:
            whole = inline_at_once(q, k, v, x, *self.local.mlp, grid=grid)
            if whole is not None:
                return whole
        y = inline_attention(q, k, v, padding)
        if self.local is None:
            return y
        # padding describes the keys: where queries stand on another grid, none of them is absent
        absent = padding if grid == kv_grid else None
        return add_local(y, zero_padding(v, padding), self.local(x, absent), grid=grid, kv_grid=kv_grid)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        x: Tensor | None = None,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        return inline_weights(q, k, padding)[:, :, None]

    def streaming(self, grid: TokenGrid) -> Streaming:
        """See `subquad.attention.sweeps`."""

        def sums(rows: GridRows, k: Tensor, v: Tensor, x: Tensor) -> State:
            return *inline_sums(k, v), x.sum(dim=1, dtype=torch.promote_types(x.dtype, torch.float32))

        def merge(state: State, other: State) -> State:
            return *merge_inline(state[:-1], other[:-1]), state[-1] + other[-1]

        def answers(rows: GridRows, state: State, q: Tensor, v: Tensor | None = None) -> Tensor:
            y = inline_answers(q, state[:-1])
            if self.local is None or v is None:
                return y
            taps = self.local.taps((state[-1] / grid.num_tokens).to(q.dtype))
            return add_local(y, v, taps, grid=rows, kv_grid=rows.widened(1))

        beside = {} if self.local is None else {"v": 1}
        return Streaming((Sweep(("k", "v", "x"), sums, merge=merge),), Sweep(("q",), answers, beside))


class LocalKernel(nn.Module):
    """Nine taps for each channel from the mean token: an MLP per head, x (b, n, c) -> (b, c, 3, 3)."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv1d(dim, dim, 1, groups=num_heads)
        self.fc2 = nn.Conv1d(dim, 9 * dim, 1, groups=num_heads)

    @property
    def is_mlp(self) -> bool:
        """Whether `mlp` says all that its two layers do."""
        return is_plain(self.fc1, nn.Conv1d) and is_plain(self.fc2, nn.Conv1d)

    @property
    def mlp(self) -> tuple[Tensor | None, ...]:
        """Weight and bias of its two layers."""
        return self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.taps(spread.mean_token(x) if padding is None else mean_present(x, padding))

    def taps(self, mean: Tensor) -> Tensor:
        """What the MLP makes of mean tokens (b, c)."""
        taps = by_head(self.fc2, F.gelu(by_head(self.fc1, mean)))
        return taps.unflatten(1, (-1, 3, 3))


def by_head(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """A grouped convolution at one place, (b, c) -> (b, c'): products of matrices, which a convolution is slow at."""
    if not is_plain(conv, nn.Conv1d) or conv.bias is None:
        # adapters compute more than their weight says
        return conv(x[..., None])[..., 0]
    h = conv.groups
    heads, weight = x.unflatten(1, (h, -1)).transpose(0, 1), conv.weight.view(h, -1, x.shape[1] // h)
    return torch.baddbmm(conv.bias.view(h, 1, -1), heads, weight.mT).transpose(0, 1).flatten(1)
