"""Windows and average precision where the numbers can be counted by hand."""

import math

import pytest
import torch
from faster_coco_eval.core import mask as coding
from torch import nn

from subquad.tasks.detection import judge_objects
from subquad.tasks.segmentation.intersection_over_union import _starts, segment


@pytest.mark.parametrize(
    ("length", "window", "starts"), [(90, 30, [0, 20, 40, 60]), (100, 30, [0, 20, 40, 60, 70]), (30, 30, [0])]
)
def test_windows_overlap_by_a_third_and_the_last_one_ends_with_the_image(length, window, starts):
    assert _starts(length, window) == starts


class Sides(nn.Module):
    """Logits 1 and 2 everywhere, and which windows there were."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(tuple(x.shape[-2:]))
        return torch.tensor([1.0, 2.0])[None, :, None, None].expand(1, 2, *x.shape[-2:])


def test_where_windows_overlap_their_mean_is_taken_and_high_ones_are_not_wide():
    model = Sides()
    found = segment(model, torch.zeros(3, 50, 90), (50, 90), (20, 60))
    assert set(model.seen) == {(20, 60)} and len(model.seen) == 4 * 2
    torch.testing.assert_close(found, torch.tensor([1.0, 2.0])[:, None, None].expand(2, 50, 90))


def test_boxes_are_large_by_themselves_and_what_is_not_there_has_no_number():
    truth = {
        "info": {},
        "images": [{"id": 1, "width": 300, "height": 300}],
        "categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 100, 100], "area": 1e4, "iscrowd": 0}
        ],
    }
    speck = torch.zeros(300, 300, dtype=torch.uint8)
    speck[200:202, 200:202] = 1
    mask = coding.encode(speck.numpy().copy(order="F"))
    found = [
        {"image_id": 1, "category_id": 1, "bbox": box, "score": score, "segmentation": mask}
        for box, score in (([190.0, 190.0, 100.0, 100.0], 0.9), ([0.0, 0.0, 100.0, 100.0], 0.5))
    ]
    result = judge_objects(truth, found, masks=False)
    # the likelier one is wrong, and large whatever its mask is
    assert result.box["ap_large"] == pytest.approx(50, abs=1) and result.box["ap"] == pytest.approx(50, abs=1)
    assert math.isnan(result.box["ap_small"]) and math.isnan(result.box["ap_medium"])
    assert result.classes[0] == pytest.approx(50, abs=1) and math.isnan(result.classes[1])
