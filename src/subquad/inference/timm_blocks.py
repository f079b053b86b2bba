"""Blocks of timm's plain networks, whose steps are one step where they can be: ViT, DeiT, DINOv2, SigLIP; DINOv3, EVA.

Such a block is of timm's class before and of a class derived from it afterwards, with the same modules and parameters.
"""

from functools import partial
from typing import Any, Protocol, cast

import torch
from timm.layers.attention import Attention
from timm.models.eva import EvaBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from subquad.grid import TokenGrid
from subquad.inference.own_blocks import (
    NORMS,
    can_fuse,
    fed_forward,
    has_plain_mlp,
    is_scale,
    scale_of,
    second_half,
)
from subquad.kernels import may_be_replayed, replayed
from subquad.models.layers import is_heard
from subquad.ops import softmax_attention
from subquad.ops.branch_at_once import norm_projection, projection_residual


class Between(Protocol):
    """An attention layer of another mechanism that says what lies between its projections `qkv` and `proj`.

    Attributes:
        is_fused: whether it is called with nothing but tokens, and has these projections.
        reads_tokens: whether what lies between reads the layer's tokens, and not only how many there are.
    """

    is_fused: bool
    reads_tokens: bool

    def stand_on(self, x: Tensor) -> TokenGrid:
        """The grid of these tokens."""

    def between(self, projected: Tensor, x: Tensor) -> Tensor:
        """(b, n, h·d) of what is projected (b, n, 3·h·d), and tokens x (b, n, c)."""


class FusedBlock(Block):
    """timm's block in evaluation; training, masks and causal attention are as they were."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        asked = any(one is not None and one is not False for one in (*args, *kwargs.values()))
        if self.training or asked:
            return super().forward(x, *args, **kwargs)
        ours = between_of(self.attn)
        grid = None if ours is None else ours.stand_on(x)
        if grid is not None and grid.whole is not grid:
            return self._steps(x)
        y = replayed(self, "block", self._steps, x.contiguous(), settings=grid)
        assert y is not None
        return y

    def _steps(self, x: Tensor) -> Tensor:
        y = first_half(self, x) if can_fuse_edges(self) else None
        if y is None:
            y = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return second_half(self, y) if can_fuse(self) else y + self.drop_path2(self.ls2(self.mlp(self.norm2(y))))


class FusedEvaBlock(EvaBlock):
    """timm's block with rotary positions in evaluation: plain MLPs, which DINOv3 has, are one step with their norm."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.training or not has_plain_mlp(self):
            return super().forward(x, *args, **kwargs)
        y = self.attn(self.norm1(x), *args, **kwargs)
        x = x + self.drop_path1(y if self.gamma_1 is None else self.gamma_1 * y)
        return fed_forward(self, x, self.gamma_2)


FUSED: dict[type[nn.Module], type[nn.Module]] = {Block: FusedBlock, EvaBlock: FusedEvaBlock}


def fuse_all(model: nn.Module) -> None:
    """Let all of timm's blocks in a network be of few steps; those of classes derived from them stay as they are."""
    for module in model.modules():
        if (fused := FUSED.get(type(module))) is not None:
            module.__class__ = fused


def between_of(attn: nn.Module) -> Between | None:
    """An attention layer that is such a one, or None."""
    return cast(Between, attn) if hasattr(type(attn), "between") else None


def can_fuse_edges(block: Block) -> bool:
    """Whether the first half of a block is norm, projections, what lies between and residual, and nobody listens."""
    attn, norm, scale = block.attn, block.norm1, block.ls1
    ours = between_of(attn)
    if not (is_plain(attn) if ours is None else ours.is_fused):
        return False
    plain = type(attn.qkv) is nn.Linear and type(attn.proj) is nn.Linear and type(norm) in NORMS and is_scale(scale)
    return plain and not any(map(is_heard, (norm, scale, attn, attn.qkv, attn.proj)))


def is_plain(attn: nn.Module) -> bool:
    """Whether this is timm's softmax attention, without a norm or a gate of its answer."""
    return type(attn) is Attention and type(getattr(attn, "norm", None)) is nn.Identity and not has_gate(attn)


def has_gate(attn: Any) -> bool:
    """Whether what it answers goes through a gate; earlier versions of timm know none."""
    return getattr(attn, "gate", None) is not None


def first_half(block: Any, x: Tensor) -> Tensor | None:
    """Tokens x (b, n, c) behind the first half; None where no kernel does that, or it would take longer."""
    if x.dtype != torch.bfloat16 and not may_be_replayed():
        return None
    norm, attn, ours = block.norm1, block.attn, between_of(block.attn)
    keeps = ours is not None and ours.reads_tokens
    before = partial(norm_projection, eps=norm.eps, keeps=keeps)
    weights = norm.weight, norm.bias, attn.qkv.weight, attn.qkv.bias
    projected = replayed(block, "before", lambda x: before(x, *weights), x)
    if projected is None:
        return None
    width = attn.qkv.out_features
    tokens = projected[..., width:] if keeps else x
    parts = projected[..., :width]
    y = softmax_between(attn, parts) if ours is None else ours.between(parts, tokens)
    behind = attn.proj.weight, attn.proj.bias, scale_of(block.ls1)
    answers = replayed(block, "behind", lambda x, y: projection_residual(x, y, *behind), x, y)
    return x + block.ls1(attn.proj(y)) if answers is None else answers


def softmax_between(attn: Any, projected: Tensor) -> Tensor:
    """What timm's attention computes between its projections."""
    heads = projected.unflatten(-1, (3, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4)
    q, k, v = heads.unbind(0)
    return softmax_attention(attn.q_norm(q), attn.k_norm(k), v).transpose(1, 2).flatten(2)
