"""State dicts of ours as the papers' authors write theirs: names, shapes and buffers, the way back of the rename rules.

Written from the layouts that docs and goldens describe, not from the rules; `test_pretrained` compares it with goldens.
"""

import re

import torch

from subquad.models import NETWORKS, VARIANTS

TABLES = {
    "agent_bias.block": "an_bias",
    "agent_bias.rows": "ah_bias",
    "agent_bias.columns": "aw_bias",
    "agent_bias.prefix": "ac_bias",
    "query_bias.block": "na_bias",
    "query_bias.rows": "ha_bias",
    "query_bias.columns": "wa_bias",
    "query_bias.prefix": "ca_bias",
}
EDGES = {
    "vit": {
        "stages.0.prefix_tokens": "cls_token",
        "stages.0.pos_embed.table": "pos_embed",
        "stages.0.embed.": "patch_embed.",
    },
    "softnet": {"stages.3.prefix_tokens": "cls_token"},
    "swin": {"stages.0.embed.": "patch_embed."},
    "cswin": {"stages.0.embed.proj.": "stage1_conv_embed.0.", "stages.0.embed.norm.": "stage1_conv_embed.2."},
    "mllanet": {
        "stages.0.embed.first.": "patch_embed.conv1.",
        "stages.0.embed.branch.0.": "patch_embed.conv2.0.",
        "stages.0.embed.branch.2.": "patch_embed.conv2.1.",
        "stages.0.embed.wide.": "patch_embed.conv3.0.",
        "stages.0.embed.last.": "patch_embed.conv3.1.",
    },
}
EDGES["hvit3"] = {f"stages.0.embed.{2 * k}.": f"patch_embed.conv.{k}." for k in range(5)}
HALVING = {"widen.": "0.conv.", "halve.": "1.conv.", "narrow.": "2."}
"""Between the stages of MLLA and of H-ViT³."""
GATED = {
    "cpe.conv.": "cpe1.",
    "cpe2.conv.": "cpe2.",
    "attn.in_proj.": "in_proj.",
    "attn.gate.": "act_proj.",
    "attn.conv.": "dwc.",
    "attn.qkv.": "attn.qk.",
    "attn.inner.local.": "attn.lepe.",
    "attn.proj.": "out_proj.",
}
"""Inside a block of MLLA."""


def released_state(network, state):
    """The entries of the authors' file for a network of the table, from a state dict of ours."""
    host = VARIANTS[NETWORKS[network].variant].host
    found = {}
    if host == "mavit":
        return _of_mavit(network, state)
    for name, tensor in state.items():
        for theirs, value in _entries(name, tensor, host, network, state):
            found[theirs] = value
    return found


def _entries(name, tensor, host, network, state):
    match = re.fullmatch(r"stages\.(\d)\.blocks\.(\d+)\.(.*)", name)
    if match is None:
        yield _edge(name, host), tensor
        return
    s, block, rest = int(match[1]), match[2], match[3]
    at = {"vit": f"blocks.{block}.", "swin": f"layers.{s}.blocks.{block}.", "cswin": f"stage{s + 1}.{block}."}
    at["hvit3"] = at["swin"]
    at = at.get(host, f"block{s + 1}.{block}.")
    if host == "mllanet":
        renamed = next(
            (theirs + rest.removeprefix(ours) for ours, theirs in GATED.items() if rest.startswith(ours)), rest
        )
        yield f"layers.{s}.blocks.{block}.{renamed}", tensor
        if rest == "attn.qkv.weight":
            # a table of each place, computed from the grid: 56 rows in stage 1 of 224 px
            yield f"layers.{s}.blocks.{block}.attn.rope.rotations", torch.zeros(56 >> s, 56 >> s, len(tensor) // 4, 2)
        return
    if host == "softnet" and s < 3:
        yield from _soft(at + "att.", rest, tensor)
        return
    attn = at + "attns.0." if host == "cswin" else at + "attn."
    kind, _, ending = rest.rpartition(".")
    if kind == "attn.qkv" and "circulant" in network:
        # its gate is apart, and alone has a bias
        width = len(state[f"stages.{s}.blocks.{block}.attn.proj.bias"])
        yield f"{attn}gate.0.{ending}", tensor[-width:]
        if ending == "weight":
            yield f"{attn}qkv.{ending}", tensor[:-width]
    elif kind == "attn.qkv" and "ttt" in network:
        # heads of 32 channels, the one that is a convolution behind all others
        size = state[f"stages.{s}.blocks.{block}.attn.inner.w3"].shape[0]
        parts = [(part[:-size], part[-size:]) for part in tensor.chunk(3)]
        yield f"{attn}qkv.{ending}", torch.cat([rows for both in zip(*parts, strict=True) for rows in both])
        if host == "hvit3" and ending == "weight":
            # a table of each place, computed from the grid: 56 rows in stage 1 of 224 px
            yield f"{at}rope.rotations", torch.zeros(56 >> s, 56 >> s, tensor.shape[1] // 2, 2)
    elif kind == "attn.qkv":
        gated = "pola" in network and len(tensor) == 4 * state[f"stages.{s}.blocks.{block}.attn.proj.bias"].shape[0]
        yield from _projections(
            at if host == "cswin" else attn, ending, tensor, host in ("pvt", "pvt_v2", "softnet"), gated
        )
    elif kind == "attn.proj":
        yield f"{at if host == 'cswin' else attn}proj.{ending}", tensor
    elif kind == "attn.lepe":
        # softmax blocks before the last stage have vertical and horizontal stripes
        linear = any(key.startswith(f"stages.{s}.blocks.{block}.attn.branches.") for key in state)
        for branch, part in enumerate(tensor.chunk(1 if linear or s == 3 else 2)):
            yield f"{at}attns.{branch}.get_v.{ending}", part
    elif branch := re.match(r"attn\.branches\.(\d)\.(.*)", rest):
        yield from _inner(f"{at}attns.{branch[1]}.", branch[2], tensor)
    elif rest.startswith("attn.inner."):
        yield from _inner(attn, rest.removeprefix("attn.inner."), tensor)
    elif rest.startswith("attn.reduce."):
        yield attn + rest.removeprefix("attn.reduce.").replace("proj.", "sr."), tensor
    else:
        inside = "mlp.dwc." if host == "hvit3" else "mlp.dwconv.dwconv."
        yield at + rest.replace("mlp.dwconv.", inside).replace("cpe.conv.", "cpe."), tensor


def _edge(name, host):
    for ours, theirs in EDGES.get(host, {}).items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    if match := re.fullmatch(r"stages\.(\d)\.embed\.(widen\.|halve\.|narrow\.)(.*)", name):
        return f"layers.{int(match[1]) - 1}.downsample.conv.{HALVING[match[2]]}{match[3]}"
    if match := re.fullmatch(r"stages\.(\d)\.norm\.(.*)", name):
        return f"norm{int(match[1]) + 1}.{match[2]}"
    if match := re.fullmatch(r"stages\.(\d)\.(embed|pos_embed)\.(.*)", name):
        s, part, rest = int(match[1]), match[2], match[3]
        if part == "pos_embed":
            return f"pos_embed{s + 1}"
        if host == "swin":
            return f"layers.{s - 1}.downsample.{rest}"
        if host == "cswin":
            return f"merge{s}.{rest.replace('proj.', 'conv.')}"
        return f"patch_embed{s + 1}.{'proj.' if host == 'softnet' else ''}{rest}"
    return name


def _projections(at, ending, tensor, apart, gated):
    if not apart:
        yield f"{at}{'qkvg' if gated else 'qkv'}.{ending}", tensor
        return
    q, k, v, *g = tensor.chunk(4 if gated else 3)
    yield f"{at}{'qg' if gated else 'q'}.{ending}", torch.cat([q, *g])
    yield f"{at}kv.{ending}", torch.cat([k, v])


def _inner(at, rest, tensor):
    if rest in TABLES:
        theirs = at + TABLES[rest]
        kind, part = rest.split(".")
        if part == "block":
            yield theirs, tensor
            return
        axes = {"rows": (..., None), "columns": (..., None, slice(None)), "prefix": (...,)}
        tensor = tensor[None][axes[part]]
        # (1, h, a, y, 1) of agents, (1, h, y, 1, a) of queries
        yield theirs, tensor if kind == "agent_bias" else tensor.movedim(2, -1)
    elif rest.startswith("local.fc"):
        yield at + rest.replace("local.fc1.", "residual.0.").replace("local.fc2.", "residual.2."), tensor
    elif rest.startswith("local."):
        yield at + rest.replace("local.", "dwc."), tensor
    elif rest == "temperature":
        yield at + "scale", tensor.reshape(1, 1, -1)
    elif rest in ("power", "w1", "w2"):
        yield at + rest, tensor[None]
    elif rest == "w3":
        yield at + rest, tensor
    elif rest == "positions.table":
        yield at + "positional_encoding", tensor.transpose(0, 1).flatten(1)[None]
    elif rest == "relative_bias.table":
        side = (tensor.shape[-1] + 1) // 2
        yield at + "relative_position_bias_table", tensor.permute(1, 2, 0).flatten(0, 1)
        yield at + "relative_position_index", torch.zeros(side**2, side**2, dtype=torch.long)
    else:
        raise AssertionError(f"no released name for {at}{rest}")


def _soft(at, rest, tensor):
    kind, _, ending = rest.rpartition(".")
    if kind == "attn.qkv":
        for letter, part in zip("qv", tensor.chunk(2), strict=True):
            yield f"{at}mha.W_{letter}.{ending}", part
        return
    names = {"attn.proj": "mha.ff", "attn.inner.landmark": "mha.attn.Qlandmark_op", "mlp.fc1": "ff1", "mlp.fc2": "ff2"}
    names |= {"attn.inner.landmark_norm": "mha.attn.Qnorm_act.0", "attn.inner.local": "mha.attn.conv"}
    yield f"{at}{names.get(kind, kind)}.{ending}", tensor


def _of_mavit(network, state):
    """Of MAViT's host: convolutions of one tap where others have linear layers, and angles of the rotation."""
    family, found = network.split("_")[0], {}
    heads = VARIANTS[NETWORKS[network].variant].arguments["num_heads"]
    # which layers have four axes
    flat = {"nala": ("head",), "polapp": ("head", "norm.proj")}.get(family, ("head", "norm.proj", "attn", "mlp"))
    wide = {name.split(".")[1] for name in state if name.endswith("same_spikiness")}
    for name, tensor in state.items():
        match = re.fullmatch(r"stages\.(\d)\.(?:embed|blocks)\.(\d+)\.(.*)", name)
        is_linear = name.endswith("weight") and tensor.dim() == 2
        if is_linear and any(f".{part}." in f".{name}" for part in flat):
            tensor = tensor[..., None, None]
        if match is None:
            found[name.removeprefix("norm.")] = tensor
            continue
        s, number, rest = match.groups()
        if ".embed." in name:
            down = f"layers.{int(s) - 1}.downsample.{'norm' if number == '1' else 'reduction'}."
            found[(f"patch_embed.proj.{number}." if s == "0" else down) + rest] = tensor
            continue
        if rest.startswith("ls"):
            width = len(tensor) // heads[int(s)]
            found[f"layers.{s}.RoPE.angle"] = torch.zeros(width // 2)
            if family == "polapp":
                found[f"layers.{s}.RoPE_linear.angle"] = torch.zeros(width)
            rest, tensor = f"gamma_{rest[2]}", tensor[None, :, None, None]
        elif "spikiness" in rest:
            rest, tensor = "attn.s1" if "same" in rest else "attn.s2", tensor[None]
        kind = "qkvg" if family == "nala" or s in wide else "qkvo"
        for ours, theirs in (
            (r"^(norm[12])\.", r"\1.norm."),
            (r"^mlp\.", "ffn."),
            (r"^cpe1\.", "cpe1." if family == "nala" else "pos."),
            (r"attn\.(?:inner\.local|lepe)\.", "attn.lepe."),
            (r"attn\.qkv\.", f"attn.{kind}."),
            (r"attn\.proj\.", "attn.out_proj." if family == "nala" else "attn.proj."),
            (r"attn\.gate_norm\.", "attn.ln."),
        ):
            rest = re.sub(ours, theirs, rest)
        found[f"layers.{s}.blocks.{number}.{rest}"] = tensor
    return found
