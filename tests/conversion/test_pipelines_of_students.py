"""Pipelines of diffusers call a converted network as they call its teacher: texts, masks, guidance, places."""

import inspect

import pytest
import torch
from foreign import difference
from foreign_diffusion import denoiser

import subquad

diffusers = pytest.importorskip("diffusers")

FOUR = {"block_out_channels": (8,) * 4, "norm_num_groups": 4, "latent_channels": 4}
FOUR |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
OF_FRAMES = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
OF_FRAMES |= {"temperal_downsample": [False, True, True], "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}

TEXT, NEGATIVE = torch.randn(2, 1, 5, 24, generator=torch.Generator().manual_seed(0))
TEXTS = {"prompt_embeds": TEXT, "negative_prompt_embeds": NEGATIVE}
PRESENT = torch.tensor([[True, True, True, False, False]])
MASKS = {"prompt_attention_mask": PRESENT, "negative_prompt_attention_mask": PRESENT.flip(1)}
OF_TWO_LENGTHS = {"prompt_embeds": [TEXT[0].repeat(8, 1)], "negative_prompt_embeds": [NEGATIVE[0]]}

# name: pipeline, encoder of images, and what is asked besides their size
PIPELINES = {
    "Chroma": ("Chroma", "AutoencoderKL", {**FOUR, "shift_factor": 0.0}, {**TEXTS, **MASKS, "guidance_scale": 3.0}),
    "Flux 2": ("Flux2", "AutoencoderKLFlux2", FOUR, {"prompt_embeds": TEXT}),
    "Qwen": (
        "QwenImage",
        "AutoencoderKLQwenImage",
        OF_FRAMES,
        {**TEXTS, "prompt_embeds_mask": PRESENT, "negative_prompt_embeds_mask": PRESENT, "true_cfg_scale": 2.0},
    ),
    "CogVideoX": ("CogVideoX", None, {}, {**TEXTS, "num_frames": 9, "guidance_scale": 6.0, "num_inference_steps": 3}),
    "CogView4": ("CogView4", None, {}, {**TEXTS, "guidance_scale": 2.0}),
    "HunyuanVideo": (
        "HunyuanVideo",
        None,
        {},
        {
            "prompt_embeds": TEXT,
            "prompt_attention_mask": PRESENT,
            "pooled_prompt_embeds": torch.ones(1, 12),
            "num_frames": 9,
        },
    ),
    "LTX": ("LTX", None, {}, {**TEXTS, **MASKS, "num_frames": 17, "guidance_scale": 2.0}),
    "Wan": ("Wan", "AutoencoderKLWan", OF_FRAMES, {**TEXTS, "num_frames": 9, "guidance_scale": 2.0}),
    "Z-Image": ("ZImage", "AutoencoderKL", FOUR, {**OF_TWO_LENGTHS, "guidance_scale": 3.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_makes_the_same_of_a_student_with_softmax(name):
    kind, encoder, sizes, asked = PIPELINES[name]
    teacher, made = denoiser(name), {}
    pipeline_class = getattr(diffusers, f"{kind}Pipeline")
    named = inspect.signature(pipeline_class.__init__).parameters
    parts = {part: None for part in named if part.startswith(("text_encoder", "tokenizer"))}
    scheduler = "CogVideoXDDIMScheduler" if kind == "CogVideoX" else "FlowMatchEulerDiscreteScheduler"
    # latents are what is asked for, so that most need no encoder of images
    parts["vae"] = None if encoder is None else getattr(diffusers, encoder)(**sizes)
    pipeline = pipeline_class(scheduler=getattr(diffusers, scheduler)(), transformer=teacher, **parts)
    pipeline.set_progress_bar_config(disable=True)
    for attention in (None, "softmax", "linear"):
        pipeline.transformer = teacher if attention is None else subquad.convert(teacher, attention)
        call = {"height": 64, "width": 96, "num_inference_steps": 1, "output_type": "latent", **asked}
        made[attention] = pipeline(generator=torch.Generator().manual_seed(0), return_dict=False, **call)[0]
    assert difference(made["softmax"], made[None]) < 1e-5
    assert made["linear"].isfinite().all() and difference(made["linear"], made[None]) > 1e-3
