"""Towers of transformers' networks of language that are handed packs of patches, of images of any sizes."""

import inspect
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from foreign import IN_TRANSFORMERS, of_transformers
from torch import nn


def tower_of_transformers(name, prefix, tower="Transformer", **sizes):
    """The images' part of a network of language as well, which transformers itself does not name."""
    try:
        defined = import_module(f"transformers.models.{name}.modeling_{name}")
        configured = import_module(f"transformers.models.{name}.configuration_{name}")
    except ImportError:
        pytest.skip(f"this transformers has no {name}")
    sizes = sizes or IN_TRANSFORMERS
    config = getattr(configured, f"{prefix}VisionConfig", None) or getattr(configured, f"{prefix}Vision{tower}Config")
    return getattr(defined, f"{prefix}Vision{tower}")(config(**sizes))


class OfImages(nn.Module):
    """A tower that is handed patches, as processors of transformers cut and order them, called with images."""

    in_chans = 3

    def __init__(self, tower):
        super().__init__()
        self.tower, self.config = tower, tower.config

    def patches(self, x):
        """Patches (n, c·t·p·p) of an image after the other, in blocks of those that are merged, and their numbers."""
        p, m = self.config.patch_size, self.config.spatial_merge_size
        rows, columns = x.shape[-2] // p, x.shape[-1] // p
        cut = x.view(len(x), 3, rows // m, m, p, columns // m, m, p).permute(0, 2, 5, 3, 6, 1, 4, 7)
        # an image is a film of frames that are alike
        frames = getattr(self.config, "temporal_patch_size", 1)
        film = cut.unsqueeze(6).expand(*cut.shape[:6], frames, p, p)
        return film.flatten(5).flatten(0, 4), torch.tensor([[1, rows, columns]]).repeat(len(x), 1)

    def together(self, several):
        """Patches of images of several sizes in one pack, and their numbers."""
        patches, numbers = zip(*map(self.patches, several), strict=True)
        return torch.cat(patches), torch.cat(numbers)

    def of_pack(self, patches, numbers):
        """Tokens of a pack (n, c)."""
        tokens = self.tower(patches, numbers).last_hidden_state
        return tokens.squeeze(0) if tokens.dim() == 3 else tokens

    def given(self, x):
        """Arguments of a call of the tower, by name."""
        return dict(zip(inspect.signature(self.tower.forward).parameters, self.patches(x), strict=False))

    def means(self, patches):
        """(n,), of the pixels of each patch."""
        return patches.flatten(0, -2).mean(-1)

    def forward(self, x):
        return self.of_pack(*self.patches(x)).unflatten(0, (len(x), -1))


TOWER = {"depth": 2, "hidden_size": 48, "num_heads": 4, "intermediate_size": 96, "patch_size": 8}


def packed_of_transformers(name, prefix, tower="Model", **more):
    return OfImages(tower_of_transformers(name, prefix, tower, **TOWER, **more))


class OfPatches(OfImages):
    """One that is handed patches (n, c, p, p) in the order of rows."""

    def patches(self, x):
        p = self.config.patch_size
        rows, columns = x.shape[-2] // p, x.shape[-1] // p
        cut = x.view(len(x), 3, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
        return cut, torch.tensor([[1, rows, columns]]).repeat(len(x), 1)

    def given(self, x):
        patches, numbers = self.patches(x)
        name = type(self.tower).__name__
        more = {"merge_sizes": torch.ones(len(numbers), dtype=torch.long)} if "VideoLlama" in name else {}
        return {"pixel_values": patches[None] if "Paddle" in name else patches, "grid_thw": numbers, **more}

    def means(self, patches):
        return patches.flatten(1).mean(1)

    def of_pack(self, patches, numbers):
        name = type(self.tower).__name__
        more = {"merge_sizes": torch.ones(len(numbers), dtype=torch.long)} if "VideoLlama" in name else {}
        return self.tower(patches[None] if "Paddle" in name else patches, grid_thw=numbers, **more).last_hidden_state


class OfPixtral(OfImages):
    """One that cuts patches itself, of images of one size."""

    def patches(self, x):
        return x, torch.tensor([x.shape[-2:]] * len(x))

    def together(self, several):
        high, wide = (max(one.shape[axis] for one in several) for axis in (-2, -1))
        filled = [F.pad(one, (0, wide - one.shape[-1], 0, high - one.shape[-2])) for one in several]
        return torch.cat(filled), torch.cat([self.patches(one)[1] for one in several])

    def given(self, x):
        return dict(zip(("pixel_values", "image_sizes"), self.patches(x), strict=True))

    def means(self, images):
        return F.avg_pool2d(images.mean(1), self.config.patch_size).flatten()

    def of_pack(self, images, sizes):
        return self.tower(images, image_sizes=sizes.tolist()).last_hidden_state[0]


class OfGemma(OfImages):
    """One that is handed as many patches of each image, and where they stand."""

    def patches(self, x):
        p = self.config.patch_size
        rows, columns = x.shape[-2] // p, x.shape[-1] // p
        cut = x.view(len(x), 3, rows, p, columns, p).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
        return cut, places.expand(len(x), -1, -1)

    def together(self, several):
        patches, places = zip(*map(self.patches, several), strict=True)
        most = max(one.shape[1] for one in patches)
        filled = [F.pad(one, (0, 0, 0, most - one.shape[1])) for one in patches]
        return torch.cat(filled), torch.cat([F.pad(one, (0, 0, 0, most - one.shape[1]), value=-1) for one in places])


class OfRows(OfImages):
    """One that is handed patches (n, c·p·p) in the order of rows."""

    def patches(self, x):
        p = self.config.patch_size
        rows, columns = x.shape[-2] // p, x.shape[-1] // p
        cut = x.view(len(x), 3, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2)
        return cut, torch.tensor([[1, rows, columns]]).repeat(len(x), 1)


def of_rows(name, prefix, tower="Model", **more):
    sizes = IN_TRANSFORMERS | {"patch_size": 8} | more
    return OfRows(tower_of_transformers(name, prefix, tower, **sizes))


def cosmos():
    sizes = {"patch_size": 8, "num_patches": 16}
    return OfImages(tower_of_transformers("cosmos3_edge", "Cosmos3Edge", "Model", **IN_TRANSFORMERS | sizes))


class OfMiniCPM(OfImages):
    """One that is handed patches beside each other in a picture of one row, and rows and columns of each image."""

    def patches(self, x):
        p = self.config.patch_size
        rows, columns = x.shape[-2] // p, x.shape[-1] // p
        cut = x.view(len(x), 3, rows, p, columns, p).permute(1, 3, 0, 2, 4, 5).flatten(2)
        return cut[None], torch.tensor([[rows, columns]]).repeat(len(x), 1)

    def together(self, several):
        patches, numbers = zip(*map(self.patches, several), strict=True)
        return torch.cat(patches, dim=-1), torch.cat(numbers)

    def means(self, patches):
        return patches.unflatten(-1, (-1, self.config.patch_size)).mean((0, 1, 2, 4))

    def of_pack(self, patches, sizes):
        return self.tower(patches, target_sizes=sizes).last_hidden_state.squeeze(0)


def minicpm(name, prefix):
    """The second of three layers stands in front of the merger."""
    sizes = {"num_hidden_layers": 3, "insert_layer_id": 1, "patch_size": 8}
    return OfMiniCPM(tower_of_transformers(name, prefix, "Model", **IN_TRANSFORMERS | sizes))


class OfInkling(OfImages):
    """One that is handed blocks of patches (n, m·p, m·p, c) in the order of rows; each image has a class token."""

    def patches(self, x):
        side = self.config.patch_size * self.config.spatial_merge_size
        rows, columns = x.shape[-2] // side, x.shape[-1] // side
        cut = x.view(len(x), 3, rows, side, columns, side).permute(0, 2, 4, 3, 5, 1).flatten(0, 2)
        return cut, torch.tensor([[1, rows, columns]]).repeat(len(x), 1)

    def means(self, patches):
        p, m = self.config.patch_size, self.config.spatial_merge_size
        return patches.unflatten(2, (m, p)).unflatten(1, (m, p)).mean((2, 4, 5)).flatten()


def inkling():
    sizes = {"posemb_grid_size": 4, "patch_size": 8, "text_hidden_size": 32, "projection_hidden_dim": 32}
    return OfInkling(tower_of_transformers("inkling2", "Inkling2", "Model", **IN_TRANSFORMERS | sizes))


def minimax():
    """Twelve channels of a head's sixteen are turned, as frame, row and column have as many."""
    sizes = {"num_attention_heads": 3, "patch_size": 8, "image_size": 64}
    model = tower_of_transformers("minimax_m3_vl", "MiniMaxM3VL", "Model", **IN_TRANSFORMERS | sizes)
    if "cu_seqlens" not in inspect.signature(type(model.layers[0].self_attn).forward).parameters:
        pytest.skip("in transformers 5.20 images of a pack see each other")
    return OfImages(model)


class OfNaFlex(OfImages):
    """One that is handed as many patches of each image, which of them are there, and rows and columns of each."""

    def patches(self, x):
        p = self.config.patch_size
        rows, columns = x.shape[-2] // p, x.shape[-1] // p
        cut = x.view(len(x), 3, rows, p, columns, p).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        return cut, torch.ones(cut.shape[:2], dtype=torch.long), torch.tensor([[rows, columns]]).repeat(len(x), 1)

    def together(self, several):
        patches, there, sizes = zip(*map(self.patches, several), strict=True)
        most = max(one.shape[1] for one in patches)
        filled = [F.pad(one, (0, 0, 0, most - one.shape[1])) for one in patches]
        return torch.cat(filled), torch.cat([F.pad(one, (0, most - one.shape[1])) for one in there]), torch.cat(sizes)

    def of_pack(self, patches, there, sizes):
        return self.tower(patches, there, sizes).last_hidden_state[there.bool()]


class OfPix2Struct(OfNaFlex):
    """One whose patches begin with their row and column."""

    def patches(self, x):
        cut, there, sizes = super().patches(x)
        rows, columns = sizes[0]
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) + 1
        return torch.cat([places.expand(len(x), -1, -1), cut], dim=-1), there, sizes

    def given(self, x):
        patches, there, _ = self.patches(x)
        return {"flattened_patches": patches, "attention_mask": there}

    def means(self, patches):
        return super().means(patches[..., 2:])

    def of_pack(self, patches, there, sizes):
        return self.tower(patches, attention_mask=there).last_hidden_state[there.bool()]


def naflex():
    sizes = {"patch_size": 8, "num_patches": 16}
    return OfNaFlex(of_transformers("Siglip2VisionModel", "Siglip2VisionConfig", **sizes))


def pix2struct():
    sizes = {"patch_embed_hidden_size": 192, "seq_len": 256, "d_ff": 96, "d_kv": 16, "num_attention_heads": 4}
    network = of_transformers("Pix2StructVisionModel", "Pix2StructVisionConfig", **sizes, initializer_range=0.1)
    network.config.patch_size = 8
    return OfPix2Struct(network)


def gemma(keys=4):
    sizes = {"head_dim": 16, "num_key_value_heads": keys, "pooling_kernel_size": 2, "position_embedding_size": 16}
    return OfGemma(tower_of_transformers("gemma4", "Gemma4", "Model", **IN_TRANSFORMERS | sizes))


def of_patches(name, prefix, **more):
    return OfPatches(tower_of_transformers(name, prefix, "Model", **IN_TRANSFORMERS | more))


def ernie():
    return OfImages(tower_of_transformers("ernie4_5_vl_moe", "Ernie4_5_VLMoe", "TransformerPretrainedModel", **TOWER))


WINDOWS = {"window_size": 32, "fullatt_block_indexes": [1], "out_hidden_size": 48}


def windows_of_transformers(name, prefix):
    """A tower whose second block sees whole images, and the first one windows of 4×4 patches."""
    defined = pytest.importorskip(f"transformers.models.{name}.modeling_{name}", exc_type=ImportError)
    configured = import_module(f"transformers.models.{name}.configuration_{name}")
    config = getattr(configured, f"{prefix}Vision{'Encoder' if 'Omni' in prefix else ''}Config")(**TOWER, **WINDOWS)
    if "Omni" in prefix:
        return OfImages(defined.Qwen2_5OmniVisionEncoder(config))
    return OfImages(defined.Qwen2_5_VisionTransformerPretrainedModel(config))


def exaone():
    return packed_of_transformers("exaone4_5", "Exaone4_5_", num_key_value_heads=2, **WINDOWS)


class OfMuse(OfImages):
    """One that is handed patches in the order of rows, and orders them by windows of 4×4 for its first block."""

    def patches(self, x):
        p = self.config.patch_size
        rows, columns = x.shape[-2] // p, x.shape[-1] // p
        cut = x.view(len(x), 3, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5).flatten(3)
        self.numbers = torch.tensor([[1, rows, columns]]).repeat(len(x), 1)
        return cut.repeat(1, 1, 1, 2).flatten(0, 2), self.numbers

    def means(self, patches):
        from transformers.vision_utils import get_vision_window_index

        order, _ = get_vision_window_index(self.numbers, spatial_merge_size=1, window_size=32, patch_size=8)
        return super().means(patches)[order]


def muse(name, prefix):
    sizes = {"pos_emb_height": 4, "pos_emb_width": 4, "layer_types": ["window_attention", "full_attention"]}
    return OfMuse(tower_of_transformers(name, prefix, "Model", **IN_TRANSFORMERS | sizes | {"patch_size": 8}))


def dots():
    experts = {"mlp_layer_types": ["dense", "sparse"], "num_local_experts": 4, "adapter_in_dim": 48}
    sizes = {"adapter_out_dim": 32, "moe_intermediate_size": 32, "patch_size": 8}
    return OfImages(tower_of_transformers("dots3_note", "Dots3Note", "Model", **IN_TRANSFORMERS | sizes | experts))


def lfm3():
    """A convolution, and a layer whose heads share keys."""
    sizes = {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "full_attention"], "patch_size": 8}
    return OfImages(
        tower_of_transformers("lfm3_vl", "Lfm3Vl", "Model", **IN_TRANSFORMERS | {"num_hidden_layers": 3} | sizes)
    )


def qwen2_vl():
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl", exc_type=ImportError)
    config = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(
        depth=2, embed_dim=48, hidden_size=32, num_heads=4, mlp_ratio=2, patch_size=8
    )
    return OfImages(module.Qwen2VisionTransformerPretrainedModel(config))


# those that are handed packs of patches
PACKS = {
    "transformers Qwen2-VL": (qwen2_vl, [(64, 96), (96, 80)]),
    "transformers Qwen3-VL": (
        partial(
            packed_of_transformers, "qwen3_vl", "Qwen3VL", num_position_embeddings=64, deepstack_visual_indexes=[0]
        ),
        [(64, 96), (96, 80)],
    ),
    "transformers Qwen3.5": (
        partial(packed_of_transformers, "qwen3_5", "Qwen3_5", num_position_embeddings=64),
        [(64, 96), (96, 80)],
    ),
    "transformers Qwen2.5-VL": (partial(windows_of_transformers, "qwen2_5_vl", "Qwen2_5_VL"), [(64, 96), (96, 80)]),
    "transformers Qwen2.5-Omni": (
        partial(windows_of_transformers, "qwen2_5_omni", "Qwen2_5Omni"),
        [(64, 96), (96, 80)],
    ),
    "transformers GLM-4V": (
        partial(packed_of_transformers, "glm4v", "Glm4v", image_size=64, out_hidden_size=32),
        [(64, 96), (96, 80)],
    ),
    **{
        f"transformers {name}": (
            partial(packed_of_transformers, *built, num_position_embeddings=64),
            [(64, 96), (96, 80)],
        )
        for name, built in {
            "Qwen3-Omni": ("qwen3_omni_moe", "Qwen3OmniMoe", "Encoder"),
            "Qwen4": ("qwen4_exp", "Qwen4Exp"),
            "Compass": ("cohere_compass", "CohereCompass"),
        }.items()
    },
    "transformers GLM-4V, experts": (
        partial(packed_of_transformers, "glm4v_moe", "Glm4vMoe", image_size=64, out_hidden_size=32),
        [(64, 96), (96, 80)],
    ),
    "transformers GLM-OCR": (
        partial(packed_of_transformers, "glm_ocr", "GlmOcr", out_hidden_size=32),
        [(64, 96), (96, 80)],
    ),
    "transformers Kimi": (
        partial(of_patches, "kimi_k25", "Kimi_K25", pos_emb_height=4, pos_emb_width=4),
        [(64, 96), (96, 64)],
    ),
    "transformers Pixtral": (
        lambda: OfPixtral(of_transformers("PixtralVisionModel", "PixtralVisionConfig")),
        [(64, 96), (96, 80)],
    ),
    "transformers Gemma 4": (gemma, [(64, 96), (96, 64)]),
    "transformers Gemma 4, shared keys": (partial(gemma, 2), [(64, 96), (96, 64)]),
    "transformers GLM-5": (
        partial(packed_of_transformers, "glm5_next", "Glm5Next", image_size=64, out_hidden_size=48),
        [(64, 96), (96, 80)],
    ),
    "transformers dots3": (dots, [(64, 96), (96, 80)]),
    "transformers LFM 3": (lfm3, [(64, 96), (96, 80)]),
    "transformers EXAONE 4.5": (exaone, [(64, 96), (96, 80)]),
    "transformers Cosmos 3 Edge": (cosmos, [(64, 96), (96, 80)]),
    "transformers HunYuan-VL": (
        partial(of_rows, "hunyuan_vl", "HunYuanVL", "Transformer", max_image_size=64, text_hidden_size=32),
        [(64, 96), (96, 80)],
    ),
    "transformers HY 4-VL": (partial(of_rows, "hy_v4_vl", "HYV4VL", max_image_size=64), [(64, 96), (96, 80)]),
    "transformers GLM-Image": (partial(of_rows, "glm_image", "GlmImage", image_size=64), [(64, 96), (96, 80)]),
    "transformers MiniCPM-OCR": (partial(minicpm, "minicpm_ocr", "MiniCPMOcr"), [(64, 96), (96, 80)]),
    "transformers MiniCPM-V 4.6": (partial(minicpm, "minicpmv4_6", "MiniCPMV4_6"), [(64, 96), (96, 80)]),
    "transformers MiniCPM-V 4.7": (partial(minicpm, "minicpmv4_7", "MiniCPMV4_7"), [(64, 96), (96, 80)]),
    "transformers Inkling 2": (inkling, [(64, 96), (96, 80)]),
    "transformers MiniMax M3": (minimax, [(64, 96), (96, 80)]),
    "transformers SigLIP 2, NaFlex": (naflex, [(64, 96), (96, 80)]),
    "transformers Pix2Struct": (pix2struct, [(64, 96), (96, 80)]),
    "transformers Muse Glimmer": (partial(muse, "muse_glimmer", "MuseGlimmer"), [(64, 96), (96, 80)]),
    "transformers Muse Spark": (partial(muse, "muse_spark", "MuseSpark"), [(64, 96), (96, 80)]),
    "transformers PaddleOCR": (partial(of_patches, "paddleocr_vl", "PaddleOCR"), [(64, 96), (96, 80)]),
    "transformers VideoLLaMA 3": (partial(of_patches, "video_llama_3", "VideoLlama3"), [(64, 96), (96, 80)]),
    "transformers ERNIE 4.5": (ernie, [(64, 96), (96, 80)]),
}
