"""Circulant attention: for each channel one kernel over all offsets, made of the whole image, and a gate of the tokens.

n log n by Fourier transforms. All queries share the kernel, so a gate weighs tokens afterwards. Heads mean nothing.
Han et al. 2025, arXiv 2512.21542.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention.bricks import check_tokens, finish, head_dim
from subquad.attention.key_removal import renormalised
from subquad.attention.refusing import refuse
from subquad.attention.traits import Traits
from subquad.grid import TokenGrid
from subquad.ops import circulant_attention, circulant_weights
from subquad.ops.at_once import circulant_at_once
from subquad.ranges import Positive, checks_arguments


class CirculantAttention(nn.Module):
    """The gate is SiLU(g). The map is a torus: what leaves it on the right comes in on the left."""

    inputs = ("q", "k", "v", "g", "padding")
    traits = Traits(
        label="circulant",
        cost="n log n",
        # of scores as they are: without a key they would be other means
        key_removal=renormalised,
        gate=F.silu,
        open_gate=1.278464542761074,  # where SiLU is 1
        refuses={
            "padding": "an absent token has no offset of its own to leave out; give it sequences of one length",
            "prefix": "it has no offset to the map; take a network without (class_token=False, reg_tokens=0)",
            "kv_grid": "offsets are from place to place of one map; keep keys on the grid of their queries",
        },
        no_streaming="its Fourier transform is of the whole map at once",
        colour="#6b3e26",
    )

    @checks_arguments
    def __init__(self, dim: Positive, num_heads: Positive, *, grid: TokenGrid, kv_grid: TokenGrid) -> None:
        super().__init__()
        head_dim(dim, num_heads)
        refuse(self, grid=grid, kv_grid=kv_grid)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        refuse(self, grid=grid, kv_grid=kv_grid, padding=padding)
        whole = circulant_at_once(q, k, v, g, grid=grid) if padding is None else None
        if whole is not None:
            return whole
        y = circulant_attention(q, k, v, grid=grid)
        return finish(None, y, v, F.silu(g), grid=grid, kv_grid=kv_grid)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        g: Tensor | None = None,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        refuse(self, grid=grid, kv_grid=kv_grid, padding=padding)
        return circulant_weights(q, k, grid=grid)
