"""Students are judged behind each step on the same held-out data, by the figure of the teacher's own task."""

from types import SimpleNamespace

import pytest
import torch
from foreign import sharp

import subquad
from subquad import SubquadError
from subquad.conversion import Judging, Plan
from subquad.conversion.judged_steps import JudgedSteps, few_images, held_out_of, judged_batches
from subquad.conversion.judging import compare_networks
from subquad.data import InputConfig
from subquad.tasks import HeldOut
from subquad.tasks.accuracy import TopOne
from subquad.tasks.held_out import evenly_some
from subquad.tasks.segmentation.trained_segmenter import MeanIntersection

PICTURES = torch.randn(6, 3, 64, 64, generator=torch.Generator().manual_seed(1))
PLAN = Plan(source="somewhere", images="photos", data_dir="there", batch_size=4)


def drawn(update):
    return PICTURES[:4] + update


drawn.batch_size = 4


def opened(model, **about):
    known = {"data": "photos", "data_dir": None, "classes": (), "held_out": lambda **given: None}
    return SimpleNamespace(model=model, **known | about)


def test_shares_of_what_is_told_right():
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0], [3.0, 2.0], [0.0, 9.0]])
    right = TopOne()
    right.add(logits[:3], torch.tensor([1, 0, 1]))
    right.add(logits[3:], torch.tensor([1]))
    assert right.share == 0.75


def test_no_answer_of_no_numbers_is_right():
    right = TopOne()
    right.add(torch.tensor([[float("nan"), 1.0], [1.0, float("-inf")]]), torch.tensor([0, 0]))
    assert right.share == 0.5


def test_unions_are_of_all_scenes_together_and_without_what_has_no_class():
    # half of the pixels of class 0 are taken for class 1
    logits = torch.zeros(1, 3, 1, 4)
    logits[0, 0, 0, :2], logits[0, 1, 0, 2:] = 1, 1
    whole = MeanIntersection(3)
    whole.add(logits, torch.tensor([[[0, 0, 0, 255]]]))
    assert whole.share == pytest.approx((2 / 3 + 0) / 2)
    # logits are brought to the size of the labels
    whole.add(logits, torch.tensor([[[0, 0, 0, 0, 1, 1, 1, 1]]]))
    assert whole.share == pytest.approx((6 / 7 + 4 / 5) / 2)


def test_a_pixel_whose_scores_are_nan_is_right_nowhere():
    of_nan = MeanIntersection(3)
    of_nan.add(torch.full((1, 3, 1, 4), torch.nan), torch.tensor([[[0, 0, 1, 2]]]))
    assert of_nan.share == 0


def test_some_of_many_are_from_all_parts():
    assert list(evenly_some(list(range(10)), 3)) == [0, 3, 6]
    assert list(evenly_some([1, 2], 3)) == [1, 2]


def test_all_steps_are_judged_by_the_figure_of_the_task():
    model = sharp("timm ViT")
    own = HeldOut("goodness", lambda size: iter([(PICTURES[:size], torch.zeros(size, dtype=torch.long))]), TopOne)
    judged = JudgedSteps(
        opened(model, held_out=lambda **given: own), InputConfig((64, 64)), PLAN, Judging(), drawn, lambda line: None
    )
    student = subquad.convert(model, "softmax")
    judged.note("swapped", student)
    judged.note("aligned", student, 3.0)
    assert judged.steps["swapped"] == judged.steps["aligned"]
    step = judged.steps["swapped"]
    assert (step.images, step.measure, step.agreement) == (4, "goodness", 1)
    assert step.student_score == step.teacher_score
    assert judged.seconds == {"aligned": 3.0}
    assert "goodness" in step.text
    assert judged.labelled is None


def test_where_its_own_data_are_is_told_of_the_same_data_alone():
    asked = []

    def held_out(**given):
        asked.append(given["data_dir"])

    for about in ({}, {"data": "others"}, {"data_dir": "here"}):
        held_out_of(opened(None, held_out=held_out, **about), PLAN, 5)
    assert asked == ["there", None, None]


def test_data_that_have_moved_are_looked_for_where_those_of_the_same_name_are():
    asked = []

    def moved(**given):
        asked.append(given["data_dir"])
        if given["data_dir"] is None:
            raise SubquadError("nothing there")
        return "held out"

    for about in ({"data_dir": "here"}, {"data_dir": "here", "data": "others"}):
        found = held_out_of(opened(None, held_out=moved, **about), PLAN, 5)
        assert found == (None if "data" in about else "held out")
    assert asked == [None, "there", None]


def test_data_that_have_moved_are_no_reason_to_give_up():
    def gone(**given):
        raise SubquadError("nothing there")

    told = []
    assert held_out_of(opened(None, held_out=gone), PLAN, 5, told.append) is None
    assert "nothing there" in told[0]
    batches = list(judged_batches(None, drawn, 9))
    assert [labels for _, labels in batches] == [None, None]
    assert not torch.equal(batches[0][0], batches[1][0])
    # of other parts than those of the updates
    assert not torch.equal(batches[0][0], drawn(0))


def test_images_that_are_shown_have_one_size():
    sizes = [(1, 3, 8, 8), (1, 3, 8, 9), (2, 3, 8, 8), (1, 3, 8, 8)]
    own = HeldOut("", lambda size: ((torch.zeros(shape), torch.zeros(1)) for shape in sizes), TopOne)
    assert few_images(own, drawn, 3).shape == (3, 3, 8, 8)
    assert few_images(None, drawn, 3).shape == (3, 3, 64, 64)


def test_batches_of_nothing_but_broken_images_are_passed_over():
    model = sharp("timm ViT")
    batches = [(PICTURES[:0], PICTURES[:0, 0, 0, 0]), (PICTURES[:1], None)]
    assert compare_networks(model, model, batches).images == 1
