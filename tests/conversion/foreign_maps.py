"""Networks of timm and torchvision whose attention layers are handed maps, small."""

from functools import partial

import timm


def made_for(model, side=64):
    model.pretrained_cfg = {"input_size": (3, side, side)}
    return model


def fastvit():
    """Branches that are fused later, and attention in the last two of four stages: maps of 4×4 and 2×2."""
    mixers = ("repmixer", "repmixer", "attention", "attention")
    dims = (16, 32, 64, 64)
    model = timm.models.FastVit(
        layers=(1, 1, 2, 1), token_mixers=mixers, embed_dims=dims, mlp_ratios=(2,) * 4, num_classes=5
    )
    return made_for(model)


def visformer():
    """Maps of 4×4 and 2×2, behind a stage of convolutions; for images of one size."""
    depth = (1, 2, 1)
    return made_for(
        timm.models.Visformer(
            64, init_channels=16, embed_dim=48, depth=depth, num_heads=4, attn_stage="011", num_classes=5
        )
    )


def volo():
    """Windows on 8×8, and maps of 4×4 behind them; a class token comes last. For images of one size."""
    model = timm.models.VOLO(
        [1, 2, 2, 2],
        img_size=64,
        embed_dims=[32, 48, 48, 48],
        num_heads=[2, 4, 4, 4],
        stem_hidden_dim=16,
        num_classes=5,
    )
    return made_for(model)


MOBILE = [["cn_r1_k3_s2_e1_c16"], ["uir_r1_a3_k3_s2_e2_c32"]]


def mobile(*stages, **more):
    """MobileNetV4's blocks, of which some have attention; maps of 4×4 and 2×2."""
    from timm.models._efficientnet_builder import decode_arch_def

    whole = [*MOBILE, *map(list, stages)]
    sizes = {"stem_size": 16, "num_features": 32, "layer_scale_init_value": 0.1, "num_classes": 5}
    return made_for(timm.models.MobileNetV3(decode_arch_def(whole), **sizes | more))


def coatnet(**attention):
    """Attention in the last two of four stages; maps of 4×4 and 2×2, for whose sizes there are biases."""
    from timm.models.maxxvit import MaxxVit, MaxxVitCfg, MaxxVitTransformerCfg

    cfg = MaxxVitCfg(
        embed_dim=(16, 32, 48, 64),
        depths=(1, 1, 2, 1),
        stem_width=16,
        transformer_cfg=MaxxVitTransformerCfg(dim_head=16, **attention),
    )
    return made_for(MaxxVit(cfg, img_size=64, num_classes=5))


def torchvisions_swin(version=""):
    """Windows on maps of 16×16 and 8×8, shifted in every second block."""
    from torchvision.models import swin_transformer as theirs

    sizes = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    block = getattr(theirs, f"SwinTransformerBlock{version}")
    merging = getattr(theirs, f"PatchMerging{version}")
    return theirs.SwinTransformer(**sizes, num_classes=5, block=block, downsample_layer=merging)


ANY = [(64, 96), (96, 80)]
FEWER_KEYS = (
    "uir_r1_a3_k3_s2_e2_c48",
    "mqa_r1_k3_h4_s1_v2_d16_c48",
    "uir_r1_a0_k0_s1_e2_c48",
    "mqa_r1_k5_h4_s1_v2_d16_c48",
    "uir_r1_a0_k0_s1_e2_c48",
)

# name: what makes it, and sizes besides 64×64 that it takes
HANDED_MAPS = {
    "torchvision Swin": (torchvisions_swin, [*ANY, (16, 64), (40, 36)]),
    "torchvision Swin v2": (partial(torchvisions_swin, "V2"), [*ANY, (16, 64), (40, 36)]),
    "timm FastViT": (fastvit, ANY),
    "timm Visformer": (visformer, []),
    "timm VOLO": (volo, []),
    "timm MobileNetV4": (
        partial(mobile, FEWER_KEYS, ("uir_r1_a3_k3_s2_e2_c64", "mqa_r1_k3_h4_s1_d24_c64", "uir_r1_a0_k0_s1_e2_c64")),
        ANY,
    ),
    "timm MobileNetV4, same padding": (partial(mobile, FEWER_KEYS, pad_type="same"), ANY),
    "timm MobileNetV4, heads apart": (
        partial(mobile, ("uir_r1_a3_k3_s2_e2_c64", "mha_r1_k3_h4_s1_d16_c64", "uir_r1_a0_k0_s1_e2_c64")),
        ANY,
    ),
    "timm CoAtNet": (coatnet, []),
    "timm CoAtNet, heads inside": (partial(coatnet, head_first=False, expand_first=False), []),
    "timm CoAtNet, biases of a network": (partial(coatnet, rel_pos_type="mlp"), []),
    "timm CoAtNet, biases of TensorFlow": (partial(coatnet, rel_pos_type="bias_tf"), []),
    "timm CoAtNet, no biases": (partial(coatnet, rel_pos_type=""), ANY),
}
