"""What is released under our names: networks, and entries of single attention layers."""

import re

import torch
from torch import Tensor

OURS = {"plain": "softmax", "flatten": "focused"}
HOSTS = {("ttt", "vit"): "vit3", ("ttt", "h"): "hvit3"}
SIZES = {"xt": "xtiny", "t": "tiny", "s": "small", "m": "medium", "b": "base", "l": "large"}

RENAMED = {"flatten_cswin_s": "flatten_cswin_small_deep"}
"""Configurations that one of another paper has the name of: Agent Attention's CSwin-S is another one."""


def our_network(name: str) -> str:
    """The network of the table that a golden is of."""
    name, pixels = re.fullmatch(r"(.*?)(_\d{3})?", RENAMED.get(name, name)).groups(default="")
    mechanism, *host, size = name.split("_")
    sizes = SIZES | ({"b": "large"} if host == ["pvt"] else {})
    host = [HOSTS.get((mechanism, each), each) for each in host]
    return "_".join([OURS.get(mechanism, mechanism), *host, sizes.get(size, size)]) + pixels


def pola_layer(state: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """A PVT layer: q and G in one projection, k and v in another."""
    named = {}
    for part in ("weight", "bias"):
        if f"qg.{part}" in state:
            (q, g), (k, v) = state[f"qg.{part}"].chunk(2), state[f"kv.{part}"].chunk(2)
            named[f"qkv.{part}"] = torch.cat([q, k, v, g])
        named[f"proj.{part}"] = state[f"proj.{part}"]
        named[f"inner.local.{part}"] = state[f"dwc.{part}"]
    named["inner.power"] = state["power"].squeeze(0)
    named["inner.temperature"] = state["scale"].reshape(heads, 1, -1)
    table = state["positional_encoding"][0]
    named["inner.positions.table"] = table.reshape(len(table), heads, -1).transpose(0, 1)
    return named


def focused_layer(state: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """A PVT layer, with or without reduced keys."""
    renamed = {"proj": "proj", "dwc": "inner.local", "sr": "reduce.proj", "norm": "reduce.norm"}
    named = {}
    for part in ("weight", "bias"):
        named[f"qkv.{part}"] = torch.cat([state[f"q.{part}"], state[f"kv.{part}"]])
        for theirs, ours in renamed.items():
            if f"{theirs}.{part}" in state:
                named[f"{ours}.{part}"] = state[f"{theirs}.{part}"]
    named["inner.temperature"] = state["scale"].reshape(heads, 1, -1)
    named["inner.positions.table"] = state["positional_encoding"][0].unflatten(1, (heads, -1)).transpose(0, 1)
    return named


def soft_layer(state: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {f"qkv.{part}": torch.cat([state[f"W_q.{part}"], state[f"W_v.{part}"]]) for part in ("weight", "bias")}
    named |= {f"proj.{part}": state[f"ff.{part}"] for part in ("weight", "bias")}
    named |= {f"inner.landmark_norm.{part}": state[f"attn.Qnorm_act.0.{part}"] for part in ("weight", "bias")}
    named["inner.landmark.weight"] = state["attn.Qlandmark_op.weight"]
    named["inner.local.weight"] = state["attn.conv.weight"]
    return named


def circulant_layer(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values without a bias, a gate with one."""
    named = {"qkv.weight": torch.cat([state["qkv.weight"], state["gate.0.weight"]]), "qkv.bias": state["gate.0.bias"]}
    return named | {f"proj.{part}": state[f"proj.{part}"] for part in ("weight", "bias")}


def mhla_names(state) -> dict[str, str]:
    """Entries of a layer with our names for them."""
    renamed = {"norm": "pre_norm", "to_qkv": "qkv", "q_norm.weight": "inner.q_scale", "k_norm.weight": "inner.k_scale"}
    renamed |= {"lepe": "inner.local", "piece_attn.conv.weight": "inner.mixing", "to_out.0": "proj"}
    names = {}
    for name in state:
        whole, _, ending = name.rpartition(".")
        names[name] = renamed[name] if name in renamed else f"{renamed[whole]}.{ending}"
    return names


def mhla_layer(state: dict[str, Tensor], start: Tensor) -> dict[str, Tensor]:
    """All of it, with the matrix of the blocks as it starts; a reshape brings it to our shapes."""
    state = state | {"piece_attn.conv.weight": start}
    return {ours: state[name] for name, ours in mhla_names(state).items()}
