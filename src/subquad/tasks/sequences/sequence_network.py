"""A classifier of sequences: the small network of the Long Range Arena, whose mixing is any mechanism.

Tokens are numbers, 0 is padding. As in Nyströmformer (Xiong et al. 2021, arXiv 2102.03902) and Skyformer (Chen et al.
2021, arXiv 2111.00035): 2 pre-norm blocks of width 64, learned positions, the mean of the tokens, a small head. Unlike
theirs the mean is over the tokens that are there; mechanisms have no dropout on their weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention import ATTENTION, traits_of
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.models.assembling import as_json, check_names, make_mechanisms
from subquad.models.attention_names import Names, parse_blocks
from subquad.models.layers import Block, Mechanism, SelfAttention
from subquad.ops.padding import mean_present
from subquad.ranges import DropRate, Positive, Ratio, checks_arguments
from subquad.tracing import insist, is_traced


class SequenceClassifier(nn.Module):
    """Sequences of numbers (b, n) to logits (b, num_classes); pairs of them (b, 2, n) where `pairs`.

    Padding is left out of every sum and mean: an answer does not depend on how much of it there is, nor on the other
    sequences of a batch. So sequences of like length are computed together, and only up to the longest of them; where
    mechanisms pool over the grid, all are filled up to `max_length`, whose parts the agents and landmarks stand for.

    Args:
        attention: the mechanism of each block.
        pooling: whether one of them pools over the grid.
        vocab_size: tokens there are, padding among them.
        max_length: tokens a sequence has at most.
        num_classes: classes of the head.
        embed_dim: channels.
        num_heads: heads of every block.
        mlp_ratio: width of the MLPs over `embed_dim`.
        drop_rate: dropout behind the embedding, the attention and the layers of the MLPs.
        pairs: read two sequences u, v with one network, and the head [u, v, u·v, u − v].
    """

    @checks_arguments
    def __init__(
        self,
        attention: Sequence[Mechanism],
        *,
        pooling: bool,
        vocab_size: Positive,
        max_length: Positive,
        num_classes: Positive,
        embed_dim: Positive = 64,
        num_heads: Positive = 2,
        mlp_ratio: Ratio = 2,
        drop_rate: DropRate = 0.1,
        pairs: bool = False,
    ) -> None:
        super().__init__()
        self.creation: dict[str, Any] = {}
        self.max_length, self.num_classes, self.pairs, self.pooling = max_length, num_classes, pairs, pooling
        self.embed = nn.Embedding(vocab_size, embed_dim)
        self.pos_embed = nn.Parameter(torch.empty(max_length, embed_dim))
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.pos_embed, std=0.02)
        self.drop = nn.Dropout(drop_rate)
        self.blocks = nn.ModuleList(
            SequenceBlock(
                embed_dim,
                SelfAttention(embed_dim, num_heads, mechanism, grid=TokenGrid(1, max_length)),
                mlp_ratio=mlp_ratio,
                drop=drop_rate,
                eps=1e-5,
            )
            for mechanism in attention
        )
        self.norm = nn.LayerNorm(embed_dim)
        width = 2 * embed_dim
        self.head = nn.Sequential(
            nn.Linear(embed_dim * (4 if pairs else 1), width), nn.ReLU(), nn.Linear(width, num_classes)
        )

    def no_weight_decay(self) -> set[str]:
        """Parameters that are tables."""
        return {"embed.weight", "pos_embed"}

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class.

        Raises:
            SubquadError: for a sequence that is too long, not of the shape that the network reads, or not of its
                tokens.
        """
        self._check(tokens)
        if not self.pairs:
            return self.head(self.encode(tokens))
        u, v = self.encode(tokens.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
        return self.head(torch.cat([u, v, u * v, u - v], dim=-1))

    def _check(self, tokens: Tensor) -> None:
        """Raise where these are no sequences of the network's tokens."""
        shape, dtype = tuple(tokens.shape), str(tokens.dtype).removeprefix("torch.")
        if tokens.dim() != 2 + self.pairs or (self.pairs and tokens.shape[1] != 2):
            wanted = "pairs of sequences (b, 2, n)" if self.pairs else "sequences (b, n)"
            raise SubquadError(f"expected {wanted}, got shape {shape}")
        if tokens.dtype not in (torch.int64, torch.int32):
            raise SubquadError(f"tokens are numbers of int64 or int32, got {dtype}: hand over tokens.long()")
        if is_traced() or not tokens.numel():
            return
        least, most = (int(one) for one in tokens.aminmax())
        if least < 0 or most >= self.embed.num_embeddings:
            raise SubquadError(
                f"tokens are numbers from 0, which is padding, to {self.embed.num_embeddings - 1}, got "
                f"{least if least < 0 else most}: make the network with another vocab_size to take these"
            )

    def encode(self, tokens: Tensor) -> Tensor:
        """Sequences (b, n) to the means of their tokens (b, c)."""
        tokens = self._fill_up(tokens)
        # of no sequences there is none to be computed with those of its length
        if self.pooling or is_traced() or not len(tokens):
            return self._mean_token(tokens)
        order, groups = by_length(tokens)
        return torch.cat([self._mean_token(group) for group in groups])[order.argsort()]

    def _mean_token(self, tokens: Tensor) -> Tensor:
        absent, length = tokens == 0, tokens.shape[1]
        # kernels know no padding: they are for sequences that have none, as those of images
        padding = absent if is_traced() or absent.any() else None
        x = self.drop(self.embed(tokens) + self.pos_embed[:length])
        for block in self.blocks:
            x = block(x, grid=TokenGrid(1, length), padding=padding)
        return mean_present(self.norm(x), absent)

    def _fill_up(self, tokens: Tensor) -> Tensor:
        """Fill up to `max_length` tokens; padding beyond it is cut off, but nothing else."""
        length = tokens.shape[-1]
        if length > self.max_length:
            is_cut = tokens[:, self.max_length :].any()
            if is_traced():
                insist(
                    ~is_cut,
                    f"a sequence is longer than the {self.max_length} tokens that the network is made for: cut it",
                )
            elif is_cut:
                longest = int(lengths_of(tokens).max())
                raise SubquadError(f"a sequence of {longest} tokens, the network is made for {self.max_length}: cut it")
            return tokens[:, : self.max_length]
        return F.pad(tokens, (0, self.max_length - length))


def lengths_of(tokens: Tensor) -> Tensor:
    """Tokens of each sequence (b, n) up to the last that is not padding, (b,)."""
    places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    return ((tokens != 0) * places).amax(1)


def by_length(tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Sequences (b, n) in the order of their lengths, (b,), and in groups that end at the longest of each.

    A group is as much as keeps a CPU busy, 2^12 tokens a thread (measured at width 64, where more tokens leave the
    cache); elsewhere the batch is one group, as is a batch whose lengths are all the same.
    """
    lengths, order = lengths_of(tokens).clamp(min=1).sort()
    size, shortest, longest = len(tokens), int(lengths[0]), int(lengths[-1])
    if tokens.device.type == "cpu" and shortest < longest:
        size = max(1, 2**12 * torch.get_num_threads() // longest)
    parts = zip(order.split(size), lengths.split(size), strict=True)
    return order, [tokens[group, : int(ends[-1])] for group, ends in parts]


class SequenceBlock(Block):
    """A block that leaves out padding, with dropout on what attention gives."""

    def __init__(self, *arguments: Any, drop: float = 0, **settings: Any) -> None:
        super().__init__(*arguments, drop=drop, **settings)
        self.drop = nn.Dropout(drop)

    def forward(  # type: ignore[override]
        self, x: Tensor, *, grid: TokenGrid, padding: Tensor | None = None
    ) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x), grid=grid, padding=padding))
        return x + self.mlp(self.norm2(x))


SIZES = frozenset({"embed_dim", "num_heads", "mlp_ratio", "drop_rate", "pairs"})


@checks_arguments
def create_sequence_model(
    attention: Names = "softmax",
    *,
    vocab_size: Positive,
    max_length: Positive,
    num_classes: Positive,
    depth: Positive = 2,
    **settings: Any,
) -> SequenceClassifier:
    """A `SequenceClassifier` with mechanisms by name; its `creation` holds the arguments of this call.

    Args:
        attention: one mechanism for all blocks, or one for each, see `create_model`.
        vocab_size: tokens there are, padding among them.
        max_length: tokens a sequence has at most.
        num_classes: classes of the head.
        depth: blocks.
        settings: further arguments of the network, and those of the mechanisms.

    Raises:
        SubquadError: for a name, a setting or a number that does not fit, in one line.
    """
    settings = {key: value for key, value in settings.items() if value is not None}
    given = {"attention": attention, "vocab_size": vocab_size, "max_length": max_length, "num_classes": num_classes}
    given |= {"depth": depth, **settings}
    blocks = parse_blocks(attention, (depth,))
    check_names(settings, set(SIZES), {mechanism for mechanism, _ in blocks})
    own = {key: value for key, value in settings.items() if key in SIZES}
    others = {key: value for key, value in settings.items() if key not in SIZES}
    mechanisms = make_mechanisms("sequence", blocks, (depth,), others)
    model = SequenceClassifier(
        mechanisms,
        pooling=any(traits_of(ATTENTION[mechanism]).pools for mechanism, _ in blocks),
        vocab_size=vocab_size,
        max_length=max_length,
        num_classes=num_classes,
        **own,
    )
    model.creation = {"task": "lra", **as_json(given)}
    return model
