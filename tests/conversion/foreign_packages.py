"""Networks of further packages, small: classes of their names that are called as theirs are, and the packages' own.

What is in `STAND_INS` is tested everywhere. `PACKAGES` are the packages themselves, where they are installed:

    pip install vit-pytorch monai sam2 sam3 rfdetr open_clip_torch depth-anything-3
    pytest tests/conversion/test_packages.py
"""

import importlib
from functools import partial

import timm
import torch
from einops.layers.torch import Rearrange
from foreign_dino import Block, Layer, PatchEmbed, named
from torch import nn
from torch.nn import functional as F


class Chained(nn.Module):
    """Blocks behind an embedding, a class token in front; positions are for one size."""

    def __init__(self, blocks, embedding, count, dim=48, *, cls_token=True):
        super().__init__()
        self.to_patch_embedding, self.layers = embedding, nn.ModuleList(blocks)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if cls_token else None
        self.pos_embedding = nn.Parameter(torch.zeros(1, count + cls_token, dim))

    def forward(self, x):
        x = self.to_patch_embedding(x)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.pos_embedding
        for block in self.layers:
            attention, mlp, *_ = block
            x = x + attention(x)
            x = x + mlp(x)
        return x


def mlp(dim=48):
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))


@named("vit_pytorch.vit", "Attention")
class OfVitPytorch(nn.Module):
    def __init__(self, dim=48, heads=4, dim_head=16):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm, self.attend, self.dropout = nn.LayerNorm(dim), nn.Softmax(dim=-1), nn.Dropout(0)
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0))

    def forward(self, x):
        q, k, v = self.to_qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = self.attend(q @ k.mT * self.scale) @ v
        return self.to_out(y.transpose(1, 2).flatten(2))


def like_vit_pytorch(**more):
    cut = Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=16, p2=16)
    blocks = (nn.ModuleList([OfVitPytorch(), mlp()]) for _ in range(2))
    return Chained(blocks, nn.Sequential(cut, nn.Linear(768, 48)), 16, **more)


@named("monai.networks.blocks.selfattention", "SABlock")
class OfMonai(nn.Module):
    """As in MONAI 1.6, with projections apart if wanted."""

    def __init__(self, dim=48, heads=4, *, fused=True):
        super().__init__()
        self.num_heads, self.scale = heads, (dim // heads) ** -0.5
        self.use_combined_linear, self.causal, self.save_attn = fused, False, False
        self.qkv = nn.Linear(dim, 3 * dim) if fused else nn.Identity()
        for name in ("to_q", "to_k", "to_v"):
            setattr(self, name, nn.Identity() if fused else nn.Linear(dim, dim))
        self.out_proj, self.drop_output, self.drop_weights = nn.Linear(dim, dim), nn.Dropout(0), nn.Dropout(0)

    def forward(self, x, attn_mask=None):
        projected = (
            self.qkv(x).chunk(3, dim=-1) if self.use_combined_linear else (self.to_q(x), self.to_k(x), self.to_v(x))
        )
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in projected)
        scores = q @ k.mT * self.scale
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask[:, None, None] == 0, -torch.inf)
        return self.drop_output(self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))


@named("monai.networks.blocks.crossattention", "CrossAttentionBlock")
class OfMonaiCrossing(nn.Module):
    """What blocks of earlier versions have beside, and do not call."""

    def __init__(self, dim=48):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))


class Patches(nn.Module):
    def __init__(self, kind, patch, channels=3):
        super().__init__()
        self.patch_embeddings = kind(channels, 48, patch, patch)

    def forward(self, x):
        return self.patch_embeddings(x).flatten(2).mT


def like_monai(kind=nn.Conv2d, patch=16, count=16, channels=3, **more):
    blocks = (nn.ModuleList([OfMonai(**more), mlp()]) for _ in range(2))
    return Chained(blocks, Patches(kind, patch, channels), count, cls_token=False)


@named("sam2.modeling.backbones.hieradet", "MultiScaleAttention")
class OfSam2(timm.models.hieradet_sam2.MultiScaleAttention):
    def forward(self, x):
        return super().forward(x)


def like_sam2():
    """timm's, with layers of the name of Meta's and what its blocks say of their windows."""
    from foreign_more import sam2_of_timm

    model = sam2_of_timm()
    for block in model.blocks:
        block.attn.__class__ = OfSam2
        block.window_size = block.window_size if block.is_windowed else 0
    return model


class OfRfDetrSelf(nn.Module):
    def __init__(self, dim=48, heads=4):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = heads, dim // heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        q, k, v = (
            one(x).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class OfRfDetrOutput(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.dense = nn.Linear(dim, dim)

    def forward(self, x, input_tensor):
        return self.dense(x)


class OfRfDetrAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.output = OfRfDetrSelf(), OfRfDetrOutput()

    def forward(self, x):
        return self.output(self.attention(x), x)


@named("rfdetr.models.backbone.dinov2_with_windowed_attn", "WindowedDinov2WithRegistersLayer")
class OfRfDetr(nn.Module):
    def __init__(self, dim=48, num_windows=2):
        super().__init__()
        self.num_windows, self.attention = num_windows, OfRfDetrAttention()
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.layer_scale1, self.layer_scale2, self.drop_path = nn.Linear(dim, dim), nn.Identity(), nn.Identity()

    def forward(self, x, output_attentions=False, run_full_attention=False):
        y = x.view(len(x) // self.num_windows**2, -1, x.shape[-1]) if run_full_attention else x
        x = x + self.layer_scale1(self.attention(self.norm1(y)).view(x.shape))
        return x + self.mlp(self.norm2(x)), None


class OfRfDetrEncoder(nn.Module):
    def __init__(self, registers):
        super().__init__()
        self.config, self.layer = RfDetrSizes(), nn.ModuleList(OfRfDetr() for _ in range(3))
        self.embeddings = nn.Conv2d(3, 48, 16, 16)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 48))
        self.register_tokens = nn.Parameter(torch.zeros(1, registers, 48)) if registers else None

    def forward(self, x):
        x = self.embeddings(x)
        size = x.shape[-2:]
        # (b, c, y·rows, x·columns) to (b·y·x, rows·columns, c)
        x = x.unflatten(-1, (2, -1)).unflatten(-3, (2, -1)).permute(0, 2, 4, 3, 5, 1).flatten(0, 2).flatten(1, 2)
        front = [one.expand(len(x), -1, -1) for one in (self.cls_token, self.register_tokens) if one is not None]
        x = torch.cat([*front, x], dim=1)
        for number, layer in enumerate(self.layer):
            x, _ = layer(x, False, number not in self.config.window_block_indexes)
        x = (
            x[:, sum(one.shape[1] for one in front) :]
            .unflatten(1, (size[0] // 2, size[1] // 2))
            .unflatten(0, (-1, 2, 2))
        )
        return x.permute(0, 5, 1, 3, 2, 4).flatten(-2).flatten(-3, -2)


class RfDetrSizes:
    """What its configuration says."""

    image_size, num_windows, window_block_indexes = 64, 2, (0, 2)


def like_rf_detr(registers=0):
    return OfRfDetrEncoder(registers)


def mit(**more):
    """SegFormer's encoder in segmentation_models_pytorch, maps of 16×16 to 2×2, keys reduced but in the last stage."""
    from segmentation_models_pytorch.encoders.mix_transformer import MixVisionTransformerEncoder

    sizes = {"embed_dims": [16, 32, 48, 64], "num_heads": [1, 2, 3, 4], "depths": [1, 1, 1, 2], "qkv_bias": True}
    sizes |= {"sr_ratios": [8, 4, 2, 1], "out_channels": (3, 0, 16, 32, 48, 64)}
    return Last(MixVisionTransformerEncoder(**sizes | more))


class Last(nn.Module):
    """The last map that a network answers with."""

    def __init__(self, network, among=None):
        super().__init__()
        self.network, self.among = network, among

    def forward(self, x):
        y = self.network(x)
        return (y if self.among is None else getattr(y, self.among))[-1]


@named("sam3.model.vitdet", "Attention")
class OfSam3(Layer):
    """Of a map (b, y, x, c) of one size, whose rows and columns turn neighbouring channels."""

    def __init__(self, dim, num_heads, side=4, **more):
        super().__init__(dim, num_heads)
        del self.attn_drop, self.proj_drop
        self.input_size = self.rope_pt_size = (side, side)
        self.cls_token, self.use_rel_pos = (more.get(name, False) for name in ("cls_token", "use_rel_pos"))
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        angles = (places[:, :, None] * 0.4 ** torch.arange(dim // num_heads // 4)).flatten(1)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x):
        q, k, v = self.heads(x.flatten(1, 2))
        q, k = (
            torch.view_as_real(torch.view_as_complex(one.unflatten(-1, (-1, 2)).contiguous()) * self.freqs_cis)
            for one in (q, k)
        )
        y = F.scaled_dot_product_attention(q.flatten(-2), k.flatten(-2), v)
        return self.proj(y.transpose(1, 2).flatten(2)).view(x.shape)


class LikeSam3(nn.Module):
    """Two blocks of which the second sees the whole map, and the first windows, here as large as that."""

    def __init__(self, dim=48, **more):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 16, 16)
        self.blocks = nn.ModuleList(Block(dim, OfSam3(dim, 4, **more)) for _ in range(2))
        self.blocks[0].window_size, self.blocks[1].window_size = 4, 0

    def forward(self, x):
        x = self.embed(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        return x.flatten(1, 2)


class TurnedByPlaces(nn.Module):
    """Rows turn one half of the channels, columns the other, each in two halves of its own."""

    def forward(self, tokens, positions):
        return torch.cat([self.turned(*one) for one in zip(tokens.chunk(2, -1), positions.unbind(-1), strict=True)], -1)

    def turned(self, x, places):
        angles = places[:, None, :, None] * 0.3 ** torch.arange(x.shape[-1] // 2)
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@named("depth_anything_3.model.dinov2.layers.attention", "Attention")
class OfDepthAnything3(Layer):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.fused_attn, self.rope = True, TurnedByPlaces()
        self.q_norm, self.k_norm = nn.LayerNorm(dim // num_heads), nn.LayerNorm(dim // num_heads)

    def forward(self, x, pos=None, attn_mask=None):
        q, k, v = self.heads(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if pos is not None:
            q, k = self.rope(q, pos), self.rope(k, pos)
        return self.back(F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask))


class DepthAnything3(nn.Module):
    """Every second block sees all views; an image's are its left and right half, or as many as it is wide."""

    def __init__(self, dim=48, depth=2, views=2):
        super().__init__()
        self.patch_embed, self.views = PatchEmbed(dim), views
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, dim, 4, 4))
        self.blocks = nn.ModuleList(Block(dim, OfDepthAnything3(dim, 4)) for _ in range(depth))

    def forward(self, images):
        views = images.unflatten(-1, (self.views, -1)).permute(0, 3, 1, 2, 4)
        x = self.patch_embed(views.flatten(0, 1))
        height, width = x.shape[-2:]
        x = x + F.interpolate(self.pos_embed, (height, width), mode="bilinear")
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x.flatten(2).mT], dim=1)
        places = torch.cartesian_prod(torch.arange(height), torch.arange(width)) + 1
        places = F.pad(places, (0, 0, 1, 0)).expand(len(x), -1, -1)
        for number, block in enumerate(self.blocks):
            # places tell no view from another
            if number % 2:
                x = block(x.unflatten(0, (-1, self.views)).flatten(1, 2), pos=together(places.clamp(max=1), self.views))
                x = x.unflatten(1, (self.views, -1)).flatten(0, 1)
            else:
                x = block(x, pos=places)
        return x.unflatten(0, (-1, self.views)).flatten(1, 2)


def together(places, views):
    return places.unflatten(0, (-1, views)).flatten(1, 2)


# name: what makes it, and sizes besides 64×64 that it takes
STAND_INS = {
    "MiT of segmentation_models_pytorch": (mit, [(64, 96), (96, 160)]),
    "ViT of vit-pytorch": (like_vit_pytorch, []),
    "SimpleViT of vit-pytorch": (partial(like_vit_pytorch, cls_token=False), []),
    "ViT of MONAI": (like_monai, []),
    "ViT of MONAI, projections apart": (partial(like_monai, fused=False), []),
    "SAM 2 of Meta": (like_sam2, [(64, 96), (128, 64)]),
    "SAM 3 of Meta": (LikeSam3, []),
    "RF-DETR of Roboflow": (like_rf_detr, [(96, 96), (64, 96)]),
    "Depth Anything 3, two views": (DepthAnything3, [(64, 96), (96, 128)]),
}


def of_package(path, name, **sizes):
    return getattr(importlib.import_module(path), name)(**sizes)


PLAIN = {"image_size": 64, "num_classes": 5, "dim": 48, "depth": 2, "heads": 4, "mlp_dim": 96}
FILM = {"image_size": 32, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2}
MONAI = {"in_channels": 3, "hidden_size": 48, "mlp_dim": 96, "num_heads": 4}
VOLUME = {"img_size": (32, 32, 32), "patch_size": 8}


class First(nn.Module):
    """The first of a network's answers."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x)[0]


def monai_vit(**sizes):
    return First(of_package("monai.networks.nets", "ViT", num_layers=2, **MONAI | sizes))


def unetr(**sizes):
    return of_package("monai.networks.nets", "UNETR", out_channels=2, feature_size=8, **MONAI | sizes)


def rf_detr_of_roboflow():
    kind = "rfdetr.models.backbone.dinov2_with_windowed_attn"
    sizes = {"image_size": 64, "patch_size": 16, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_register_tokens": 0, "num_windows": 2, "window_block_indexes": [0, 2], "out_features": ["stage3"]}
    config = of_package(kind, "WindowedDinov2WithRegistersConfig", **sizes)
    network = of_package(kind, "WindowedDinov2WithRegistersBackbone", config=config)
    return Last(network, "feature_maps")


def sam2_of_meta():
    sizes = {"embed_dim": 16, "num_heads": 1, "stages": (1, 2, 2), "q_pool": 2, "window_spec": (4, 2, 2)}
    sizes |= {"global_att_blocks": (2, 4), "window_pos_embed_bkg_spatial_size": (4, 4)}
    return Last(of_package("sam2.modeling.backbones.hieradet", "Hiera", **sizes))


class Scene(nn.Module):
    """What Depth Anything 3 has of all of a scene's views, of several blocks."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, views):
        answers, _ = self.network.get_intermediate_layers(views, [1, 3, 5])
        return torch.cat([maps for maps, _ in answers], dim=-1)


def depth_anything_3():
    sizes = {"img_size": 56, "patch_size": 14, "embed_dim": 48, "depth": 6, "num_heads": 4, "mlp_ratio": 2}
    starts = {"alt_start": 2, "qknorm_start": 2, "rope_start": 2}
    return Scene(
        of_package("depth_anything_3.model.dinov2.vision_transformer", "DinoVisionTransformer", **sizes | starts)
    )


def sam3_of_meta():
    sizes = {"img_size": 64, "patch_size": 16, "embed_dim": 48, "depth": 4, "num_heads": 4, "mlp_ratio": 2.0}
    sizes |= {"window_size": 2, "global_att_blocks": (1, 3), "rel_pos_blocks": (), "retain_cls_token": False}
    return Last(of_package("sam3.model.vitdet", "ViT", **sizes, use_rope=True, use_interp_rope=True))


def tower_of_open_clip():
    sizes = {"image_size": 64, "patch_size": 16, "width": 48, "layers": 2, "heads": 4, "mlp_ratio": 2.0}
    return of_package("open_clip.transformer", "VisionTransformer", **sizes, output_dim=16)


# the package's module: what makes a network, and shapes of what it takes, the first what it is made for
PACKAGES = {
    "vit_pytorch": {
        "ViT": (partial(of_package, "vit_pytorch", "ViT", patch_size=16, **PLAIN), [(3, 64, 64)]),
        "SimpleViT": (partial(of_package, "vit_pytorch", "SimpleViT", patch_size=16, **PLAIN), [(3, 64, 64)]),
        "flash": (
            partial(
                of_package, "vit_pytorch.simple_flash_attn_vit", "SimpleViT", patch_size=16, use_flash=True, **PLAIN
            ),
            [(3, 64, 64), (3, 64, 96)],
        ),
        "film": (partial(of_package, "vit_pytorch.vit_3d", "ViT", **PLAIN | FILM), [(3, 4, 32, 32)]),
        "simple film": (
            partial(of_package, "vit_pytorch.simple_vit_3d", "SimpleViT", **PLAIN | FILM),
            [(3, 4, 32, 32), (3, 8, 32, 48)],
        ),
    },
    "monai": {
        "ViT": (partial(monai_vit, img_size=64, patch_size=16, spatial_dims=2, classification=True), [(3, 64, 64)]),
        "linear patches": (
            partial(monai_vit, img_size=(64, 96), patch_size=16, spatial_dims=2, proj_type="perceptron"),
            [(3, 64, 96)],
        ),
        "ViT of volumes": (partial(monai_vit, **VOLUME), [(3, 32, 32, 32)]),
        "UNETR": (partial(unetr, img_size=(64, 64), spatial_dims=2), [(3, 64, 64)]),
        "UNETR of volumes": (partial(unetr, img_size=(32, 32, 32)), [(3, 32, 32, 32)]),
    },
    "sam2": {"Hiera": (sam2_of_meta, [(3, 64, 64), (3, 64, 96), (3, 128, 64)])},
    "sam3": {"ViT": (sam3_of_meta, [(3, 64, 64)])},
    "rfdetr": {"backbone": (rf_detr_of_roboflow, [(3, 64, 64), (3, 96, 96), (3, 64, 96)])},
    "depth_anything_3": {
        "backbone": (depth_anything_3, [(1, 3, 56, 56), (1, 3, 56, 70), (2, 3, 56, 56), (5, 3, 42, 56)])
    },
    "open_clip": {"tower": (tower_of_open_clip, [(3, 64, 64)])},
}


def of_lucidrains():
    return of_package("denoising_diffusion_pytorch", "Unet", dim=16, dim_mults=(1, 2), full_attn=(True, True))


LATENT = {"channels": (16, 32), "attention_levels": (False, True), "norm_num_groups": 8}


def denoising(**more):
    sizes = {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "num_res_blocks": 1, "num_head_channels": 16}
    return of_package("monai.networks.nets", "DiffusionModelUNet", **sizes | LATENT | more)


def coding():
    sizes = {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "num_res_blocks": (1, 1), "latent_channels": 3}
    return of_package("monai.networks.nets", "AutoencoderKL", **sizes, **LATENT)


def of_taming():
    sizes = {"ch": 32, "out_ch": 3, "ch_mult": (1, 2), "num_res_blocks": 1, "in_channels": 3, "resolution": 16}
    return of_package("taming.modules.diffusionmodules.model", "Model", attn_resolutions=[8], **sizes)


def step(time, channels, *sides, **more):
    """What a U-Net is called with."""
    return {"x": torch.randn(2, channels, *sides), time: torch.tensor([3, 7]), **more}


TEXT = {"context": torch.randn(2, 5, 8)}
CALLED = {
    "denoising_diffusion_pytorch": {"U-Net": (of_lucidrains, partial(step, "time", 3), [(16, 16), (24, 16)])},
    "monai": {
        "U-Net": (denoising, partial(step, "timesteps", 1), [(16, 16), (24, 16)]),
        "U-Net of texts": (
            partial(denoising, with_conditioning=True, cross_attention_dim=8),
            partial(step, "timesteps", 1, **TEXT),
            [(16, 16), (24, 16)],
        ),
        "U-Net of volumes": (
            partial(denoising, spatial_dims=3),
            partial(step, "timesteps", 1),
            [(8, 8, 8), (8, 12, 8)],
        ),
        "autoencoder": (coding, lambda *sides: {"x": torch.randn(2, 1, *sides)}, [(16, 16), (24, 16)]),
    },
    "taming": {"U-Net": (of_taming, partial(step, "t", 3), [(16, 16), (24, 16)])},
}
"""What makes networks that take more than images, what they are called with, and sizes; by package and name."""
