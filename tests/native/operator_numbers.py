"""Numbers of tests of operators, and parts of their definitions in float64."""

import torch
from torch import Tensor

from subquad import TokenGrid
from subquad.rope import ROPES, AxialRope, tables_of

GRID = TokenGrid(9, 14, 2)
MAP = TokenGrid(5, 14)
HEADS, AGENTS = 3, 5
PIECES = (2, 5)
SCALE = 0.4


def tokens_of_heads(width: int, count: int = 1, tokens: int = GRID.num_tokens) -> tuple[Tensor, ...]:
    return torch.randn(2, tokens, count, HEADS, width, dtype=torch.float64).permute(2, 0, 3, 1, 4).unbind(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def rotation_tables(width: int, name: str = "mala", features: int = 1) -> tuple[Tensor | None, Tensor | None, bool]:
    """The tables of a published rotation of GRID in float64; none for heads that have no such pairs."""
    if width % 4:
        return None, None, True
    rope = AxialRope(width, HEADS, **ROPES[name])
    return tables_of(rope(GRID, torch.device("cpu"), torch.float64, feature_width=features))


def halved(v, same, opposite):
    """The streams' weights (b, h, n_q, n_k) times the halves of the values."""
    middle = (v.shape[-1] + 1) // 2
    return torch.cat([same @ v[..., :middle], opposite @ v[..., middle:]], dim=-1)


def block_features(x, scale):
    normed = x * (x.square().mean(dim=(1, 3), keepdim=True) + torch.finfo(torch.float32).eps).rsqrt()
    return (normed * scale).relu() + 1e-6


def branched(y, v, weight, bias, whose):
    """A core's y with the local branch of v, whose f filters (f, 1, w, w) are a channel's or a head's."""
    each = {"channel": lambda x: x, "head_channel": lambda x: x.repeat(HEADS, *[1] * (x.dim() - 1))}
    each["head"] = lambda x: x.repeat_interleave(v.shape[-1], dim=0)
    weight, bias = each[whose](weight), None if bias is None else each[whose](bias)
    padding = weight.shape[-1] // 2
    image = torch.nn.functional.conv2d(GRID.to_map(v), weight, bias, padding=padding, groups=len(weight))
    return y + GRID.to_heads(image, HEADS)
