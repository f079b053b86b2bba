"""Linear layers and parameters of a converted network that others put in the place of its own, as adapters and
offloading do, compute as they do anywhere else."""

from functools import partial

import pytest
import torch
from foreign import FOREIGN, difference, images, side_of
from foreign import teacher as foreign_teacher
from foreign_diffusion import DIFFUSION, denoised, denoiser, inputs
from foreign_more import MORE
from foreign_more import teacher as teacher_of_more
from mechanisms import lent
from torch import nn

import subquad

# Mochi asks for fp32 by autocast
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
HERE = ["softmax", "linear"]


def answer_of(model, name):
    """What a network of some name answers, a tensor."""
    if name in DIFFUSION:
        return denoised(model, inputs(name))
    with torch.no_grad():
        answered = model(images(side_of(name)))
    while not isinstance(answered, torch.Tensor):
        answered = answered[0] if isinstance(answered, tuple | list) else next(iter(answered.values()))
    return answered


def teacher(name):
    if name in FOREIGN:
        return foreign_teacher(name)
    return teacher_of_more(name) if name in MORE else denoiser(name)


ALL = [*FOREIGN, *MORE, *DIFFUSION]


class Doubled(nn.Linear):
    """As an adapter does, it computes more than its weight says."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.slow
@pytest.mark.thinned(6)
@pytest.mark.parametrize("attention", HERE)
@pytest.mark.parametrize("name", ALL)
def test_layers_that_compute_more_than_their_weights_say_are_called(name, attention):
    student = subquad.convert(teacher(name), attention).eval()
    answer = partial(answer_of, student, name)
    answer()
    for layer in subquad.conversion.converted_layers(student).values():
        added = {part for one in layer.added() for part in one.modules()}
        for part in [one for one in layer.modules() if type(one) is nn.Linear and one not in added]:
            part.__class__ = Doubled
            found = answer()
            part.__class__ = nn.Linear
            with torch.no_grad():
                kept = [one.clone() for one in part.parameters()]
                for one in part.parameters():
                    one *= 2
            wanted = answer()
            with torch.no_grad():
                for one, before in zip(part.parameters(), kept, strict=True):
                    one.copy_(before)
            assert difference(found, wanted) < 1e-4


@pytest.mark.slow
@pytest.mark.thinned(6)
@pytest.mark.parametrize("attention", HERE)
@pytest.mark.parametrize("name", ALL)
def test_parameters_may_be_there_only_while_a_part_is_called(name, attention):
    model = teacher(name)
    student = subquad.convert(model, attention).eval()
    wanted = answer_of(student, name)
    for converted in subquad.conversion.converted_layers(student).values():
        for part in converted.modules():
            if part is not converted and list(part.parameters(recurse=False)):
                lent(part)
    assert difference(answer_of(student, name), wanted) < 1e-5
