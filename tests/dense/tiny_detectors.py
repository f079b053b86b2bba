"""Detectors of transformers with a few thousand weights, made up, and folders that it writes of them."""

import json

import pytest
import torch

NAMES = {"id2label": {0: "N/A", 1: "red", 2: "green"}, "label2id": {"N/A": 0, "red": 1, "green": 2}}
"""Those of `worlds.py`, which has no class of the first name."""

SIZES = {"num_queries": 6, "decoder_layers": 2, "decoder_ffn_dim": 16}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}
BY_EDGES = {"shortest_edge": 64, "longest_edge": 90}
WHOLE = {"height": 64, "width": 96}


def yolos(t):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return t.YolosConfig(**sizes, image_size=[64, 64], num_detection_tokens=6, **NAMES)


def detr(t, name="Detr", **more):
    backbone = t.ResNetConfig(**RESNET, out_features=["stage4"])
    width = {"hidden_size" if name == "DabDetr" else "d_model": 16, "encoder_layers": 1}
    own = {"use_timm_backbone": False, "backbone_config": backbone, "use_pretrained_backbone": False}
    return getattr(t, f"{name}Config")(**own | width | SIZES | HEADS | NAMES | more)


def deformable(t):
    backbone = t.ResNetConfig(**RESNET, out_features=["stage2", "stage3", "stage4"])
    return detr(t, "DeformableDetr", backbone_config=backbone, num_feature_levels=3, d_model=32)


def real_time(t, name="RTDetr"):
    levels = {"encoder_in_channels": [8, 16, 16], "decoder_in_channels": [16] * 3, "encoder_hidden_dim": 16}
    stages = {"out_features": ["stage2", "stage3", "stage4"]}
    if name.startswith("RTDetr"):
        backbone = t.RTDetrResNetConfig(**RESNET, **stages)
    else:
        channels = {"stage_in_channels": [8, 8, 8, 16], "stage_mid_channels": [8] * 4, "stem_channels": [3, 8, 8]}
        blocks = {"stage_num_blocks": [1] * 4, "stage_numb_of_layers": [1] * 4, "stage_light_block": [False] * 4}
        more = {"stage_out_channels": [8, 8, 16, 16], "stage_kernel_size": [3] * 4, "embedding_size": 8}
        sizes = {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "stage_downsample": [False, True, True, True]}
        backbone = t.HGNetV2Config(**channels | blocks | more | sizes | stages)
    return getattr(t, f"{name}Config")(backbone_config=backbone, d_model=16, **SIZES | HEADS | levels | NAMES)


def light(t, name="LwDetr", **own):
    vit = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 16}
    heads = {"decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 2, "group_detr": 2, "d_model": 16}
    vit |= {"out_indices": [1, 2], **own}
    more = {"projector_scale_factors": [1.0]} if name == "LwDetr" else {}
    return getattr(t, f"{name}Config")(backbone_config=vit, **SIZES | heads | more | NAMES)


KINDS = {
    "Yolos": (yolos, "Yolos", BY_EDGES),
    "Detr": (detr, "Detr", BY_EDGES),
    "TableTransformer": (lambda t: detr(t, "TableTransformer"), "Detr", BY_EDGES),
    "ConditionalDetr": (lambda t: detr(t, "ConditionalDetr"), "ConditionalDetr", BY_EDGES),
    "DabDetr": (lambda t: detr(t, "DabDetr"), "ConditionalDetr", BY_EDGES),
    "DeformableDetr": (deformable, "DeformableDetr", BY_EDGES),
    "RTDetr": (real_time, "RTDetr", WHOLE),
    "RTDetrV2": (lambda t: real_time(t, "RTDetrV2"), "RTDetr", WHOLE),
    "DFine": (lambda t: real_time(t, "DFine"), "RTDetr", WHOLE),
    "Deimv2": (lambda t: real_time(t, "Deimv2"), "RTDetr", WHOLE),
    "LwDetr": (
        lambda t: light(t, model_type="lw_detr_vit", pretrain_image_size=64, window_block_indices=[0], num_windows=4),
        "DeformableDetr",
        WHOLE,
    ),
    "RfDetr": (lambda t: light(t, "RfDetr", model_type="rf_detr_dinov2", num_windows=2), "RfDetr", WHOLE),
}
"""How each is configured, which processor it has, and to which sizes that brings images."""


def saved(folder, name="Yolos", **pictures):
    """A detector in a folder, with its processor; `pictures` are settings of that."""
    import transformers

    if not hasattr(transformers, f"{name}ForObjectDetection"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    configure, processor, size = KINDS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForObjectDetection")(configure(transformers)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    said = {"image_processor_type": f"{processor}ImageProcessor", "size": size, "image_mean": [0.5, 0.4, 0.3]}
    (folder / "preprocessor_config.json").write_text(json.dumps(said | pictures))
    return model
