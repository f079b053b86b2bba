"""What can be had without any training: softmax through landmarks, as a line to compare trained conversions with.

Nyströmformer, Xiong et al. 2021, arXiv 2102.03902, eq. 13: with landmarks q̃ and k̃, means of queries and of keys over a
coarse grid, softmax(q k̃ᵀ) softmax(q̃ k̃ᵀ)⁺ softmax(q̃ kᵀ) v stands for softmax(q kᵀ) v. Cost 4 n m d + m³ a head with m
landmarks. The other row without training is agent attention as `convert` starts it: agents without biases.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.conversion.replacing import convert, converted_layers
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.ops import pool_tokens


class NystromAttention(nn.Module):
    """Softmax attention through `landmarks` of (height, width); prefix tokens are landmarks of their own."""

    inputs = ("q", "k", "v", "padding")

    def __init__(self, landmarks: tuple[int, int]) -> None:
        super().__init__()
        self.landmarks = TokenGrid(*landmarks)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None, *, grid: TokenGrid, kv_grid: TokenGrid
    ) -> Tensor:
        if padding is not None:
            raise SubquadError("landmarks without training take no padding")
        few_queries, few_keys = self.pooled(q, grid), self.pooled(k, kv_grid)
        of_keys = F.scaled_dot_product_attention(few_queries, k, v)
        between = soft_map(few_queries, few_keys).to(torch.promote_types(q.dtype, torch.float32))
        try:
            inverse = torch.linalg.pinv(between).to(q.dtype)
        except torch.linalg.LinAlgError:
            raise SubquadError("the map between landmarks has no pseudo-inverse: it is not finite") from None
        return soft_map(q, few_keys) @ (inverse @ of_keys)

    def pooled(self, tokens: Tensor, grid: TokenGrid) -> Tensor:
        """Prefix tokens and means over the coarse grid (b, h, m, d), no more of them than the map has places."""
        coarse = TokenGrid(min(self.landmarks.height, grid.height), min(self.landmarks.width, grid.width))
        return torch.cat([tokens[:, :, : grid.prefix], pool_tokens(tokens, grid, coarse)], dim=2)


def soft_map(q: Tensor, k: Tensor) -> Tensor:
    """softmax(q kᵀ / √d), (b, h, n, m)."""
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)


def convert_without_training(model: nn.Module, landmarks: tuple[int, int] = (7, 7), **settings: object) -> nn.Module:
    """A copy of a network whose attention goes through landmarks; see `convert` for the settings.

    It can be compared with its teacher and restored, but not kept in a file: there is nothing in it to keep.
    """
    student = convert(model, "linear", **settings)  # type: ignore[arg-type]
    for layer in converted_layers(student).values():
        layer.inner = NystromAttention(landmarks)
    return student
