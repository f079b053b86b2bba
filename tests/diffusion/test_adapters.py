"""Adapters keep working on a patched pipeline, and nothing of the patch is left when both have gone."""

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import tiny
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from subquad.diffusion import apply_agent_attention, remove_agent_attention
from subquad.diffusion.processor import MergedAttention


@pytest.fixture
def pipe():
    return tiny.pipeline()


def ip_adapter(unet):
    """The weights of an IP-Adapter for a tiny U-Net, in the layout that is published."""
    projection = {"proj.weight": torch.randn(4 * 32, 32), "proj.bias": torch.randn(4 * 32)}
    projection |= {"norm.weight": torch.randn(32), "norm.bias": torch.randn(32)}
    attention, modules = {}, dict(unet.named_modules())
    crossing = [name.removesuffix(".processor") for name in unet.attn_processors if "attn2" in name]
    for k, name in enumerate(crossing):
        for part in ("k", "v"):
            shape = getattr(modules[name], f"to_{part}").weight.shape
            attention[f"{2 * k + 1}.to_{part}_ip.weight"] = torch.randn(shape)
    return {"image_proj": projection, "ip_adapter": attention}


def load(pipe):
    pipe.load_ip_adapter(ip_adapter(pipe.unet), subfolder="", weight_name="", image_encoder_folder=None)


def seen(pipe):
    """What the pipeline makes of a picture's embedding and the text."""
    torch.manual_seed(3)
    return tiny.latents(pipe, ip_adapter_image_embeds=[torch.randn(2, 1, 32)])


def test_an_ip_adapter_that_is_there_works_with_the_patch(pipe):
    plain = tiny.latents(pipe)
    load(pipe)
    before = seen(pipe)
    with apply_agent_attention(pipe) as handle:
        assert handle.active and not torch.equal(seen(pipe), before)
    assert torch.equal(seen(pipe), before)
    pipe.unload_ip_adapter()
    assert torch.equal(tiny.latents(pipe), plain)


def test_an_ip_adapter_that_comes_later_switches_the_patch_off_which_the_handle_tells(pipe):
    plain = tiny.latents(pipe)
    handle = apply_agent_attention(pipe)
    patched = tiny.latents(pipe)
    torch.manual_seed(0)
    load(pipe)
    assert not handle.active
    with pytest.warns(UserWarning, match="agents and merging are off"):
        off = seen(pipe)
    again = apply_agent_attention(pipe)
    assert again.active and not handle.active and not torch.equal(seen(pipe), off)
    pipe.unload_ip_adapter()
    assert not again.active
    with pytest.warns(UserWarning, match="agents and merging are off"):
        assert torch.equal(tiny.latents(pipe), plain)
    assert torch.equal(tiny.latents(pipe), plain) and apply_agent_attention(pipe).active
    assert torch.equal(tiny.latents(pipe), patched)
    remove_agent_attention(pipe)
    kinds = {type(processor).__name__ for processor in pipe.unet.attn_processors.values()}
    assert kinds == {"AttnProcessor2_0"} and torch.equal(tiny.latents(pipe), plain)


def test_a_processor_made_without_arguments_is_plain_attention(pipe):
    plain = tiny.latents(pipe)
    for module in pipe.unet.modules():
        if hasattr(module, "processor"):
            module.processor = MergedAttention()
    assert torch.equal(tiny.latents(pipe), plain)


def test_lora_weights_come_and_go_on_a_patched_pipeline(pipe, tmp_path):
    plain = tiny.latents(pipe)
    trained = tiny.unet()
    trained.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False))
    pipe.save_lora_weights(tmp_path, unet_lora_layers=get_peft_model_state_dict(trained))
    pipe.load_lora_weights(tmp_path)
    adapted = tiny.latents(pipe)
    pipe.unload_lora_weights()
    assert not torch.equal(adapted, plain)

    handle = apply_agent_attention(pipe)
    patched = tiny.latents(pipe)
    pipe.load_lora_weights(tmp_path)
    assert handle.active and not torch.equal(tiny.latents(pipe), patched)
    remove_agent_attention(pipe)
    assert torch.equal(tiny.latents(pipe), adapted)
    pipe.unload_lora_weights()
    assert torch.equal(tiny.latents(pipe), plain)


def test_fused_projections_are_taken_over_and_given_back(pipe):
    pipe.unet.fuse_qkv_projections()
    plain = tiny.latents(pipe)
    with apply_agent_attention(pipe) as handle:
        assert handle.active and not torch.equal(tiny.latents(pipe), plain)
    assert torch.equal(tiny.latents(pipe), plain)


@pytest.mark.parametrize("sizes", [{"sx": 4, "sy": 4}, {"agents": 8}], ids=["agent", "agents"])
def test_fused_projections_are_what_is_read_though_they_have_changed_since(pipe, sizes):
    """By training, or a LoRA of their own: the three layers that were fused stay behind as they were."""
    apply_agent_attention(pipe, **sizes)
    apart = tiny.latents(pipe)
    remove_agent_attention(pipe)
    pipe.unet.fuse_qkv_projections()
    apply_agent_attention(pipe, **sizes)
    torch.testing.assert_close(tiny.latents(pipe), apart, atol=1e-4, rtol=1e-4)
    layers = [module for name, module in pipe.unet.named_modules() if name.endswith("attn1.to_qkv")]
    for layer in layers:
        torch.nn.init.normal_(layer.weight, std=0.3)
    changed = tiny.latents(pipe)
    pipe.unet.unfuse_qkv_projections()
    with torch.no_grad():
        for name, module in pipe.unet.named_modules():
            if name.endswith("attn1"):
                for part, weight in zip("qkv", module.to_qkv.weight.chunk(3), strict=True):
                    getattr(module, f"to_{part}").weight.copy_(weight)
    apply_agent_attention(pipe, **sizes)
    torch.testing.assert_close(changed, tiny.latents(pipe), atol=1e-4, rtol=1e-4)
    assert layers and not torch.allclose(changed, apart, atol=1e-2)


def test_processors_that_an_adapter_made_of_the_patchs_class_go_with_it(pipe):
    handle = apply_agent_attention(pipe)
    load(pipe)
    handle.remove()
    pipe.unload_ip_adapter()
    assert not any(isinstance(one, MergedAttention) for one in pipe.unet.attn_processors.values())
    pipe.unet.set_default_attn_processor()
