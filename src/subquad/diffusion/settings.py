"""What can be set of AgentSD and of token merging, and the schedule that its authors publish."""

import math
from dataclasses import dataclass, replace
from typing import Any

from subquad.errors import SubquadError
from subquad.ranges import Positive, Share, check_fields

FACTORS, FACTORS_IN_WORDS = (1, 2, 4, 8), "1, 2, 4 or 8"
"""How far below the latent a level may be that is patched at most."""


@dataclass(frozen=True)
class Settings:
    """How tokens of a U-Net's self-attention are merged.

    Attributes:
        sx, sy: columns and rows of a cell, in each of which one token is a destination.
        ratio: the share of tokens that is merged away; at most what is not a destination.
        agent_ratio: the share merged away for the agents, None for token merging without agents. They are used only
            where there are less than half as many of them as tokens.
        k_scale: the second softmax is scaled by d^(-k_scale / 2).
        k_shortcut: the weight of the values that are added.
        agents: about how many agents there are on a map of any size: its cells grow with it and all sources are merged
            for the agents, so that time grows as the tokens do, where the released method's grows as their square. sx,
            sy and agent_ratio are not used then.
        merge_mlp: whether the blocks' MLPs run on the merged tokens too.
    """

    sx: Positive = 4
    sy: Positive = 4
    ratio: Share = 0.4
    agent_ratio: Share | None = 0.95
    k_scale: float = 0.3
    k_shortcut: float = 0.075
    agents: Positive | None = None
    merge_mlp: bool = False

    def cell(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of a cell on a map of this size."""
        if self.agents is None:
            return self.sy, self.sx
        side = max(2, math.ceil(math.sqrt(height * width / self.agents)))
        # a map that is not as high, or as wide, has none of these cells, and its agents in one line
        if side > height:
            return height, max(2, math.ceil(width / self.agents))
        if side > width:
            return max(2, math.ceil(height / self.agents)), width
        return side, side

    def merged_for_agents(self, num_tokens: int) -> int | None:
        """How many of the tokens are merged away for the agents, None where there are to be none."""
        if self.agents is not None:
            return num_tokens
        return None if self.agent_ratio is None else int(num_tokens * self.agent_ratio)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.agents is None and self.sx * self.sy == 1:
            raise SubquadError("cells of 1×1 tokens hold nothing to merge: give sx or sy of 2 or more")


EARLY, LATE = Settings(), Settings(sx=2, sy=2, agent_ratio=0.5)
"""The authors' two phases, the second of which has too many agents to use any."""

SWITCH = 0.6
"""The share of the training steps from which down the late phase holds: the first 20 of 50 steps are above it."""


def agent_phases(
    *,
    sx: int | None = None,
    sy: int | None = None,
    agent_ratio: float | None = None,
    agents: int | None = None,
    **common: Any,
) -> tuple[Settings, Settings]:
    """The early and the late phase: one for both where any of the first four is given, else the authors' two.

    Raises:
        SubquadError: a setting is none, or does not go with another.
    """
    given = {"sx": sx, "sy": sy, "agent_ratio": agent_ratio, "agents": agents}
    own: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    replaced = [name for name in own if agents is not None and name != "agents"]
    if replaced:
        raise SubquadError(
            f"agents={agents} stands in place of sx, sy and agent_ratio: leave out {' and '.join(replaced)}"
        )
    if own:
        phase = Settings(**own, **common)
        return phase, phase
    return replace(EARLY, **common), replace(LATE, **common)


def merging_phase(*, sx: int = 2, sy: int = 2, ratio: float = 0.5, merge_mlp: bool = False) -> Settings:
    """The phase of token merging without agents."""
    return Settings(sx=sx, sy=sy, ratio=ratio, agent_ratio=None, merge_mlp=merge_mlp)
