"""ViT, the plain host: all tokens attend to all, in one stage. DeiT, Touvron et al. 2020, arXiv 2012.12877.

Images of any size: they are padded to whole patches and the position table is resampled to their grid.
"""

from collections.abc import Sequence

import torch
from timm.layers import PatchEmbed, resample_abs_pos_embed, trunc_normal_
from timm.models import checkpoint
from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.models.layers import Block, Mechanism, SelfAttention


class ViT(nn.Module):
    """A plain vision transformer.

    Args:
        attention: the mechanism of each block.
        img_size: (height, width) in pixels that position parameters are made for; other sizes work.
        embed_dim: channels c.
        num_heads: heads of every block.
        class_token: a learned token in front, which the head reads; without it the head reads the mean.
        reg_tokens: further learned tokens in front, which nothing reads (registers, arXiv 2309.16588).
        drop_path_rate: stochastic depth of the last block; it rises linearly from 0.
    """

    def __init__(
        self,
        attention: Sequence[Mechanism],
        *,
        img_size: tuple[int, int] = (224, 224),
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 768,
        num_heads: int = 12,
        mlp_ratio: float = 4,
        class_token: bool = True,
        reg_tokens: int = 0,
        drop_rate: float = 0,
        drop_path_rate: float = 0,
    ) -> None:
        super().__init__()
        if min(img_size) < 1 or patch_size < 1:
            raise SubquadError(
                f"an image of {img_size[0]}×{img_size[1]} px in patches of {patch_size} px has no tokens"
            )
        self.img_size, self.patch_size = img_size, patch_size
        self.num_classes, self.num_features = num_classes, embed_dim
        self.grad_checkpointing = False
        self.patch_embed = PatchEmbed(
            img_size,
            patch_size,
            in_chans,
            embed_dim,
            output_fmt="NHWC",
            flatten=False,
            strict_img_size=False,
            dynamic_img_pad=True,
        )
        height, width = self.patch_embed.dynamic_feat_size(img_size)
        self.grid = TokenGrid(height, width, int(class_token) + reg_tokens)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, reg_tokens, embed_dim)) if reg_tokens else None
        self.pos_embed = nn.Parameter(torch.zeros(1, self.grid.num_tokens, embed_dim))
        self.pos_drop = nn.Dropout(drop_rate)
        rates = torch.linspace(0, drop_path_rate, len(attention), device="cpu").tolist()
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                SelfAttention(embed_dim, num_heads, mechanism, grid=self.grid),
                mlp_ratio=mlp_ratio,
                drop=drop_rate,
                drop_path=rate,
            )
            for mechanism, rate in zip(attention, rates, strict=True)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        self.init_weights()

    def init_weights(self) -> None:
        """Linear layers and tables: truncated normal, std 0.02. Mechanisms have initialised their own parameters."""
        for table in (self.pos_embed, self.cls_token, self.reg_token):
            if table is not None:
                trunc_normal_(table, std=0.02)
        self.apply(_init_linear)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (b, in_chans, height, width) to normed tokens (b, n, c), prefix tokens first."""
        x = self.patch_embed(x)
        grid = TokenGrid(x.shape[1], x.shape[2], self.grid.prefix)
        x = self.pos_drop(self._with_prefix(x.flatten(1, 2)) + self._positions(grid))
        for block in self.blocks:
            if self.grad_checkpointing and self.training and not torch.jit.is_scripting():
                x = checkpoint(block, x, grid=grid)
            else:
                x = block(x, grid=grid)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (b, n, c) to logits (b, num_classes), or to the features that the head reads."""
        x = x[:, 0] if self.cls_token is not None else x[:, self.grid.prefix :].mean(dim=1)
        return x if pre_logits else self.head(self.head_drop(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def _with_prefix(self, x: Tensor) -> Tensor:
        tokens = [token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        return torch.cat([*tokens, x], dim=1)

    def _positions(self, grid: TokenGrid) -> Tensor:
        if grid == self.grid:
            return self.pos_embed
        return resample_abs_pos_embed(
            self.pos_embed, list(grid.shape), list(self.grid.shape), num_prefix_tokens=grid.prefix
        )

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """A new head for `num_classes` classes, on the old one's device; 0 for none."""
        like = self.pos_embed
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.head.apply(_init_linear).to(device=like.device, dtype=like.dtype)

    def no_weight_decay(self) -> set[str]:
        """Parameters that the papers' recipes do not decay."""
        return {"pos_embed", "cls_token", "reg_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, object]:
        """Layer groups, for layer-wise learning rates."""
        return {
            "stem": r"^(?:cls_token|reg_token|pos_embed|patch_embed)",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade time for memory in training: blocks are computed again in the backward pass."""
        self.grad_checkpointing = enable


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
