"""Gradient checkpointing: blocks are computed again on the grid of their own call, whatever the network saw since."""

import pytest
import timm
import torch
from foreign import FOREIGN, difference, images, side_of, teacher
from foreign_diffusion import DIFFUSION, denoiser, inputs, sample_of
from foreign_more import MORE
from foreign_more import teacher as further_teacher
from torch.utils.checkpoint import checkpoint

import subquad
from subquad import SubquadError
from subquad.conversion import converted_layers
from subquad.conversion.checkpointed_calls import in_backward

ANY_SIZE = [name for name, (_, any_size) in FOREIGN.items() if any_size]
TURNED = [name for name, (_, sizes) in MORE.items() if any(height != width for height, width in sizes)]
SWITCHES = (
    "activation_checkpointing_enable",
    "gradient_checkpointing_enable",
    "enable_gradient_checkpointing",
    "set_grad_checkpointing",
)
"""How libraries call it: transformers 5.24 and before, diffusers, timm."""


def computed_again(model):
    """The network, which computes its blocks again for their gradients, as its library switches that on."""
    for name in SWITCHES:
        for module in model.modules():
            if hasattr(module, name):
                try:
                    getattr(module, name)()
                except (AssertionError, ValueError):
                    pytest.skip("this network does not do it")
                return model
    pytest.skip("this network can't be told to")


def answer(model, x):
    """A tensor that it answers with."""
    answered = model(x)
    while not isinstance(answered, torch.Tensor):
        answered = answered[0] if isinstance(answered[0], torch.Tensor) else answered[-1]
    return answered


def gradients(model, calls, run=answer):
    """Of all calls at once, so that each block is computed again when the network has seen the last one."""
    model.zero_grad()
    # networks drop paths at random
    torch.manual_seed(0)
    sum(run(model, call).square().mean() for call in calls).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_the_same_when_computed_again(model, calls, run=answer):
    student = subquad.convert(model, "linear").train()
    again = []
    for layer in converted_layers(student).values():
        layer.register_forward_pre_hook(lambda *called: again.append(None) if in_backward() else None)
    expected = gradients(student, calls, run)
    assert not again
    actual = gradients(computed_again(student), calls, run)
    # else nothing is shown
    assert len(again) >= len(calls)
    assert_equal(actual, expected)


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        assert difference(gradient, expected[name]) < 1e-5 or expected[name].norm() < 1e-6, name


@pytest.mark.parametrize("name", ANY_SIZE)
def test_images_of_one_number_of_tokens_are_told_apart(name):
    high, wide = side_of(name), side_of(name) // 2 * 3 if side_of(name) % 16 == 0 else 84
    shapes = [(high, wide), (wide, high)]
    assert_the_same_when_computed_again(teacher(name), [images(*shape) for shape in shapes])


@pytest.mark.parametrize("name", TURNED)
def test_images_of_one_number_of_tokens_are_told_apart_in_further_families(name):
    height, width = next(size for size in MORE[name][1] if size[0] != size[1])
    assert_the_same_when_computed_again(further_teacher(name), [images(height, width), images(width, height)])


# Mochi asks for fp32 by autocast
@pytest.mark.filterwarnings("ignore:In CPU autocast")
# diffusers 0.42 fails where HunyuanImage computes its blocks again
@pytest.mark.parametrize("name", [name for name in DIFFUSION if name != "HunyuanImage"])
def test_latents_of_one_number_of_tokens_are_told_apart(name):
    # a text of another length, too
    calls = [inputs(name, 8, 12, text=5), inputs(name, 12, 8, text=7)]
    assert_the_same_when_computed_again(denoiser(name), calls, sample_of)


def student_of_a_vit():
    return subquad.convert(teacher("timm ViT"), "agent", num_agents=4).train()


@pytest.mark.parametrize("reentrant", [False, True])
def test_either_kind_of_pytorchs_checkpoints(reentrant):
    student = student_of_a_vit()
    calls = [images(64, 96), images(96, 64)]
    expected = gradients(student, calls)
    timm.layers.set_reentrant_ckpt(reentrant)
    try:
        assert_equal(gradients(computed_again(student), calls), expected)
    finally:
        timm.layers.set_reentrant_ckpt(False)


class Blocks(torch.nn.Sequential):
    """Blocks that are computed again one by one, within what is computed again as a whole."""

    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_blocks_within_what_is_computed_again_may_be_computed_again_themselves():
    model = teacher("timm ViT")
    calls = [images(64, 96), images(96, 64)]
    expected = gradients(subquad.convert(model, "linear").train(), calls)
    model.blocks = Blocks(*model.blocks)
    student = subquad.convert(model, "linear").train()
    whole = student.blocks.forward
    student.blocks.forward = lambda x: checkpoint(whole, x, use_reentrant=False)
    assert_equal(gradients(student, calls), expected)


class Within(torch.nn.Module):
    """A network that is computed again as a whole, or but its head, by whoever has it as a part."""

    def __init__(self, part, reentrant, features_alone):
        super().__init__()
        self.part, self.reentrant, self.features_alone = part, reentrant, features_alone

    def forward(self, x):
        run = self.part.forward_features if self.features_alone else self.part
        answered = checkpoint(run, x.clone().requires_grad_(), use_reentrant=self.reentrant)
        return self.part.forward_head(answered) if self.features_alone else answered


@pytest.mark.parametrize("features_alone", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("within_blocks", [False, True])
def test_a_network_may_be_computed_again_as_a_whole(reentrant, within_blocks, features_alone):
    calls = [images(64, 96), images(96, 64)]
    expected = gradients(student_of_a_vit(), calls)
    student = computed_again(student_of_a_vit()) if within_blocks else student_of_a_vit()
    whole = Within(student, reentrant, features_alone)
    assert_equal(gradients(student, calls, lambda model, x: whole(x)), expected)


def test_what_was_computed_again_as_a_whole_tells_nothing_of_what_is_kept_elsewhere():
    # which is computed again behind it
    student = computed_again(student_of_a_vit())
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
        by_blocks = student(images(96, 64))
    whole = checkpoint(student, images(64, 96), use_reentrant=False)
    with pytest.raises(SubquadError, match="are computed again"):
        (by_blocks + whole).sum().backward()


def test_what_is_kept_elsewhere_is_refused_where_it_cannot_be_told_apart():
    student = computed_again(student_of_a_vit())
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
        loss = student(images(64, 96)).sum() + student(images(96, 64)).sum()
        with pytest.raises(SubquadError, match=r"25 tokens are computed again .* was kept elsewhere, .* of two shapes"):
            loss.backward()
        # different numbers of tokens are told apart
        student(images(64, 80)).sum().add(student(images(64, 128)).sum()).backward()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_blocks_that_are_compiled_alone_warn_of_shapes_of_one_number_of_tokens(whole, recwarn):
    torch.compiler.reset()
    student = subquad.convert(teacher("timm ViT"), "linear").train()
    for part in [student] if whole else student.blocks:
        part.compile(backend="eager")
    with torch.no_grad():
        student(images(64, 96))
        student(images(96, 64))
    student(images(64, 128))
    assert not [one for one in recwarn if "compiled" in str(one.message)]
    student(images(128, 64))
    said = [str(one.message) for one in recwarn if "compiled" in str(one.message)]
    assert len(said) == (not whole)
    assert whole or said[0].startswith("images of 4×8 and 8×4 tokens in turns")
    torch.compiler.reset()


def test_parts_of_blocks_have_no_hooks_before_anything_is_trained():
    student = subquad.convert(teacher("timm ViT"), "linear")
    parts = [part for block in student.blocks for name, part in block.named_children() if name != "attn"]

    def listened_to():
        return [bool(part._forward_hooks or part._forward_pre_hooks) for part in parts]

    with torch.no_grad():
        student(images())
    assert not any(listened_to())
    student.train()(images())
    assert all(listened_to())


def test_nothing_is_kept_of_calls_whose_graph_is_gone():
    student = computed_again(student_of_a_vit())
    recorder = next(part.recorder for part in student.modules() if hasattr(part, "recorder"))
    for _ in range(4):
        student(images(64, 96)).sum().backward()
    student(images())
    one_call = len(recorder.calls._calls)
    for width in (64, 80, 96, 112):
        student(images(64, width)).sum().backward()
    student(images())
    assert len(recorder.calls._calls) == one_call
