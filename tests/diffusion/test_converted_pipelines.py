"""Pipelines of diffusers whose U-Net or autoencoder has another attention."""

import pytest
import torch
from tiny import latents, pipeline, pipeline_xl

import subquad
from subquad import SubquadError
from subquad.conversion import converted_layers
from subquad.diffusion import apply_agent_attention


@pytest.mark.parametrize("make", [pipeline, pipeline_xl])
def test_a_student_takes_its_teachers_place(make):
    pipe = make()
    expected, teacher = latents(pipe), pipe.unet
    pipe.unet = subquad.convert(teacher, "softmax")
    assert torch.allclose(latents(pipe), expected, atol=1e-4)
    pipe.unet = subquad.convert(teacher, "linear")
    made = latents(pipe)
    assert made.isfinite().all() and not torch.allclose(made, expected, atol=1e-3)
    # another size than the network is made for, and classifier-free guidance without
    assert latents(pipe, height=48, width=32, guidance_scale=1.0).isfinite().all()
    with pytest.raises(SubquadError, match=r"a DiffusersAttention without a processor.* apply agents to the network"):
        apply_agent_attention(pipe)


def test_an_autoencoder_is_sliced_and_tiled_as_before():
    pipe = pipeline()
    latent = torch.randn(2, pipe.vae.config.latent_channels, 16, 12)
    expected = pipe.vae.decode(latent).sample
    pipe.vae = subquad.convert(pipe.vae, "softmax", in_place=True)
    assert len(converted_layers(pipe.vae)) == 2
    assert torch.allclose(pipe.vae.decode(latent).sample, expected, atol=1e-4)
    pipe.vae.enable_slicing()
    assert torch.allclose(pipe.vae.decode(latent).sample, expected, atol=1e-4)
    vae = subquad.convert(pipeline().vae, "agent:num_agents=4")
    vae.enable_tiling()
    assert vae.decode(torch.randn(1, vae.config.latent_channels, 40, 24)).sample.isfinite().all()
