"""Pipelines of every kind that has self-attention over image tokens are patched; others are refused in one line."""

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import tiny
from diffusers import (
    ControlNetModel,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusionControlNetPipeline,
    StableDiffusionInpaintPipeline,
)

from subquad import SubquadError
from subquad.diffusion import apply_agent_attention, apply_token_merging, remove_agent_attention


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def noise():
    return torch.Generator().manual_seed(0)


def inpaint():
    pipe = tiny.pipeline()
    made = quiet(StableDiffusionInpaintPipeline(**pipe.components, requires_safety_checker=False))
    image, mask = torch.rand(1, 3, 32, 24), torch.zeros(1, 1, 32, 24)
    mask[..., 8:24, 4:20] = 1
    given = {"image": image, "mask_image": mask, "height": 32, "width": 24, "num_inference_steps": 4}
    return made, lambda: made("a", generator=noise(), output_type="latent", **given).images


def controlled():
    pipe = tiny.pipeline()
    torch.manual_seed(1)
    control = ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(16, 32)).eval()
    for parameter in control.parameters():
        # its last layers are zero before training
        torch.nn.init.normal_(parameter, std=0.05)
    parts = {**pipe.components, "controlnet": control}
    made = quiet(StableDiffusionControlNetPipeline(**parts, requires_safety_checker=False))
    image = torch.rand(1, 3, 32, 24)
    given = {"image": image, "height": 32, "width": 24, "num_inference_steps": 3}
    return made, lambda: made("a", generator=noise(), output_type="latent", **given).images


def of_classes():
    made = quiet(tiny.pipeline_dit())
    return made, lambda: torch.as_tensor(made([1], num_inference_steps=3, generator=noise(), output_type="np").images)


def of_pixart():
    made = quiet(tiny.pipeline_pixart())
    torch.manual_seed(2)
    texts = {"prompt_embeds": torch.randn(1, 5, 32), "negative_prompt_embeds": torch.randn(1, 5, 32)}
    masks = {"prompt_attention_mask": torch.ones(1, 5), "negative_prompt_attention_mask": torch.ones(1, 5)}
    size = {"height": 40, "width": 24, "use_resolution_binning": False, "num_inference_steps": 3}
    given = {"negative_prompt": None, "output_type": "latent", **texts, **masks, **size}
    return made, lambda: made(generator=noise(), **given).images


@pytest.mark.parametrize("make", [inpaint, controlled, of_classes, of_pixart], ids=lambda make: make.__name__)
@pytest.mark.parametrize("apply", [apply_agent_attention, apply_token_merging], ids=["agent", "tome"])
def test_a_pipeline_is_patched_and_restored_to_the_bit(make, apply):
    pipe, images = make()
    before = images()
    with apply(pipe) as handle:
        assert handle.active and handle.processors and not torch.equal(images(), before)
    assert torch.equal(images(), before)
    with apply(pipe, ratio=0.0):
        assert torch.equal(images(), before)


def test_a_controlnet_is_patched_by_itself():
    pipe, images = controlled()
    before = images()
    with apply_agent_attention(pipe.controlnet) as handle:
        assert handle.active and len(handle.processors) == 1 and not torch.equal(images(), before)
        assert set(handle.processors) == {"down_blocks.0.attentions.0.transformer_blocks.0.attn1"}
    assert torch.equal(images(), before)


UPSCALER = {"down_block_types": ("CrossAttnDownBlock2D",) * 2, "up_block_types": ("CrossAttnUpBlock2D",) * 2}


def test_blocks_that_attend_to_the_text_alone_are_passed_over():
    """Stable Diffusion's upscaler has them at its first levels: a patch there computes nothing else."""
    network = tiny.unet(**UPSCALER, only_cross_attention=(True, False))
    image, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, 32)
    with torch.no_grad():
        before = network(image, 900, text).sample
        with apply_agent_attention(network, sx=2, sy=2) as handle:
            places = {name.split(".attentions")[0] for name in handle.processors}
            assert places == {"down_blocks.1", "mid_block", "up_blocks.0"}
            assert not torch.equal(network(image, 900, text).sample, before)
    with pytest.raises(SubquadError, match="max_downsample=1 patches nothing: self-attention stands at 1/2 here"):
        apply_agent_attention(network, max_downsample=1)
    assert set(apply_agent_attention(tiny.unet(**UPSCALER, only_cross_attention=True)).processors) == {
        "mid_block.attentions.0.transformer_blocks.0.attn1"
    }


def test_pipelines_are_patched_one_beside_the_other():
    one, other = tiny.pipeline(), tiny.pipeline()
    before = tiny.latents(one)
    first = apply_agent_attention(one)
    assert torch.equal(tiny.latents(other), before)
    second = apply_token_merging(other, ratio=0.3)
    agents, merged = tiny.latents(one), tiny.latents(other)
    assert not torch.equal(agents, merged)
    first.remove()
    assert torch.equal(tiny.latents(one), before) and torch.equal(tiny.latents(other), merged) and second.active


def test_a_network_that_a_pipeline_no_longer_has_is_restored_all_the_same():
    pipe = tiny.pipeline()
    handle, patched = apply_agent_attention(pipe), pipe.unet
    pipe.unet = tiny.unet()
    assert not handle.active
    handle.remove()
    assert not any(module._forward_pre_hooks for module in patched.modules())


@pytest.mark.parametrize("kind", [SD3Transformer2DModel, FluxTransformer2DModel])
def test_networks_that_mix_text_into_their_attention_are_refused(kind):
    with torch.device("meta"):
        network = kind(num_layers=1)
    with pytest.raises(SubquadError, match=f"{kind.__name__} has no blocks of self-attention over a map of image"):
        apply_agent_attention(network)
    remove_agent_attention(network)
