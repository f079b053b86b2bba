"""Foreign networks with our attention: equal with softmax, any size, restored to the bit."""

import copy
import io
import threading
from functools import partial

import numpy as np
import pytest
import timm
import torch
from foreign import FOREIGN, answer, difference, has_prefix, images, sharp, side_of, teacher
from mechanisms import assert_refused, refuses
from torch import nn

import subquad
from subquad import ATTENTION, SubquadError
from subquad.conversion import conversion_of, converted_layers, load_converted
from subquad.conversion.converted_attention import ADDED
from subquad.grid import TokenGrid
from subquad.models.mavit import GATES

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
    with pytest.raises(SubquadError, match="before subquad"):
        student.set_input_size((96, 96))


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


def test_two_shapes_of_one_number_of_tokens_are_not_mixed_up_when_computed_again():
    student = subquad.convert(teacher("timm ViT"), "agent", num_agents=4).train()
    student.set_grad_checkpointing()
    loss = student(images(64, 96)).sum() + student(images(96, 64)).sum()
    with pytest.raises(SubquadError, match="computed again"):
        loss.backward()
    # different numbers of tokens are told apart
    student(images(64, 80)).sum().add(student(images(64, 128)).sum()).backward()


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
    both_embedded, answers = threading.Barrier(2), [None, None]
    embedding = student.get_submodule(student.subquad_conversion.embedding)

    def wait(*called):
        both_embedded.wait(60)

    embedding.register_forward_hook(wait)

    def call(number):
        answers[number] = answer(student, calls[number])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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


def quantized():
    model = teacher("timm ViT")
    model.head = Quantized(48, 5)
    return model


def windows_alone():
    sizes = {"depth": 2, "global_attn_indexes": (), "window_size": 3, "neck_chans": 16}
    return timm.create_model("samvit_base_patch16", img_size=64, embed_dim=48, num_heads=4, **sizes)


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
        (lambda: subquad.convert(teacher("timm ViT"), "linear", img_size=(64, 64, 3)), "one number of pixels, or"),
        (lambda: subquad.convert(teacher("timm ViT"), "linear", img_size=64.0), "one number of pixels, or"),
        (lambda: subquad.convert(teacher("timm ViT").to("meta"), "linear"), "cls_token is on the device meta"),
        (lambda: subquad.convert(windows_alone(), "linear"), r"blocks\.0\.attn sees a window.*name those"),
        (lambda: load_converted("delta.safetensors", "timm/vit"), "teacher is the network"),
        (lambda: subquad.convert(not_copyable(), "linear"), "can't be copied, take in_place=True"),
        (lambda: subquad.convert(quantized(), "linear"), "as in quantized networks"),
    ],
    ids=range(23),
)
def test_mistakes_are_one_line(call, says):
    with pytest.raises(SubquadError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)
