"""The layouts of the authors' checkpoints, and of timm's ViTs: rename tables, one a family.

A rule is a pattern and what it becomes, tried in order, all of them. A name that ends in `@qkv` is a part of a fused
projection: its letters say which; `@0`, `@1` are parts in a row. Parts are joined at the end.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from subquad.errors import SubquadError

Rule = tuple[str, str | Callable[[re.Match[str]], str]]


def _stage(template: str, shift: int = -1) -> Callable[[re.Match[str]], str]:
    """A replacement whose {s} is the first group, a stage's number, moved to count as ours do."""
    return lambda match: template.format(s=int(match[1]) + shift)


MECHANISMS: list[Rule] = [
    (r"attn\.(qkvg?|qk|qg?|kv)\.(weight|bias)$", r"attn.qkv.\2@\1"),
    (r"attn\.gate\.0\.(weight|bias)$", r"attn.qkv.\1@g"),
    (r"attn\.residual\.0\.", "attn.inner.local.fc1."),
    (r"attn\.residual\.2\.", "attn.inner.local.fc2."),
    (r"attn\.dwc\.", "attn.inner.local."),
    (r"attn\.(?=(?:an|ah|aw|ac|na|ha|wa|ca)_bias$|power$|scale$|positional_encoding$)", "attn.inner."),
    (r"attn\.(?=w[123]$)", "attn.inner."),
    (r"attn\.sr\.", "attn.reduce.proj."),
    (r"attn\.norm\.", "attn.reduce.norm."),
    (r"\ban_bias$", "agent_bias.block"),
    (r"\bah_bias$", "agent_bias.rows"),
    (r"\baw_bias$", "agent_bias.columns"),
    (r"\bac_bias$", "agent_bias.prefix"),
    (r"\bna_bias$", "query_bias.block"),
    (r"\bha_bias$", "query_bias.rows"),
    (r"\bwa_bias$", "query_bias.columns"),
    (r"\bca_bias$", "query_bias.prefix"),
    (r"\bscale$", "temperature"),
    (r"\bpositional_encoding$", "positions.table"),
    (r"attn\.relative_position_bias_table$", "attn.inner.relative_bias.table"),
]
"""Inside an attention layer, the same in all families."""

PYRAMID: list[Rule] = [
    (r"^pos_embed(\d)$", _stage("stages.{s}.pos_embed.table")),
    (r"^patch_embed(\d)\.", _stage("stages.{s}.embed.")),
    (r"^block(\d)\.", _stage("stages.{s}.blocks.")),
]

HALVING: list[Rule] = [
    (r"^layers\.(\d)\.downsample\.conv\.0\.conv\.", _stage("stages.{s}.embed.widen.", 1)),
    (r"^layers\.(\d)\.downsample\.conv\.1\.conv\.", _stage("stages.{s}.embed.halve.", 1)),
    (r"^layers\.(\d)\.downsample\.conv\.2\.", _stage("stages.{s}.embed.narrow.", 1)),
]
"""Between the stages of MLLA and of H-ViT³."""

FAMILIES: dict[str, list[Rule]] = {
    "vit": [
        (r"^cls_token$", "stages.0.prefix_tokens@0"),
        (r"^reg_token$", "stages.0.prefix_tokens@1"),
        (r"^pos_embed$", "stages.0.pos_embed.table"),
        (r"^patch_embed\.", "stages.0.embed."),
        (r"^blocks\.", "stages.0.blocks."),
        (r"\.cpe\.", ".cpe.conv."),
        (r"\.gamma_([12])$", r".ls\1.gamma"),
        (r"attn\.([qkv])_bias$", r"attn.qkv.bias@\1"),
        (r"attn\.([qkv])_proj\.(weight|bias)$", r"attn.qkv.\2@\1"),
        (r"mlp\.fc1_g\.(weight|bias)$", r"mlp.fc1.\1@0"),
        (r"mlp\.fc1_x\.(weight|bias)$", r"mlp.fc1.\1@1"),
        (r"\.cpe\.(weight|bias)$", r".cpe.conv.\1"),
    ],
    "mhla": [
        (r"^pos_embed$", "stages.0.pos_embed.table"),
        (r"^patch_embed\.", "stages.0.embed."),
        (r"^blocks\.", "stages.0.blocks."),
        (r"attn\.norm\.", "attn.pre_norm."),
        (r"attn\.to_qkv\.", "attn.qkv."),
        (r"attn\.([qk])_norm\.weight$", r"attn.inner.\1_scale"),
        (r"attn\.lepe\.", "attn.inner.local."),
        (r"attn\.piece_attn\.conv\.weight$", "attn.inner.mixing"),
        (r"attn\.to_out\.0\.", "attn.proj."),
    ],
    "pvt": PYRAMID,
    "pvt_v2": [
        *PYRAMID,
        (r"^norm(\d)\.", _stage("stages.{s}.norm.")),
        (r"\bmlp\.dwconv\.dwconv\.", "mlp.dwconv."),
        # timm's
        (r"^patch_embed\.", "stages.0.embed."),
        (r"^stages\.(\d)\.downsample\.", _stage("stages.{s}.embed.", 0)),
    ],
    "swin": [
        (r"^patch_embed\.", "stages.0.embed."),
        (r"^layers\.(\d)\.blocks\.", _stage("stages.{s}.blocks.", 0)),
        (r"^layers\.(\d)\.downsample\.", _stage("stages.{s}.embed.", 1)),
    ],
    "cswin": [
        (r"^stage1_conv_embed\.0\.", "stages.0.embed.proj."),
        (r"^stage1_conv_embed\.2\.", "stages.0.embed.norm."),
        (r"^merge(\d)\.conv\.", _stage("stages.{s}.embed.proj.", 0)),
        (r"^merge(\d)\.norm\.", _stage("stages.{s}.embed.norm.", 0)),
        (r"^stage(\d)\.", _stage("stages.{s}.blocks.")),
        (r"(blocks\.\d+)\.(qkvg?|proj)\.", r"\1.attn.\2."),
        (r"\battns\.(\d)\.get_v\.(weight|bias)$", r"attn.lepe.\2@\1"),
        # the rules of attention layers, inside a branch
        (r"\battns\.(\d)\.residual\.0\.", r"attn.branches.\1.local.fc1."),
        (r"\battns\.(\d)\.residual\.2\.", r"attn.branches.\1.local.fc2."),
        (r"\battns\.(\d)\.dwc\.", r"attn.branches.\1.local."),
        (r"\battns\.(\d)\.", r"attn.branches.\1."),
    ],
    "softnet": [
        (r"^cls_token$", "stages.3.prefix_tokens"),
        (r"^patch_embed(\d)\.proj\.", _stage("stages.{s}.embed.")),
        *PYRAMID,
        (r"\batt\.mha\.W_([qv])\.(weight|bias)$", r"attn.qkv.\2@\1"),
        (r"\batt\.mha\.ff\.", "attn.proj."),
        (r"\batt\.mha\.attn\.Qlandmark_op\.", "attn.inner.landmark."),
        (r"\batt\.mha\.attn\.Qnorm_act\.0\.", "attn.inner.landmark_norm."),
        (r"\batt\.mha\.attn\.conv\.", "attn.inner.local."),
        (r"\batt\.ff([12])\.", r"mlp.fc\1."),
        (r"\batt\.(norm[12])\.", r"\1."),
    ],
    "hvit3": [
        (r"^patch_embed\.conv\.(\d)\.", lambda match: f"stages.0.embed.{2 * int(match[1])}."),
        *HALVING,
        (r"^layers\.(\d)\.blocks\.", _stage("stages.{s}.blocks.", 0)),
        (r"\.cpe\.(weight|bias)$", r".cpe.conv.\1"),
        (r"\bmlp\.dwc\.", "mlp.dwconv."),
    ],
    "mllanet": [
        (r"^patch_embed\.conv1\.", "stages.0.embed.first."),
        (r"^patch_embed\.conv2\.0\.", "stages.0.embed.branch.0."),
        (r"^patch_embed\.conv2\.1\.", "stages.0.embed.branch.2."),
        (r"^patch_embed\.conv3\.0\.", "stages.0.embed.wide."),
        (r"^patch_embed\.conv3\.1\.", "stages.0.embed.last."),
        *HALVING,
        (r"^layers\.(\d)\.blocks\.", _stage("stages.{s}.blocks.", 0)),
        (r"\.cpe1\.(weight|bias)$", r".cpe.conv.\1"),
        (r"\.cpe2\.(weight|bias)$", r".cpe2.conv.\1"),
        (r"(blocks\.\d+)\.in_proj\.", r"\1.attn.in_proj."),
        (r"(blocks\.\d+)\.act_proj\.", r"\1.attn.gate."),
        (r"(blocks\.\d+)\.dwc\.", r"\1.attn.conv."),
        (r"(blocks\.\d+)\.out_proj\.", r"\1.attn.proj."),
        (r"\battn\.lepe\.", "attn.inner.local."),
    ],
    "mavit": [
        (r"^norm\.", "norm.norm."),
        (r"^proj\.", "norm.proj."),
        (r"^patch_embed\.proj\.", "stages.0.embed."),
        (r"^layers\.(\d)\.blocks\.", _stage("stages.{s}.blocks.", 0)),
        (r"^layers\.(\d)\.downsample\.reduction\.", _stage("stages.{s}.embed.0.", 1)),
        (r"^layers\.(\d)\.downsample\.norm\.", _stage("stages.{s}.embed.1.", 1)),
        (r"\.gamma_([12])$", r".ls\1.gamma"),
        (r"\.(norm[12])\.norm\.", r".\1."),
        (r"\bffn\.", "mlp."),
        (r"\bpos\.", "cpe1."),
        (r"attn\.qkvo\.(weight|bias)$", r"attn.qkv.\1@qkvg"),
        (r"attn\.out_proj\.", "attn.proj."),
        (r"attn\.ln\.", "attn.gate_norm."),
        (r"attn\.s1$", "attn.inner.same_spikiness"),
        (r"attn\.s2$", "attn.inner.opposite_spikiness"),
    ],
}
"""Rename rules by host, and those of networks that have names of their own for one."""

HOST_OF = {"mhla": "vit"}
"""The host of a family that is not called after it."""

OF_MECHANISM: list[Rule] = [(r"attn\.lepe\.", "attn.inner.local.")]
"""What a host keeps or leaves to a mechanism that has it: which of the two, the file does not say, but the model."""

MARKS: dict[str, str] = {
    r"^stage1_conv_embed\.0\.weight$": "cswin",
    r"^patch_embed1\.proj\.0\.weight$": "softnet",
    r"^block1\.0\.mlp\.dwconv\.dwconv\.weight$": "pvt_v2",
    r"^stages\.1\.downsample\.proj\.weight$": "pvt_v2",
    r"^patch_embed1\.proj\.weight$": "pvt",
    r"^layers\.0\.blocks\.0\.in_proj\.weight$": "mllanet",
    r"^layers\.0\.blocks\.0\.mlp\.dwc\.weight$": "hvit3",
    r"^layers\.0\.blocks\.0\.norm1\.weight$": "swin",
    r"^layers\.0\.blocks\.0\.norm1\.norm\.weight$": "mavit",
    r"^blocks\.0\.attn\.to_qkv\.weight$": "mhla",
    r"^blocks\.0\.norm1\.weight$": "vit",
}
"""By which entry a family is recognised, the first that is there."""

EVALUATED: dict[str, str] = {r"^stage1\.0\.attns\.0\.positional_encoding$": "model"}
"""By an entry: under which key of a trainer's file the weights lie whose accuracy was published, where others are too.

FLatten's CSwin was evaluated by the script that reads `model`, and its files may hold an average of weights as well.
"""

DROPPED: dict[str, str] = {
    r"\.relative_position_index$": "computed from the window",
    r"\.relative_coords_table$": "computed from the window",
    r"\.attn_mask$": "computed from the image",
    r"\brope\.rotations$": "computed from the grid",
    r"\.RoPE(_linear)?\.angle$": "computed from the width of a head",
}
"""What is not read, and why."""


def from_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename what timm calls otherwise: its Swin merges patches where a stage begins, and has its head in `fc`."""
    late = any(name.startswith("layers.1.downsample.") for name in state) and not any(
        name.startswith("layers.0.downsample.") for name in state
    )
    if not late and "head.fc.weight" not in state:
        return state
    renamed = {}
    for name, tensor in state.items():
        if late:
            name = re.sub(r"^layers\.(\d)\.downsample\.", _stage("layers.{s}.downsample."), name)
        renamed[re.sub(r"^head\.fc\.", "head.", name)] = tensor
    return renamed


def family_of(names: Any) -> str | None:
    """The host whose released layout these entry names have, or None."""
    for mark, family in MARKS.items():
        if any(re.search(mark, name) for name in names):
            return family
    return None


def evaluated_under(names: Iterable[str]) -> str | None:
    """The key of a trainer's file that holds what was evaluated, by the names under any; None for the usual one."""
    names = list(names)
    return next((key for mark, key in EVALUATED.items() if any(re.search(mark, name) for name in names)), None)


def our_name(name: str, family: str, own: Collection[str] | None = None) -> str:
    """Where an entry of a released checkpoint goes; may end in `@part`. `own` are the entries of the model."""
    for pattern, replacement in (*FAMILIES[family], *MECHANISMS):
        name = re.sub(pattern, replacement, name)
    for pattern, replacement in OF_MECHANISM if own is not None and name not in own else ():
        moved = re.sub(pattern, replacement, name)
        name = moved if own is not None and moved in own else name
    return name


def to_our_layout(state: dict[str, Tensor], family: str, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """A released state dict under our names and in our shapes.

    Args:
        state: the authors' entries.
        family: whose layout it is.
        shapes: of our model's entries; they say how many heads a table is for.
    """
    ours: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in state.items():
        if any(re.search(pattern, name) for pattern in DROPPED):
            continue
        target, _, part = our_name(name, family, shapes).partition("@")
        extra = _extra_width(target, shapes) if shapes.get(target, tensor.shape) == tensor.shape else 0
        pieces = _pieces(tensor, part, extra) if part.isalpha() else {part: tensor}
        if target in ours or pieces.keys() & parts.get(target, {}).keys():
            raise SubquadError(f"two entries are {target}, one of them {name}")
        if part:
            parts[target] |= pieces
        else:
            ours[target] = _reshape(target, tensor, shapes.get(target))
    for target, pieces in parts.items():
        if target in ours:
            raise SubquadError(f"two entries are {target}")
        order = [letter for letter in "qkvg" if letter in pieces] or sorted(pieces)
        joined = torch.cat([pieces[letter] for letter in order], dim=1 if target.endswith("prefix_tokens") else 0)
        ours[target] = _reshape(target, joined, shapes.get(target)) if joined.dim() == 4 else joined
    return ours


def _extra_width(target: str, shapes: dict[str, torch.Size]) -> int:
    """Channels of heads that a mechanism has beside the host's: what the output projection reads more than it gives."""
    read = shapes.get(target.rpartition(".qkv.")[0] + ".proj.weight", (0, 0))
    return read[1] - read[0]


def _pieces(tensor: Tensor, part: str, extra: int) -> dict[str, Tensor]:
    """A fused projection by the letters of its parts; those of heads beside the host's stand behind all others."""
    hosts = tensor[: len(tensor) - extra * len(part)].chunk(len(part))
    if not extra:
        return dict(zip(part, hosts, strict=True))
    others = tensor[len(tensor) - extra * len(part) :].chunk(len(part))
    return {letter: torch.cat(both) for letter, *both in zip(part, hosts, others, strict=True)}


def _reshape(target: str, tensor: Tensor, like: torch.Size | None) -> Tensor:
    """Tables of released layers: a leading axis of one, queries before agents, all heads in one row.

    Convolutions of one tap are linear weights here, and factors of channels have no other axes.
    """
    if like is not None and tensor.dim() == 4 and len(like) < 4 and tensor.squeeze().shape == torch.Size(like):
        return tensor.reshape(like)  # (c', c, 1, 1) and (1, c, 1, 1)
    table = target.rpartition(".inner.")[2] if ".inner." in target else target.rpartition(".branches.")[2][2:]
    if table in ("agent_bias.rows", "agent_bias.columns", "agent_bias.prefix"):
        return tensor[0].flatten(2)  # (1, h, a, y, 1)
    if table in ("query_bias.rows", "query_bias.columns", "query_bias.prefix"):
        return rearrange(tensor[0].flatten(1, -2), "h n a -> h a n")  # (1, h, y, 1, a)
    if table == "mixing":
        return tensor.flatten(1)  # (m, m, 1, 1)
    if like is not None and table in ("q_scale", "k_scale"):
        return tensor.reshape(like)  # (c,)
    if table in ("power", "same_spikiness", "opposite_spikiness", "w1", "w2"):
        return tensor[0]  # (1, h, 1, d), (1, h, 1, 2d), and (1, h, d, d)
    if table == "relative_bias.table":
        side = round(len(tensor) ** 0.5)
        return rearrange(tensor, "(y x) h -> h y x", y=side)
    if like is not None and table == "temperature" and tensor.numel() == like.numel():
        return tensor.reshape(like)  # (1, 1, c)
    if like is not None and table == "positions.table" and tensor.shape[2] == like[0] * like[2]:
        return rearrange(tensor, "1 n (h d) -> h n d", h=like[0])
    return tensor
