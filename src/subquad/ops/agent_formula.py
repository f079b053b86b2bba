"""Agent attention: two softmax attentions through a few agents A. Linear in n: 4 n a d products a head.

    v_A = softmax(s A Kᵀ + B₁) V        o = softmax(s Q Aᵀ + B₂) v_A,  s = d^-1/2

Han et al. 2023, arXiv 2312.08874, eq. 4, with the scale and the biases of the released code.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from subquad import kernels, spread
from subquad.ops.padding import zero_padding
from subquad.ops.precision import in_fp32, kept_in_fp32, of_widest_dtype
from subquad.ops.softmax_formula import pytorch_softmax
from subquad.ops.weighted_sums import raised, relative_to_all
from subquad.positions import BiasTables
from subquad.tracing import is_traced

SHAPES = kernels.Shapes(
    "agent attention",
    q="b h n d",
    agents="b h a d",
    k="b h m d",
    v="b h m d",
    key_bias="h a m",
    query_bias="h n a",
    padding="b m",
    idle="b a",
)
WEIGHTS_SHAPES = SHAPES.without("v")
TABLES_SHAPES = kernels.Shapes("a bias of tables", block="h a s t", rows="h a y", columns="h a x", prefix="h a p")


def agent_attention(
    q: Tensor,
    agents: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Tensor | BiasTables,
    query_bias: Tensor | BiasTables,
    padding: Tensor | None = None,
    idle: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """(b, h, n_q, d) from q (b, h, n_q, d), agents (b, h, a, d), k and v (b, h, n_k, d).

    `key_bias` (h, a, n_k) is B₁, `query_bias` (h, n_q, a) is B₂, or each is the tables of (h, a, n); `padding` (b, n_k)
    and `idle` (b, a) leave out keys and agents.
    """
    _check_biases(agents, k, q, key_bias, query_bias)
    SHAPES.check(q, agents, k, v, _tensor(key_bias), _tensor(query_bias), padding, idle)
    tokens, beyond = (q, agents.contiguous(), k, v), (padding, idle)

    def with_biases(*tensors: Tensor | None) -> Tensor:
        return kernels.compute(kernels.agent_attention, _agent, tensors, (), beyond, backend=backend)

    def with_tables(q: Tensor, agents: Tensor, k: Tensor, v: Tensor, *tables: Tensor | None) -> Tensor:
        biases = BiasTables(*tables[:4]), BiasTables(*tables[4:8])  # type: ignore[arg-type]
        return with_biases(q, agents, k, v, *map(_written_out, biases))

    if isinstance(key_bias, BiasTables) and isinstance(query_bias, BiasTables):
        tensors = *tokens, *key_bias, *query_bias
        operator = kernels.agent_attention_of_tables
        return kernels.compute(operator, with_tables, tensors, (), beyond, backend=backend, optional=True)
    agents_first = query_bias.mT if isinstance(query_bias, Tensor) else query_bias
    return with_biases(*tokens, _written_out(key_bias), _written_out(agents_first))


def _tensor(bias: Tensor | BiasTables) -> Tensor | None:
    return bias if isinstance(bias, Tensor) else None


def _check_biases(agents: Tensor, k: Tensor, q: Tensor, *biases: Tensor | BiasTables) -> None:
    """Raise where tables are not those of these agents and as many places as there are keys and queries."""
    for bias, tokens in zip(biases, (k, q), strict=True):
        if isinstance(bias, Tensor):
            continue
        TABLES_SHAPES.check(*bias, h=agents.shape[1], a=agents.shape[2])
        bias.grid.check(tokens)


def _agent(
    q: Tensor,
    agents: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Tensor,
    query_bias: Tensor,
    padding: Tensor | None = None,
    idle: Tensor | None = None,
) -> Tensor:
    """Compute it with biases (h, a, n), both with agents in front."""
    dtype, (q, agents, k, v) = q.dtype, of_widest_dtype(q, agents, k, v)
    # a weight of nothing makes nothing of any number, but not of NaN
    k, v = zero_padding(k, padding), zero_padding(v, padding)
    key_bias = _forbid(key_bias.to(q.dtype), padding)
    query_bias = _forbid(query_bias.mT.to(q.dtype), idle)
    if spread.is_spread():
        _, *sums = relative_to_all(agent_sums(agents, k, v, key_bias))
        values = _quotient(spread.sums(*sums)).to(v.dtype)
    elif _maps_are_small(q, agents):
        scaled = agents * q.shape[-1] ** -0.5
        values = (scaled @ k.mT + key_bias).softmax(dim=-1) @ v
    else:
        values = pytorch_softmax(agents, k, v, key_bias)
    return _distributed(q, agents, values, query_bias.mT).to(dtype)


def _distributed(q: Tensor, agents: Tensor, values: Tensor, query_bias: Tensor) -> Tensor:
    """What queries (b, h, n, d), with biases (h, a, n), get of what agents have (b, h, a, d)."""
    if _maps_are_small(q, agents):
        scaled = agents * q.shape[-1] ** -0.5
        # agents in front, so that the softmax over a few of them runs along the tokens
        return (scaled @ q.mT + query_bias).softmax(dim=-2).mT @ values
    return pytorch_softmax(q, agents, values, query_bias.mT)


@kept_in_fp32
def agent_sums(agents: Tensor, k: Tensor, v: Tensor, key_bias: Tensor) -> tuple[Tensor, ...]:
    """What agents (b, h, a, d) collect from keys and values (b, h, n, d) with biases (h, a, n), by `merge_weighted`.

    The state has m and the sum of weights (b, h, a, 1), and Σ e^(s − m) v (b, h, a, d).
    """
    most, weights = raised(agents @ k.mT * k.shape[-1] ** -0.5 + key_bias)
    return most, weights.sum(dim=-1, keepdim=True), weights @ v


@in_fp32
def agent_answers(q: Tensor, agents: Tensor, sums: Sequence[Tensor], query_bias: Tensor) -> Tensor:
    """What some queries (b, h, n, d), with biases (h, a, n), get of what agents collected from all keys."""
    return _distributed(q, agents, _quotient(sums[1:]), query_bias)


def _quotient(sums: Sequence[Tensor]) -> Tensor:
    """The mean (b, h, a, d) of values, from the sum of weights and that of weighted values."""
    total, values = sums
    return values / total


def _written_out(bias: Tensor | BiasTables) -> Tensor:
    """(h, a, n) of tables, and of what is that already."""
    return bias if isinstance(bias, Tensor) else bias.written_out()


SMALL = 2**20
"""Entries of one softmax map up to which it pays on a CPU to write the maps out."""


def _maps_are_small(q: Tensor, agents: Tensor) -> bool:
    """Whether both softmax maps are written out: on a CPU, in full precision, where they stay in its cache.

    There the fused kernel, which is made for many keys, is up to twice as slow (9 agents, 3,136 tokens: 2.0 against
    1.0 ms forward, 10.3 against 5.8 with backward).
    """
    full = q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64)
    return full and not is_traced() and agents.shape[:-1].numel() * q.shape[-2] <= SMALL


@in_fp32
def agent_weights(
    q: Tensor,
    agents: Tensor,
    k: Tensor,
    key_bias: Tensor | BiasTables,
    query_bias: Tensor | BiasTables,
    padding: Tensor | None = None,
    idle: Tensor | None = None,
) -> Tensor:
    """Explicit weights (b, h, n_q, n_k) of `agent_attention`: the product of its two softmax maps."""
    _check_biases(agents, k, q, key_bias, query_bias)
    WEIGHTS_SHAPES.check(q, agents, k, _tensor(key_bias), _tensor(query_bias), padding, idle)
    scale = q.shape[-1] ** -0.5
    key_bias = _written_out(key_bias)
    query_bias = query_bias if isinstance(query_bias, Tensor) else query_bias.written_out().mT
    aggregate = (agents @ zero_padding(k, padding).mT * scale + _forbid(key_bias, padding)).softmax(dim=-1)
    broadcast = (q @ agents.mT * scale + _forbid(query_bias, idle)).softmax(dim=-1)
    return broadcast @ aggregate


def _forbid(bias: Tensor, absent: Tensor | None) -> Tensor:
    """Bias (h, i, j) as (b, h, i, j) with the lowest number where column j is `absent` (b, j)."""
    bias = bias[None]
    return bias if absent is None else bias.masked_fill(absent[:, None, None, :], torch.finfo(bias.dtype).min)
