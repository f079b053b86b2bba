"""timm's plain networks (ViT, DeiT, DINOv2; EVA and DINOv3 with rotary positions) as what a walk asks of them.

Their blocks are called as they are; positions of some rows are formed here, from the network's table. Images of any
size go through, also where the network was not made with `dynamic_img_size` and `dynamic_img_pad`, as if it had been.

Letters: n tokens, c channels, d channels of a head, p prefix tokens, y x rows and columns.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import GluMlp, Mlp, PatchEmbed, SwiGLU
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaBlock
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from subquad.attention.bricks import ConvLayer, is_conv, is_heard
from subquad.errors import SubquadError
from subquad.grid import GridRows, TokenGrid
from subquad.inference.timm_blocks import FUSED
from subquad.large.block_walks import check_is_not_heard
from subquad.large.streaming import StreamedBlocks
from subquad.models.stages import ImageRows
from subquad.positions import resample_places

NETWORKS = {VisionTransformer: Block, VisionTransformerDistilled: Block, Eva: EvaBlock}
"""The networks that are known, and the block that each must be of."""
MLPS = (Mlp, GluMlp, SwiGLU)
"""Those that look at one token at a time."""
POOLS = ("avg", "max", "token")
PREFIX_TOKENS = ("cls_token", "dist_token", "reg_token")
"""In the order in which they stand in front of the map."""


def is_plain_of_timm(model: nn.Module) -> bool:
    """Whether it is one of timm's plain networks, converted or not."""
    return type(model) in NETWORKS


class TimmHost:
    """A plain network of timm whose attention layers were converted."""

    def __init__(self, model: Any) -> None:
        self.model, self.fc_norm = model, model.fc_norm
        self.global_pool: str | None = model.global_pool
        self.in_chans, self.patch_size = model.patch_embed.proj.weight.shape[1], model.patch_embed.patch_size
        self.num_features, self.num_classes = model.num_features, model.num_classes
        heads = [getattr(model, name, None) for name in ("head", "head_dist")] if self.num_classes else []
        self.heads: Sequence[Any] = [head for head in heads if head is not None]
        self.prefix = [token for name in PREFIX_TOKENS if (token := getattr(model, name, None)) is not None]
        self._check()

    def _check(self) -> None:
        """Raise a SubquadError where the network has a part that is not known here."""
        model, name = self.model, type(self.model).__name__
        wanted = NETWORKS[type(model)]
        odd = [block for block in model.blocks if type(block) not in (wanted, FUSED[wanted])]
        if type(model.patch_embed) is not PatchEmbed:
            raise SubquadError(f"{name} can't be streamed: it is embedded by a {type(model.patch_embed).__name__}")
        check_is_not_heard(model.patch_embed)
        if odd:
            raise SubquadError(f"{name} can't be streamed: it has {type(odd[0]).__name__}s, not {wanted.__name__}s")
        if other := [block.mlp for block in model.blocks if type(block.mlp) not in MLPS]:
            raise SubquadError(f"{name} can't be streamed: a {type(other[0]).__name__} may look beyond a token")
        if getattr(model, "attn_pool", None) is not None or getattr(model, "pool_include_prefix", False):
            raise SubquadError(
                f"{name} can't be streamed with the pool that its head has ('{model.global_pool}'): call "
                "model.reset_classifier(0, 'avg') and ask for features"
            )
        if model.global_pool not in POOLS:
            raise SubquadError(
                f"{name} can't be streamed: its head reads '{model.global_pool}' of the tokens, not {', '.join(POOLS)}"
            )
        if getattr(model, "rope_mixed", False):
            raise SubquadError(f"{name} can't be streamed: its blocks turn tokens each by angles of their own")

    def image(self, image: ImageRows) -> ImageRows:
        return image

    def stages(self, size: tuple[int, int]) -> list[StreamedBlocks]:
        height, width = (-(-side // patch) for side, patch in zip(size, self.patch_size, strict=True))
        grid = TokenGrid(height, width, sum(token.shape[1] for token in self.prefix))
        table = self._rotary_table(grid)

        def call(block: Any, x: Tensor, rows: GridRows) -> Tensor:
            if table is None:
                y: Tensor = block(x)
            else:
                places = rows.without_prefix
                y = block(x, rope=places.own_tokens(table))
            return y

        blocks = list(self.model.blocks)
        return [StreamedBlocks(grid, self.num_features, blocks, self._embed, call, _none, nn.Identity())]

    def normed(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.model.norm(tokens)
        return y

    def logits(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.model.forward_head(tokens)
        return y

    def _embed(self, image: ImageRows, rows: GridRows) -> Tensor:
        """The tokens (1, n, c) that go into the blocks, of some rows."""
        patch_embed: Any = self.model.patch_embed
        first, behind = (row * self.patch_size[0] for row in (rows.first, rows.behind))
        x = image.rows(first, min(behind, image.shape[0]))
        x = F.pad(x, (0, rows.width * self.patch_size[1] - image.shape[1], 0, behind - first - x.shape[2]))
        tokens = patch_embed.norm(self._projected(x))
        of_prefix = [token.expand(len(tokens), -1, -1) for token in self.prefix] if rows.prefix else []
        table = self.model.pos_embed
        if table is None:
            tokens = torch.cat([*of_prefix, tokens], dim=1)
        elif self.model.no_embed_class:
            tokens = tokens + self._positions(table, 0, rows.without_prefix)
            tokens = torch.cat([*of_prefix, tokens], dim=1)
        else:
            tokens = torch.cat([*of_prefix, tokens], dim=1)
            tokens = tokens + self._positions(table, rows.whole.prefix, rows)
        normed: Tensor = self.model.norm_pre(self.model.pos_drop(tokens))
        return normed

    def _projected(self, x: Tensor) -> Tensor:
        """The patches (1, n, c) of rows of an image (1, channels, y, x)."""
        proj = self.model.patch_embed.proj
        if not is_conv(proj) or is_heard(proj):
            # what others make of it is not in its weight, or wants to see it called
            return rearrange(proj(x), "b c y x -> b (y x) c")
        patches = rearrange(x, "b c (y i) (x j) -> b (y x) (c i j)", i=self.patch_size[0], j=self.patch_size[1])
        product = proj.product if isinstance(proj, ConvLayer) else F.linear
        return product(patches, proj.weight.flatten(1), proj.bias)

    def _positions(self, table: Tensor, prefix: int, rows: TokenGrid) -> Tensor:
        """The rows of a table of positions (1, n, c), resampled as timm does it."""
        height, width = self.model.patch_embed.grid_size
        return resample_places(table, TokenGrid(height, width, prefix), rows, "bicubic")

    def _rotary_table(self, grid: TokenGrid) -> Tensor | None:
        """Sines and cosines (y·x, 2d) of all places; None for a network that has no rotary positions."""
        rope: Any = getattr(self.model, "rope", None)
        if rope is None:
            return None
        own = not self.model.dynamic_img_size
        if own and grid.shape != tuple(self.model.patch_embed.grid_size):
            raise SubquadError(
                f"rotary positions of this network are of {self.model.patch_embed.grid_size} tokens, and the image has "
                f"{grid.shape}: make it with timm.create_model(…, dynamic_img_size=True)"
            )
        table: Tensor = rope.get_embed() if own else rope.get_embed(shape=grid.shape)
        return table


def _none(block: Any, rows: GridRows) -> None:
    """How tokens turn: what blocks are called with says it."""
