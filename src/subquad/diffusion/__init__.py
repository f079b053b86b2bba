"""Diffusion pipelines made faster: AgentSD and token merging on U-Nets of diffusers."""

from subquad.diffusion.patch import Handle, apply_agent_attention, apply_token_merging, remove_agent_attention
from subquad.diffusion.settings import EARLY, LATE, SWITCH, Settings

__all__ = [
    "EARLY",
    "LATE",
    "SWITCH",
    "Handle",
    "Settings",
    "apply_agent_attention",
    "apply_token_merging",
    "remove_agent_attention",
]
