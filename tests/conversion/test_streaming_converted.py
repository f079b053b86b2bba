"""Converted networks over some rows of tokens at a time give what they give of the whole, or say why they can't."""

from functools import partial

import numpy as np
import pytest
import timm
import torch
from foreign import FOREIGN, has_prefix, side_of, teacher
from mechanisms import refuses

import subquad
from subquad import ATTENTION, SubquadError
from subquad.attention import traits_of
from subquad.large.timm_hosts import NETWORKS

STREAMED = [name for name, cls in ATTENTION.items() if not traits_of(cls).no_streaming]
PLAIN = ["timm ViT", "timm DeiT, distilled", "timm DINOv2 with registers", "timm EVA-02", "timm DINOv3"]
ELSEWHERE = [f"transformers {name}" for name in ("ViT", "DINOv2", "DINOv2 with registers", "DINOv3")]
"""Those of test_streaming_transformers.py."""
OWN = ["our DeiT", "our DINOv3", "our PVT", "our PVTv2", "our MAViT"]


def image_for(name, rows=7, columns=5):
    patch = 14 if side_of(name) == 56 else 16
    return torch.randn(3, rows * patch, columns * patch)


def assert_same(model, image, **settings):
    with torch.no_grad():
        expected = model(image[None])[0]
    found = subquad.stream(model, image, **{"most_tokens": 10} | settings).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("attention", STREAMED)
@pytest.mark.parametrize("name", PLAIN + OWN)
def test_rows_at_a_time_are_the_whole(name, attention):
    if has_prefix(name) and refuses(attention, "prefix"):
        return
    assert_same(subquad.convert(teacher(name), attention), image_for(name))


@pytest.mark.parametrize("name", ["timm ViT", "timm EVA-02"])
def test_what_stands_around_the_blocks_takes_part(name):
    """Adapters of `proj`, LoRA's usual target, are in the patch embedding too, and a head may have one."""
    peft = pytest.importorskip("peft")
    model = subquad.convert(teacher(name), "linear")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["proj", "head"], r=2), model)
    for path, parameter in model.named_parameters():
        if "lora_" in path:
            torch.nn.init.normal_(parameter, std=0.1)
    model.eval()
    for path in ("pos_drop", "patch_embed.proj", "blocks.0"):
        model.get_submodule(path).register_forward_hook(lambda module, given, y: 1.1 * y)
    assert_same(model, image_for(name))
    model.patch_embed.register_forward_hook(lambda module, given, y: 2 * y)
    with pytest.raises(SubquadError, match="PatchEmbed has a hook or a forward of its own"):
        subquad.stream(model, image_for(name))


def test_the_plain_networks_of_timm_are_all_tried():
    assert {type(teacher(name)) for name in PLAIN} == set(NETWORKS)


@pytest.mark.parametrize("name", [name for name in FOREIGN if name not in PLAIN + OWN + ELSEWHERE])
def test_what_cant_be_streamed_says_so(name):
    model = teacher(name)
    with pytest.raises(SubquadError, match="can't be streamed") as refusal:
        subquad.stream(subquad.convert(model, "linear"), image_for(name, 4, 4))
    assert "\n" not in str(refusal.value)


def test_softmax_that_is_left_is_refused_with_what_can():
    for model in (teacher("timm ViT"), subquad.convert(teacher("timm ViT"), "linear", blocks=[0])):
        with pytest.raises(SubquadError, match=r"Attention can't be streamed: .* subquad.convert\(model, 'linear'\)"):
            subquad.stream(model, torch.zeros(3, 64, 64))


def made(name="vit_tiny_patch16_224", size=64, **settings):
    sizes = {"embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 5, "dynamic_img_size": True}
    model = timm.create_model(name, img_size=size, **sizes | settings)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return subquad.convert(model.eval(), "linear")


@pytest.mark.parametrize(
    "settings",
    [
        {"global_pool": "avg"},
        {"global_pool": "max", "reg_tokens": 2},
        {"class_token": False, "global_pool": "avg", "fc_norm": False},
        {"no_embed_class": True, "pre_norm": True},
        {"pos_embed": "none"},
        {"num_classes": 0},
    ],
    ids=str,
)
def test_heads_and_positions_are_those_of_the_whole(settings):
    assert_same(made(**settings), torch.randn(3, 112, 80))


def test_images_that_fill_no_patch_are_filled_up():
    assert_same(made(dynamic_img_pad=True), torch.randn(3, 83, 61))
    whole, same = (made(**settings) for settings in ({"dynamic_img_pad": True}, {"dynamic_img_size": False}))
    same.load_state_dict(whole.state_dict())
    image = torch.randn(3, 83, 61)
    stream = partial(subquad.stream, image=image, most_tokens=10)
    assert torch.equal(stream(whole).logits, stream(same).logits)


def test_rotary_tables_of_one_size_are_refused_for_another():
    model = made("eva02_tiny_patch14_224", 56, dynamic_img_size=False)
    assert_same(model, torch.randn(3, 56, 56))
    with pytest.raises(SubquadError, match="dynamic_img_size=True"):
        subquad.stream(model, torch.randn(3, 112, 56))


def test_maps_are_those_of_the_whole(tmp_path):
    model, image = subquad.convert(teacher("timm DeiT, distilled"), "agent:num_agents=4"), torch.randn(3, 112, 80)
    with torch.no_grad():
        tokens = model.forward_features(image[None])[0, 2:].view(7, 5, 48)
        each = (model.head(tokens) + model.head_dist(tokens)) / 2
    files = {"features": tmp_path / "features.npy", "heat": tmp_path / "heat.npy", "labels": tmp_path / "labels.npy"}
    subquad.stream(model, image, **files, heat_class=3, most_tokens=10)
    assert np.allclose(np.load(files["features"]), tokens, atol=1e-4)
    assert np.allclose(np.load(files["heat"]), each[..., 3], atol=1e-4)
    assert np.array_equal(np.load(files["labels"]), each.argmax(dim=-1))


def test_pixels_are_normalised_as_the_network_says(monkeypatch):
    model = made()
    model.pretrained_cfg = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    normed = (torch.from_numpy(pixels) / 255 - torch.tensor([0.1, 0.2, 0.3])) / torch.tensor([0.5, 0.6, 0.7])
    with torch.no_grad():
        expected = model(normed.permute(2, 0, 1)[None])[0]
    assert torch.allclose(subquad.stream(model, pixels).logits, expected, atol=1e-5)


def test_a_network_that_was_streamed_computes_as_before():
    model = subquad.convert(teacher("timm EVA-02"), "linear")
    images = image_for("timm EVA-02")[None]
    with torch.no_grad():
        before = model(images)
        subquad.stream(model, images[0])
        assert torch.equal(model(images), before)
