"""Blocks of timm's plain networks, whose steps are one step where they can be: ViT, DeiT, DINOv2, SigLIP; DINOv3, EVA.

Such a block is of timm's class before and of a class derived from it afterwards, with the same modules and parameters.
"""

from functools import partial
from typing import Any, Protocol, cast

import torch
from timm.layers import apply_rot_embed_cat
from timm.layers.attention import Attention, AttentionRope
from timm.models.eva import EvaAttention, EvaBlock
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
from subquad.tracing import refuse_torchscript


class Between(Protocol):
    """An attention layer of another mechanism that says what lies between its projections `qkv` and `proj`.

    Attributes:
        is_fused: whether it has these projections.
        reads_tokens: whether what lies between reads the layer's tokens, and not only how many there are.
    """

    is_fused: bool
    reads_tokens: bool

    def stand_on(self, x: Tensor) -> TokenGrid:
        """The grid of these tokens."""

    def between(self, projected: Tensor, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """(b, n, h·d) of what is projected (b, n, 3·h·d), tokens x (b, n, c), and timm's table of a rotation."""


class FusedBlock(Block):
    """timm's block in evaluation; training, masks and causal attention are as they were."""

    __prepare_scriptable__ = refuse_torchscript

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.training or is_asked_for(*args, *kwargs.values()):
            return super().forward(x, *args, **kwargs)
        ours = between_of(self.attn)
        grid = None if ours is None else ours.stand_on(x)
        if grid is not None and grid.whole is not grid:
            return self._steps(x)
        y = replayed(self, "block", self._steps, x.contiguous(), settings=grid)
        assert y is not None
        return y

    def _steps(self, x: Tensor) -> Tensor:
        scales = is_scale(self.ls1) and not is_heard(self.ls1)
        y = first_half(self, x, scale_of(self.ls1)) if scales and can_fuse_edges(self) else None
        if y is None:
            y = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return second_half(self, y) if can_fuse(self) else y + self.drop_path2(self.ls2(self.mlp(self.norm2(y))))


class FusedEvaBlock(EvaBlock):
    """timm's block with rotary positions in evaluation, whose second half is one step where its MLP is plain."""

    __prepare_scriptable__ = refuse_torchscript

    def forward(self, x: Tensor, rope: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if self.training:
            return super().forward(x, rope, *args, **kwargs)
        y = None
        if can_fuse_edges(self) and not is_asked_for(*args, *kwargs.values()):
            y = first_half(self, x, self.gamma_1, rope)
        if y is None:
            y = x + scaled(self.drop_path1(self.attn(self.norm1(x), rope, *args, **kwargs)), self.gamma_1)
        if has_plain_mlp(self):
            return fed_forward(self, y, self.gamma_2)
        return y + scaled(self.drop_path2(self.mlp(self.norm2(y))), self.gamma_2)


def is_asked_for(*settings: Any) -> bool:
    """Whether a block is called with more than tokens: a mask, or that attention is causal."""
    return any(one is not None and one is not False for one in settings)


def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """Tokens (b, n, c) times the factors of their channels, if there are some."""
    return x if scale is None else x * scale


FUSED: dict[type[nn.Module], type[nn.Module]] = {Block: FusedBlock, EvaBlock: FusedEvaBlock}


def fuse_all(model: nn.Module) -> None:
    """Let all of timm's blocks in a network be of few steps; those of classes derived from them stay as they are."""
    for module in model.modules():
        if (fused := FUSED.get(type(module))) is not None:
            module.__class__ = fused


def between_of(attn: nn.Module) -> Between | None:
    """An attention layer that is such a one, or None."""
    return cast(Between, attn) if hasattr(type(attn), "between") else None


def can_fuse_edges(block: Any) -> bool:
    """Whether the first half of a block is norm, projections, what lies between and residual, and nobody listens."""
    attn, norm = block.attn, block.norm1
    ours = between_of(attn)
    if not (is_plain(attn) if ours is None else ours.is_fused):
        return False
    plain = type(attn.qkv) is nn.Linear and type(attn.proj) is nn.Linear and type(norm) in NORMS
    return plain and not any(map(is_heard, (norm, attn, attn.qkv, attn.proj)))


def is_plain(attn: nn.Module) -> bool:
    """Whether this is timm's softmax attention, without a norm or a gate of its answer; earlier versions know no gate.

    EVA's biases are no part of its projection.
    """
    has_more = any(getattr(attn, name, None) is not None for name in ("gate", "q_bias"))
    return type(attn) in (Attention, AttentionRope, EvaAttention) and type(attn.norm) is nn.Identity and not has_more


def first_half(block: Any, x: Tensor, scale: Tensor | None, rope: Tensor | None = None) -> Tensor | None:
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
    tokens, parts = projected[..., width:] if keeps else x, projected[..., :width]
    y = softmax_between(attn, parts, rope) if ours is None else ours.between(parts, tokens, rope)
    answers = replayed(
        block, "behind", lambda x, y: projection_residual(x, y, attn.proj.weight, attn.proj.bias, scale), x, y
    )
    return x + scaled(attn.proj(y), scale) if answers is None else answers


def softmax_between(attn: Any, projected: Tensor, rope: Tensor | None) -> Tensor:
    """What timm's attention computes between its projections."""
    heads = projected.unflatten(-1, (3, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4)
    q, k, v = heads.unbind(0)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if rope is not None:
        q, k = (turned(attn, tokens, rope) for tokens in (q, k))
    return softmax_attention(q, k, v).transpose(1, 2).flatten(2)


def turned(attn: Any, tokens: Tensor, rope: Tensor) -> Tensor:
    """Queries or keys (b, h, n, d), turned by where they stand; those of the prefix stand nowhere."""
    prefix, others = tokens.split([attn.num_prefix_tokens, tokens.shape[2] - attn.num_prefix_tokens], dim=2)
    by_place = apply_rot_embed_cat(others, rope, half=getattr(attn, "rotate_half", False))
    return torch.cat([prefix, by_place.type_as(prefix)], dim=2)
