"""The table of whole networks: a size, a mechanism for each stage, and what was published about it.

Names are `<mechanism>_<host>_<size>`, and those of the papers. Every row is a timm model as well.
"""

from dataclasses import dataclass, field
from typing import Any

from subquad.attention import ATTENTION, traits_of
from subquad.models.variants import HOSTS, VARIANTS, Variant


@dataclass(frozen=True)
class Network:
    """A row.

    Attributes:
        variant: a name of VARIANTS.
        attention: the mechanism of all blocks, or one for each stage, or (name, count) pairs within a stage.
        settings: what differs from the variant: arguments of the host and of the mechanisms.
        params: parameters with 1000 classes, in millions, as the released network has them.
        gmacs: published multiply-adds of an image, in billions ("FLOPs" in the papers).
        top1: published ImageNet-1k accuracy in per cent.
        source: which authors' weights fit; a name of SOURCES.
        label: what its blocks are called where they take no mechanism.
    """

    variant: str
    attention: Any
    settings: dict[str, Any] = field(default_factory=dict)
    params: float | None = None
    gmacs: float | None = None
    top1: float | None = None
    source: str = ""
    label: str = ""


SOURCES = {
    "agent": "github.com/LeapLabTHU/Agent-Attention",
    "inline": "github.com/LeapLabTHU/InLine",
    "pola": "huggingface.co/ZachMeng/PolaFormer",
    "soft": "github.com/fudan-zvg/SOFT",
    "focused": "github.com/LeapLabTHU/FLatten-Transformer",
    "mlla": "github.com/LeapLabTHU/MLLA",
    "mala": "huggingface.co/aldjalkdf/MAViT",
    "circulant": "github.com/LeapLabTHU/Circulant-Attention",
    "rala": "huggingface.co/aldjalkdf/RAVLT",
    "ttt": "github.com/LeapLabTHU/ViTTT",
    "polapp": "github.com/ZacharyMeng/PolaFormerPP",
}
"""Where the authors' weights are."""


def agent(variant: str, attention: Any, params: float, gmacs: float, top1: float, **settings: Any) -> Network:
    """Agent Attention, arXiv 2312.08874, table of the released networks."""
    return Network(variant, attention, settings, params, gmacs, top1, "agent")


def inline(
    variant: str, attention: Any, params: float, gmacs: float | None, top1: float | None, **settings: Any
) -> Network:
    """InLine, arXiv 2412.06590, table of the released networks; PVTs have twice the heads, DeiTs are other sizes."""
    return Network(variant, attention, settings, params, gmacs, top1, "inline")


def pola(variant: str, attention: Any, params: float, gmacs: float | None, top1: float | None, **more: Any) -> Network:
    """PolaFormer, arXiv 2501.15061, table of the released networks."""
    return Network(variant, attention, more, params, gmacs, top1, "pola")


def flatten(
    variant: str,
    attention: Any,
    params: float,
    gmacs: float | None,
    top1: float | None,
    *,
    source: str = "focused",
    **settings: Any,
) -> Network:
    """FLatten, arXiv 2308.00442: its released networks, and those that its code builds, which have no `source`.

    Multiply-adds, and accuracies without weights, are read off its plot.
    """
    return Network(variant, attention, settings, params, gmacs, top1, source)


def soft(variant: str, params: float, gmacs: float | None, top1: float | None, *, norm: bool = False) -> Network:
    """SOFT, arXiv 2110.11945, and its normalised form, 2207.03341, trained with the gradients that the authors use."""
    settings = {"inverse": "norm"} if norm else {"gradient": "inverse"}
    return Network(variant, SSSX, settings, params, gmacs, top1, "soft")


def mlla(variant: str, params: float, gmacs: float, top1: float) -> Network:
    """MLLA, arXiv 2405.16605, table of the released networks."""
    return Network(variant, "mlla", {}, params, gmacs, top1, "mlla")


WITHOUT_PREFIX: dict[str, Any] = {"class_token": False, "reg_tokens": 0, "global_pool": "avg"}


def circulant(variant: str, params: float, gmacs: float, top1: float, **more: Any) -> Network:
    """CA-DeiT, arXiv 2512.21542, table of the released networks: no class token, positions by convolutions."""
    settings = {"pos_embed": "none", "cpe": True, "qkv_bias": False, "gate_bias": True, **WITHOUT_PREFIX}
    return Network(variant, "circulant", settings | more, params, gmacs, top1, "circulant")


def ttt(variant: str, params: float, gmacs: float, top1: float) -> Network:
    """ViT³ and H-ViT³, arXiv 2512.01643, table of the released networks; H-ViT³'s accuracies are those with MESA."""
    return Network(variant, "ttt", {}, params, gmacs, top1, "ttt")


def mhla(variant: str, params: float, gmacs: float | None, top1: float | None) -> Network:
    """DeiT with MHLA, arXiv 2601.07832, as its code builds it; no weights are released.

    Images have a margin, so that 16×16 tokens make blocks of 4×4. The published multiply-adds are without it.
    """
    settings = {"image_margin": 16, "qkv_bias": False, "attn_norm": True, "fc_norm": True, "normaliser": "released"}
    return Network(variant, "mhla", settings | WITHOUT_PREFIX, params, gmacs, top1)


SSSX = ("soft", "soft", "soft", "softmax")
AAAB = ("agent", "agent", "agent", "softmax")
AABB = ("agent", "agent", "softmax", "softmax")
AAMB2 = ("agent", "agent", (("agent", 2), ("softmax", 16)), "softmax")
IIIS = ("inline", "inline", "inline", "softmax")
IISS = ("inline", "inline", "softmax", "softmax")
IIMS2 = ("inline", "inline", (("inline", 2), ("softmax", 16)), "softmax")
LLSS = ("pola", "pola", "softmax", "softmax")
FFSS = ("focused", "focused", "softmax", "softmax")
CCSS = ("circulant", "circulant", "softmax", "softmax")
HEADS = (2, 4, 10, 16)


def mala(variant: str, params: float, gmacs: float, top1: float) -> Network:
    """MAViT with MALA, arXiv 2507.00698; accuracies are those of the paper's tables as others quote them."""
    return Network(variant, fine("mala"), {}, params, gmacs, top1, "mala")


def rala(variant: str, params: float, gmacs: float, top1: float) -> Network:
    """RAVLT with RALA, arXiv 2411.07635, table of the released networks; T, B and L as others quote the paper."""
    return Network(variant, fine("rala"), {}, params, gmacs, top1, "rala")


def nala(variant: str, params: float, gmacs: float, top1: float) -> Network:
    """NaLaFormer, arXiv 2506.21137: published figures of T and the smallest fit other sizes than its code builds."""
    return Network(variant, fine("nala"), {}, params, gmacs, top1)


def polapp(variant: str, params: float, gmacs: float, top1: float) -> Network:
    """PolaFormer++, the table of its repository."""
    return Network(variant, fine("polapp"), {}, params, gmacs, top1, "polapp")


def fine(mechanism: str) -> tuple[str, ...]:
    """A mechanism in the two stages of the finest maps, softmax in the others."""
    return (mechanism, mechanism, "softmax", "softmax")


PUBLISHED: dict[str, Network] = {
    "agent_deit_tiny": agent("deit_tiny", "agent", 6.015640, 1.2, 74.9),
    "agent_deit_small": agent("deit_small", "agent", 22.647112, 4.4, 80.5),
    "agent_deit_small_448": agent("deit_small", "agent", 23.070472, 17.7, 83.1, img_size=448),
    "agent_deit_base": agent(
        "deit_base", (("agent", 4), ("softmax", 8)), 87.204904, 17.6, 82.0, num_agents=81, drop_path_rate=0.3
    ),
    "agent_pvt_tiny": agent("pvt_tiny", "agent", 11.570352, 2.0, 78.4),
    "agent_pvt_small": agent("pvt_small", "agent", 20.635066, 4.0, 82.2),
    "agent_pvt_medium": agent("pvt_medium", "agent", 35.921746, 7.0, 83.4),
    "agent_pvt_medium_256": agent("pvt_medium", "agent", 36.083682, 9.2, 83.8, img_size=256),
    "agent_pvt_large": agent("pvt_large", "agent", 48.738180, 10.4, 83.7),
    "agent_swin_tiny": agent("swin_tiny", AAAB, 28.902964, 4.5, 82.6),
    "agent_swin_small": agent("swin_small", AABB, 49.666684, 8.7, 83.7),
    "agent_swin_small_288": agent("swin_small", AABB, 49.707964, 14.6, 84.1, img_size=288),
    "agent_swin_base": agent("swin_base", AAMB2, 88.095096, 15.4, 84.0),
    "agent_swin_base_384": agent("swin_base", AAMB2, 88.305016, 46.3, 84.9, img_size=384),
    "agent_cswin_tiny": agent("cswin_tiny", AABB, 20.458672, 4.3, 83.1),
    "agent_cswin_small": agent("cswin_small", AABB, 32.814100, 6.8, 83.9),
    "agent_cswin_base": agent("cswin_base", AABB, 73.249696, 14.9, 84.7),
    "agent_cswin_base_384": agent("cswin_base", AABB, 73.328416, 46.3, 85.8, img_size=384, drop_path_rate=0.7),
    "inline_deit_tiny": inline("deit_tiny", "inline", 6.477736, 1.1, 74.5, num_heads=6, drop_path_rate=0.1),
    "inline_deit_small": inline(
        "deit_small", "inline", 16.734760, 5.0, 80.2, embed_dim=320, num_heads=10, img_size=288
    ),
    "inline_deit_base": inline(
        "deit_small", "inline", 23.797096, 17.2, 82.3, embed_dim=384, num_heads=12, img_size=448
    ),
    "inline_pvt_tiny": inline("pvt_tiny", "inline", 12.032232, 2.0, 78.2, num_heads=HEADS),
    "inline_pvt_small": inline("pvt_small", "inline", 21.556136, 3.9, 82.0, num_heads=HEADS),
    "inline_pvt_medium": inline("pvt_medium", "inline", 37.618856, 6.9, 83.2, num_heads=HEADS),
    "inline_pvt_large": inline("pvt_large", "inline", 51.154280, 10.2, 83.6, num_heads=HEADS),
    "inline_swin_tiny": inline("swin_tiny", IIIS, 29.223544, 4.5, 82.4),
    "inline_swin_small": inline("swin_small", IISS, 49.793296, 8.7, 83.6),
    "inline_swin_base": inline("swin_base", IIMS2, 88.350120, 15.4, 84.1),
    "inline_swin_base_384": inline("swin_base", IIMS2, 88.465320, None, None, img_size=384),
    "inline_cswin_tiny": inline("cswin_tiny", IISS, 20.604520, 4.3, 83.2),
    "inline_cswin_small": inline("cswin_small", IISS, 33.032872, 6.8, 83.8),
    "inline_cswin_base": inline("cswin_base", IISS, 73.413640, 14.9, 84.5),
    "inline_cswin_base_384": inline("cswin_base", IISS, 73.413640, 46.3, 85.7, img_size=384, drop_path_rate=0.7),
    "pola_pvt_tiny": pola("pvt_tiny", "pola", 12.923624, 2.1, 78.8),
    "pola_pvt_small": pola("pvt_small", "pola", 23.156200, 4.1, 81.9),
    "pola_pvt_medium": pola("pvt_medium", "pola", 39.964648, None, None),
    "pola_pvt_large": pola("pvt_large", "pola", 54.365544, None, None),
    "pola_swin_tiny": pola("swin_tiny", LLSS, 29.285696, 4.5, 82.6),
    "pola_swin_small": pola("swin_small", LLSS, 50.603600, 8.7, 83.6),
    "pola_swin_base": pola("swin_base", LLSS, 89.137864, 15.4, 83.8),
    "pola_swin_base_384": pola("swin_base", LLSS, 91.599304, None, None, img_size=384),
    "focused_pvt_tiny": flatten("pvt_tiny", "focused", 12.149480, 2.0, 77.8),
    "focused_pvt_small": flatten("pvt_small", "focused", 21.669224, 4.0, 81.7, source=""),
    "focused_pvt_medium": flatten("pvt_medium", "focused", 37.241192, 7.1, 83.0, source=""),
    "focused_pvt_large": flatten("pvt_large", "focused", 50.648168, None, None, source=""),
    "focused_pvt_v2_b0": flatten("pvt_v2_b0", "focused", 3.594824, None, 71.1),
    "focused_pvt_v2_b1": flatten("pvt_v2_b1", "focused", 12.931240, None, None, source=""),
    "focused_pvt_v2_b2": flatten("pvt_v2_b2", "focused", 22.548264, 4.3, 82.5, source=""),
    "focused_pvt_v2_b3": flatten("pvt_v2_b3", "focused", 38.273832, 7.3, 83.7, source=""),
    "focused_pvt_v2_b4": flatten("pvt_v2_b4", "focused", 51.836968, 10.7, 84.0, source=""),
    "focused_swin_tiny": flatten("swin_tiny", FFSS, 29.192384, 4.5, 82.1),
    "focused_swin_small": flatten("swin_small", FFSS, 50.510288, 8.8, 83.5),
    "focused_swin_base": flatten("swin_base", FFSS, 88.972488, 15.5, 83.8),
    "focused_swin_base_384": flatten("swin_base", FFSS, 91.433928, None, 85.0, img_size=384),
    "focused_cswin_tiny": flatten("cswin_tiny", FFSS, 21.201768, 4.3, 83.1),
    "focused_cswin_small_deep": flatten("cswin_small_deep", FFSS, 35.451752, 6.8, 83.8, source=""),
    "focused_cswin_base": flatten("cswin_base", FFSS, 74.867032, 15.0, 84.5, source=""),
    "focused_cswin_base_384": flatten("cswin_base", FFSS, 78.369112, None, None, source="", img_size=384),
    "soft_tiny": soft("softnet_tiny", 13.069056, 1.9, 79.3),
    "soft_small": soft("softnet_small", 24.110092, 3.3, 82.2),
    "soft_small_deep": soft("softnet_small_deep", 38.858462, None, None),
    "soft_medium": soft("softnet_medium", 45.812707, 7.2, 82.9),
    "soft_large": soft("softnet_large", 64.700646, 11.0, 83.1),
    "soft_huge": soft("softnet_huge", 87.108273, 16.3, 83.3),
    "soft_norm_tiny": soft("softnet_tiny", 13.069056, 1.9, 79.4, norm=True),
    "soft_norm_small": soft("softnet_small", 24.110092, 3.3, 82.4, norm=True),
    "soft_norm_small_deep": soft("softnet_small_deep", 38.858462, None, None, norm=True),
    "soft_norm_medium": soft("softnet_medium", 45.812707, 7.2, 83.1, norm=True),
    "soft_norm_large": soft("softnet_large", 64.700646, 11.0, 83.3, norm=True),
    "soft_norm_huge": soft("softnet_huge", 87.108273, 16.3, 83.4, norm=True),
    "mlla_tiny": mlla("mllanet_tiny", 24.392200, 4.2, 83.5),
    "mlla_small": mlla("mllanet_small", 43.015048, 7.3, 84.4),
    "mlla_base": mlla("mllanet_base", 95.983960, 16.2, 85.3),
    "mala_tiny": mala("mavit_tiny", 16.449128, 2.5, 82.9),
    "mala_small": mala("mavit_small", 27.142568, 4.6, 84.7),
    "mala_base": mala("mavit_base", 49.792648, 9.9, 85.7),
    "mala_large": mala("mavit_large", 97.766088, 16.1, 86.0),
    "circulant_deit_tiny": circulant("deit_tiny", 6.140200, 1.2, 75.0),
    "circulant_deit_small": circulant("deit_small", 23.780968, 4.8, 81.0),
    "circulant_deit_base": circulant("deit_base", 93.567208, 18.9, 82.3, drop_path_rate=0.4),
    "rala_tiny": rala("ravlt_tiny", 14.897768, 2.4, 82.8),
    "rala_small": rala("ravlt_small", 25.591208, 4.6, 84.4),
    "rala_base": rala("ravlt_base", 48.241288, 9.9, 85.5),
    "rala_large": rala("ravlt_large", 95.242440, 16.0, 86.1),
    "nala_xtiny": nala("nalaformer_xtiny", 6.142248, 1.0, 79.1),
    "nala_tiny": nala("nalaformer_tiny", 15.907752, 2.7, 82.6),
    "nala_small": nala("nalaformer_small", 25.654184, 5.1, 84.3),
    "nala_base": nala("nalaformer_base", 52.002952, 12, 85.2),
    "nala_large": nala("nalaformer_large", 95.426760, 18, 85.7),
    "polapp_b0": polapp("polaformerpp_b0", 7.548712, 0.7, 76.9),
    "polapp_b1": polapp("polaformerpp_b1", 9.227496, 1.0, 79.1),
    "polapp_b2": polapp("polaformerpp_b2", 16.450664, 2.7, 82.8),
    "polapp_b3": polapp("polaformerpp_b3", 27.145896, 5.1, 84.3),
    "polapp_b4": polapp("polaformerpp_b4", 49.798792, 11, 85.4),
    "polapp_b5": polapp("polaformerpp_b5", 97.773000, 18, 85.6),
    "ttt_vit3_tiny": ttt("vit3_tiny", 6.149416, 1.2, 76.5),
    "ttt_vit3_small": ttt("vit3_small", 23.799400, 4.8, 81.6),
    "ttt_vit3_base": ttt("vit3_base", 90.055912, 18.0, 82.6),
    "ttt_hvit3_tiny": ttt("hvit3_tiny", 28.703560, 4.9, 84.0),
    "ttt_hvit3_small": ttt("hvit3_small", 54.362056, 8.8, 84.9),
    "ttt_hvit3_base": ttt("hvit3_base", 94.369304, 16.7, 85.5),
    "mhla_deit_tiny": mhla("deit_tiny", 5.793832, 1.1, 75.8),
    "mhla_deit_small": mhla("deit_small", 22.200424, 4.2, 81.0),
    "mhla_deit_base": mhla("deit_base", 86.864104, None, None),
}


def vits(mechanism: str) -> dict[str, str]:
    """A mechanism in all blocks of the later plain ViTs."""
    return dict.fromkeys(("deit3", "dinov2", "eva02", "dinov3"), mechanism)


def everywhere(mechanism: str) -> dict[str, Any]:
    """A mechanism in all blocks where positions are added to tokens, and in the finest stages of Swin and CSwin."""
    whole = dict.fromkeys(("deit", "pvt", "pvt_v2"), mechanism)
    return {**whole, "swin": fine(mechanism), "cswin": fine(mechanism), **vits(mechanism)}


PATTERNS: dict[str, dict[str, Any]] = {
    "softmax": {
        **dict.fromkeys(("deit", "pvt", "pvt_v2", "swin", "cswin"), "softmax"),
        **vits("softmax"),
        "mavit": "softmax",
    },
    "linear": {
        **dict.fromkeys(("deit", "pvt", "pvt_v2", "swin", "cswin"), "linear"),
        **vits("linear"),
        "mavit": fine("linear"),
    },
    "focused": {
        **dict.fromkeys(("deit", "pvt", "pvt_v2"), "focused"),
        "swin": FFSS,
        "cswin": FFSS,
        **vits("focused"),
        "mavit": fine("focused"),
    },
    "agent": {"pvt_v2": "agent", **vits("agent"), "mavit": fine("agent")},
    "inline": {"pvt_v2": "inline", **vits("inline"), "mavit": fine("inline")},
    "pola": {"deit": "pola", "pvt_v2": "pola", "cswin": LLSS, **vits("pola"), "mavit": fine("pola")},
    "soft": {
        "deit": "soft",
        **dict.fromkeys(("pvt", "pvt_v2", "swin", "cswin"), SSSX),
        **vits("soft"),
        "mavit": fine("soft"),
    },
    "mala": everywhere("mala"),
    "mlla": {
        **dict.fromkeys(("deit", "pvt", "pvt_v2", "swin", "cswin"), "mlla"),
        **vits("mlla"),
        "mavit": fine("mlla"),
    },
    "circulant": {
        **dict.fromkeys(("pvt", "pvt_v2"), "circulant"),
        "swin": CCSS,
        "cswin": CCSS,
        **vits("circulant"),
        "mavit": fine("circulant"),
    },
    "rala": everywhere("rala"),
    "nala": everywhere("nala"),
    "polapp": everywhere("polapp"),
    "ttt": {
        **dict.fromkeys(("deit", "pvt", "pvt_v2", "swin", "cswin"), "ttt"),
        **vits("ttt"),
        "mavit": fine("ttt"),
    },
    "mhla": {
        **dict.fromkeys(("pvt", "pvt_v2", "swin", "cswin"), "mhla"),
        **vits("mhla"),
        "mavit": fine("mhla"),
    },
}
"""The mechanism of each stage in the networks that complete the scheme: baselines, and what nobody published."""


def plain_settings(mechanism: str, variant: Variant) -> dict[str, Any] | None:
    """What a mechanism needs of a network of these sizes to stand in it; None where it can't.

    One that refuses prefix tokens has a plain network without them. Networks that are known for theirs are left out.
    """
    if variant.host != "vit" or "prefix" not in traits_of(ATTENTION[mechanism]).refuses:
        return {}
    return None if variant.arguments.get("reg_tokens") else WITHOUT_PREFIX


BASELINES: dict[str, Network] = {
    name: Network(variant, patterns[family], needed | settings)
    for mechanism, patterns in PATTERNS.items()
    for variant in VARIANTS
    for ending, settings in (("", {}), ("_384", {"img_size": 384}))
    if (family := VARIANTS[variant].family) in patterns and (not ending or variant in ("swin_base", "cswin_base"))
    if (name := f"{mechanism}_{variant}{ending}") not in PUBLISHED
    if (needed := plain_settings(mechanism, VARIANTS[variant])) is not None
}

RECONSTRUCTED: dict[str, Network] = {
    # the published 10.9, 22.4 and 39.6 M, 1.6, 3.3 and 6.1 G are of networks that nobody can rebuild
    name: Network(name, "softmax", label=label)
    for name, variant in VARIANTS.items()
    if (label := HOSTS[variant.host].own_attention)
}

NETWORKS: dict[str, Network] = {**PUBLISHED, **RECONSTRUCTED, **BASELINES}
