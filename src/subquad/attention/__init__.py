"""How gathered tokens are mixed: one file a mechanism."""

from typing import Any, cast

from torch import nn

from subquad.attention.agent import AgentAttention
from subquad.attention.circulant import CirculantAttention
from subquad.attention.contract import Mechanism, check_mechanism
from subquad.attention.focused import FocusedAttention
from subquad.attention.inline import InLineAttention
from subquad.attention.linear import LinearAttention
from subquad.attention.mala import MalaAttention
from subquad.attention.mhla import MHLAAttention
from subquad.attention.mlla import MLLAAttention
from subquad.attention.nala import NalaAttention
from subquad.attention.pola import PolaAttention
from subquad.attention.polapp import PolappAttention
from subquad.attention.rala import RalaAttention
from subquad.attention.soft import SoftAttention
from subquad.attention.softmax import SoftmaxAttention
from subquad.attention.traits import Traits, traits_of
from subquad.attention.ttt import TTTAttention
from subquad.plugins import Table

# that a class keeps the contract without deriving from anything is what `check_mechanism` sees, and no type checker
ATTENTION: Table[type[Mechanism]] = Table(
    "an attention",
    "subquad.attention",
    check_mechanism,
    cast(
        dict[str, type[Mechanism]],
        {
            "softmax": SoftmaxAttention,
            "linear": LinearAttention,
            "focused": FocusedAttention,
            "inline": InLineAttention,
            "agent": AgentAttention,
            "pola": PolaAttention,
            "soft": SoftAttention,
            "mlla": MLLAAttention,
            "mala": MalaAttention,
            "rala": RalaAttention,
            "nala": NalaAttention,
            "polapp": PolappAttention,
            "ttt": TTTAttention,
            "circulant": CirculantAttention,
            "mhla": MHLAAttention,
        },
    ),
)
"""The mechanisms by name, and the contract that each of them keeps.

    class XAttention(nn.Module):
        inputs = ("q", "k", "v", "padding")
        traits = Traits(quadratic=…, pools=…, key_removal=…, in_hosts=…, label=…, colour=…)
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

`forward` gives (b, h, n_q, d), before the output projection. `weights` gives the explicit attention (b, h, s, n_q, n_k)
over s value streams (stream t weighs the t-th part of each head's channels): weights·v is forward without the local
branch (and with an open gate, see `Traits.open_gate`). Tokens stand in the order of their grid, prefix tokens first.
`grid` describes queries, `kv_grid` keys and values. They size position parameters at construction and may differ at a
call: the mechanism resamples its tables, or raises a SubquadError that says why it can't. Images of a batch do not see
each other.

A host with rotary positions turns queries and keys before it hands them over. A mechanism that turns them itself, or
something else, says so by naming `rotation` among its inputs: it then gets q and k as they were projected, and the
angles of as many channels as its `feature_width` says; `None` from a host without rotary positions. Weights are those
of the rotated features then.

A mechanism may have no explicit attention (`Traits.no_weights`), heads of its own beside the host's
(`Traits.extra_heads`), and may refuse padding, prefix tokens or keys on another grid (`Traits.refuses`).

`traits` says the rest that others have to know of it; each has a default, see `Traits`. Nobody keeps a list of
mechanisms that are this or that.

Classes are final: no base class, no flags beside these two, no `**kwargs`. `tests/attention/test_contract.py` holds
every entry to all of it; docs/adding-a-mechanism.md walks through one. A class from outside is added by
`register_attention`, or is found as an installed plug-in.
"""


def register_attention(name: str, cls: type[nn.Module]) -> None:
    """Make a class of yours an attention like those of subquad, for this process: in every host, command and page.

    What is to be found without a line of code, by the command line too, is a plug-in: see `plugins.py`.

    Args:
        name: small letters, digits and _; one that no other mechanism has.
        cls: keeps the contract of `ATTENTION`; what of it shows without computing is checked here.

    Raises:
        SubquadError: for a name that is taken, and a class that lacks something: what it lacks, in one line.
    """
    ATTENTION.register(name, cast(Any, cls))


__all__ = [
    "ATTENTION",
    "AgentAttention",
    "CirculantAttention",
    "FocusedAttention",
    "InLineAttention",
    "LinearAttention",
    "MHLAAttention",
    "MLLAAttention",
    "MalaAttention",
    "NalaAttention",
    "PolaAttention",
    "PolappAttention",
    "RalaAttention",
    "SoftAttention",
    "SoftmaxAttention",
    "TTTAttention",
    "Traits",
    "register_attention",
    "traits_of",
]
