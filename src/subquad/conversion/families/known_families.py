"""Which attention layers can be converted: a row for each family of foreign networks, a file for each row.

A row names the module that reads a family. It is imported when a layer of the family is seen, since a family's file may
need a library that is heavy, or not installed. Layers are known by the full names of their classes (`replaces`), so
that nothing is imported to find that something is of no known kind.

Added from outside by `register_family`, or by an installed package with an entry point in the group
`subquad.families`: its name is the module in which the foreign layers are defined, its object the class that stands for
them.
"""

from importlib import import_module
from typing import Any

from torch import nn

from subquad.conversion.converted_attention import ConvertedAttention
from subquad.errors import SubquadError, shown
from subquad.inference.foreign_halves import InFewSteps
from subquad.plugins import Table

FAMILIES: dict[str, str] = {
    "diffusers.models.attention_processor": "subquad.conversion.families.diffusers_attention",
    **{
        f"diffusers.models.transformers.transformer_{name}": "subquad.conversion.families.diffusers_rows"
        for name in ("bria", "bria_fibo", "flux", "flux2", "flux3", "krea2", "longcat_image", "ovis_image")
    },
    **{
        f"diffusers.models.transformers.transformer_{name}": "subquad.conversion.families.diffusers_films"
        for name in ("anyflow", "chronoedit", "ltx", "skyreels_v2", "wan")
    },
    "dinov2.layers.attention": "subquad.conversion.families.dino_attention",
    "dinov3.layers.attention": "subquad.conversion.families.dino_attention",
    "segment_anything.modeling.image_encoder": "subquad.conversion.families.sam_attention",
    "timm.layers.attention": "subquad.conversion.families.timm_attention",
    "timm.models.beit": "subquad.conversion.families.timm_biased_attention",
    "timm.models.eva": "subquad.conversion.families.timm_attention",
    "timm.models.hieradet_sam2": "subquad.conversion.families.sam_attention",
    "timm.models.metaformer": "subquad.conversion.families.metaformer_attention",
    "timm.models.pvt_v2": "subquad.conversion.families.reducing_attention",
    "timm.models.swin_transformer": "subquad.conversion.families.timm_swin",
    "timm.models.swin_transformer_v2": "subquad.conversion.families.timm_swin",
    "timm.models.twins": "subquad.conversion.families.reducing_attention",
    "timm.models.vision_transformer_relpos": "subquad.conversion.families.timm_biased_attention",
    "timm.models.vision_transformer_sam": "subquad.conversion.families.sam_attention",
    "torch.nn.modules.activation": "subquad.conversion.families.torch_attention",
    "transformers.models.eomt.modeling_eomt": "subquad.conversion.families.transformers_queries",
    "transformers.models.eomt_dinov3.modeling_eomt_dinov3": "subquad.conversion.families.transformers_queries",
    "transformers.models.glpn.modeling_glpn": "subquad.conversion.families.reducing_attention",
    **{
        f"transformers.models.{name}.modeling_{name}": "subquad.conversion.families.padded_packs"
        for name in ("gemma4", "pix2struct", "siglip2")
    },
    **{
        f"transformers.models.{name}.modeling_{name}": "subquad.conversion.families.packed_turning"
        for name in ("inkling2", "minimax_m3_vl")
    },
    "transformers.models.lw_detr.modeling_lw_detr": "subquad.conversion.families.windowed_tokens",
    "transformers.models.llama4.modeling_llama4": "subquad.conversion.families.tiled_attention",
    "transformers.models.mllama.modeling_mllama": "subquad.conversion.families.tiled_attention",
    "transformers.models.pvt_v2.modeling_pvt_v2": "subquad.conversion.families.reducing_attention",
    "transformers.models.radio.modeling_radio": "subquad.conversion.families.radio_attention",
    "transformers.models.rf_detr.modeling_rf_detr": "subquad.conversion.families.windowed_tokens",
    "transformers.models.segformer.modeling_segformer": "subquad.conversion.families.reducing_attention",
    "transformers.models.swin.modeling_swin": "subquad.conversion.families.transformers_swin",
    "transformers.models.swinv2.modeling_swinv2": "subquad.conversion.families.transformers_swin",
    **{
        f"transformers.models.{name}.modeling_{name}": "subquad.conversion.families.transformers_films"
        for name in ("videomae", "vivit", "vjepa2")
    },
    "transformers.models.yolos.modeling_yolos": "subquad.conversion.families.transformers_queries",
    **{
        f"transformers.models.{name}.modeling_{name}": "subquad.conversion.families.transformers_attention"
        for name in (
            "aimv2",
            "altclip",
            "beit",
            "blip",
            "blip_2",
            "chinese_clip",
            "clip",
            "clipseg",
            "deit",
            "dinov2",
            "dinov2_with_registers",
            "dinov3_vit",
            "dpt",
            "git",
            "granite_docling",
            "idefics2",
            "idefics3",
            "ijepa",
            "instructblip",
            "instructblipvideo",
            "internvl",
            "janus",
            "kosmos2",
            "metaclip_2",
            "mlcd",
            "ovis2",
            "owlv2",
            "owlvit",
            "pixio",
            "qianfan_ocr",
            "sapiens2",
            "siglip",
            "smolvlm",
            "step3p7",
            "tipsv2",
            "vit",
            "vit_mae",
            "vit_msn",
            "vitpose_backbone",
        )
    },
    **{
        f"transformers.models.{name}.modeling_{name}": "subquad.conversion.families.sam_attention"
        for name in (
            "deepseek_ocr2",
            "got_ocr2",
            "pp_formulanet",
            "sam",
            "sam2",
            "sam3",
            "sam_hq",
            "slanext",
            "unlimited_ocr",
            "vitdet",
        )
    },
    **{
        f"transformers.models.{name}.modeling_{name}": "subquad.conversion.families.packed_attention"
        for name in (
            "cohere_compass",
            "dots3_note",
            "ernie4_5_vl_moe",
            "glm4v",
            "glm4v_moe",
            "glm5_next",
            "glm_ocr",
            "kimi_k25",
            "lfm3_vl",
            "paddleocr_vl",
            "pixtral",
            "qwen2_vl",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_omni_moe",
            "qwen3_vl",
            "qwen3_vl_moe",
            "qwen4_exp",
            "video_llama_3",
        )
    },
    **{
        f"transformers.models.{name}.modeling_{name}": "subquad.conversion.families.packed_by_numbers"
        for name in (
            "cosmos3_edge",
            "glm_image",
            "hunyuan_vl",
            "hy_v4_vl",
            "minicpm_ocr",
            "minicpmv4_6",
            "minicpmv4_7",
        )
    },
    **{
        f"transformers.models.{name}.modeling_{name}": "subquad.conversion.families.packed_windows"
        for name in ("exaone4_5", "muse_glimmer", "muse_spark", "qwen2_5_omni", "qwen2_5_vl")
    },
    **{
        f"subquad.models.{host}": "subquad.conversion.families.own_attention"
        for host in ("cswin", "layers", "mavit", "mlla_network", "pvt", "swin")
    },
}
"""Modules in which foreign attention layers are defined, and the module of ours that reads them."""

_REGISTERED: dict[str, type[ConvertedAttention]] = {}


def check_family(name: str, cls: Any) -> None:
    """Raise a SubquadError where a class stands for no foreign layers, or not for those of the module `name`."""
    if not (isinstance(cls, type) and issubclass(cls, ConvertedAttention) and _are_names(cls.replaces)):
        raise SubquadError(
            "a family is a class of ConvertedAttention whose `replaces` is a tuple of full names of classes, got "
            f"{shown(cls)}{f' with {shown(cls.replaces)}' if hasattr(cls, 'replaces') else ''}"
        )
    if missing := [one for one in ("sizes", "forward") if getattr(cls, one) is getattr(ConvertedAttention, one)]:
        raise SubquadError(f"{cls.__name__} can't be a family: it has no method {', '.join(missing)} (docs/convert.md)")
    if name and (elsewhere := [one for one in cls.replaces if not one.startswith(f"{name}.")]):
        raise SubquadError(
            f"{cls.__name__} replaces {', '.join(elsewhere)}, and its entry point is called {name}: that is the module "
            "in which foreign layers are defined"
        )


def _are_names(replaces: Any) -> bool:
    names = isinstance(replaces, tuple) and replaces
    return bool(names) and all(isinstance(one, str) and "." in one.strip(".") for one in replaces)


PLUGGED_IN: Table[type[ConvertedAttention]] = Table("a family", "subquad.families", check_family)
"""Families of installed plug-ins, by the modules in which foreign layers are defined."""


def register_family(cls: type[ConvertedAttention]) -> None:
    """Convert attention layers of further classes, for this process: those that `cls.replaces` names in full.

    Raises:
        SubquadError: `cls` is no class of `ConvertedAttention`, or stands for nothing.
    """
    check_family("", cls)
    _REGISTERED.update(dict.fromkeys(cls.replaces, cls))


def converted_class(layer: nn.Module) -> type[ConvertedAttention] | None:
    """The class of ours that stands for a layer, by its class or one that it is derived from; None where none does.

    A class that overrides `forward` is not what it is derived from, and is of no known kind.
    """
    for cls in type(layer).__mro__:
        name = f"{cls.__module__}.{cls.__qualname__}"
        found = _REGISTERED.get(name) or _of_family(cls.__module__).get(name)
        if found is not None:
            return found.standing_for(layer)
        if "forward" in vars(cls) and InFewSteps not in cls.__bases__:
            return None
    return None


def _of_family(module: str) -> dict[str, type[ConvertedAttention]]:
    others = dict.fromkeys(PLUGGED_IN[module].replaces, PLUGGED_IN[module]) if module in PLUGGED_IN else {}
    if module not in FAMILIES:
        return others
    members = vars(import_module(FAMILIES[module])).values()
    kinds = [one for one in members if isinstance(one, type) and issubclass(one, ConvertedAttention)]
    # what a class is derived from stands for its layers itself; a plug-in adds to what we know of a module
    return {name: kind for kind in kinds for name in vars(kind).get("replaces", ())} | others
