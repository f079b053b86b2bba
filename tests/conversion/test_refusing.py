"""Networks that can't be converted are refused by the name of what is not known, and left as they are."""

from copy import deepcopy
from functools import partial

import pytest
import timm
import torch
from foreign import FOREIGN, TINY, answer, difference, images, teacher, timms
from foreign_more import MORE
from foreign_more import teacher as teacher_of_more
from torch import nn

import subquad
from subquad import SubquadError
from subquad.conversion import conversion_of, converted_layers
from subquad.conversion.towers import find_tower

PYRAMID = {"embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4)}
REFUSED = {
    "CaiT": ("cait_xxs24_224", {"depth": 1}, r"blocks\.0\.attn is a timm.*cait\.TalkingHeadAttn"),
    "ConvNeXt": ("convnext_atto", {}, "no blocks with attention"),
    "CrossViT": ("crossvit_tiny_240", {}, "its tokens stand on two maps, each with a class token"),
    "LeViT": ("levit_128s", {}, r"is a timm\.models\.levit\.Attention"),
    "MaxViT": ("maxvit_rmlp_pico_rw_256", {}, r"is a timm\.models\.maxxvit\.\w*Attention\w*"),
    "MobileViT": ("mobilevit_xxs", {}, "no patch embedding"),
    "MViTv2": ("mvitv2_tiny", {}, r"is a timm\.models\.mvitv2\.MultiScaleAttention"),
    "parallel blocks": (
        "vit_base_patch16_xp_224",
        TINY | {"img_size": 64},
        r"no blocks with attention .* timm\.\S*\.ParallelScalingBlock holds none",
    ),
    "ResNet": ("resnet10t", {}, "no patch embedding"),
    "Swin v2, CR": ("swinv2_cr_tiny_ns_224", PYRAMID | {"img_size": 64}, r"is a timm.*swin_transformer_v2_cr\.Window"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_networks_are_refused_by_name(name):
    row, sizes, says = REFUSED[name]
    model = timm.create_model(row, **sizes)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(SubquadError, match=says) as caught:
        subquad.convert(model, "linear", in_place=True)
    assert "\n" not in str(caught.value)
    assert [type(module) for module in model.modules()] == kinds
    assert not any(module._forward_hooks for module in model.modules())


def test_a_size_that_fits_no_position_is_refused_with_what_to_give():
    model = timm.create_model("volo_d1_224", img_size=64, num_classes=5)
    with pytest.raises(
        SubquadError, match=r"can't be run for images of 224×224 px, .*: .*; if it is made for others, gi"
    ):
        subquad.convert(model, "linear")


def test_a_size_may_stand_with_the_images_in_a_configuration():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision, text = {"image_size": 64, "patch_size": 16, **sizes}, {**sizes, "vocab_size": 99, "intermediate_size": 64}
    config = transformers.BridgeTowerConfig(vision_config=vision, text_config=text, **sizes)
    student = subquad.convert(transformers.BridgeTowerModel(config), "linear")
    assert conversion_of(student).grid == (4, 4, 1)


@pytest.mark.parametrize("optimized", [False, True], ids=["as it is", "optimized"])
@pytest.mark.parametrize("name", FOREIGN)
def test_one_image_without_a_batch_is_called_so(name, optimized):
    """It was what each library says of its own unpacking: not enough values, expected 4, got 3."""
    student = subquad.convert(teacher(name), "linear")
    student = subquad.optimize(student) if optimized else student
    x = images(64, 64)[0]
    said = r"takes images \(b, 3, height, width\), got \(3, 64, 64\): x\[None\] makes a batch of one image"
    for call in [partial(student, x), *([partial(student, pixel_values=x)] if "transformers" in name else [])]:
        with pytest.raises(SubquadError, match=said):
            call()


class Adapter(nn.Module):
    """As people write it by hand, without a word on how wide it is."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 0.5 * self.layer(x)


@pytest.mark.parametrize("name", [name for name in FOREIGN if not name.startswith("torch")])
def test_what_stands_in_a_projections_place_is_to_say_how_wide_it_is(name):
    model = teacher(name)
    for layer in find_tower(model).layers:
        owners = {owner: list(owner.named_children()) for owner in layer.module.modules()}
        for owner, children in owners.items():
            for own, part in children:
                if type(part) is nn.Linear:
                    setattr(owner, own, Adapter(part))
    # it has a gate, which is as wide as what projections read
    with pytest.raises(SubquadError, match="a Adapter stands where a linear layer was") as caught:
        subquad.convert(model, "mala", in_place=True)
    assert "\n" not in str(caught.value)


class OddAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(48, 48)

    def forward(self, x, **kwargs):
        return self.mix(x)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_forward_that_was_put_onto_a_layer_is_not_lost(name):
    model = teacher(name)
    tower = find_tower(model)
    number, layer = next((n, one.module) for n, one in enumerate(tower.layers) if one.known is not None)
    usual = layer.forward
    layer.forward = lambda *args, **kwargs: usual(*args, **kwargs)
    with pytest.raises(SubquadError, match=r"^\S+: the forward of this \w+ was replaced on the layer itself"):
        subquad.convert(model, "softmax", blocks=[number], in_place=True)
    del layer.forward
    subquad.convert(model, "softmax", blocks=[number], in_place=True)


@pytest.mark.parametrize("name", [*FOREIGN, *MORE])
def test_hooks_on_parts_that_a_converted_layer_has_not_are_refused(name):
    model = teacher(name) if name in FOREIGN else teacher_of_more(name)
    layers = conversion_of(student := subquad.convert(model, "linear")).paths
    lost = [
        (number, f"{path}.{part}")
        for number, path in layers.items()
        for part, _ in model.get_submodule(path).named_modules()
        if part and part not in dict(student.get_submodule(path).named_modules())
    ]
    for number, path in lost:
        handle = model.get_submodule(path).register_forward_hook(print)
        with pytest.raises(SubquadError, match=rf"^{layers[number]}: somebody listens to the \S+ of a"):
            subquad.convert(model, "linear")
        handle.remove()
    subquad.convert(model, "linear")


@pytest.mark.parametrize("in_place", [False, True])
def test_one_block_of_an_unknown_kind_is_no_reason_to_leave_the_others(in_place):
    model = teacher("timm ViT")
    model.blocks[1].attn = OddAttention()
    expected = answer(model, images())
    with pytest.raises(SubquadError, match=r"blocks\.1\.attn is a .*OddAttention.*leave its block out by blocks=\[0"):
        subquad.convert(model, "linear", in_place=in_place)
    # nothing is converted by halves
    assert torch.equal(answer(model, images()), expected)
    assert not hasattr(model, "subquad_conversion")
    assert list(converted_layers(subquad.convert(model, "linear", blocks=[0], in_place=in_place))) == [0]


def with_own_scale(name, factor):
    model = teacher(name)
    for module in model.modules():
        for attribute in ("scale", "scaling"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, factor * getattr(module, attribute))
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return model


@pytest.mark.parametrize(
    "name", ["timm ViT", "timm DINOv3", "transformers ViT", "transformers CLIP", "transformers DINOv3"]
)
def test_scores_of_another_scale_are_kept_and_not_optimized_away(name):
    model, x = with_own_scale(name, 1.5), images()
    expected = answer(model, x)
    assert difference(expected, answer(teacher(name), x)) > 1e-4
    assert difference(answer(subquad.convert(model, "softmax"), x), expected) < 1e-5
    assert difference(answer(subquad.optimize(deepcopy(model)), x), expected) < 1e-5
    student = subquad.convert(model, "agent")
    assert difference(answer(student, x), answer(subquad.convert(teacher(name), "agent"), x)) > 1e-5
    assert difference(answer(subquad.optimize(deepcopy(student)), x), answer(student, x)) < 1e-5


def test_scores_that_are_turned_about_are_refused():
    with pytest.raises(SubquadError, match=r"its scores are multiplied by -0\.4\d+, and .* by a number above 0"):
        subquad.convert(with_own_scale("timm ViT", -1.5), "linear")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")
def test_masks_that_are_no_numbers_are_refused_with_what_to_take():
    model = teacher("transformers ViT")
    model.set_attn_implementation("flex_attention")
    student = subquad.convert(model, "linear")
    with pytest.raises(SubquadError, match=r"is handed a BlockMask .* set_attn_implementation\(.sdpa.\)"):
        answer(student, images())
    student.set_attn_implementation("sdpa")
    answer(student, images())


def test_a_tower_that_is_not_told_where_images_begin_is_refused(monkeypatch):
    """As MiniMax M3's in transformers 5.20, where images of a call see each other; ours ended in a TypeError."""
    model = teacher_of_more("transformers MiniMax M3")
    kind = type(model.tower.layers[0].self_attn)
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states, attention_mask=None, **kwargs: hidden_states)
    with pytest.raises(SubquadError, match=r"self_attn: .* not told where images begin \(cu_seqlens\)"):
        subquad.convert(model, "linear")


def test_what_stands_for_a_network_is_told_from_one():
    with pytest.raises(SubquadError, match=r"a str is no network: subquad\.open_trained\(…\)\.model is"):
        subquad.convert("runs/mine", "linear")
    with pytest.raises(SubquadError, match=r"this network is compiled: give model\._orig_mod"):
        subquad.convert(torch.compile(teacher("timm ViT")), "linear")


def test_a_deeper_teacher_is_another_network():
    model = timms("vit_tiny_patch16_224")
    student, deeper = subquad.convert(model, "linear"), timms("vit_tiny_patch16_224", depth=3)
    for fit in (subquad.conversion.align, subquad.conversion.distil):
        with pytest.raises(SubquadError, match=r"another network than the student was made of: blocks\.2\."):
            fit(student, images(64, 64), teacher=deeper, updates=1)
