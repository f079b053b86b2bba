"""Further families: their cheapest tests are in test_more_families.py, those of `foreign.FOREIGN` are for all."""

from functools import partial

import pytest
import timm
import torch
from foreign import IN_TRANSFORMERS, TINY, draw, of_transformers, timms, timms_sam
from foreign_dino import ListedBlock, dinov2, dinov3, named
from foreign_hiera import HIERAS
from foreign_maps import HANDED_MAPS
from foreign_packages import STAND_INS
from foreign_packs import PACKS, tower_of_transformers
from torch import nn


def timms_swin_v2(**more):
    """Windows of 4×4, shifted in every second block; maps of 16×16 and 8×8."""
    sizes = {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "strict_img_size": False}
    return timm.create_model("swinv2_tiny_window8_256", img_size=64, num_classes=5, **sizes | more)


def timms_naflex(name="naflexvit_base_patch16_gap", **more):
    return timm.create_model(name, num_classes=5, **TINY | more)


def dpt_of_transformers():
    sizes = {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16]}
    return of_transformers("DPTForDepthEstimation", "DPTConfig", **sizes, fusion_hidden_size=8, is_hybrid=False)


def hybrid_dpt_of_transformers():
    """As Intel's dpt-hybrid-midas: a small BiT reads the image, and a token is a place of its last map."""
    import transformers

    read = {"embedding_size": 8, "hidden_sizes": [8, 16, 16], "depths": [1, 1, 1], "num_groups": 4}
    read |= {"layer_type": "bottleneck", "global_padding": "same", "embedding_dynamic_padding": True}
    sizes = {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 16, 16, 16]}
    sizes |= {"backbone_config": transformers.BitConfig(**read, out_features=["stage1", "stage2", "stage3"])}
    sizes |= {"backbone_featmap_shape": [1, 16, 4, 4], "neck_ignore_stages": [0, 1], "fusion_hidden_size": 8}
    return of_transformers("DPTForDepthEstimation", "DPTConfig", **sizes, is_hybrid=True)


def vitpose_of_transformers():
    return of_transformers("VitPoseBackbone", "VitPoseBackboneConfig", image_size=[64, 64], patch_size=[16, 16])


class OfMaps(nn.Module):
    """The maps that a backbone answers with, the last one first."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.config = backbone, backbone.config

    def forward(self, x):
        return self.backbone(x).feature_maps[::-1]


def sam2_of_transformers():
    """Hiera, pooled twice; blocks 2 and 4 see the whole map."""
    import transformers

    sizes = {"embed_dim_per_stage": [16, 32, 64], "num_attention_heads_per_stage": [1, 2, 4], "hidden_size": 16}
    sizes |= {"blocks_per_stage": [1, 2, 2], "window_size_per_stage": [4, 2, 2], "global_attention_blocks": [2, 4]}
    config = transformers.Sam2HieraDetConfig(**sizes, num_query_pool_stages=2, image_size=[64, 64])
    return transformers.models.sam2.modeling_sam2.Sam2HieraDetModel(config)


SAM = {"num_hidden_layers": 3, "mlp_dim": 96, "output_channels": 16, "global_attn_indexes": [1], "window_size": 3}


def sam2_of_timm():
    """The same."""
    from timm.models.hieradet_sam2 import HieraDet

    sizes = {"embed_dim": 16, "stages": (1, 2, 2), "q_pool": 2, "window_spec": (4, 2, 2)}
    model = HieraDet(**sizes, global_att_blocks=(2, 4), global_pos_size=(4, 4), num_classes=5)
    model.pretrained_cfg = {"input_size": (3, 64, 64)}
    return model


def sam_hq_of_transformers():
    return of_transformers("SamHQVisionModel", "SamHQVisionConfig", **SAM)


@named("segment_anything.modeling.image_encoder", "Attention")
class MetasSamAttention(timm.models.vision_transformer_sam.Attention):
    def forward(self, x):
        return super().forward(x)


def sam_of_meta():
    """What Meta's own package has, which is not here: timm's, with layers of its class's name."""
    model = timms_sam()
    for block in model.blocks:
        block.attn.__class__ = MetasSamAttention
    return model


def sam3_of_transformers():
    """Windows of 2×2 but in the last block."""
    sizes = {"num_hidden_layers": 3, "global_attn_indexes": [2], "window_size": 2, "pretrain_image_size": 32}
    return of_transformers("Sam3ViTModel", "Sam3ViTConfig", **sizes)


def rf_detr():
    """DINOv2 with a class token in each of 2×2 windows; block 1 sees the whole map."""
    sizes = {"num_windows": 2, "out_indices": [1, 3], "image_size": 64, "mlp_ratio": 2, "num_hidden_layers": 3}
    return OfMaps(of_transformers("RfDetrDinov2Backbone", "RfDetrDinov2Config", **sizes))


def lw_detr():
    """2×2 windows; block 1 sees the whole map."""
    sizes = {"num_windows": 4, "window_block_indices": [0, 2], "image_size": 64, "pretrain_image_size": 64}
    network = of_transformers("LwDetrViTBackbone", "LwDetrViTConfig", num_hidden_layers=3, mlp_ratio=2, **sizes)
    return OfMaps(network)


VIT_DET = {"window_size": 3, "window_block_indices": [0, 2], "residual_block_indices": [2], "num_hidden_layers": 3}


def vit_det(**more):
    """Windows of 3×3 but in block 1."""
    sizes = {"pretrain_image_size": 32, "use_relative_position_embeddings": True, "mlp_ratio": 2}
    return OfMaps(of_transformers("VitDetBackbone", "VitDetConfig", **VIT_DET | sizes | more))


class Alphas(nn.Module):
    """What ViTMatte finds, of images whose last channel is a trimap."""

    in_chans = 3

    def __init__(self):
        import transformers

        super().__init__()
        sizes = {**IN_TRANSFORMERS, **VIT_DET, "out_features": ["stage3"], "num_channels": 4, "pretrain_image_size": 32}
        backbone = transformers.VitDetConfig(**sizes, mlp_ratio=2, use_relative_position_embeddings=True)
        config = transformers.VitMatteConfig(
            backbone_config=backbone, hidden_size=48, convstream_hidden_sizes=[8, 8, 8], fusion_hidden_sizes=[8] * 4
        )
        self.network = transformers.VitMatteForImageMatting(config)

    def forward(self, x):
        return self.network(torch.cat([x, x[:, :1]], dim=1)).alphas


class OfTiles(nn.Module):
    """What Llama 3.2 finds in an image of four tiles, of which the last one is not there."""

    def __init__(self, tower):
        super().__init__()
        self.tower, self.config = tower, tower.config

    def forward(self, x):
        tiles = torch.stack([x, x.flip(-1), -x, torch.zeros_like(x)], dim=1).unsqueeze(1)
        there = torch.tensor([1, 1, 1, 0]).expand(len(x), 1, 4)
        return self.tower(tiles, torch.full((len(x), 1), 3), there).last_hidden_state[:, 0].flatten(1, 2)


def mllama():
    sizes = {"attention_heads": 4, "num_global_layers": 1, "intermediate_layers_indices": [0], "max_num_tiles": 4}
    small = {name: size for name, size in IN_TRANSFORMERS.items() if name != "num_attention_heads"}
    return OfTiles(tower_of_transformers("mllama", "Mllama", "Model", **small | sizes))


def llama4():
    sizes = {"projector_input_dim": 48, "projector_output_dim": 48, "vision_output_dim": 48, "intermediate_size": 192}
    return tower_of_transformers("llama4", "Llama4", "Model", **IN_TRANSFORMERS | sizes)


class Film(nn.Module):
    """What an encoder of films finds in four frames made of one image."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        frames = torch.stack([x, x.flip(-1), -x, x.roll(3, dims=-2)], dim=1)
        return self.network(frames).last_hidden_state


def film_of_transformers(name, **more):
    sizes = {"num_frames": 4, "tubelet_size": 2} | more
    return Film(of_transformers(f"{name}Model", f"{name}Config", **sizes))


def v_jepa():
    sizes = {"crop_size": 64, "frames_per_clip": 4, "pred_num_hidden_layers": 1, "mlp_ratio": 2.0}
    network = film_of_transformers("VJEPA2", **sizes)
    network.network.forward = partial(network.network.forward, skip_predictor=True)
    return network


def sapiens_of_transformers(**more):
    sizes = {"num_key_value_heads_per_layer": [4, 4], "use_qk_norm": True, "image_size": [64, 64]}
    return of_transformers("Sapiens2Model", "Sapiens2Config", **sizes | more)


def sapiens_of_timm():
    if not timm.is_model("vit_base_patch16_sapiens2"):
        pytest.skip("this timm does not have it")
    return timms("vit_base_patch16_sapiens2", num_kv_heads=(4, 2), num_classes=5)


def eomt_of_transformers(model="Eomt", **more):
    """Queries come in before the last of three blocks; nothing is masked, as in trained ones."""
    sizes = {"num_hidden_layers": 3, "num_blocks": 1, "num_queries": 5, "num_upscale_blocks": 1}
    network = of_transformers(f"{model}ForUniversalSegmentation", f"{model}Config", **sizes | more)
    network.attn_mask_probs.zero_()
    return network


def yolos_of_transformers(**more):
    return of_transformers("YolosModel", "YolosConfig", num_detection_tokens=7, image_size=[64, 64], **more)


def sam_that_reads(name, prefix, tower, **more):
    return tower_of_transformers(name, prefix, tower, **IN_TRANSFORMERS | SAM | more)


def beit_of_transformers(**biases):
    return of_transformers("BeitModel", "BeitConfig", **biases)


def swin_of_transformers(model, config):
    import transformers

    sizes = {"image_size": 64, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


def timms_biased(name, **more):
    """One of timm's whose logits have a bias of each pair; it is for images of one size."""
    return timm.create_model(name, img_size=64, num_classes=5, **TINY | more)


STAGES = {"depths": [1, 1, 1, 2], "num_heads": [1, 2, 3, 4]}


def timms_pyramid(**more):
    """PVTv2, whose keys are reduced eight, four and two times, or pooled; maps of 16×16 to 2×2."""
    from timm.models.pvt_v2 import PyramidVisionTransformerV2

    model = PyramidVisionTransformerV2(embed_dims=(16, 32, 48, 64), num_classes=5, **STAGES | more)
    model.pretrained_cfg = {"input_size": (3, 64, 64)}
    return model


def twins(**more):
    """Keys reduced by convolutions but in the last stage; maps of 16×16 to 2×2."""
    from timm.models.twins import Twins

    sizes = {"embed_dims": (16, 32, 48, 64), "mlp_ratios": (2, 2, 2, 2), **STAGES}
    model = Twins(img_size=64, num_classes=5, **sizes | more)
    model.pretrained_cfg = {"input_size": (3, 64, 64)}
    return model


def caformer():
    """Attention in the last two of four stages, as timm makes it in each size; maps of 4×4 and 2×2."""
    from timm.models import metaformer as timms

    norms = [timms.LayerNorm2dNoBias, timms.LayerNorm2dNoBias, timms.LayerNormNoBias, timms.LayerNormNoBias]
    mixers = [timms.SepConv, timms.SepConv, timms.Attention, timms.Attention]
    dims = (16, 32, 64, 96)
    model = timms.MetaFormer(depths=(1, 1, 2, 1), dims=dims, token_mixers=mixers, norm_layers=norms, num_classes=5)
    model.pretrained_cfg = {"input_size": (3, 64, 64)}
    return model


def pyramid_of_transformers(model, config, **more):
    import transformers

    sizes = {"depths": STAGES["depths"], "num_attention_heads": STAGES["num_heads"], "hidden_sizes": [16, 32, 48, 64]}
    return getattr(transformers, model)(getattr(transformers, config)(**sizes | more))


PYRAMIDS = {
    "timm PVTv2": (timms_pyramid, [(64, 96), (96, 80)]),
    "timm PVTv2, pooled keys": (partial(timms_pyramid, linear=True), [(64, 96), (96, 80)]),
    "timm Twins-PCPVT": (twins, [(64, 96)]),
    "timm CAFormer": (caformer, [(64, 96), (96, 80)]),
    "transformers SegFormer": (
        partial(pyramid_of_transformers, "SegformerModel", "SegformerConfig"),
        [(64, 96), (96, 80)],
    ),
    "transformers PVTv2": (
        partial(pyramid_of_transformers, "PvtV2Model", "PvtV2Config", image_size=64),
        [(64, 96), (96, 80)],
    ),
    "transformers PVTv2, pooled keys": (
        partial(pyramid_of_transformers, "PvtV2Model", "PvtV2Config", image_size=64, linear_attention=True),
        [(64, 96), (96, 80)],
    ),
    "transformers PVT": (partial(pyramid_of_transformers, "PvtModel", "PvtConfig", image_size=64), []),
    "transformers GLPN": (partial(pyramid_of_transformers, "GLPNModel", "GLPNConfig"), [(64, 96), (96, 80)]),
}

# name: what makes it, and sizes besides 64×64 that it takes
MORE = {
    **PYRAMIDS,
    **HIERAS,
    **HANDED_MAPS,
    **STAND_INS,
    "transformers Llama 3.2": (mllama, []),
    "transformers Llama 4": (llama4, []),
    "transformers Step 3": (
        partial(tower_of_transformers, "step3p7", "Step3p7", "Model", **IN_TRANSFORMERS),
        [(64, 96), (96, 80)],
    ),
    "timm Twins-SVT": (partial(twins, wss=(4, 4, 4, 4), depths=(2, 2, 2, 2)), [(64, 96)]),
    "timm Swin v2": (timms_swin_v2, [(64, 96), (96, 80)]),
    "timm NaFlexViT": (timms_naflex, [(64, 96), (96, 80)]),
    "timm NaFlexViT, rotary positions": (
        partial(timms_naflex, attn_type="rope", rope_type="axial", dynamic_img_pad=True),
        # timm 1.0.26 fills images up to whole patches, and stumbles over that
        [(64, 96), (96, 80) if timm.__version__.startswith("1.0.26") else (96, 70)],
    ),
    "timm BEiT": (partial(timms_biased, "beit_base_patch16_224"), []),
    "timm BEiT, shared biases": (
        partial(timms_biased, "beit_base_patch16_224", use_rel_pos_bias=False, use_shared_rel_pos_bias=True),
        [],
    ),
    "timm ViT, relative positions": (partial(timms_biased, "vit_relpos_small_patch16_224"), []),
    "timm ViT, relative positions shared": (partial(timms_biased, "vit_srelpos_small_patch16_224"), []),
    "transformers Swin": (partial(swin_of_transformers, "SwinModel", "SwinConfig"), [(64, 96), (96, 80)]),
    "transformers Swin v2": (partial(swin_of_transformers, "Swinv2Model", "Swinv2Config"), [(64, 96), (96, 80)]),
    "transformers BEiT": (partial(beit_of_transformers, use_relative_position_bias=True), []),
    "transformers BEiT, shared biases": (partial(beit_of_transformers, use_shared_relative_position_bias=True), []),
    "transformers DPT": (dpt_of_transformers, []),
    "transformers DPT, hybrid": (hybrid_dpt_of_transformers, []),
    "transformers ViTPose": (lambda: OfMaps(vitpose_of_transformers()), []),
    "transformers SAM 2": (sam2_of_transformers, [(64, 96), (128, 64)]),
    "timm SAM 2": (sam2_of_timm, [(64, 96), (128, 64)]),
    "transformers SAM-HQ": (sam_hq_of_transformers, []),
    **{
        f"transformers {name}": (partial(sam_that_reads, *built), [])
        for name, built in {
            "DeepSeek-OCR 2": ("deepseek_ocr2", "DeepseekOcr2Sam", "Encoder"),
            "GOT-OCR 2": ("got_ocr2", "GotOcr2", "Encoder"),
            "SLANeXt": ("slanext", "SLANeXt", "Encoder"),
            "Unlimited-OCR": ("unlimited_ocr", "UnlimitedOcrSam", "Encoder"),
        }.items()
    },
    "transformers PP-FormulaNet": (
        partial(sam_that_reads, "pp_formulanet", "PPFormulaNet", "Model", post_conv_in_channels=16),
        [],
    ),
    "transformers VideoMAE": (partial(film_of_transformers, "VideoMAE"), []),
    "transformers ViViT": (partial(film_of_transformers, "Vivit", tubelet_size=[2, 16, 16]), []),
    "transformers V-JEPA 2": (v_jepa, [(64, 96), (96, 80)]),
    "transformers ViTDet": (vit_det, [(64, 96), (96, 80)]),
    "transformers ViTMatte": (Alphas, [(64, 96), (96, 80)]),
    "SAM of segment_anything": (sam_of_meta, []),
    "transformers SAM 3": (sam3_of_transformers, []),
    "transformers RF-DETR": (rf_detr, [(96, 96), (64, 96)]),
    "transformers LW-DETR": (lw_detr, [(96, 96), (64, 96)]),
    "transformers Sapiens 2": (sapiens_of_transformers, [(64, 96), (96, 80)]),
    "transformers Sapiens 2, grouped queries": (
        partial(sapiens_of_transformers, num_key_value_heads_per_layer=[4, 2]),
        [(64, 96), (96, 80)],
    ),
    "timm Sapiens 2": (sapiens_of_timm, [(64, 96), (96, 80)]),
    "transformers InternVL": (
        partial(of_transformers, "InternVLVisionModel", "InternVLVisionConfig", use_qk_norm=True, image_size=[64, 64]),
        [],
    ),
    "transformers EoMT": (eomt_of_transformers, []),
    "transformers EoMT, DINOv3": (partial(eomt_of_transformers, "EomtDinov3"), []),
    "transformers YOLOS": (
        partial(yolos_of_transformers, use_mid_position_embeddings=False),
        [(64, 96), (96, 80)],
    ),
    "transformers YOLOS, positions between blocks": (
        partial(yolos_of_transformers, use_mid_position_embeddings=True),
        [(64, 96), (96, 80)],
    ),
    **PACKS,
    "transformers Idefics 2": (partial(tower_of_transformers, "idefics2", "Idefics2"), [(64, 32)]),
    "transformers Idefics 3": (partial(tower_of_transformers, "idefics3", "Idefics3"), [(64, 32)]),
    "transformers SmolVLM": (partial(tower_of_transformers, "smolvlm", "SmolVLM"), [(64, 32)]),
    "transformers Granite Docling": (partial(tower_of_transformers, "granite_docling", "GraniteDocling", "Model"), []),
    "transformers Ovis 2": (partial(tower_of_transformers, "ovis2", "Ovis2", "Transformer"), []),
    "transformers Qianfan OCR": (partial(tower_of_transformers, "qianfan_ocr", "QianfanOCR", "Model"), []),
    "transformers InstructBLIP, films": (
        partial(tower_of_transformers, "instructblipvideo", "InstructBlipVideo", "Model"),
        [],
    ),
    "transformers Kosmos-2": (partial(tower_of_transformers, "kosmos2", "Kosmos2", "Model"), []),
    "transformers BLIP-2": (partial(of_transformers, "Blip2VisionModel", "Blip2VisionConfig"), []),
    "transformers Janus": (partial(of_transformers, "JanusVisionModel", "JanusVisionConfig", projection_dim=48), []),
    "transformers AIMv2": (partial(of_transformers, "Aimv2VisionModel", "Aimv2VisionConfig"), []),
    "transformers Pixio": (partial(of_transformers, "PixioModel", "PixioConfig"), [(64, 96), (96, 80)]),
    "transformers TIPS v2": (partial(of_transformers, "Tipsv2VisionModel", "Tipsv2VisionConfig"), [(64, 96)]),
    "transformers RADIO": (
        partial(of_transformers, "RadioModel", "RadioConfig", max_img_size=128, mlp_ratio=2.0),
        [(64, 96), (96, 80)],
    ),
    "transformers MLCD": (partial(of_transformers, "MLCDVisionModel", "MLCDVisionConfig"), [(64, 96)]),
    "DINOv2 of torch.hub": (dinov2, [(64, 96), (96, 80)]),
    "DINOv2 of torch.hub, registers": (partial(dinov2, 4), [(64, 96), (96, 80)]),
    "DINOv3 of torch.hub": (dinov3, [(64, 96), (96, 80)]),
    "DINOv3 of torch.hub, lists": (partial(dinov3, ListedBlock), [(64, 96)]),
    **{
        f"transformers {name}": (partial(of_transformers, f"{model}Model", f"{model}Config"), [])
        for name, model in (
            ("MSN", "ViTMSN"),
            ("MetaCLIP 2", "MetaClip2Vision"),
            ("Chinese CLIP", "ChineseCLIPVision"),
            ("CLIPSeg", "CLIPSegVision"),
            ("AltCLIP", "AltCLIPVision"),
            ("OWL-ViT", "OwlViTVision"),
            ("OWLv2", "Owlv2Vision"),
            ("BLIP", "BlipVision"),
            ("InstructBLIP", "InstructBlipVision"),
            ("GIT", "GitVision"),
        )
    },
    **{
        f"transformers Data2Vec{name}": (
            partial(of_transformers, "Data2VecVisionModel", "Data2VecVisionConfig", **biases),
            [],
        )
        for name, biases in {
            "": {"use_relative_position_bias": True},
            ", shared biases": {"use_shared_relative_position_bias": True},
            ", no biases": {"use_absolute_position_embeddings": True},
        }.items()
    },
}


def teacher(name):
    """A network whose answers depend on all of its weights."""
    torch.manual_seed(0)
    model = MORE[name][0]()
    draw(model)
    return model.eval()
