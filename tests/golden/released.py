"""Released checkpoint entries of the DeiT family and of single attention layers, under our names."""

import re

import torch
from einops import rearrange
from torch import Tensor

RENAMES = [
    (r"attn\.qkv\.", "attn.project."),
    (r"attn\.residual\.0\.", "attn.inner.local.fc1."),
    (r"attn\.residual\.2\.", "attn.inner.local.fc2."),
    (r"attn\.dwc\.", "attn.inner.local."),
    (r"attn\.an_bias", "attn.inner.agent_bias.block"),
    (r"attn\.ah_bias", "attn.inner.agent_bias.rows"),
    (r"attn\.aw_bias", "attn.inner.agent_bias.columns"),
    (r"attn\.ac_bias", "attn.inner.agent_bias.prefix"),
    (r"attn\.na_bias", "attn.inner.query_bias.block"),
    (r"attn\.ha_bias", "attn.inner.query_bias.rows"),
    (r"attn\.wa_bias", "attn.inner.query_bias.columns"),
    (r"attn\.ca_bias", "attn.inner.query_bias.prefix"),
]


def our_name(name: str) -> str:
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def our_tensor(name: str, value: Tensor) -> Tensor:
    """Tables: (1, h, a, y, 1) and the like to (h, a, y); tables of queries are stored token-first."""
    kind = name.rsplit(".", 1)[-1]
    if kind in ("ha_bias", "wa_bias", "ca_bias"):
        return rearrange(value.squeeze(0).flatten(1, -2), "h n a -> h a n")
    return value.squeeze(0).flatten(2) if kind in ("ah_bias", "aw_bias", "ac_bias") else value


def deit(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {our_name(name): our_tensor(name, value) for name, value in state.items()}


def pola_layer(state: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """A PVT layer: q and G in one projection, k and v in another."""
    named = {}
    for part in ("weight", "bias"):
        if f"qg.{part}" in state:
            (q, g), (k, v) = state[f"qg.{part}"].chunk(2), state[f"kv.{part}"].chunk(2)
            named[f"project.{part}"] = torch.cat([q, k, v, g])
        named[f"proj.{part}"] = state[f"proj.{part}"]
        named[f"inner.local.{part}"] = state[f"dwc.{part}"]
    named["inner.power"] = state["power"].squeeze(0)
    named["inner.temperature"] = state["scale"].reshape(heads, 1, -1)
    table = state["positional_encoding"][0]
    named["inner.positions.table"] = table.reshape(len(table), heads, -1).transpose(0, 1)
    return named


def soft_layer(state: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {f"project.{part}": torch.cat([state[f"W_q.{part}"], state[f"W_v.{part}"]]) for part in ("weight", "bias")}
    named |= {f"proj.{part}": state[f"ff.{part}"] for part in ("weight", "bias")}
    named |= {f"inner.landmark_norm.{part}": state[f"attn.Qnorm_act.0.{part}"] for part in ("weight", "bias")}
    named["inner.landmark.weight"] = state["attn.Qlandmark_op.weight"]
    named["inner.local.weight"] = state["attn.conv.weight"]
    return named
