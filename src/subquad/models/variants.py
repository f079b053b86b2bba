"""The table of sizes: rows of literals. What a row does not say is the host's default."""

from dataclasses import dataclass, field, replace
from typing import Any

from timm.data.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from subquad.models.backbone import Backbone
from subquad.models.cswin import CSwin
from subquad.models.hvit3 import HViT3
from subquad.models.lavit import LaViT, LaViTPlain
from subquad.models.mavit import MAViT
from subquad.models.mlla_network import MLLANet
from subquad.models.pvt import PVT
from subquad.models.pvt_v2 import PVTv2
from subquad.models.softnet import SoftNet
from subquad.models.swin import Swin
from subquad.models.vit import ViT

HOSTS: dict[str, type[Backbone]] = {
    "vit": ViT,
    "pvt": PVT,
    "pvt_v2": PVTv2,
    "swin": Swin,
    "cswin": CSwin,
    "softnet": SoftNet,
    "lavit": LaViT,
    "lavit_vit": LaViTPlain,
    "mllanet": MLLANet,
    "mavit": MAViT,
    "hvit3": HViT3,
}


@dataclass(frozen=True)
class Variant:
    """A network without its mechanism: a host and its sizes.

    Attributes:
        host: a name of HOSTS.
        depths: blocks of each stage.
        arguments: of the host's constructor.
        recipe: the training recipe it was published with.
        family: whose scheme of baselines it has, a key of PATTERNS; empty for sizes without baselines.
        timm: what timm calls its own network of these sizes, with softmax.
        evaluation: how that is evaluated, where it differs from the host's: entries of timm's configuration.
    """

    host: str
    depths: tuple[int, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    recipe: str = ""
    family: str = ""
    timm: str = ""
    evaluation: dict[str, Any] = field(default_factory=dict)


def deit(embed_dim: int, num_heads: int, timm: str, drop_path_rate: float = 0.0) -> Variant:
    """A DeiT, arXiv 2012.12877: patches of 16 px, 12 blocks, a class token."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "drop_path_rate": drop_path_rate}
    return Variant("vit", (12,), sizes, "deit", family="deit", timm=timm)


def deit3(embed_dim: int, num_heads: int, timm: str) -> Variant:
    """A DeiT-III, arXiv 2204.07118: LayerScale, and positions of patches alone."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "init_values": 1e-6, "pos_embed": "patches"}
    return Variant("vit", (12,), sizes, "deit", "deit3", timm, {"crop_pct": 0.9, "crop_mode": "center"})


def dinov2(
    embed_dim: int, num_heads: int, timm: str, *, depth: int = 12, family: str = "dinov2", **more: Any
) -> Variant:
    """A DINOv2, arXiv 2304.07193: patches of 14 px, LayerScale; registers, arXiv 2309.16588, have no positions."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "patch_size": 14, "img_size": (518, 518)}
    sizes |= {"init_values": 1e-5, **more}
    return Variant("vit", (depth,), sizes, "deit", family, timm, {"crop_pct": 1.0, "crop_mode": "center"})


def eva02(embed_dim: int, num_heads: int, timm: str, *, family: str = "eva02", mlp: str = "swiglu") -> Variant:
    """An EVA-02, arXiv 2303.11331: rotary and learned positions, gated MLPs, keys without bias, a norm of the mean."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "patch_size": 14, "mlp": mlp, "mlp_ratio": 4 * 2 / 3}
    sizes |= {"rope": "eva02", "key_bias": False, "global_pool": "avg", "fc_norm": True}
    input_config = {"mean": OPENAI_CLIP_MEAN, "std": OPENAI_CLIP_STD, "crop_pct": 0.9, "crop_mode": "center"}
    return Variant("vit", (12,), sizes, "deit", family, timm, input_config)


def dinov3(embed_dim: int, num_heads: int, timm: str) -> Variant:
    """A DINOv3, arXiv 2508.10104: rotary positions alone, four registers, LayerScale, projections without bias."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "img_size": (256, 256), "reg_tokens": 4}
    sizes |= {"pos_embed": "none", "rope": "dinov3", "qkv_bias": False, "init_values": 1e-5, "norm_eps": 1e-5}
    sizes |= {"global_pool": "avg"}
    return Variant("vit", (12,), sizes, "deit", "dinov3", timm, {"crop_pct": 1.0, "crop_mode": "center"})


def small_deit(embed_dim: int, num_heads: int, depth: int, patch_size: int, img_size: int, recipe: str) -> Variant:
    """A DeiT of ours for small images, to compare mechanisms in minutes; nobody published it."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "patch_size": patch_size}
    return Variant("vit", (depth,), sizes | {"img_size": (img_size, img_size)}, recipe)


def pvt(depths: tuple[int, ...], drop_path_rate: float) -> Variant:
    """A PVT, arXiv 2102.12122: widths and heads are the host's defaults."""
    return Variant("pvt", depths, {"drop_path_rate": drop_path_rate}, "pvt", family="pvt")


def pvt_v2(depths: tuple[int, ...], timm: str, drop_path_rate: float = 0.1, **sizes: Any) -> Variant:
    """A PVTv2, arXiv 2106.13797: widths and heads are the host's defaults, but for the narrow B0."""
    return Variant("pvt_v2", depths, {"drop_path_rate": drop_path_rate, **sizes}, "pvt", "pvt_v2", timm)


def swin(embed_dim: int, depths: tuple[int, ...], num_heads: tuple[int, ...], drop_path_rate: float) -> Variant:
    """A Swin, arXiv 2103.14030."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "drop_path_rate": drop_path_rate}
    return Variant("swin", depths, sizes, "swin", family="swin")


def cswin(embed_dim: int, depths: tuple[int, ...], num_heads: tuple[int, ...], drop_path_rate: float) -> Variant:
    """A CSwin, arXiv 2107.00652, with the depths of the linear families' code (the original's are 1-2-21-1, …)."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "drop_path_rate": drop_path_rate}
    return Variant("cswin", depths, sizes, "cswin", family="cswin")


def softnet(depths: tuple[int, ...], stage3: int = 320) -> Variant:
    """SOFT's pyramid, arXiv 2110.11945, with its width in stage 3."""
    return Variant("softnet", depths, {"embed_dims": (64, 128, stage3, 512), "drop_path_rate": 0.1}, "soft")


def lavit(depths: tuple[int, ...], drop_path_rate: float) -> Variant:
    """A LaViT, arXiv 2406.00427: a reconstruction, widths and depths are ours (those of PVT)."""
    return Variant("lavit", depths, {"drop_path_rate": drop_path_rate}, "pvt")


def lavit_deit(embed_dim: int, num_heads: int, drop_path_rate: float) -> Variant:
    """A DeiT whose second half is less attention; ours."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "drop_path_rate": drop_path_rate}
    return Variant("lavit_vit", (12,), sizes, "deit")


def mllanet(embed_dim: int, depths: tuple[int, ...], num_heads: tuple[int, ...], drop_path_rate: float) -> Variant:
    """MLLA's pyramid, arXiv 2405.16605: heads are 32 channels wide, rotary positions across all of them."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "drop_path_rate": drop_path_rate, "rope": "mlla"}
    return Variant("mllanet", depths, sizes, "swin")


def mavit(size: str, *, family: str = "", recipe: str = "mavit", **more: Any) -> Variant:
    """A MAViT, arXiv 2507.00698, or what else stands on this host: sizes are the same, and `more` is what differs."""
    depths, sizes = MAVIT_SIZES[size]
    return Variant("mavit", depths, {**sizes, "rope": "mala", **more}, recipe, family)


def nalaformer(size: str, **more: Any) -> Variant:
    """A NaLaFormer, arXiv 2506.21137: MAViT with two convolutions of positions and a norm in front of the gate."""
    return mavit(size, head_width=1024, gate="norm_silu", conv_positions=2, start="uniform", **more)


def polaformerpp(size: str, **more: Any) -> Variant:
    """A network of PolaFormer++: MAViT, but for what linear layers start from and its recipe."""
    return mavit(size, start="uniform_blocks", recipe="swin", **more)


MAVIT_SIZES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "xtiny": (
        (2, 2, 2, 2),
        {"embed_dims": (32, 64, 128, 384), "num_heads": (1, 2, 4, 12), "drop_path_rate": 0.1},
    ),
    "mini": (
        (2, 2, 4, 2),
        {"embed_dims": (32, 64, 192, 384), "num_heads": (1, 2, 6, 12), "drop_path_rate": 0.1},
    ),
    "tiny": (
        (2, 2, 6, 2),
        {"embed_dims": (64, 128, 256, 512), "num_heads": (1, 2, 4, 8), "drop_path_rate": 0.1},
    ),
    "small": (
        (3, 5, 9, 3),
        {"embed_dims": (64, 128, 320, 512), "num_heads": (1, 2, 5, 8), "drop_path_rate": 0.15},
    ),
    "base": (
        (4, 6, 12, 6),
        {"embed_dims": (96, 192, 384, 512), "num_heads": (1, 2, 6, 8), "drop_path_rate": 0.4}
        | {"init_values": (1, 1, 1e-6, 1e-6)},
    ),
    "large": (
        (4, 7, 19, 8),
        {"embed_dims": (96, 192, 448, 640), "num_heads": (1, 2, 7, 10), "drop_path_rate": 0.55}
        | {"init_values": (1e-6, 1e-6, 1e-6, 1e-6)},
    ),
}
"""Depths, and widths, heads and starts of MAViT's sizes."""


def vit3(embed_dim: int, num_heads: int, drop_path_rate: float) -> Variant:
    """A ViT³, arXiv 2512.01643: a DeiT whose tokens are placed by convolutions, without a class token."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "drop_path_rate": drop_path_rate}
    return Variant("vit", (12,), sizes | {"cpe": True, "pos_embed": "none", "class_token": False}, "deit")


def hvit3(
    embed_dims: tuple[int, ...], depths: tuple[int, ...], num_heads: tuple[int, ...], drop_path_rate: float
) -> Variant:
    """An H-ViT³, arXiv 2512.01643: heads are 32 channels wide, rotary positions across all of them."""
    sizes = {"embed_dims": embed_dims, "num_heads": num_heads, "drop_path_rate": drop_path_rate, "rope": "mlla"}
    return Variant("hvit3", depths, sizes, "swin")


REG4: dict[str, Any] = {"reg_tokens": 4, "pos_embed": "patches"}
GIANT: dict[str, Any] = {"mlp": "swiglu", "mlp_ratio": 2.66667}

VARIANTS: dict[str, Variant] = {
    "deit_micro": small_deit(64, num_heads=4, depth=3, patch_size=4, img_size=16, recipe="digits"),
    "deit_mini": small_deit(128, num_heads=4, depth=6, patch_size=4, img_size=32, recipe="cifar10_small"),
    "deit_tiny": deit(192, 3, "deit_tiny_patch16_224"),
    "deit_small": deit(384, 6, "deit_small_patch16_224", drop_path_rate=0.1),
    "deit_base": deit(768, 12, "deit_base_patch16_224", drop_path_rate=0.3),
    "deit3_small": deit3(384, 6, "deit3_small_patch16_224"),
    "deit3_base": deit3(768, 12, "deit3_base_patch16_224"),
    "dinov2_small": dinov2(384, 6, "vit_small_patch14_dinov2"),
    "dinov2_base": dinov2(768, 12, "vit_base_patch14_dinov2"),
    "dinov2_giant": dinov2(1536, 24, "vit_giant_patch14_dinov2", depth=40, family="", **GIANT),
    "dinov2_small_reg4": dinov2(384, 6, "vit_small_patch14_reg4_dinov2", **REG4),
    "dinov2_base_reg4": dinov2(768, 12, "vit_base_patch14_reg4_dinov2", **REG4),
    "eva02_tiny": eva02(192, 3, "eva02_tiny_patch14_224"),
    "eva02_small": eva02(384, 6, "eva02_small_patch14_224"),
    "eva02_base": eva02(768, 12, "eva02_base_patch14_224", family="", mlp="swiglu_norm"),
    "dinov3_small": dinov3(384, 6, "vit_small_patch16_dinov3"),
    "dinov3_base": dinov3(768, 12, "vit_base_patch16_dinov3"),
    "pvt_tiny": pvt((2, 2, 2, 2), drop_path_rate=0.1),
    "pvt_small": pvt((3, 4, 6, 3), drop_path_rate=0.1),
    "pvt_medium": pvt((3, 4, 18, 3), drop_path_rate=0.3),
    "pvt_large": pvt((3, 8, 27, 3), drop_path_rate=0.3),
    "pvt_v2_b0": pvt_v2((2, 2, 2, 2), "pvt_v2_b0", embed_dims=(32, 64, 160, 256)),
    "pvt_v2_b1": pvt_v2((2, 2, 2, 2), "pvt_v2_b1"),
    "pvt_v2_b2": pvt_v2((3, 4, 6, 3), "pvt_v2_b2"),
    "pvt_v2_b3": pvt_v2((3, 4, 18, 3), "pvt_v2_b3", drop_path_rate=0.3),
    "pvt_v2_b4": pvt_v2((3, 8, 27, 3), "pvt_v2_b4", drop_path_rate=0.3),
    "pvt_v2_b5": pvt_v2((3, 6, 40, 3), "pvt_v2_b5", drop_path_rate=0.3, mlp_ratios=(4, 4, 4, 4)),
    "swin_tiny": swin(96, (2, 2, 6, 2), (3, 6, 12, 24), drop_path_rate=0.2),
    "swin_small": swin(96, (2, 2, 18, 2), (3, 6, 12, 24), drop_path_rate=0.3),
    "swin_base": swin(128, (2, 2, 18, 2), (4, 8, 16, 32), drop_path_rate=0.5),
    "cswin_tiny": cswin(64, (2, 4, 18, 1), (2, 4, 8, 16), drop_path_rate=0.2),
    "cswin_small": cswin(64, (3, 6, 29, 2), (2, 4, 8, 16), drop_path_rate=0.4),
    # FLatten's CSwin-S, whose code says other depths than Agent Attention's
    "cswin_small_deep": replace(cswin(64, (2, 4, 32, 2), (2, 4, 8, 16), drop_path_rate=0.4), family=""),
    "cswin_base": cswin(96, (3, 6, 29, 2), (4, 8, 16, 32), drop_path_rate=0.5),
    "softnet_tiny": softnet((1, 2, 3, 2)),
    "softnet_small": softnet((1, 3, 7, 4)),
    "softnet_small_deep": softnet((1, 3, 20, 4)),
    "softnet_medium": softnet((1, 3, 29, 5), stage3=288),
    "softnet_large": softnet((1, 3, 40, 5)),
    "softnet_huge": softnet((1, 5, 49, 5), stage3=352),
    "lavit_tiny": lavit((2, 2, 2, 2), drop_path_rate=0.1),
    "lavit_small": lavit((3, 4, 6, 3), drop_path_rate=0.1),
    "lavit_base": lavit((3, 4, 18, 3), drop_path_rate=0.3),
    "lavit_deit_tiny": lavit_deit(192, 3, drop_path_rate=0.0),
    "lavit_deit_small": lavit_deit(384, 6, drop_path_rate=0.1),
    "lavit_deit_base": lavit_deit(768, 12, drop_path_rate=0.3),
    "mllanet_tiny": mllanet(64, (2, 4, 8, 4), (2, 4, 8, 16), drop_path_rate=0.2),
    "mllanet_small": mllanet(64, (3, 6, 21, 6), (2, 4, 8, 16), drop_path_rate=0.3),
    "mllanet_base": mllanet(96, (3, 6, 21, 6), (3, 6, 12, 24), drop_path_rate=0.5),
    "mavit_tiny": mavit("tiny", family="mavit"),
    "mavit_small": mavit("small", family="mavit"),
    "mavit_base": mavit("base", family="mavit"),
    "mavit_large": mavit("large", family="mavit", head_width=2560),
    "ravlt_tiny": mavit("tiny", head_width=1024),
    "ravlt_small": mavit("small", head_width=1024),
    "ravlt_base": mavit("base", head_width=1024),
    "ravlt_large": mavit("large", head_width=1024),
    "nalaformer_xtiny": nalaformer("xtiny"),
    "nalaformer_tiny": nalaformer("tiny", mlp_ratio=4),
    "nalaformer_small": nalaformer("small"),
    "nalaformer_base": nalaformer("base", mlp_ratio=4),
    "nalaformer_large": nalaformer("large"),
    "polaformerpp_b0": polaformerpp("xtiny"),
    "polaformerpp_b1": polaformerpp("mini"),
    "polaformerpp_b2": polaformerpp("tiny"),
    "polaformerpp_b3": polaformerpp("small"),
    "polaformerpp_b4": polaformerpp("base"),
    "polaformerpp_b5": polaformerpp("large", head_width=2560),
    "vit3_tiny": vit3(192, 6, drop_path_rate=0.0),
    "vit3_small": vit3(384, 6, drop_path_rate=0.1),
    "vit3_base": vit3(768, 12, drop_path_rate=0.4),
    "hvit3_tiny": hvit3((64, 128, 320, 512), (1, 3, 9, 4), (2, 4, 10, 16), drop_path_rate=0.2),
    "hvit3_small": hvit3((64, 128, 320, 512), (2, 6, 18, 8), (2, 4, 10, 16), drop_path_rate=0.4),
    "hvit3_base": hvit3((96, 192, 448, 640), (2, 6, 18, 8), (3, 6, 14, 20), drop_path_rate=0.6),
}
