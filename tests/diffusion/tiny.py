"""Complete Stable Diffusion pipelines with random weights, small enough to run in a fraction of a second."""

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer


def tokenizer():
    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: k for k, word in enumerate(words)}, merges=[], model_max_length=77)


def text_encoder(kind):
    ids = {"bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    return kind(CLIPTextConfig(vocab_size=514, max_position_embeddings=77, projection_dim=32, **sizes, **ids))


def vae():
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return AutoencoderKL(block_out_channels=(32, 64), latent_channels=4, norm_num_groups=8, sample_size=32, **blocks)


def scheduler():
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    return DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1, **betas)


# self-attention at the latent's own size; 4 heads of 8 (diffusers calls their number attention_head_dim)
UNET = {
    "sample_size": 16,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
}


def unet(**changes):
    return UNet2DConditionModel(**UNET | changes).eval()


# none at the latent's own size, as in SDXL
UNET_XL = UNET | {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 64,
    "transformer_layers_per_block": (1, 2),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 32,
    "use_linear_projection": True,
}


def pipeline():
    torch.manual_seed(0)
    parts = {"vae": vae(), "text_encoder": text_encoder(CLIPTextModel), "tokenizer": tokenizer(), "unet": unet()}
    without = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    made = StableDiffusionPipeline(scheduler=scheduler(), **parts, **without)
    made.set_progress_bar_config(disable=True)
    return made


def pipeline_xl():
    torch.manual_seed(0)
    texts = {"text_encoder": text_encoder(CLIPTextModel), "tokenizer": tokenizer()}
    texts |= {"text_encoder_2": text_encoder(CLIPTextModelWithProjection), "tokenizer_2": tokenizer()}
    made = StableDiffusionXLPipeline(
        vae=vae(), unet=unet(**UNET_XL), scheduler=scheduler(), **texts, add_watermarker=False
    )
    made.set_progress_bar_config(disable=True)
    return made


TRANSFORMER = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "patch_size": 2,
    "sample_size": 32,
}


def pipeline_dit():
    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(**TRANSFORMER, num_embeds_ada_norm=1000, norm_elementwise_affine=False)
    return DiTPipeline(transformer.eval(), vae(), scheduler())


def pipeline_pixart():
    """Without its text encoder: it is to be given embeddings."""
    torch.manual_seed(0)
    sizes = {"cross_attention_dim": 16, "caption_channels": 32, "use_additional_conditions": False}
    transformer = PixArtTransformer2DModel(**TRANSFORMER, **sizes)
    return PixArtAlphaPipeline(None, None, vae(), transformer.eval(), scheduler())


def latents(pipe, height=32, width=24, **settings):
    """What the pipeline makes of one noise, before the decoder."""
    made = pipe(
        "a cat",
        height=height,
        width=width,
        num_inference_steps=settings.pop("steps", 3),
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        **settings,
    )
    return made.images
