"""Foreign networks with our attention: equal with softmax, any size, restored to the bit."""

import copy
import io
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import timm
import torch
from foreign import (
    FOREIGN,
    TINY,
    Plain,
    answer,
    answers_at_once,
    difference,
    has_prefix,
    images,
    sharp,
    side_of,
    teacher,
    with_other_weights,
)
from foreign_more import MORE, timms_biased
from mechanisms import assert_refused, refuses
from torch import nn
from torch.nn.utils import parametrizations, prune

import subquad
from subquad import ATTENTION, SubquadError
from subquad.conversion import conversion_of, converted_layers, load_converted, save_converted, save_delta
from subquad.conversion.converted_attention import ADDED
from subquad.conversion.towers import find_tower
from subquad.grid import TokenGrid
from subquad.models.mavit import GATES


@pytest.mark.parametrize("in_place", [False, True], ids=["a copy", "in place"])
def test_a_network_converted_within_its_training_says_that_the_optimizer_is_old(in_place):
    model = teacher("timm ViT").train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        subquad.convert(copy.deepcopy(model), "linear", in_place=True)
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        subquad.convert(model, "linear", blocks=[0], in_place=in_place)
    told = [str(warning.message) for warning in said]
    assert len(told) == int(in_place) and all("make its optimizer anew" in text for text in told)
    assert all(
        "blocks.0.attn." in text and warning.filename == __file__ for text, warning in zip(told, said, strict=True)
    )


SUB_QUADRATIC = sorted(name for name, cls in ATTENTION.items() if not cls.traits.quadratic)


@pytest.mark.parametrize("name", FOREIGN)
def test_with_softmax_it_is_the_teacher(name):
    model, side = teacher(name), side_of(name)
    sizes = [(side, side)]
    if FOREIGN[name][1]:
        patch = 14 if side == 56 else 16
        sizes += [(side + patch, side + 2 * patch), (side // 2 // patch * patch, side + 3 * patch)]
    student = subquad.convert(model, "softmax")
    for size in sizes:
        x = images(*size)
        assert difference(answer(student, x), answer(model, x)) < 1e-6


@pytest.mark.parametrize("name", FOREIGN)
def test_every_mechanism_runs_and_the_old_network_comes_back_to_the_bit(name):
    model = sharp(name)
    x = images(side_of(name))
    before, state = answer(model, x), {key: value.clone() for key, value in model.state_dict().items()}
    for attention in SUB_QUADRATIC:
        settings = {"num_agents": 4} if attention == "agent" else {}
        if has_prefix(name) and refuses(attention, "prefix"):
            assert_refused(attention, partial(subquad.convert, model, attention), "prefix")
            continue
        student = subquad.convert(model, attention, **settings)
        assert not torch.equal(answer(student, x), before)
        new = student.state_dict().keys() - state.keys()
        assert all(any(f".{part}." in key for part in ADDED) for key in new)
        with torch.no_grad():
            for layer in converted_layers(student).values():
                for parameter in layer.parameters():
                    parameter.add_(1)
        restored = subquad.restore(student)
        assert torch.equal(answer(restored, x), before)
        assert restored.state_dict().keys() == state.keys()
        assert not hasattr(restored, "subquad_conversion")
    assert torch.equal(answer(model, x), before)


def test_what_is_new_adds_nothing_at_first():
    """The uniform mean of the values is the first order of softmax: with keys of zeros all of them are that."""
    model = teacher("timm ViT")
    for block in model.blocks:
        with torch.no_grad():
            block.attn.k_norm.weight.zero_()
            block.attn.k_norm.bias.zero_()
    x = images()
    for attention in ("inline", "agent:num_agents=4"):
        student = subquad.convert(model, attention)
        assert difference(answer(student, x), answer(model, x)) < 1e-2, attention


@pytest.mark.parametrize("name", ["timm ViT", "torchvision ViT", "transformers ViT", "timm Swin", "our DeiT"])
def test_a_second_tower_is_not_passed_over_in_silence(name):
    class TwoStreams(nn.Module):
        def __init__(self):
            super().__init__()
            self.near, self.far = teacher(name), teacher(name)

    model = TwoStreams()
    with pytest.warns(UserWarning, match=r"^far.* of this TwoStreams, .* stays as it is") as said:
        student = subquad.convert(model, "linear")
    assert said[0].filename == __file__
    assert all(path.startswith("near.") for path in student.subquad_conversion.paths.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        subquad.convert(model.far, "linear")


def test_some_blocks_by_number_and_each_with_its_own():
    model = teacher("timm ViT")
    student = subquad.convert(model, "inline", blocks=[-1])
    assert student.blocks[0].attn.qkv.weight is not model.blocks[0].attn.qkv.weight
    assert type(student.blocks[0].attn) is type(model.blocks[0].attn)
    assert list(converted_layers(student)) == [1]
    student = subquad.convert(model, {1: "linear:feature_map=elu", 0: "pola"})
    kinds = [type(layer.inner) for layer in converted_layers(student).values()]
    assert kinds == [ATTENTION["pola"], ATTENTION["linear"]]
    student = subquad.convert(model, "pola+linear")
    assert [type(layer.inner) for layer in converted_layers(student).values()] == kinds


def test_only_global_blocks_of_sam_unless_others_are_named():
    model = teacher("timm SAM")
    assert list(converted_layers(subquad.convert(model, "linear"))) == [1]
    assert list(converted_layers(subquad.convert(model, "linear", blocks=[0, 1, 2]))) == [0, 1, 2]


@pytest.mark.parametrize("name", sorted(name for name in FOREIGN if name.startswith("our ")))
@pytest.mark.parametrize("attention", ["agent", "inline"])
def test_one_of_ours_is_what_the_table_makes_with_that_mechanism(name, attention):
    model = teacher(name)
    student = subquad.convert(model, attention)
    made = subquad.create_model(**{**model.creation, "attention": attention}).eval()
    state = student.state_dict()
    renamed = {key.replace(".attn.inner.", ".attn.branches.0."): value for key, value in state.items()}
    made.load_state_dict(renamed if name == "our CSwin" else state)
    for x in (images(64), images(96, 80)):
        assert torch.equal(answer(made, x), answer(student, x))


@pytest.mark.parametrize("gate", GATES)
def test_gates_and_convolutions_of_mavit_stay_whoever_had_them(gate):
    model = subquad.create_model(
        "mavit_tiny", attention="mala", depths=(1,), embed_dims=(24,), num_heads=(2,), head_width=40, gate=gate
    ).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = images(32, 24)
    same, other = subquad.convert(model, "mala"), subquad.convert(model, "linear")
    assert difference(answer(same, x), answer(model, x)) < 1e-5
    layer, local = other.stages[0].blocks[0].attn, model.stages[0].blocks[0].attn.inner.local
    assert torch.equal(layer.lepe.weight, local.weight) and torch.equal(layer.lepe.bias, local.bias)
    assert answer(other, x).isfinite().all()


def test_swin_keeps_the_windows_of_blocks_that_stay_quadratic():
    student = subquad.convert(teacher("timm Swin"), {0: "agent:num_agents=4", 1: "softmax", 3: "linear"})
    x = images(64, 96)
    assert answer(student, x).isfinite().all()
    kinds = {number: (layer.window, layer.grid.shape) for number, layer in converted_layers(student).items()}
    assert kinds == {0: (None, (16, 16)), 1: (TokenGrid(4, 4), (16, 16)), 3: (None, (8, 8))}
    assert [key for key in student.state_dict() if "bias_table" in key] == [
        f"layers.{stage}.blocks.{block}.attn.relative_position_bias_table" for stage, block in ((0, 1), (1, 0))
    ]


def test_a_converted_swin_is_set_to_another_size():
    model = teacher("timm Swin")
    student = subquad.convert(model, "focused")
    tables = [parameter.numel() for name, parameter in student.named_parameters() if ".inner.positions" in name]
    student.set_input_size((128, 96), window_size=4)
    moved = [parameter.numel() for name, parameter in student.named_parameters() if ".inner.positions" in name]
    # maps of 16×16 and 8×8 became 32×24 and 16×12
    assert moved == [3 * count for count in tables]
    assert answer(student, images(128, 96)).isfinite().all()
    with pytest.raises(SubquadError, match="leave img_size out"):
        subquad.convert(model, "linear", img_size=96)


def with_tables(name):
    """One of ours whose mechanism has position parameters."""
    pyramid = {"depths": (1, 1), "num_heads": (2, 4)}
    sizes = {"embed_dims": (24, 48)} if "pvt" in name or "mavit" in name else {"embed_dim": 24}
    if name == "deit_tiny":
        pyramid, sizes = {"depths": (2,), "num_heads": 4}, {"embed_dim": 48}
    attention = "softmax" if "cswin" in name or "swin" in name else "focused"
    bias = {"relative_bias": True} if attention == "softmax" else {}
    return subquad.create_model(name, attention=attention, img_size=64, num_classes=5, **pyramid, **sizes, **bias)


def strict_swin(name):
    """Of images of one size, so that its masks are made for that."""
    sizes = {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "img_size": 64}
    return timm.create_model(name, num_classes=5, **sizes)


OURS = ("deit_tiny", "swin_tiny", "pvt_tiny", "mavit_tiny", "cswin_tiny", "mllanet_tiny")

# what makes a network, and what makes it one for images of another size
MOVED = {
    "timm Swin": (partial(strict_swin, "swin_tiny_patch4_window7_224"), {"window_size": (4, 4)}),
    "timm Swin, larger windows": (partial(strict_swin, "swin_tiny_patch4_window7_224"), {}),
    "timm Swin v2": (partial(strict_swin, "swinv2_tiny_window8_256"), {"window_size": (4, 4)}),
    "timm Swin v2, larger windows": (partial(strict_swin, "swinv2_tiny_window8_256"), {}),
    **{name: (MORE[name][0], {}) for name in MORE if name.startswith(("timm BEiT", "timm ViT"))},
    "timm ViT, table of relative positions": (
        partial(timms_biased, "vit_relpos_small_patch16_224", rel_pos_type="bias"),
        {},
    ),
    **{f"our {name}": (partial(with_tables, name), {}) for name in OURS},
}


# timm's interpolation does what PyTorch warns of
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:torch.searchsorted")
@pytest.mark.parametrize("name", MOVED)
def test_what_is_put_back_is_made_for_the_images_that_the_network_is_made_for_by_now(name, tmp_path):
    torch.manual_seed(0)
    model = MOVED[name][0]().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    if not hasattr(model, "set_input_size"):
        pytest.skip("some of timm's have none in 1.0.26")
    made = copy.deepcopy(model)
    students = {attention: subquad.convert(model, attention) for attention in ("softmax", "linear")}
    for one in (model, *students.values()):
        one.set_input_size((96, 128), **MOVED[name][1])
    x = images(96, 128)
    expected = answer(model, x)
    if not name.startswith("our"):
        assert difference(answer(students["softmax"], x), expected) < 1e-6
    for student in students.values():
        assert answer(student, x).isfinite().all()
        if not MOVED[name][1]:
            # the file says for which images its network is by now
            save_converted(student, tmp_path / "moved.safetensors")
            read = load_converted(tmp_path / "moved.safetensors", made)
            assert torch.equal(answer(read, x), answer(student, x))
        restored = subquad.restore(student, strict=False)
        assert torch.equal(answer(restored, x), expected)
        torch.testing.assert_close(restored.state_dict(), model.state_dict(), rtol=0, atol=0)


def smaller_patches(model):
    model.set_input_size((96, 144), patch_size=24)


def another_convolution(model):
    model.patch_embed.proj = nn.Conv2d(3, 48, 24, 16, padding=4)


def another_embedding(model):
    model.patch_embed = timm.layers.PatchEmbed(64, 16, 3, 48, strict_img_size=False, flatten=False, output_fmt="NHWC")


def wrapped_convolution(model):
    model.patch_embed.proj = nn.Sequential(nn.Identity(), model.patch_embed.proj)


@pytest.mark.parametrize("change", [smaller_patches, another_convolution, another_embedding, wrapped_convolution])
@pytest.mark.parametrize("again", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_another_patch_embedding_is_listened_to(change, again):
    """A fresh conversion of the changed network says what is wanted."""
    student, x = subquad.convert(teacher("timm ViT"), "inline"), images(96, 144)
    for parameter in student.parameters():
        nn.init.normal_(parameter, std=0.3)
    answer(student, images(144, 96))
    expected = subquad.restore(copy.deepcopy(student), strict=False)
    for one in (student, expected):
        torch.manual_seed(0)
        change(one)
    expected = subquad.convert(expected, "inline")
    expected.load_state_dict(student.state_dict())
    student = again(student)
    assert torch.equal(answer(student, x), answer(expected, x))
    subquad.restore(student, strict=False)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in student.modules())


def test_a_replaced_embedding_without_a_map_is_refused_in_one_line():
    for path, embedding in (("patch_embed", nn.Linear(3, 48)), ("patch_embed.proj", nn.Flatten())):
        student = subquad.convert(teacher("timm ViT"), "linear")
        answer(student, images())
        student.set_submodule(path, embedding)
        with pytest.raises(SubquadError, match=r"patch embedding.*replaced.*before subquad\.convert") as caught:
            answer(student, images())
        assert "\n" not in str(caught.value)


def with_stem(*stem):
    model = Plain()
    model.patches = nn.Sequential(*stem)
    return model


CONVOLUTIONS = (nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 2, 2), nn.Conv2d(8, 48, 4, 4))
TINY_HYBRID = {"img_size": 64, "dynamic_img_size": True, "num_classes": 5} | TINY
STEMS = {
    "mci": partial(timm.create_model, "vit_base_mci_224", **TINY_HYBRID | {"embed_dim": 768, "depth": 1}),
    "patches of a stem": partial(timm.create_model, "vit_tiny_r_s16_p8_224", **TINY_HYBRID),
    "a stem and a projection": partial(timm.create_model, "vit_tiny_r_s16_p8_224", **TINY_HYBRID | {"patch_size": 1}),
    "several convolutions": partial(with_stem, *CONVOLUTIONS),
}


@pytest.mark.parametrize("name", STEMS)
def test_tokens_behind_several_convolutions_stand_on_the_map_of_the_last(name):
    torch.manual_seed(0)
    model = STEMS[name]().eval()
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", (4, 4))
    for attention in ("softmax", "focused"):
        student = subquad.convert(model, attention)
        assert conversion_of(student).grid[:2] == grid
        for size in ((64, 64), (64, 96)):
            expected, answered = answer(model, images(*size)), answer(student, images(*size))
            assert answered.isfinite().all()
            assert attention != "softmax" or difference(answered, expected) < 1e-5


OTHER_STEMS = {
    "pooled before": (nn.MaxPool2d(4), nn.Conv2d(3, 48, 4, 4)),
    "pooled behind": (nn.Conv2d(3, 48, 4, 4), nn.MaxPool2d(4)),
    "overlapping behind": (nn.Conv2d(3, 48, 4, 4), nn.Conv2d(48, 48, 3, 2)),
}


@pytest.mark.parametrize("stem", OTHER_STEMS.values(), ids=OTHER_STEMS)
def test_stems_that_are_no_chain_of_convolutions_are_found_by_a_call_in_ones_own_network_alone(stem):
    own = with_stem(*stem).eval()
    student = subquad.convert(own, "softmax")
    for size in ((64, 64), (64, 96)):
        assert difference(answer(student, images(*size)), answer(own, images(*size))) < 1e-5
    of_transformers = teacher("transformers ViT")
    of_transformers.vit.embeddings.patch_embeddings.projection = nn.Sequential(*stem)
    with pytest.raises(SubquadError, match="in front of the blocks") as caught:
        subquad.convert(of_transformers, "linear")
    assert "\n" not in str(caught.value)


def test_stages_have_the_settings_of_a_pyramid():
    def agents(student):
        return [layer.inner.agent_grid.num_tokens for layer in converted_layers(student).values()]

    # the last two of four stages, as in create_model
    assert agents(subquad.convert(teacher("timm Swin"), "agent")) == [49] * 4
    assert agents(subquad.convert(teacher("our Swin"), "agent", num_agents=[4, 9])) == [4, 4, 9]
    assert agents(subquad.convert(teacher("our Swin"), "agent", blocks=[0, 2], num_agents=[4, 9])) == [4, 9]


def test_a_copied_and_a_pickled_network_know_their_own_grid():
    student = subquad.convert(teacher("timm ViT"), "inline")
    copied = copy.deepcopy(student)
    stored = io.BytesIO()
    torch.save(student, stored)
    stored.seek(0)
    read = torch.load(stored, weights_only=False)
    wide, high = images(64, 96), images(96, 64)
    expected = answer(student, wide)
    answer(copied, high), answer(read, high)
    assert torch.equal(answer(student, wide), expected)
    assert torch.equal(answer(copied, wide), expected)
    assert torch.equal(answer(read, wide), expected)


def test_hooks_of_a_replaced_layer_stay():
    model = teacher("timm ViT")
    seen = []
    model.blocks[0].attn.register_forward_hook(lambda *call: seen.append(call[2].shape))
    answer(subquad.convert(model, "linear"), images())
    assert seen == [torch.Size([2, 17, 48])]


def test_a_call_may_bring_other_weights():
    for name in FOREIGN:
        called, loaded = with_other_weights(subquad.convert(teacher(name), "softmax"), images(side_of(name)))
        assert difference(called, loaded) < 1e-6, name


def test_weights_may_be_computed_of_others():
    for name, path, weight in (
        ("timm ViT", "blocks.0.attn.qkv", "weight"),
        ("timm EVA-02", "blocks.0.attn", "q_bias"),
        ("torch encoder", "encoder.layers.0.self_attn", "in_proj_weight"),
    ):
        for attention in ("softmax", "linear"):
            student = subquad.convert(teacher(name), attention)
            expected = answer(student, images(side_of(name)))
            parametrizations.weight_norm(student.get_submodule(path), weight, dim=None)
            assert difference(answer(student, images(side_of(name))), expected) < 1e-6


def test_pruned_layers_are_converted_once_their_weights_are_computed_without_gradients():
    for name, path in (("timm ViT", "blocks.0.attn.qkv"), ("transformers ViT", "vit.layers.0.attention.q_proj")):
        model = teacher(name)
        prune.l1_unstructured(model.get_submodule(path), "weight", 0.5)
        model(images())
        for in_place in (False, True):
            says = rf"{path}\.weight is computed of other tensors.*torch\.no_grad\(\).*prune\.remove"
            with pytest.raises(SubquadError, match=says) as caught:
                subquad.convert(model, "softmax", in_place=in_place)
            assert "\n" not in str(caught.value)
        expected = answer(model, images())
        for in_place in (False, True):
            assert difference(answer(subquad.convert(model, "softmax", in_place=in_place), images()), expected) < 1e-6


def hooked(layer, seen):
    """A hook of each kind on a layer, and one on a part of it; their handles."""

    def note(kind):
        return lambda *call, **more: seen.append(kind)

    return [
        layer.register_forward_hook(note("answer")),
        layer.register_forward_hook(note("answer, with names"), with_kwargs=True),
        layer.register_forward_hook(note("answer or failure"), always_call=True),
        layer.register_forward_pre_hook(note("call")),
        layer.register_forward_pre_hook(note("call, with names"), with_kwargs=True),
        layer.register_full_backward_hook(note("gradient")),
        layer.register_full_backward_pre_hook(note("gradient of the answer")),
        layer.qkv.register_forward_hook(note("answer of a part")),
    ]


def noted(model, seen):
    """Which hooks a pass and its gradient call."""
    seen.clear()
    model(images()).sum().backward()
    return sorted(seen)


def test_every_kind_of_hook_stays_and_is_removed_by_its_handle():
    for in_place in (False, True):
        model, seen = teacher("timm ViT"), []
        handles = hooked(model.blocks[0].attn, seen)
        every_kind = noted(model, seen)
        assert len(set(every_kind)) == len(handles)
        # with gradients it would be one within a training
        model.zero_grad()
        student = subquad.convert(model, "linear", in_place=in_place)
        assert noted(student, seen) == every_kind
        for handle in handles:
            handle.remove()
        # a copy has hooks of its own
        left = [] if in_place else every_kind
        assert noted(student, seen) == left
        handles = hooked(student.blocks[0].attn, seen)
        assert noted(subquad.restore(student), seen) == sorted(left + every_kind)
        for handle in handles:
            handle.remove()
        assert noted(student, seen) == left


class Hidden(nn.Module):
    """A linear layer that is called, and shows nothing of its weight, as quantized ones and low-rank changes do."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features, self.inside = linear.in_features, linear.out_features, [linear]

    def forward(self, x):
        return self.inside[0](x)


def hide(model):
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, nn.Linear):
                setattr(module, name, Hidden(part))


def listen_to_all(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *called: None)


@pytest.mark.parametrize("change", [hide, listen_to_all])
@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("name", FOREIGN)
def test_projections_may_be_listened_to_and_be_something_else(name, attention, change):
    model, x = teacher(name), images(side_of(name))
    student = subquad.convert(model, attention)
    expected = answer(student, x)
    change(model)
    try:
        answer(model, x)
    except AttributeError:
        pytest.skip("the network itself reads the weights of its layers")
    change(student)
    assert difference(answer(student, x), expected) < 1e-5


class InBlocks(nn.Module):
    """Somebody's own network, whose blocks have linear layers of their own beside attention."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 48, 16, stride=16)
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(2))

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return x


class OwnBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True)
        self.wider, self.narrower = nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.narrower(self.wider(x).relu())


def test_layers_beside_attention_are_quantized_by_pytorch():
    """Its layers are called with the hooks of those whose place they take, and without the arguments' names."""
    torch.manual_seed(0)
    student = subquad.convert(InBlocks().eval(), "linear", img_size=64)
    expected = answer(student, images())
    with warnings.catch_warnings():
        # that this way of PyTorch's is old
        warnings.simplefilter("ignore")
        torch.ao.quantization.quantize_dynamic(student, {nn.Linear}, inplace=True)
    assert not isinstance(student.blocks[0].wider, nn.Linear)
    assert difference(answer(student, images()), expected) < 0.05


def test_gradient_checkpointing_gives_the_same_gradients():
    student = subquad.convert(teacher("timm ViT"), "agent", num_agents=4)
    student(images(64, 96)).sum().backward()
    plain = {name: parameter.grad.clone() for name, parameter in student.named_parameters()}
    student.zero_grad()
    student.train()
    student.set_grad_checkpointing()
    student(images(64, 96)).sum().backward()
    for name, parameter in student.named_parameters():
        assert difference(parameter.grad, plain[name]) < 1e-5 or plain[name].norm() < 1e-6, name


def test_features_of_a_converted_network():
    sizes = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", features_only=True, out_indices=(0, 1), **sizes)
    features = subquad.convert(model.eval(), "linear")(images())
    assert [feature.shape for feature in features] == [feature.shape for feature in model(images())]


def test_half_precision_and_the_device_of_the_network():
    model = teacher("timm ViT").bfloat16()
    student = subquad.convert(model, "pola")
    assert {parameter.dtype for parameter in student.parameters()} == {torch.bfloat16}
    assert answer(student, images().bfloat16()).isfinite().all()


def test_what_was_trained_besides_is_not_restored_in_silence():
    student = subquad.convert(teacher("timm ViT"), "linear")
    with torch.no_grad():
        student.norm.weight.mul_(2)
    with pytest.raises(SubquadError, match="have changed since"):
        subquad.restore(student)
    assert len(converted_layers(student)) == 2
    subquad.restore(student, strict=False)
    with pytest.raises(SubquadError, match="not converted"):
        subquad.restore(student)


@pytest.mark.parametrize("name", ["timm ViT", "timm DINOv3", "torch encoder"])
def test_threads_that_call_one_network_each_have_the_grid_of_their_image(name):
    """Two shapes of one number of tokens: what is mixed up is no error."""
    student = subquad.convert(teacher(name), "inline")
    for layer in converted_layers(student).values():
        for parameter in layer.inner.parameters():
            # local branches start as zeros, which see no neighbours
            nn.init.normal_(parameter)
    calls = [images(64, 96), images(96, 64)]
    expected = [answer(student, x) for x in calls]
    answers = answers_at_once(student, calls, answer)
    assert all(torch.equal(one, other) for one, other in zip(answers, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_put_back_is_of_the_type_that_the_network_has_by_now(dtype):
    model = teacher("timm ViT")
    restored = subquad.restore(subquad.convert(model, "agent", num_agents=4).to(dtype), strict=False)
    assert {parameter.dtype for parameter in restored.parameters()} == {dtype}
    assert torch.equal(answer(restored, images().to(dtype)), answer(copy.deepcopy(model).to(dtype), images().to(dtype)))


def test_a_network_that_is_converted_without_gradients_can_be_trained():
    model = teacher("timm ViT")
    with torch.inference_mode():
        student = subquad.convert(model, "agent", num_agents=4)
    student(images()).sum().backward()
    assert all(parameter.grad is not None for parameter in student.blocks[0].attn.parameters())


def test_blocks_are_any_whole_numbers():
    model = teacher("timm ViT")
    for blocks in (range(1), np.argsort([0.1, 0.2])[:1], torch.tensor([0]), (0,)):
        assert list(converted_layers(subquad.convert(model, "linear", blocks=blocks))) == [0]
    assert conversion_of(subquad.convert(model, "linear", img_size=[64, 96])).grid == (4, 6, 1)


def not_copyable():
    """PyTorch copies no tensor that something was computed from, as those of weight norms of DINO's heads."""
    model = teacher("timm ViT")
    model.doubled = 2 * model.cls_token
    return model


class Quantized(nn.Linear):
    def get_extra_state(self):
        return torch.qint8


def quantized(model):
    model.head = Quantized(48, 5)
    return model


def windows_alone():
    sizes = {"depth": 2, "global_attn_indexes": (), "window_size": 3, "neck_chans": 16}
    return timm.create_model("samvit_base_patch16", img_size=64, embed_dim=48, num_heads=4, **sizes)


def normed():
    model = teacher("torch encoder")
    parametrizations.weight_norm(model.encoder.layers[0].self_attn, "in_proj_weight")
    return model


def pruned():
    model = teacher("torch encoder")
    prune.l1_unstructured(model.encoder.layers[0].self_attn, "in_proj_weight", 0.5)
    with torch.no_grad():
        model(images())
    return model


class OddAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(48, 48)

    def forward(self, x, **kwargs):
        return self.mix(x)


def odd():
    model = teacher("timm ViT")
    model.blocks[1].attn = OddAttention()
    return model


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: subquad.convert(odd(), "linear"), r"blocks\.1\.attn is a .*OddAttention.*not known here"),
        (lambda: subquad.convert(teacher("timm ViT"), "lineer"), "did you mean linear"),
        (lambda: subquad.convert(teacher("timm ViT"), "linear", num_agents=4), "num_agents"),
        (lambda: subquad.convert(teacher("timm ViT"), "linear", blocks=[2]), "numbers from 0 to 1"),
        (lambda: subquad.convert(teacher("timm ViT"), "linear", blocks=[]), "at least one"),
        (lambda: subquad.convert(teacher("timm ViT"), "linear", blocks=[1, -1]), "each once"),
        (lambda: subquad.convert(teacher("timm ViT"), "linear+pola+agent"), "3 entries for 2 blocks"),
        (lambda: subquad.convert(nn.Linear(3, 3), "linear"), "no patch embedding"),
        (lambda: subquad.convert(timm.create_model("resnet10t"), "linear"), "no "),
        (
            lambda: subquad.convert(subquad.convert(teacher("timm ViT"), "linear"), "linear"),
            "converted already",
        ),
        (lambda: answer(subquad.convert(teacher("timm ViT"), "linear", prefix=0), images()), "17 tokens are not"),
        (lambda: subquad.convert(teacher("timm ViT"), 3), "name of a mechanism, or one for each block, got 3"),
        (lambda: subquad.convert(teacher("timm ViT"), ATTENTION["linear"]), "name of a mechanism"),
        (lambda: subquad.convert(teacher("timm ViT"), {0: ATTENTION["linear"]}), "name of a mechanism"),
        (lambda: subquad.convert(teacher("timm ViT"), "linear", blocks=1), "numbers from 0 to 1"),
        (lambda: subquad.convert(teacher("timm ViT"), "linear", blocks="1"), "numbers from 0 to 1"),
        (
            lambda: subquad.convert(teacher("timm ViT"), "linear", img_size=(64, 64, 3)),
            r"img_size has 3 sides, \(64, 64, 3\), and this network takes images: give height and width",
        ),
        (
            lambda: subquad.convert(teacher("timm ViT"), "linear", img_size=64.0),
            "img_size is pixels, one",
        ),
        (lambda: subquad.convert(teacher("timm ViT").to("meta"), "linear"), "cls_token is on the device meta"),
        (lambda: subquad.convert(windows_alone(), "linear"), r"blocks\.0\.attn sees a window.*name those"),
        (lambda: load_converted("delta.safetensors", "timm/vit"), "teacher is the network"),
        (lambda: subquad.convert(not_copyable(), "linear"), "can't be copied, take in_place=True"),
        (lambda: subquad.convert(quantized(teacher("timm ViT")), "linear"), "as in quantized or sharded networks"),
        (lambda: subquad.convert(normed(), "linear"), "weights of a MultiheadAttention are computed of others"),
        (lambda: subquad.convert(pruned(), "linear"), "weights of a MultiheadAttention are computed of others"),
    ],
    ids=range(25),
)
def test_mistakes_are_one_line(call, says):
    with pytest.raises(SubquadError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


class Wrapped(torch.Tensor):
    """A tensor that wraps another, as quantized and sharded ones do."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data):
        self.data_inside = data

    def __tensor_flatten__(self):
        return ["data_inside"], None

    @classmethod
    def __torch_dispatch__(cls, call, types, args=(), kwargs=None):
        if call is torch.ops.aten.detach.default:
            return cls(args[0].data_inside)
        raise NotImplementedError(str(call))


def wrapped(model, path="head"):
    layer = model.get_submodule(path)
    layer.weight = nn.Parameter(Wrapped(layer.weight.detach()), requires_grad=False)
    return model


@pytest.mark.parametrize("quantize", [wrapped, quantized], ids=["wrapped", "no tensors"])
def test_quantized_and_sharded_networks_are_refused_in_one_line(quantize, tmp_path):
    whole = teacher("timm ViT")
    student = subquad.convert(whole, "agent")
    save_delta(student, tmp_path / "changes.safetensors")
    student = quantize(student)
    state = list(student.state_dict())
    for call in (
        lambda: subquad.convert(quantize(teacher("timm ViT")), "linear"),
        lambda: subquad.restore(student),
        lambda: save_converted(student, tmp_path / "whole.safetensors"),
        lambda: save_delta(student, tmp_path / "delta.safetensors"),
        lambda: save_delta(student, tmp_path / "delta.safetensors", teacher=whole),
        lambda: load_converted(tmp_path / "changes.safetensors", quantize(teacher("timm ViT"))),
        lambda: subquad.save_weights(student, tmp_path / "weights.safetensors"),
    ):
        with pytest.raises(SubquadError, match=r"^head\..*as in quantized or sharded networks") as caught:
            call()
        assert "\n" not in str(caught.value)
    assert list(student.state_dict()) == state
    assert [file.name for file in tmp_path.iterdir()] == ["changes.safetensors"]


@pytest.mark.parametrize("strict", [True, False])
def test_quantized_attention_layers_are_put_back_as_they_were(strict):
    whole = teacher("timm ViT")
    student, x = subquad.convert(whole, "linear"), images()
    for layer in converted_layers(student).values():
        # without parameters, as layers of int8 are
        for name, _ in layer.named_children():
            setattr(layer, name, nn.Identity())
    assert torch.equal(answer(subquad.restore(student, strict=strict), x), answer(whole, x))


@pytest.mark.parametrize("name", ["timm SAM", "transformers SAM"])
def test_heads_that_were_cut_out_stay_out(name):
    model = teacher(name)
    for layer in find_tower(model).layers:
        attn = layer.module
        heads = "num_heads" if hasattr(attn, "num_heads") else "num_attention_heads"
        count, width = getattr(attn, heads) - 1, attn.proj.in_features // getattr(attn, heads)
        qkv = nn.Linear(attn.qkv.in_features, 3 * count * width)
        with torch.no_grad():
            for own in ("weight", "bias"):
                parts = getattr(attn.qkv, own).unflatten(0, (3, -1))
                getattr(qkv, own).copy_(parts[:, : count * width].flatten(0, 1))
            attn.proj.weight = nn.Parameter(attn.proj.weight[:, : count * width].clone())
        attn.proj.in_features, attn.qkv = count * width, qkv
        setattr(attn, heads, count)
    x = images()
    assert difference(answer(subquad.convert(model, "softmax"), x), answer(model, x)) < 1e-5
    assert answer(subquad.convert(model, "linear"), x).isfinite().all()
