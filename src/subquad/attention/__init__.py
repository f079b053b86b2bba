"""How gathered tokens are mixed: one file a mechanism."""

from torch import nn

from subquad.attention.agent import AgentAttention
from subquad.attention.focused import FocusedAttention
from subquad.attention.inline import InLineAttention
from subquad.attention.linear import LinearAttention
from subquad.attention.pola import PolaAttention
from subquad.attention.soft import SoftAttention
from subquad.attention.softmax import SoftmaxAttention

ATTENTION: dict[str, type[nn.Module]] = {
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "focused": FocusedAttention,
    "inline": InLineAttention,
    "agent": AgentAttention,
    "pola": PolaAttention,
    "soft": SoftAttention,
}
"""The mechanisms by name, and the contract that each of them keeps.

    class XAttention(nn.Module):
        inputs = ("q", "k", "v", "padding")
        def __init__(self, dim, num_heads, *, grid, kv_grid, <own settings with defaults>)
        def forward(self, <inputs>, *, grid, kv_grid) -> Tensor
        def weights(self, <inputs but v>, *, grid, kv_grid) -> Tensor

`inputs` names what a host supplies, in the order of its fused projection, out of a closed vocabulary:

    q k v     projected heads                              (b, h, n, d)
    g         a projected gate                             (b, h, n_q, d)
    x         the unprojected tokens                       (b, n_q, c)
    rotation  where tokens stand, as angles, or None       see `subquad.rope.Rotation`
    padding   keys that are absent, True = absent, or None (b, n_k) bool
    mask      pairs that are forbidden, True, or None      broadcastable to (b, h, n_q, n_k) bool

`forward` gives (b, h, n_q, d), before the output projection. `weights` gives the explicit attention
(b, h, s, n_q, n_k) over s value streams (stream t weighs the t-th part of each head's channels): weights·v is forward
without the local branch (and with a gate of ones). Tokens stand in the order of their grid, prefix tokens first.
`grid` describes queries, `kv_grid` keys and values. They size position parameters at construction and may differ at a
call: the mechanism resamples its tables, or raises a SubquadError that says why it can't. Images of a batch do not
see each other.

A host with rotary positions turns queries and keys before it hands them over. A mechanism that turns them itself, or
something else, says so by naming `rotation` among its inputs: it then gets q and k as they were projected.

Classes are final: no base class, no flags beside `inputs`, no `**kwargs`. `tests/attention/test_contract.py` holds
every entry to all of it; docs/adding-a-mechanism.md walks through one.
"""

QUADRATIC = frozenset({"softmax"})
"""Mechanisms whose cost grows with n²; the others' is linear in n."""

POOLING = frozenset({"agent", "soft"})
"""Mechanisms that pool over parts of the grid: the same tokens at the head of a longer row are answered differently."""

__all__ = [
    "ATTENTION",
    "POOLING",
    "QUADRATIC",
    "AgentAttention",
    "FocusedAttention",
    "InLineAttention",
    "LinearAttention",
    "PolaAttention",
    "SoftAttention",
    "SoftmaxAttention",
]
