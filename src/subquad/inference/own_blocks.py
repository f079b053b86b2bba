"""Our blocks, whose steps are one step where they can be."""

from typing import Any, cast

import torch
from timm.layers import LayerScale as TimmLayerScale
from timm.layers import Mlp
from torch import Tensor, nn

from subquad import spread
from subquad.attention.bricks import is_conv
from subquad.grid import TokenGrid
from subquad.inference.halves import (
    activation_of,
    are_mlp,
    does_more,
    drops_no_branch,
    drops_nothing,
    filtered,
    first_half,
    is_depthwise,
    is_norm,
    second_half,
    second_half_on_map,
)
from subquad.inference.rotations import replayed_turning
from subquad.inference.windowed_halves import half_in_windows
from subquad.kernels import replayed, replayed_in_a_row
from subquad.models.layers import (
    AttentionSteps,
    Block,
    LayerScale,
    PartlyBiased,
    SelfAttention,
    is_linear,
    whole_bias,
)
from subquad.models.map_layers import MapMlp, PositionConv
from subquad.models.stages import Stage
from subquad.models.vit import PatchEmbed
from subquad.ops.patch_formula import patch_tokens
from subquad.positions import PositionTable
from subquad.rope import Rotation
from subquad.tracing import up_to_multiple


def fuse_stage(stage: Stage) -> None:
    """Let what is in front of the blocks be one step, and all of them one, where they can be."""
    stage.fused_embed = first_tokens if can_fuse_embed(stage) else None
    stage.in_a_row = blocks_in_a_row


def fuse(block: Block) -> None:
    """Let both halves of a block be one step each, or few, where they can be."""
    block.fused_edges = first_edges if can_fuse_edges(block) else None
    block.fused_attention = FIRST_HALF if can_fuse_attention(block) else None
    block.fused = feed_forward if can_fuse(block) else feed_forward_on_map if can_fuse_on_map(block) else None
    block.again = replayed_turning


def blocks_in_a_row(stage: Stage, tokens: Tensor, grid: TokenGrid, rotations: dict[int, Rotation]) -> Tensor:
    """What `stage.through` gives, by one call of the library where each block is one."""
    # where blocks turn in different ways there is no row, nor is there of some rows of an image; somebody else's may do
    # more; and patches that a convolution makes lie channel by channel
    are_ours = all(type(block).forward is Block.forward for block in stage.blocks)
    if len(rotations) > 1 or grid.whole is not grid or not are_ours:
        return stage.through(tokens, grid, rotations)
    interleaved = [rotation.interleaved for rotation in rotations.values()]

    def through(tokens: Tensor, *tables: Tensor) -> Tensor:
        turned = {width: Rotation(tables[0], tables[1], *interleaved) for width in rotations}
        return stage.through(tokens, grid, turned)

    tables = [table for rotation in rotations.values() for table in (rotation.cos, rotation.sin)]
    return replayed_in_a_row(stage.blocks, through, tokens.contiguous(), *tables, settings=(grid, *interleaved))


def first_tokens(stage: Stage, x: Tensor) -> tuple[Tensor, TokenGrid] | None:
    """What `stage.tokens_of` gives of an image (b, c, y, x), in one step; None where it goes its own steps.

    It does where tokens are spread, or few and fp32: PyTorch's convolution is faster then.
    """
    if not can_fuse_embed(stage):
        return None
    embed = cast(PatchEmbed, stage.embed)
    side, weight = embed.patch_size, embed.proj.weight
    if x.dtype != weight.dtype or spread.is_spread():
        return None
    if x.dtype != torch.bfloat16 and x.shape[2] * x.shape[3] < 1024 * side**2:
        return None
    height, width = (up_to_multiple(size, side) // side for size in x.shape[2:])
    grid = TokenGrid(height, width, stage.grid.prefix)
    positions = None
    if stage.pos_embed is not None:
        positions = stage.pos_embed(grid if stage.pos_embed.grid.prefix else grid.without_prefix)
    return patch_tokens(x, weight, embed.proj.bias, stage.prefix_tokens, positions), grid


def can_fuse_embed(stage: Stage) -> bool:
    """Whether what is in front of the blocks is a projection of patches, with nothing that listens to it."""
    embed, table = stage.embed, stage.pos_embed
    if type(embed) is not PatchEmbed or embed.margin or not is_conv(embed.proj):
        return False
    proj, side = embed.proj, (embed.patch_size,) * 2
    whole = proj.kernel_size == proj.stride == side and proj.padding == (0, 0) and proj.dilation == (1, 1)
    whole = whole and proj.groups == 1 and (table is None or type(table) is PositionTable)
    whole = whole and drops_nothing(stage.drop)
    return whole and not _do_more(*(module for module in (embed, proj, table) if module is not None))


def attention_sums(block: Block, x: Tensor) -> Tensor | None:
    """What the mechanism of a block sums up of tokens x (b, n, c), in one step; None where no kernel does that."""
    if not can_fuse_attention(block):
        return None
    norm, attn = block.norm1, cast(SelfAttention, block.attn)
    dim = x.shape[2]
    weights = norm.weight, norm.bias, attn.qkv.weight[dim:], _part(whole_bias(attn.qkv), slice(dim, None))
    sums: Tensor | None = attn.inner.branch.sums(x, *weights, num_heads=attn.num_heads, norm_eps=norm.eps)
    return sums


def attention_answers(block: Block, x: Tensor, sums: Tensor, count: int) -> Tensor | None:
    """Tokens x (b, n, c) behind the first half of a block, from sums over `count`; None where no kernel does that."""
    norm, attn = block.norm1, cast(SelfAttention, block.attn)
    queries = slice(x.shape[2])
    weights = norm.weight, norm.bias, attn.qkv.weight[queries], _part(whole_bias(attn.qkv), queries)
    scale = scale_of(block.ls1)
    behind = sums, attn.proj.weight, attn.proj.bias, scale
    settings = {"count": count, "norm_eps": norm.eps}
    answers: Tensor | None = attn.inner.branch.answers(x, *weights, *behind, **settings)
    return answers


FIRST_HALF = AttentionSteps(attention_sums, attention_answers)


def scale_of(module: nn.Module) -> Tensor | None:
    """The factors of a branch's channels, if it has some."""
    return None if isinstance(module, nn.Identity) else cast(Tensor, module.gamma)


def _part(bias: Tensor | None, rows: slice) -> Tensor | None:
    return None if bias is None else bias[rows]


def first_edges(block: Block, x: Tensor, grid: TokenGrid, rotation: Rotation | None) -> Tensor | None:
    """Tokens x (b, n, c) behind the first half of a block, in one step before and one behind its mechanism.

    None where no kernel does that, or it would take longer.
    """
    attn = cast(SelfAttention, block.attn)
    if not can_fuse_edges(block):
        return None

    def between(projected: list[Tensor], tokens: Tensor) -> Tensor:
        return attn.mixed_of(projected[0], tokens, grid, rotation)

    def in_window(projected: list[Tensor], tokens: Tensor, mask: Tensor | None) -> Tensor:
        assert windows is not None
        return attn.mixed_of(projected[0], tokens, windows.window, None, mask=mask)

    grid.check(x)
    norm, weights, scale = block.norm1, [(attn.qkv.weight, whole_bias(attn.qkv))], scale_of(block.ls1)
    keeps, windows = attn.reads_tokens, attn.windows_on(grid)
    if windows is not None and rotation is None:
        return half_in_windows(block, x, windows, norm, weights, in_window, attn.proj, scale, keeps=keeps)
    if not attn.is_plain_on(grid):
        return None
    return first_half(block, x, norm, weights, between, attn.proj, scale, keeps=keeps)


def can_fuse_edges(block: Block) -> bool:
    """Whether the first half of a block is norm, projections, mechanism and residual, with nothing that listens."""
    attn, norm, scale = cast(Any, block.attn), block.norm1, block.ls1
    # subclasses that say nothing of their calls may do anything in them
    if "is_plain_on" not in vars(type(attn)) or getattr(attn, "pre_norm", None) is not None:
        return False
    # what others make of a projection, low-rank changes for instance, has a class of its own
    plain = (is_linear(attn.qkv) or type(attn.qkv) is PartlyBiased) and is_linear(attn.proj)
    plain = plain and is_norm(norm) and is_scale(scale) and drops_no_branch(block)
    return plain and not _do_more(norm, scale, attn, attn.qkv, attn.proj)


def can_fuse_attention(block: Block) -> bool:
    """Whether the first half of a block is its mechanism's `branch`, with nothing that listens to it."""
    if not can_fuse_edges(block):
        return False
    attn = cast(SelfAttention, block.attn)
    has_norms = any(getattr(attn, name, None) is not None for name in ("q_norm", "k_norm"))
    is_branch = getattr(attn.inner, "branch", None) is not None and attn.projected == ("q", "k", "v")
    return is_branch and not has_norms and not attn.reads_tokens and not _do_more(attn.inner)


def fuse_position(position: PositionConv) -> None:
    """Let a conditional position be one step, where it can be."""
    position.fused = positioned if is_depthwise(position) else None


def positioned(position: PositionConv, x: Tensor, grid: TokenGrid) -> Tensor | None:
    """Tokens x (b, n, c) with their positions, in one step; None where no kernel does that."""
    grid.check(x)
    if not is_depthwise(position):
        return None
    return replayed(position, "position", lambda x: filtered(x, position, grid, adds=True), x, settings=grid)


def feed_forward(block: Any, x: Tensor, grid: TokenGrid) -> Tensor | None:
    """What `block.feed_forward` computes of x (b, n, c), in one step; None where it is no plain MLP any more."""
    return plain_mlp(block, x, scale_of(block.ls2)) if can_fuse(block) else None


def feed_forward_on_map(block: Any, x: Tensor, grid: TokenGrid) -> Tensor | None:
    """What `block.feed_forward` computes of x (b, n, c), in three steps; None where no kernel does that."""
    if not can_fuse_on_map(block):
        return None
    grid.check(x)
    mlp, scale = block.mlp, scale_of(block.ls2)
    return second_half_on_map(
        block, x, block.norm2, mlp.fc1, mlp.dwconv, mlp.fc2, scale, grid, in_front=mlp.in_front, behind=mlp.behind
    )


def plain_mlp(block: Any, x: Tensor, scale: Tensor | None) -> Tensor:
    """Tokens x (b, n, c) behind the second half of a block that has timm's MLP, in one step."""
    mlp, activation = block.mlp, activation_of(block.mlp.act)
    assert activation is not None
    return second_half(block, x, block.norm2, mlp.fc1, mlp.fc2, scale, activation=activation)


def is_scale(module: nn.Module) -> bool:
    """Whether this is a LayerScale, ours or timm's, or none."""
    return type(module) in (nn.Identity, LayerScale, TimmLayerScale)


def can_fuse(block: Any) -> bool:
    """Whether the second half of a block is what `subquad.ops.mlp_branch` computes, with nothing that listens to it."""
    return is_scale(block.ls2) and not does_more(block.ls2) and has_plain_mlp(block)


def can_fuse_on_map(block: Any) -> bool:
    """Whether the second half of a block is an MLP that sees the map, with nothing that listens to it."""
    mlp, norm = block.mlp, block.norm2
    if type(mlp) is not MapMlp or not (is_scale(block.ls2) and is_norm(norm)) or not drops_no_branch(block):
        return False
    plain = are_mlp(mlp.fc1, mlp.fc2) and activation_of(mlp.act) == "gelu" and is_depthwise(mlp.dwconv)
    plain = plain and drops_nothing(mlp.drop1, mlp.drop2)
    return plain and not _do_more(block.ls2, norm, mlp, *mlp.children())


def has_plain_mlp(block: Any) -> bool:
    """Whether norm and MLP of a block's second half are those of `subquad.ops.mlp_branch`, and nobody listens."""
    mlp, norm = block.mlp, block.norm2
    if type(mlp) is not Mlp or not is_norm(norm) or not drops_no_branch(block):
        return False
    plain = are_mlp(mlp.fc1, mlp.fc2) and activation_of(mlp.act) is not None and type(mlp.norm) is nn.Identity
    plain = plain and drops_nothing(mlp.drop1, mlp.drop2)
    return plain and not _do_more(norm, mlp, *mlp.children())


def _do_more(*modules: nn.Module) -> bool:
    """Whether one of these is to be called."""
    return any(map(does_more, modules))
