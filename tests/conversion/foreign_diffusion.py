"""Small transformers of diffusers with random weights, and what they are called with."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn

SIZES = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "num_layers": 2,
    "patch_size": 2,
    "sample_size": 8,
}
OF_TEXT = {"joint_attention_dim": 24, "pooled_projection_dim": 12}


def dit():
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(**SIZES, out_channels=8, num_embeds_ada_norm=1000, norm_elementwise_affine=False)


def pixart():
    from diffusers import PixArtTransformer2DModel

    text = {"cross_attention_dim": 16, "caption_channels": 32, "use_additional_conditions": False}
    return PixArtTransformer2DModel(**SIZES, out_channels=8, **text)


def sd3(**more):
    from diffusers import SD3Transformer2DModel

    sizes = {"caption_projection_dim": 16, "out_channels": 4, "pos_embed_max_size": 16}
    return SD3Transformer2DModel(**SIZES, **OF_TEXT, **sizes, **more)


def sd35():
    """With norms of queries and keys, and a second attention of the image alone."""
    return sd3(qk_norm="rms_norm", dual_attention_layers=(0,))


PACKED = {"num_attention_heads": 2, "attention_head_dim": 8, "axes_dims_rope": (2, 2, 4), "patch_size": 1}
ROWS = {**PACKED, "in_channels": 16, "num_layers": 1, "num_single_layers": 2}


def flux():
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(**ROWS, **OF_TEXT)


def chroma():
    from diffusers import ChromaTransformer2DModel

    approximator = {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1}
    with warnings.catch_warnings():
        # of diffusers, that it uses a class of its own which is to go
        warnings.simplefilter("ignore", FutureWarning)
        return ChromaTransformer2DModel(**ROWS, joint_attention_dim=24, **approximator)


def bria():
    from diffusers import BriaTransformer2DModel

    return BriaTransformer2DModel(**ROWS, joint_attention_dim=24)


def bria_fibo():
    from diffusers import BriaFiboTransformer2DModel

    return BriaFiboTransformer2DModel(**ROWS, joint_attention_dim=24, text_encoder_dim=6)


def longcat():
    from diffusers import LongCatImageTransformer2DModel

    return LongCatImageTransformer2DModel(**ROWS, **OF_TEXT)


def ovis():
    from diffusers import OvisImageTransformer2DModel

    return OvisImageTransformer2DModel(**ROWS, out_channels=16, joint_attention_dim=24)


def flux2():
    from diffusers import Flux2Transformer2DModel

    sizes = ROWS | {"axes_dims_rope": (2, 2, 2, 2)}
    return Flux2Transformer2DModel(**sizes, joint_attention_dim=24, timestep_guidance_channels=8)


def flux3():
    theirs = pytest.importorskip("diffusers.models.transformers.transformer_flux3", exc_type=ImportError)
    sizes = ROWS | {"axes_dims_rope": (2, 2, 2, 2), "cond_in_channels": 16, "timestep_channels": 8}
    del sizes["patch_size"]
    return theirs.Flux3Transformer2DModel(**sizes, joint_attention_dim=24)


def krea():
    from diffusers import Krea2Transformer2DModel

    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_key_value_heads": 1, "axes_dims_rope": (2, 2, 4)}
    text = {"text_hidden_dim": 24, "num_text_layers": 2, "text_num_attention_heads": 2, "text_num_key_value_heads": 1}
    blocks = {"num_layers": 2, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1}
    mlps = {"intermediate_size": 16, "text_intermediate_size": 16, "timestep_embed_dim": 8}
    return Krea2Transformer2DModel(in_channels=16, **heads, **text, **blocks, **mlps)


def lumina():
    from diffusers import Lumina2Transformer2DModel

    sizes = {"hidden_size": 16, "num_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 2, "num_kv_heads": 1}
    more = {"in_channels": 4, "sample_size": 8, "multiple_of": 8, "axes_dim_rope": (2, 2, 4), "cap_feat_dim": 24}
    return Lumina2Transformer2DModel(**sizes, **more, axes_lens=(32, 32, 32))


def qwen():
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(**PACKED, in_channels=16, num_layers=2, joint_attention_dim=24)


def z_image():
    from diffusers import ZImageTransformer2DModel

    sizes = {"dim": 16, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 24}
    return ZImageTransformer2DModel(in_channels=4, **sizes, axes_dims=[2, 2, 4], axes_lens=[256, 32, 32])


def wan(name="Wan", **more):
    import diffusers

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "in_channels": 4, "out_channels": 4}
    return getattr(diffusers, f"{name}Transformer3DModel")(
        **sizes, text_dim=24, freq_dim=8, ffn_dim=16, rope_max_seq_len=32, **more
    )


FILMS = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2}


def ltx():
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(**FILMS, cross_attention_dim=16, caption_channels=24)


def cogvideox(**more):
    from diffusers import CogVideoXTransformer3DModel

    sizes = {"text_embed_dim": 24, "max_text_seq_length": 5, "time_embed_dim": 8, "sample_frames": 9}
    size = {"sample_width": 8, "sample_height": 8}
    return CogVideoXTransformer3DModel(
        **FILMS | {"attention_head_dim": 16}, **sizes, **size, use_rotary_positional_embeddings=True, **more
    )


def hunyuan_image():
    from diffusers import HunyuanImageTransformer2DModel

    text = {"text_embed_dim": 24, "num_single_layers": 1, "num_refiner_layers": 1}
    return HunyuanImageTransformer2DModel(**FILMS | {"num_layers": 1}, **text, rope_axes_dim=(4, 4))


def hunyuan_video15():
    from diffusers import HunyuanVideo15Transformer3DModel

    text = {"text_embed_dim": 24, "text_embed_2_dim": 8, "image_embed_dim": 8, "num_refiner_layers": 1}
    return HunyuanVideo15Transformer3DModel(**FILMS, **text, rope_axes_dim=(2, 2, 4))


def hunyuan_video():
    from diffusers import HunyuanVideoTransformer3DModel

    text = {"text_embed_dim": 24, "pooled_projection_dim": 12, "num_single_layers": 1, "num_refiner_layers": 1}
    return HunyuanVideoTransformer3DModel(**FILMS | {"num_layers": 1}, **text, rope_axes_dim=(2, 2, 4))


def cosmos():
    from diffusers import CosmosTransformer3DModel

    sizes = {"text_embed_dim": 24, "adaln_lora_dim": 8, "max_size": (8, 32, 32), "mlp_ratio": 2.0}
    return CosmosTransformer3DModel(**FILMS | {"attention_head_dim": 16}, **sizes, concat_padding_mask=False)


def anyflow():
    from diffusers import AnyFlowTransformer3DModel

    return AnyFlowTransformer3DModel(**FILMS, text_dim=24, freq_dim=8, ffn_dim=16, rope_max_seq_len=32)


def mochi():
    from diffusers import MochiTransformer3DModel

    sizes = {"text_embed_dim": 24, "time_embed_dim": 8, "pooled_projection_dim": 16, "in_channels": 4}
    return MochiTransformer3DModel(num_attention_heads=2, attention_head_dim=8, num_layers=2, **sizes)


def cogview4():
    from diffusers import CogView4Transformer2DModel

    sizes = {"text_embed_dim": 24, "time_embed_dim": 8, "condition_dim": 4, "rope_axes_dim": (8, 8), "sample_size": 8}
    return CogView4Transformer2DModel(**FILMS, **sizes)


def aura_flow():
    from diffusers import AuraFlowTransformer2DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "joint_attention_dim": 24, "caption_projection_dim": 16}
    sizes |= {"num_mmdit_layers": 1, "num_single_dit_layers": 2, "sample_size": 8, "pos_embed_max_size": 144}
    return AuraFlowTransformer2DModel(**sizes)


def hunyuan_dit():
    from diffusers import HunyuanDiT2DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "patch_size": 2, "sample_size": 8}
    sizes |= {"hidden_size": 16, "num_layers": 4, "cross_attention_dim": 24, "cross_attention_dim_t5": 16}
    return HunyuanDiT2DModel(**sizes, pooled_projection_dim=8, text_len=5, text_len_t5=4, mlp_ratio=2)


# name: what makes it, and which latents it takes besides 8×8
DIFFUSION = {
    "DiT": (dit, [(12, 12), (6, 6)]),
    "PixArt": (pixart, [(12, 8), (4, 20)]),
    "HunyuanDiT": (hunyuan_dit, [(12, 8), (4, 20)]),
    "SD3": (sd3, [(12, 8), (4, 20)]),
    "SD3.5": (sd35, [(12, 8), (4, 20)]),
    "Flux": (flux, [(12, 8), (4, 20)]),
    "Chroma": (chroma, [(12, 8), (4, 20)]),
    "Bria": (bria, [(12, 8), (2, 20)]),
    "Bria FIBO": (bria_fibo, [(12, 8), (20, 2)]),
    "LongCat": (longcat, [(12, 8), (2, 20), (20, 2)]),
    "Ovis": (ovis, [(12, 8), (4, 20)]),
    "Flux 2": (flux2, [(12, 8), (2, 20), (20, 2)]),
    "Flux 3": (flux3, [(12, 8), (2, 20), (20, 2)]),
    "Krea 2": (krea, [(12, 8), (2, 20), (20, 2)]),
    "Lumina 2": (lumina, [(12, 8), (4, 20)]),
    "Qwen": (qwen, [(12, 8), (4, 20)]),
    "Wan": (wan, [(12, 8), (4, 20)]),
    "ChronoEdit": (partial(wan, "ChronoEdit"), [(12, 8), (4, 20)]),
    "LTX": (ltx, [(12, 8), (4, 20)]),
    "CogVideoX": (cogvideox, [(12, 8), (4, 20)]),
    "CogVideoX 1.5": (partial(cogvideox, patch_size_t=2), [(12, 8), (4, 20)]),
    "HunyuanVideo": (hunyuan_video, [(12, 8), (4, 20)]),
    "HunyuanVideo 1.5": (hunyuan_video15, [(6, 4), (2, 10)]),
    "HunyuanImage": (hunyuan_image, [(6, 4), (2, 10)]),
    "SkyReels V2": (partial(wan, "SkyReelsV2"), [(12, 8), (4, 20)]),
    "Wan VACE": (partial(wan, "WanVACE", vace_layers=[0], vace_in_channels=4), [(12, 8), (4, 20)]),
    "CogView4": (cogview4, [(12, 8), (4, 20)]),
    "AuraFlow": (aura_flow, [(12, 8), (4, 20)]),
    "Cosmos": (cosmos, [(12, 8), (4, 20)]),
    "AnyFlow": (anyflow, [(12, 8), (4, 20)]),
    "Mochi": (mochi, [(12, 8), (4, 20)]),
    "Z-Image": (z_image, [(12, 8), (4, 20)]),
}
OF_FRAMES = ("Wan", "Wan VACE", "ChronoEdit", "SkyReels V2", "Cosmos", "AnyFlow")
"""Films whose texts do not attend together with them, called much alike."""
UNEVEN = ("Flux 3", "Lumina 2", "Z-Image")
"""Whose blocks differ in how many tokens there are beside the map."""
JOINT = [name for name in DIFFUSION if name not in ("DiT", "PixArt", "HunyuanDiT", *OF_FRAMES, "LTX", *UNEVEN)]
"""Whose texts attend together with the image, all of them in front of it."""
REGISTERS = {"AuraFlow": 8}
"""Tokens that learn, in front of a text."""


def in_front(name, text=5):
    """Tokens in front of the image where a text has so many."""
    return text + REGISTERS.get(name, 0)


def denoiser(name):
    """A network whose answers depend on all of its weights."""
    torch.manual_seed(0)
    model = DIFFUSION[name][0]()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3 if parameter.dim() < 2 else 0.2)
    return model.eval()


def inputs(name, height=8, width=8, text=5):
    """Arguments of a call for latents of this size and a text of so many tokens."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    timestep = torch.tensor([30, 500])
    if name == "DiT":
        return {"hidden_states": noise(2, 4, height, width), "timestep": timestep, "class_labels": timestep}
    if name == "PixArt":
        hidden, conditions = noise(2, 4, height, width), {"resolution": None, "aspect_ratio": None}
        texts = {"encoder_hidden_states": noise(2, text, 32), "added_cond_kwargs": conditions}
        return {"hidden_states": hidden, "timestep": timestep, **texts}
    if name == "HunyuanDiT":
        angles = torch.rand(height // 2 * (width // 2), 4, generator=generator).repeat_interleave(2, dim=-1)
        texts = {"encoder_hidden_states": noise(2, 5, 24), "encoder_hidden_states_t5": noise(2, 4, 16)}
        texts |= {"text_embedding_mask": torch.ones(2, 5), "text_embedding_mask_t5": torch.ones(2, 4)}
        more = {"image_meta_size": noise(2, 6), "style": torch.zeros(2, dtype=torch.long)}
        more |= {"timestep": timestep.float(), "image_rotary_emb": (angles.cos(), angles.sin())}
        return {"hidden_states": noise(2, 4, height, width), **texts, **more}
    if name in OF_FRAMES:
        film = {"hidden_states": noise(2, 4, 3, height, width), "timestep": timestep}
        if name == "AnyFlow":
            film = {"hidden_states": noise(2, 3, 4, height, width), "timestep": timestep[:, None].expand(2, 3)}
            film |= {"r_timestep": film["timestep"] // 2}
        if name == "Wan VACE":
            film |= {"control_hidden_states": noise(2, 4, 3, height, width)}
        return film | {"encoder_hidden_states": noise(2, text, 24)}
    if name in ("LTX", "Lumina 2", "Mochi") or "Hunyuan" in name or "CogV" in name:
        return of_texts_beside(name, height, width, timestep, noise(2, text, 24), noise)
    if name == "Z-Image":
        latents, texts = noise(2, 4, 1, height, width), noise(2, text, 24)
        return {"x": list(latents), "t": timestep / 1000, "cap_feats": list(texts)}
    texts = {"encoder_hidden_states": noise(2, text, 24)}
    if name == "AuraFlow":
        return {"hidden_states": noise(2, 4, height, width), "timestep": timestep / 1000, **texts}
    if name in ("SD3", "SD3.5"):
        pooled = {"pooled_projections": noise(2, 12)}
        return {"hidden_states": noise(2, 4, height, width), "timestep": timestep, **texts, **pooled}
    rows, columns = height // 2, width // 2
    call = {"hidden_states": noise(2, rows * columns, 16), "timestep": timestep / 1000, **texts}
    if name == "Krea 2":
        ids = ids_of(name, rows, columns, text)
        present = torch.ones(2, text, dtype=torch.bool)
        present[0, -2:] = False
        call |= {"encoder_hidden_states": noise(2, text, 2, 24), "encoder_attention_mask": present}
        return call | {"position_ids": torch.cat([ids["txt_ids"], ids["img_ids"]])}
    if name == "Qwen":
        return call | {"img_shapes": [[(1, rows, columns)]] * 2}
    more = {
        "Flux": {"pooled_projections": noise(2, 12)},
        "Bria FIBO": {"text_encoder_layers": [noise(2, text, 6) for _ in range(3)]},
        "Flux 2": {"guidance": torch.ones(2)},
    }
    return call | ids_of(name, rows, columns, text) | more.get(name, {})


def of_texts_beside(name, height, width, timestep, texts, noise):
    """The same of networks of films, and of CogView4, that are told the size of a latent in one way or another."""
    call = {"timestep": timestep, "encoder_hidden_states": texts}
    present = torch.ones(texts.shape[:2])
    # the first of two texts is shorter
    present[0, -2:] = 0
    if name == "LTX":
        frames = {"num_frames": 3, "height": height, "width": width, "rope_interpolation_scale": (0.3, 32, 32)}
        return call | frames | {"hidden_states": noise(2, 3 * height * width, 4), "encoder_attention_mask": present}
    if name == "Lumina 2":
        return call | {"hidden_states": noise(2, 4, height, width), "encoder_attention_mask": present.long()}
    if name == "HunyuanImage":
        call |= {"timestep": timestep.float(), "encoder_attention_mask": present}
        return call | {"hidden_states": noise(2, 4, height, width)}
    if name == "HunyuanVideo 1.5":
        # no glyphs and no image
        more = {"encoder_hidden_states_2": noise(2, 0, 8), "encoder_attention_mask_2": torch.ones(2, 0)}
        more |= {"image_embeds": torch.zeros(2, 0, 8), "encoder_attention_mask": present, "timestep": timestep.float()}
        return call | more | {"hidden_states": noise(2, 4, 3, height, width)}
    if name == "HunyuanVideo":
        more = {"pooled_projections": noise(2, 12), "guidance": torch.tensor([6.0, 6.0])}
        return call | more | {"hidden_states": noise(2, 4, 3, height, width), "encoder_attention_mask": present}
    if name == "Mochi":
        return call | {"hidden_states": noise(2, 4, 3, height, width), "encoder_attention_mask": present.bool()}
    if name == "CogView4":
        size = torch.tensor([[8.0 * height, 8.0 * width]] * 2)
        sizes = {"original_size": size, "target_size": size, "crop_coords": torch.zeros(2, 2)}
        return call | sizes | {"hidden_states": noise(2, 4, height, width)}
    frames, maps = (4, 2) if name == "CogVideoX 1.5" else (3, 3)
    angles = noise(maps * (height // 2) * (width // 2), 8).repeat_interleave(2, dim=1)
    return call | {
        "hidden_states": noise(2, frames, 4, height, width),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def ids_of(name, rows, columns, text):
    """Where tokens stand, as the pipeline of each says it."""
    axes = 4 if name in ("Flux 2", "Flux 3") else 3
    of_image, of_text = torch.zeros(rows, columns, axes), torch.zeros(text, axes)
    of_image[..., 1], of_image[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
    if name == "Flux 3":
        of_image[..., 1:3] *= 0.75
    if name in ("Flux 2", "Flux 3"):
        of_text[:, 3] = torch.arange(text)
    if name == "LongCat":
        # a text goes on diagonally, and the image from its end
        of_image[..., 0] = 1
        of_image[..., 1:] += text
        of_text[:, 1:] = torch.arange(text)[:, None]
    return {"img_ids": of_image.flatten(0, 1), "txt_ids": of_text}


def denoised(model, arguments):
    with torch.no_grad():
        return sample_of(model, arguments)


def sample_of(model, arguments):
    """What is denoised, of a network that answers with a list, too."""
    sample = model(**arguments).sample
    return torch.stack(sample) if isinstance(sample, list) else sample
