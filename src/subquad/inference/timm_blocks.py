"""Blocks of timm's networks, whose steps are one step where they can be: ViT, DeiT, DINOv2, SigLIP; DINOv3, EVA.

Of those with a bias of each pair of tokens (BEiT, ViTs with relative positions) that is the second half.
Such a block is of timm's class before and of a class derived from it afterwards, with the same modules and parameters.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, cast

from timm.layers.attention import Attention, AttentionRope
from timm.models import register_notrace_module
from timm.models.beit import Block as BeitBlock
from timm.models.eva import EvaAttention, EvaBlock
from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention
from timm.models.vision_transformer import Block
from timm.models.vision_transformer_relpos import RelPosBlock
from torch import Tensor, nn

from subquad.grid import TokenGrid
from subquad.inference.foreign_halves import (
    Between,
    InFewSteps,
    Turning,
    converted,
    first_half_of,
    has_usual_scale,
    is_asked_for,
    replayed_where_it_stands,
    three,
)
from subquad.inference.halves import does_more, scaled
from subquad.inference.own_blocks import can_fuse, has_plain_mlp, is_scale, plain_mlp, scale_of
from subquad.inference.rotations import of_one_table, remembered
from subquad.kernels import replayed_in_a_row
from subquad.models.layers import is_linear
from subquad.models.windows import Windows
from subquad.ops import softmax_attention
from subquad.ops.turning import turned_tokens
from subquad.rope import Rotation
from subquad.tracing import refuse_torchscript


@register_notrace_module
class FusedBlock(Block):
    """timm's block in evaluation; training, masks and causal attention are as they were."""

    __prepare_scriptable__ = refuse_torchscript

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.training or is_asked_for(*args, *kwargs.values()):
            return super().forward(x, *args, **kwargs)
        return replayed_where_it_stands(self, mixing_of(self.attn), x, None, self._steps)

    def _steps(self, x: Tensor, rotation: None) -> Tensor:
        y = None
        if is_scale(self.ls1) and not does_more(self.ls1):
            y = first_half_of(self, x, self.norm1, self.attn, mixing_of(self.attn), scale_of(self.ls1))
        if y is None:
            y = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return behind_module(self, y)


@register_notrace_module
class FusedBlocks(nn.Sequential):
    """Blocks of a plain network, one call of the library in evaluation where each of them is one."""

    __prepare_scriptable__ = refuse_torchscript

    def forward(self, x: Tensor) -> Tensor:
        if self.training or not all(type(block) is FusedBlock for block in self):
            return super().forward(x)
        # of one network, all of whose layers stand on the same map
        mixing = next((mixing for block in self if (mixing := converted(cast(Any, block).attn)) is not None), None)
        grid = None if mixing is None else mixing.grid_under(x)
        if grid is not None and grid.whole is not grid:
            return super().forward(x)
        return replayed_in_a_row(self, super().forward, x.contiguous(), settings=grid)


@register_notrace_module
class FusedRelPosBlock(RelPosBlock):
    """timm's block with relative positions in evaluation, whose second half is one step."""

    __prepare_scriptable__ = refuse_torchscript

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.training:
            return super().forward(x, *args, **kwargs)
        return behind_module(self, x + self.drop_path1(self.ls1(self.attn(self.norm1(x), *args, **kwargs))))


@register_notrace_module
class FusedSwinBlock(InFewSteps, SwinTransformerBlock):
    """timm's block of windows in evaluation: the first half in few steps within windows, the second in one."""

    __prepare_scriptable__ = refuse_torchscript

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        tokens, attn = x.flatten(1, 2), self.attn
        mixing = TimmWindowSoftmax(attn) if is_plain_in_windows(attn) else None
        y = first_half_of(self, tokens, self.norm1, attn, mixing, None, windows=windows_under(self, x))
        if y is None:
            y = (x + self.drop_path1(self._attn(self.norm1(x)))).flatten(1, 2)
        return behind_factors(self, y, None).view_as(x)


@register_notrace_module
class FusedBeitBlock(BeitBlock):
    """BEiT's block in evaluation, whose second half is one step where its MLP is plain."""

    __prepare_scriptable__ = refuse_torchscript

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.training:
            return super().forward(x, *args, **kwargs)
        y = x + self.drop_path1(scaled(self.attn(self.norm1(x), *args, **kwargs), self.gamma_1))
        return behind_factors(self, y, self.gamma_2)


@register_notrace_module
class FusedEvaBlock(EvaBlock):
    """timm's block with rotary positions in evaluation; training, masks and causal attention are as they were."""

    __prepare_scriptable__ = refuse_torchscript

    def forward(self, x: Tensor, rope: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if self.training or is_asked_for(*args, *kwargs.values()):
            return super().forward(x, rope, *args, **kwargs)
        mixing = mixing_of(self.attn)
        rotation = None if mixing is None or rope is None else cast(Turning, mixing).rotation_of(x, rope)
        return replayed_where_it_stands(self, mixing, x, rotation, partial(self._steps, rope=rope))

    def _steps(self, x: Tensor, rotation: Rotation | None, rope: Tensor | None) -> Tensor:
        y = first_half_of(self, x, self.norm1, self.attn, mixing_of(self.attn), self.gamma_1, rotation)
        if y is None:
            y = x + self.drop_path1(scaled(self.attn(self.norm1(x), rope=rope), self.gamma_1))
        return behind_factors(self, y, self.gamma_2)


def behind_module(block: Any, y: Tensor) -> Tensor:
    """Tokens y (b, n, c) behind the second half of a block whose factors are a module's."""
    if can_fuse(block):
        return plain_mlp(block, y, scale_of(block.ls2))
    return y + block.drop_path2(block.ls2(block.mlp(block.norm2(y))))


def behind_factors(block: Any, y: Tensor, scale: Tensor | None) -> Tensor:
    """Tokens y (b, n, c) behind the second half of a block whose factors, if there are some, are its own."""
    if has_plain_mlp(block):
        return plain_mlp(block, y, scale)
    return y + block.drop_path2(scaled(block.mlp(block.norm2(y)), scale))


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    Block: FusedBlock,
    BeitBlock: FusedBeitBlock,
    EvaBlock: FusedEvaBlock,
    RelPosBlock: FusedRelPosBlock,
    SwinTransformerBlock: FusedSwinBlock,
}


def fuse_all(model: nn.Module) -> None:
    """Let all of timm's blocks in a network be of few steps; those of classes derived from them stay as they are."""
    for module in model.modules():
        if (fused := FUSED.get(type(module))) is not None:
            module.__class__ = fused
    for module in model.modules():
        if type(module) is nn.Sequential and len(module) > 1 and all(type(each) is FusedBlock for each in module):
            module.__class__ = FusedBlocks


def mixing_of(attn: nn.Module) -> Between | None:
    """What an attention layer computes between its projections; None where nobody knows."""
    return converted(attn) or (TimmSoftmax(attn) if is_plain(attn) else None)


def is_plain(attn: Any) -> bool:
    """Whether this is timm's softmax attention, without a norm or a gate of its answer; earlier versions know no gate.

    EVA's biases are no part of its projection.
    """
    has_more = any(getattr(attn, name, None) is not None for name in ("gate", "q_bias"))
    is_one = type(attn) in (Attention, AttentionRope, EvaAttention) and type(attn.norm) is nn.Identity and not has_more
    # PyTorch's fused attention is not told it
    return is_one and (attn.fused_attn or has_usual_scale(attn.scale, attn.head_dim))


class TimmSoftmax:
    """Between the projections of timm's attention; positions are a rotation."""

    answered_by = "proj"
    reads_tokens = False

    def __init__(self, attn: Any) -> None:
        self.attn = attn

    @property
    def projected_by(self) -> tuple[str, ...]:
        """Of a layer that projects with one, or with three."""
        return ("qkv",) if self.attn.qkv is not None else ("q_proj", "k_proj", "v_proj")

    def grid_under(self, x: Tensor) -> None:
        """Nothing asks for it."""

    def rotation_of(self, x: Tensor, rope: Tensor) -> Rotation:
        """Timm's table as a rotation of tokens (b, n, c)."""
        interleaved = not getattr(self.attn, "rotate_half", False)
        return remembered(of_one_table, rope, prefix=self.attn.num_prefix_tokens, interleaved=interleaved)

    def between(self, projected: Sequence[Tensor], x: Tensor, positions: Any = None) -> Tensor:
        """(b, n, h·d)."""
        attn = self.attn
        q, k, v = (part.unflatten(-1, (attn.num_heads, attn.head_dim)).transpose(1, 2) for part in three(projected))
        q, k = attn.q_norm(q), attn.k_norm(k)
        if positions is not None:
            q, k = (turned_tokens(positions, tokens) for tokens in (q, k))
        return softmax_attention(q, k, v).transpose(1, 2).flatten(2)


class TimmWindowSoftmax(TimmSoftmax):
    """Between the projections of timm's attention of windows, with a bias of pairs of places."""

    projected_by: ClassVar[tuple[str, ...]] = ("qkv",)

    def between(self, projected: Sequence[Tensor], x: Tensor, positions: Any = None) -> Tensor:
        """(b·r·l, n, h·d); in the place of positions stand the pairs that must not attend."""
        q, k, v = (part.unflatten(-1, (self.attn.num_heads, -1)).transpose(1, 2) for part in three(projected))
        return softmax_attention(q, k, v, positions, self.attn._get_rel_pos_bias()[0]).transpose(1, 2).flatten(2)


def is_plain_in_windows(attn: Any) -> bool:
    """Whether this is timm's softmax attention of windows, with the usual scale."""
    # what stands in a projection's place, low-rank changes for instance, need not say how wide it is
    is_one = type(attn) is WindowAttention and is_linear(attn.qkv)
    return is_one and attn.scale == (attn.qkv.out_features // (3 * attn.num_heads)) ** -0.5


def windows_under(block: Any, image: Tensor) -> Windows:
    """Those of timm's block on a map (b, y, x, c)."""
    grid, shift = TokenGrid(image.shape[1], image.shape[2]), tuple(block.shift_size)
    return Windows(grid, TokenGrid(*block.window_size), shift if any(shift) else None, pads_first=False)
