"""Blocks of MLLA's pyramid, what stands around their mechanism in few steps."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from subquad.grid import TokenGrid
from subquad.inference.halves import does_more, drops_no_branch, filtered, is_depthwise, is_norm, scaled
from subquad.inference.own_blocks import is_scale, scale_of
from subquad.kernels import multipliers, replayed
from subquad.models.layers import Block, is_linear
from subquad.models.mlla_network import MambaLikeAttention
from subquad.ops.branch_at_once import norm_projection, projection_residual
from subquad.rope import Rotation


def fuse(block: Block) -> None:
    """Let the first half of a block be few steps, where it is one of MLLA's and can be."""
    if can_fuse_edges(block):
        block.fused_edges = first_edges


def can_fuse_edges(block: Block) -> bool:
    """Whether the first half of a block is norm, MLLA's layer and residual, with nothing that listens to its parts."""
    attn, norm, scale = cast(Any, block.attn), block.norm1, block.ls1
    # subclasses that do not say so may do anything with their tokens
    if "mixed_tokens" not in vars(type(attn)):
        return False
    linear = attn.in_proj, attn.gate, attn.proj
    plain = all(is_linear(layer) for layer in linear) and is_depthwise(attn.conv)
    plain = plain and is_norm(norm) and is_scale(scale) and drops_no_branch(block)
    return plain and not any(map(does_more, (norm, scale, attn, *linear)))


def first_edges(block: Block, x: Tensor, grid: TokenGrid, rotation: Rotation | None) -> Tensor | None:
    """Tokens x (b, n, c) behind the first half of a block, in four steps around its mechanism.

    None where no kernel does that, and in fp32, where PyTorch's products are as fast, unless they lag.
    """
    if x.dtype != torch.bfloat16 and not multipliers.products_lag():
        return None
    if not can_fuse_edges(block):
        return None
    grid.check(x)
    attn, norm = cast(MambaLikeAttention, block.attn), block.norm1

    def projected(x: Tensor, layer: nn.Linear, activation: str = "nothing") -> Tensor | None:
        weights = norm.weight, norm.bias, layer.weight, layer.bias
        return norm_projection(x, *weights, eps=norm.eps, activation=activation)

    def convolved(x: Tensor) -> Tensor | None:
        tokens = projected(x, attn.in_proj)
        return None if tokens is None else filtered(tokens, attn.conv, grid, adds=False, activation="silu")

    tokens = replayed(block, "convolved", convolved, x, settings=grid)
    gate = replayed(block, "gate", lambda x: projected(x, attn.gate, "silu"), x)
    if tokens is None or gate is None:
        return None
    y = attn.mixed_tokens(tokens, grid, rotation) * gate
    proj, scale = attn.proj, scale_of(block.ls1)
    back = replayed(block, "behind", lambda x, y: projection_residual(x, y, proj.weight, proj.bias, scale), x, y)
    return x + scaled(proj(y), scale) if back is None else back
