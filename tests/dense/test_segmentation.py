"""Intersection over union is that of a matrix counted by hand, and windows see the whole image."""

import math

import pytest
import torch
from torch import nn

from subquad import SubquadError
from subquad.tasks.segmentation.intersection_over_union import (
    count_pixels,
    evaluate_segmentation,
    judge_confusion,
    segment,
)
from subquad.tasks.segmentation.scene_data import VOID


class Colours(nn.Module):
    """Says of every pixel what its first channel is, as logits."""

    def __init__(self, classes):
        super().__init__()
        self.classes, self.seen = classes, []

    def forward(self, x):
        self.seen.append(tuple(x.shape[-2:]))
        return nn.functional.one_hot(x[:, 0].long(), self.classes).permute(0, 3, 1, 2).float()


def test_a_matrix_counted_by_hand():
    labels = torch.tensor([[0, 0, 1], [1, 2, VOID]])
    predicted = torch.tensor([[0, 1, 1], [1, 0, 2]])
    by_hand = [[0] * 4 for _ in range(4)]
    for y in range(2):
        for x in range(3):
            if labels[y, x] != VOID:
                by_hand[labels[y, x]][predicted[y, x]] += 1
    confusion = count_pixels(predicted, labels, 4)
    assert confusion.tolist() == by_hand
    found = judge_confusion(confusion)
    # class 0: one of {(0,0), (0,1), (1,1)}; class 1: two of three; class 2 is never found; class 3 is nowhere
    assert found.iou[:3] == pytest.approx((100 / 3, 200 / 3, 0)) and math.isnan(found.iou[3])
    assert found.miou == pytest.approx(100 / 3) and found.accuracy == pytest.approx(60)
    assert found.class_accuracy == pytest.approx((50 + 100 + 0) / 3)
    with pytest.raises(SubquadError, match="no pixels with a class"):
        judge_confusion(torch.zeros(2, 2))


@pytest.mark.parametrize(("label", "answer", "message"), [(0, 5, "answers of .* 3 classes .* got 5"), (3, 0, "labels")])
def test_classes_that_are_not_counted_are_refused(label, answer, message):
    with pytest.raises(SubquadError, match=message):
        count_pixels(torch.full((2, 2), answer), torch.full((2, 2), label), 3)


@pytest.mark.parametrize("size", [(20, 31), (8, 9), (50, 12)])
def test_windows_see_every_pixel_and_are_never_larger_than_asked(size):
    image, model = torch.randint(5, (3, *size)).float(), Colours(5)
    whole = segment(model, image, size)
    slid = segment(model, image, size, (16, 10))
    assert torch.equal(whole.argmax(0), slid.argmax(0)) and torch.equal(whole.argmax(0), image[0].long())
    assert max(h for h, _ in model.seen[1:]) <= 16 and max(w for _, w in model.seen[1:]) <= 10


def test_logits_are_brought_to_the_size_of_the_labels():
    labels = torch.randint(3, (12, 16))
    image = labels[::2, ::2].expand(3, -1, -1).float()
    found = evaluate_segmentation(Colours(3), [[(image, labels)], []], device="cpu", num_classes=3)
    assert found.confusion.sum() == labels.numel()
