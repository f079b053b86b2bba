"""Networks whose modules have functions of their own in the place of `forward`."""

import functools
from copy import deepcopy

import pytest
import timm
import torch
from torch import nn

import subquad
from subquad import SubquadError
from subquad.conversion import align
from subquad.copying import copied


def network():
    sizes = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
    return timm.create_model("vit_tiny_patch16_224", **sizes).eval()


def wrapped(module):
    """As diffusers' hooks do: a function that holds an object that holds the module's own method."""

    class Reference:
        forward = None

    reference = Reference()
    reference.forward = module.forward

    def around(module, *args, **kwargs):
        return reference.forward(*args, **kwargs)

    module.forward = functools.partial(around, module)


def captured(module):
    """As torch.compile of a method does."""
    own = module.forward
    module.forward = lambda *args: own(*args)


def bound(module):
    """As accelerate does: copies have their own."""
    own = module.forward
    module.own_forward = own

    def new_forward(module, *args, **kwargs):
        return module.own_forward(*args, **kwargs)

    module.forward = functools.partial(new_forward, module)


@pytest.mark.parametrize("put", [wrapped, captured])
@pytest.mark.parametrize("place", ["", "blocks.1", "norm"])
def test_a_network_with_a_function_that_holds_a_module_is_not_copied(put, place):
    model = network()
    put(model.get_submodule(place))
    what = f"the forward of {place or 'this network'}, a .* by a function that holds this very module"
    with pytest.raises(SubquadError, match=f"{what}.* take it away, by disable_cache"):
        subquad.convert(model, "linear")
    with pytest.raises(SubquadError, match=what):
        copied(model)
    # what is converted where it stands is called all the same
    x, plain = torch.randn(2, 3, 32, 32), deepcopy(network())
    plain.load_state_dict(model.state_dict())
    subquad.convert(model, "linear", in_place=True)
    with torch.no_grad():
        torch.testing.assert_close(model(x), subquad.convert(plain, "linear")(x))


@pytest.mark.parametrize("in_place", [False, True])
def test_parts_of_layers_are_copied_wherever_they_are_converted(in_place):
    model = network()
    wrapped(model.blocks[1].attn.qkv)
    what = r"the forward of blocks\.1\.attn\.qkv, a Linear.* put it there behind subquad\.convert"
    with pytest.raises(SubquadError, match=what):
        subquad.convert(model, "linear", in_place=in_place)


def test_a_teacher_is_not_made_of_a_student_that_can_not_be_copied():
    student = subquad.convert(network(), "linear")
    wrapped(student.blocks[0])
    with pytest.raises(SubquadError, match=r"holds this very module.* give `teacher`, or take it away"):
        align(student, torch.randn(4, 3, 32, 32), updates=1)


def test_functions_that_are_handed_the_module_are_copied_with_it():
    model, x = network(), torch.randn(2, 3, 32, 32)
    bound(model.blocks[0])
    again = copied(model)
    assert again.blocks[0].forward.args[0] is again.blocks[0]
    with torch.no_grad():
        nn.init.zeros_(again.blocks[0].mlp.fc2.weight)
        assert not torch.equal(again(x), model(x))
        student = subquad.convert(model, "linear")
        assert not torch.equal(student(x), model(x))
