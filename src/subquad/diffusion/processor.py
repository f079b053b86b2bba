"""Self-attention on merged tokens, through agents: AgentSD, Han et al. 2023, arXiv 2312.08874, section 4.4.

    V_A = softmax(d^-½ G Kᵀ) V        O = softmax(d^(-k_scale/2) Q Gᵀ) V_A + k_shortcut V

Q, K, V of the merged tokens; G, the agents' queries, of the same tokens merged further. Nothing is learned.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from subquad.diffusion.settings import Settings
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.ops.merging import Matching, Merge, match

FUSED = "FusedAttnProcessor2_0"
"""The processor of diffusers that reads one layer in place of three."""


MOST_CALLS = 64
"""Of a network at one noise level whose matchings are kept: images of a single step each are all at the same one."""


class Shared:
    """What all patched blocks of one network share: the settings that hold now, and what is kept between blocks.

    Attributes:
        settings: of the phase that holds now.
        random: whether destinations are drawn.
        reuse: for how many steps a map's matching holds, in all blocks on maps of that size; 0 to match in each block.
        said_off: whether it was said that something else has been put in the place of the processors.
        said_late: whether it was said that an image begins where the late phase ends.
    """

    def __init__(self, settings: Settings, random: bool = False, reuse: int = 0) -> None:
        self.settings, self.random, self.reuse = settings, random, reuse
        self.said_off = self.said_late = False
        self.level, self.age, self.call = -math.inf, 0, 0
        self.begins = True
        self.offsets: dict[tuple[int, ...], Tensor] = {}
        self.matchings: dict[tuple[int, ...], Matching | None] = {}

    def enter(self, level: float) -> None:
        """Forget what does not hold in a step at this noise level, which is below the last one's in the same image."""
        # other dicts, not emptied ones: calls whose blocks are to be called again in a backward pass have these
        if level == self.level and self.call + 1 < MOST_CALLS:
            # another part or view of the same step, which the next step has as well
            self.call += 1
            return
        if level != self.level:
            self.offsets = {}
        falls = level < self.level
        # of several calls at an image's first level some may have been of another image, which was broken off there
        holds = falls and not (self.begins and self.call)
        self.age = self.age + 1 if holds else self.reuse
        self.begins, self.level, self.call = not falls, level, 0
        if self.age >= self.reuse:
            self.matchings = {}
            self.age = 0

    def matching(self, tokens: Tensor, grid: TokenGrid) -> Matching | None:
        """How the tokens of a map are matched, or were in an earlier block or step."""
        rows, columns = self.settings.cell(grid.height, grid.width)
        offsets = self.draw(grid, tokens.device)
        if not self.reuse:
            return match(tokens, grid, (rows, columns), offsets)
        key = self.call, grid.height, grid.width, rows, columns, len(tokens)
        if key not in self.matchings:
            self.matchings[key] = match(tokens, grid, (rows, columns), offsets)
        return self.matchings[key]

    def cuts(self, tokens: Tensor, grid: TokenGrid) -> tuple[Merge, Merge | None] | None:
        """How features are merged and how agents, if there are any; None where nothing is."""
        settings, n = self.settings, tokens.shape[1]
        if int(n * settings.ratio) < 1:
            return None
        matching = self.matching(tokens, grid)
        if matching is None:
            return None
        features, more = matching.cut(int(n * settings.ratio)), settings.merged_for_agents(n)
        if more is None or 2 * (n - min(more, matching.sources.shape[1])) >= features.count:
            return features, None
        return features, matching.cut(more)

    def draw(self, grid: TokenGrid, device: torch.device) -> Tensor | None:
        """Which token of each cell is a destination, the same in all blocks and calls of a step; None: the first."""
        height, width = grid.height, grid.width
        rows, columns = self.settings.cell(height, width)
        if not self.random or height < rows or width < columns:
            return None
        key = height, width, rows, columns
        if key not in self.offsets:
            # the same on all devices
            self.offsets[key] = torch.randint(rows * columns, (height // rows, width // columns)).to(device)
        return self.offsets[key]


@dataclass(frozen=True)
class Told:
    """What blocks are told in one call of the network: the size of their map, and what held then."""

    grid: TokenGrid
    state: Shared


class MergedAttention:
    """A processor of diffusers for a block's self-attention, which is given the block's tokens before their norm.

    Made without arguments, as loading an IP-Adapter does with the class of whatever is in place, it is plain attention.
    """

    def __init__(self, original: Any = None, shared: Shared | None = None) -> None:
        self.is_plain = original is None
        if original is None:
            from diffusers.models.attention_processor import AttnProcessor2_0

            original = AttnProcessor2_0()
        self.original, self.shared = original, shared or Shared(Settings(ratio=0.0))
        self.grid: TokenGrid | None = None
        self.again: Told | None = None
        self.tokens: Tensor | None = None
        self.features: Merge | None = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        tokens, self.tokens = self.tokens, None
        again, self.again = self.again, None
        grid, state = (self.grid, self.shared) if again is None else (again.grid, again.state)
        if tokens is not None and tokens.shape[1] != hidden_states.shape[1]:
            raise SubquadError(
                f"self-attention is given {hidden_states.shape[1]} of its block's {tokens.shape[1]} tokens: something "
                "else, such as tomesd, merges them as well; take one of the two away"
            )
        cuts = None
        if tokens is not None and grid is not None and encoder_hidden_states is None and attention_mask is None:
            cuts = state.cuts(tokens, grid)
        if cuts is None:
            return self.original(attn, hidden_states, encoder_hidden_states, attention_mask, *args, **kwargs)
        settings, (features, coarse) = state.settings, cuts
        self.features = features if settings.merge_mlp else None
        x = features.merge(hidden_states)
        q, k, v = (_heads(part, attn.heads) for part in self._projected(attn, x))
        q, k = _normed(attn.norm_q, q), _normed(attn.norm_k, k)
        if coarse is None:
            y = F.scaled_dot_product_attention(q, k, v, scale=attn.scale)
        else:
            queries, *_ = self._projected(attn, coarse.merge(hidden_states), queries_alone=True)
            agents = _normed(attn.norm_q, _heads(queries, attn.heads))
            y = merged_agent_attention(q, k, v, agents, attn.scale, settings.k_scale, settings.k_shortcut)
        y = attn.to_out[1](attn.to_out[0](rearrange(y, "b h n d -> b n (h d)").to(q.dtype)))
        return features.unmerge(y) / attn.rescale_output_factor

    def _projected(self, attn: Any, x: Tensor, queries_alone: bool = False) -> Sequence[Tensor]:
        """Queries, keys and values (b, n, h·d) of tokens, by the layers that the original processor reads."""
        if type(self.original).__name__ == FUSED:
            # the three that were fused are still there, and as they were then
            parts: Sequence[Tensor] = attn.to_qkv(x).chunk(3, dim=-1)
            return parts
        return [project(x) for project in (attn.to_q, attn.to_k, attn.to_v)[: 1 if queries_alone else 3]]


def merged_agent_attention(
    q: Tensor, k: Tensor, v: Tensor, agents: Tensor, scale: float, k_scale: float, k_shortcut: float
) -> Tensor:
    """(b, h, n, d) from q, k and v (b, h, n, d) and agents (b, h, m, d), in two fused attentions."""
    values = F.scaled_dot_product_attention(agents, k, v, scale=scale)
    return F.scaled_dot_product_attention(q, agents, values, scale=scale**k_scale) + k_shortcut * v


def _heads(x: Tensor, count: int) -> Tensor:
    return rearrange(x, "b n (h d) -> b h n d", h=count)


def _normed(norm: Any, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
