"""A fit returns the best that it measured, and nothing worse than it was given."""

import pytest
import torch
from foreign import sharp
from torch import nn

import subquad
from subquad import ATTENTION
from subquad.conversion import align, converted_layers, distil, relative_errors
from subquad.conversion.best_states import BestStates, Part
from subquad.conversion.hybrids import sensitivity

PICTURES = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))
HARMFUL = {"updates": 3, "lr": 3e-2, "batch_size": 4}


@pytest.fixture(scope="module")
def teacher():
    return sharp("timm ViT")


def test_a_block_that_is_near_its_teacher_is_not_made_worse_by_alignment(teacher):
    student = subquad.convert(teacher, {0: "softmax", 1: "linear"})
    weight = student.blocks[0].attn.proj.weight
    weight.data += 1e-3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    before = relative_errors(student, teacher, PICTURES)
    done = align(student, PICTURES, teacher=teacher, **HARMFUL | {"lr": 3e-3})
    after = relative_errors(student, teacher, PICTURES)
    assert after[0] <= before[0] < 1e-3
    assert max(figure for _, figure in done.progress.judged["block 0"]) > before[0]
    # the other one learns meanwhile
    assert after[1] < before[1]
    assert done.before == pytest.approx(before, rel=1e-4, abs=1e-12)
    assert done.after == pytest.approx(after, rel=1e-4, abs=1e-12)


def test_distillation_does_not_make_a_good_student_worse(teacher):
    student = subquad.convert(teacher, "softmax")
    done = distil(student, PICTURES, teacher=teacher, **HARMFUL)
    assert max(row.damage for row in sensitivity(student, teacher, [PICTURES])) < 1e-10
    assert sum(done.last.values()) <= sum(done.first.values())


# importing peft takes seconds
@pytest.mark.slow
def test_changes_of_low_rank_that_harm_are_not_added(teacher):
    pytest.importorskip("peft")
    student = subquad.convert(teacher, "softmax")
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    distil(student, PICTURES, teacher=teacher, train="lora", **HARMFUL)
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())


def test_the_best_on_the_way_is_what_is_returned(teacher):
    """The rate is far too high, so that the end is worse than the middle."""
    student = subquad.convert(teacher, "linear")
    done = align(student, PICTURES, teacher=teacher, updates=12, lr=1e-2, batch_size=4)
    judged = done.progress.judged
    for number in converted_layers(student):
        curve = [figure for _, figure in judged[f"block {number}"]]
        assert done.after[number] == min(curve) < curve[0] == done.before[number]
    assert len(curve) > 2


def test_what_is_no_number_is_worse_than_anything():
    weight = nn.Parameter(torch.zeros(1))
    best = BestStates([Part([weight])])
    for value, figure in ((1.0, float("nan")), (2.0, 0.5), (3.0, float("nan")), (4.0, 0.7)):
        weight.data.fill_(value)
        best.note({"error": figure})
    best.put_back()
    assert weight.item() == 2
    assert best.figures == {"error": 0.5}
    other = BestStates([Part([nn.Parameter(torch.zeros(2))])])
    with pytest.raises(ValueError, match="other parameters"):
        other.load_state_dict(best.state_dict())


def test_images_of_the_figures_are_not_those_of_the_updates(teacher):
    asked = []

    def numbered(update):
        asked.append(update)
        return PICTURES[:1]

    align(subquad.convert(teacher, "linear"), numbered, teacher=teacher, updates=2, lr=1e-4)
    assert sorted(asked) == [0, 1, 2, 3]


def test_a_power_that_is_better_than_all_start_values_stays(teacher, monkeypatch):
    student = subquad.convert(teacher, "pola")
    before = relative_errors(student, teacher, PICTURES)
    monkeypatch.setitem(ATTENTION["pola"].traits.start_values, "power", (2.0, 9.0))
    align(student, PICTURES, teacher=teacher, updates=1, lr=1e-12, batch_size=4)
    assert relative_errors(student, teacher, PICTURES) == pytest.approx(before, rel=1e-5)
