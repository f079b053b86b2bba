"""Every detector stands on every kind of backbone, is trained by finite losses, and is restored from its file."""

import copy

import pytest
import torch
from hosts import small
from torch import nn

from subquad import SubquadError
from subquad.models import restore, save_weights
from subquad.tasks.backbone_arguments import DENSE_AGENTS
from subquad.tasks.conventions import CONVENTIONS
from subquad.tasks.detection import Detection, cascade, openmmlab_parts
from subquad.tasks.detection.detectors import DETECTORS, WITH_MASKS, build_detector

# masks are drawn for a hundred boxes an image, which takes seconds
HEADS = [pytest.param(head, marks=pytest.mark.slow if head in WITH_MASKS else ()) for head in DETECTORS]
SIZES = {"num_classes": 2, "short_side": [64], "long_side": 128, "head_channels": 16}


def made(head, host="pvt", attention="linear", **changes):
    torch.manual_seed(0)
    return build_detector(small(host, attention, num_classes=0).creation, head=head, **SIZES | changes)


def batch():
    images = [torch.rand(3, 50, 70), torch.rand(3, 64, 40)]
    boxes = [torch.tensor([[5.0, 5, 30, 40], [20, 10, 60, 45]]), torch.zeros(0, 4)]
    labels = [torch.tensor([1, 2]), torch.zeros(0, dtype=torch.long)]
    masks = [torch.zeros(2, 50, 70, dtype=torch.uint8), torch.zeros(0, 64, 40, dtype=torch.uint8)]
    masks[0][0, 5:40, 5:30] = masks[0][1, 10:45, 20:60] = 1
    return images, [{"boxes": b, "labels": k, "masks": m} for b, k, m in zip(boxes, labels, masks, strict=True)]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    "host, conventions", [("pvt", "own"), ("vit", "own"), ("pvt", "openmmlab"), ("swin", "openmmlab")]
)
def test_losses_reach_every_parameter_and_detections_have_their_parts(head, host, conventions):
    model, (images, targets) = made(head, host, conventions=conventions).train(), batch()
    losses = model(images, targets)
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert not without
    found = model.eval()(images)
    assert len(found) == 2 and all({"boxes", "labels", "scores"} <= one.keys() for one in found)
    for one, image in zip(found, images, strict=True):
        assert ("masks" in one) == (head in WITH_MASKS)
        assert (one["labels"] >= 1).all() and (one["labels"] <= 2).all()
        if "masks" in one:
            assert one["masks"].shape == (len(one["boxes"]), 1, *image.shape[-2:])


def test_a_cascade_matches_more_closely_from_stage_to_stage():
    stages = made("cascade_mask_rcnn").network.roi_heads.stages
    assert [stage.proposal_matcher.high_threshold for stage in stages] == [0.5, 0.6, 0.7]
    losses = made("cascade_mask_rcnn").train()(*batch())
    assert {f"{kind}_{k}" for kind in ("classes", "boxes", "masks") for k in range(3)} <= losses.keys()


def test_losses_of_later_stages_of_a_cascade_count_less(monkeypatch):
    one = torch.tensor(1.0)
    monkeypatch.setattr(cascade, "fastrcnn_loss", lambda *_: (one, one))
    monkeypatch.setattr(cascade, "maskrcnn_loss", lambda *_: one)
    model = made("cascade_mask_rcnn").train().network.roi_heads
    features = {str(k): torch.rand(1, 16, 64 >> k, 64 >> k) for k in range(4)}
    targets = batch()[1][:1]
    losses = model(features, [torch.tensor([[5.0, 5, 30, 40], [0, 0, 9, 9]])], [(50, 70)], targets)[1]
    assert losses == {f"{kind}_{k}": 0.5**k for kind in ("classes", "boxes", "masks") for k in range(3)}


class Stage(nn.Module):
    """A stage of a cascade that says the same of every box, and moves boxes by one pixel to the right."""

    def __init__(self, share, mask):
        super().__init__()
        self.share, self.mask = share, mask

    @property
    def box_coder(self):
        return self

    def box_roi_pool(self, features, proposals, shapes):
        return proposals[0]

    mask_roi_pool = box_roi_pool

    def box_head(self, x):
        return x

    mask_head = box_head

    def box_predictor(self, boxes):
        return torch.tensor([[1 - self.share, self.share]]).log().expand(len(boxes), 2), boxes

    def mask_predictor(self, boxes):
        return torch.full((len(boxes), 2, 2, 2), self.mask).logit()

    def decode(self, boxes, proposals):
        return (proposals[0] + torch.tensor([1.0, 0, 1, 0]))[:, None]

    def postprocess_detections(self, logits, boxes, proposals, shapes):
        assert torch.equal(boxes, proposals[0])
        return proposals, [logits.softmax(-1)[:, 1]], [torch.ones(len(boxes), dtype=torch.long)]

    def has_mask(self):
        return True


def test_detections_of_a_cascade_are_the_last_boxes_with_the_mean_of_scores_and_masks():
    stages = cascade.CascadeHeads([Stage(0.9, 0.1), Stage(0.5, 0.4), Stage(0.4, 0.7)]).eval()
    (found,), losses = stages({}, [torch.tensor([[2.0, 3, 8, 9], [1, 1, 4, 4]])], [(20, 30)])
    assert not losses and found["boxes"].tolist() == [[4, 3, 10, 9], [3, 1, 6, 4]]
    torch.testing.assert_close(found["scores"], torch.full((2,), 0.6))
    torch.testing.assert_close(found["masks"], torch.full((2, 1, 2, 2), 0.4))


@pytest.mark.parametrize("head", DETECTORS)
def test_images_are_normed_by_the_mean_and_the_deviation_that_are_given(head):
    resize = made(head, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)).network.transform
    # a mean and twice a deviation
    image = torch.tensor([0.9, 1.2, 1.5])[:, None, None].expand(3, 2, 2)
    torch.testing.assert_close(resize.normalize(image), torch.full((3, 2, 2), 2.0))


def test_retinanet_has_three_sizes_an_octave():
    sizes = made("retinanet").network.anchor_generator.sizes
    assert [size[0] for size in sizes] == [32, 64, 128, 256, 512]
    assert sizes[0] == (32, int(32 * 2 ** (1 / 3)), int(32 * 2 ** (2 / 3)))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("head", HEADS)
def test_a_detector_is_restored_from_its_file(head, tmp_path):
    model = made(head, frozen_stages=1).eval()
    save_weights(model, tmp_path / "a.safetensors", {"classes": ["a", "b"]})
    again, _ = restore(tmp_path / "a.safetensors", "detect", build_detector)
    images = batch()[0]
    with torch.no_grad():
        for one, other in zip(model(images), again.eval()(images), strict=True):
            assert all(torch.equal(one[key], other[key]) for key in one)
    with pytest.raises(SubquadError, match="is for `subquad detect`, not for `subquad segment`"):
        restore(tmp_path / "a.safetensors", "segment", build_detector)


@pytest.mark.parametrize("host", DENSE_AGENTS)
def test_the_papers_agents_work_on_maps_of_any_size(host):
    agents = list(DENSE_AGENTS[host])
    model = made("faster_rcnn", host, "agent", short_side=[96]).eval()
    paper = build_detector({**model.creation["backbone"], "pooled_agents": agents}, head="faster_rcnn", **SIZES).eval()
    layers = [m for m in paper.modules() if hasattr(m, "agent_grid")]
    assert {layer.agent_grid.num_places for layer in layers} == set(agents)
    with torch.no_grad():
        assert len(paper(batch()[0])) == 2


@pytest.mark.parametrize("conventions", CONVENTIONS)
@pytest.mark.parametrize("head", DETECTORS)
def test_no_detector_keeps_boxes_below_the_score_that_predict_names(head, conventions):
    """`detect predict --threshold 0.01` says in its help what it can't show."""
    parts = made(head, conventions=conventions).modules()
    kept = {
        part.score_thresh
        for part in parts
        if type(part).__name__ != "RegionProposalNetwork" and hasattr(part, "score_thresh")
    }
    text = next(flag.settings["help"] for flag in Detection.prediction_flags if flag.key == "threshold")
    assert kept == {0.05} and text.endswith("below 0.05 there is nothing")


def test_a_head_that_is_not_known_is_said():
    with pytest.raises(SubquadError, match="unknown head 'mask_rcn': did you mean mask_rcnn"):
        made("mask_rcn")


def test_images_that_vanish_when_they_are_resized_are_refused():
    model = made("retinanet").eval()
    with pytest.raises(SubquadError, match="an image of 190×1 px is less than a pixel thin at a long_side of 128"):
        model([torch.rand(3, 1, 190)])
    assert len(model([torch.rand(3, 2, 190)])) == 1


@pytest.mark.parametrize("conventions", CONVENTIONS)
@pytest.mark.parametrize(
    ("images", "targets", "reason"),
    [
        ([], None, "takes one image or more, got none"),
        ([torch.zeros(64, 64)], None, r"images \(3, height, width\), got one of \(64, 64\)"),
        ([torch.zeros(1, 64, 64)], None, r"got one of \(1, 64, 64\)"),
        (torch.zeros(3, 64, 64), None, r"got one of \(64, 64\)"),
        ([torch.zeros(3, 64, 64, dtype=torch.uint8)], None, r"got torch\.uint8: divide bytes by 255"),
        ([torch.zeros(3, 64, 64)], "none", "in training takes targets"),
        ([torch.zeros(3, 64, 64)], [0, 1], "labels of 2 classes go from 1 to 2, got some from 0 to 1"),
        ([torch.zeros(3, 64, 64)], [2, 3], "labels of 2 classes go from 1 to 2, got some from 2 to 3"),
    ],
)
def test_what_a_detector_does_not_take_is_said_in_one_line(conventions, images, targets, reason):
    """A label of 0 was trained as no object; the rest ended in torchvision's errors, or PyTorch's."""
    model = made("retinanet", conventions=conventions).train(targets is not None)
    boxes = torch.tensor([[5.0, 5, 30, 40], [20, 10, 60, 45]])
    given = [{"boxes": boxes, "labels": torch.tensor(targets)}] if isinstance(targets, list) else None
    with pytest.raises(SubquadError, match=reason) as caught:
        model(images, given)
    assert "\n" not in str(caught.value)


def test_what_is_found_in_an_image_does_not_depend_on_those_beside_it():
    model, (images, _) = made("retinanet", conventions="openmmlab").eval(), batch()
    with torch.no_grad():
        together, alone = model(images), [model([image])[0] for image in images]
    for one, other in zip(together, alone, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_networks_of_before_have_the_conventions_that_they_were_trained_with():
    creation = made("retinanet").creation
    assert creation.pop("conventions") == "own"
    creation.pop("task")
    again = build_detector(**creation)
    assert again.creation["conventions"] == "own" and again.network.backbone.pyramid.filled


def test_unknown_conventions_are_said():
    with pytest.raises(SubquadError, match="unknown conventions 'openmlab': did you mean openmmlab"):
        made("retinanet", conventions="openmlab")


def test_boxes_of_half_precision_are_decoded_in_whole():
    boxes = torch.tensor([[1001.0, 500, 1102, 777]])
    coder = openmmlab_parts.ClampedCoder()
    found = coder.decode_single(torch.zeros(1, 4, dtype=torch.bfloat16), boxes)
    assert torch.equal(found, boxes)
    # a side becomes 62.5 times as long, or as short, at most
    far = coder.decode_single(torch.tensor([[0.0, 0, 99, -99]]), boxes)
    sides = (far[:, 2:] - far[:, :2]) / torch.tensor([101.0, 277.0])
    torch.testing.assert_close(sides, torch.tensor([[62.5, 1 / 62.5]]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("head", ["retinanet", "faster_rcnn"])
def test_released_conventions_bear_autocast(head):
    model, (images, targets) = made(head, conventions="openmmlab"), batch()
    with torch.autocast("cpu", torch.bfloat16):
        losses = model.train()(images, targets)
        found = model.eval()(images)
    assert all(loss.isfinite() for loss in losses.values()) and len(found) == 2


@pytest.mark.parametrize("conventions", CONVENTIONS)
@pytest.mark.parametrize("head", DETECTORS)
def test_a_network_that_answers_no_numbers_does_not_find_nothing(head, conventions):
    """Scores that are no numbers are above no threshold."""
    model, image = made(head, conventions=conventions).eval(), [torch.rand(3, 40, 50)]
    parts = [model.pyramid.backbone, getattr(model.network, "rpn", None), getattr(model.network, "roi_heads", None)]
    for part in filter(None, parts):
        before = copy.deepcopy(part.state_dict())
        with torch.no_grad():
            next(p for p in part.parameters() if p.dim() > 1).fill_(float("inf"))
            with pytest.raises(SubquadError, match="not finite: its weights are damaged, or it has diverged"):
                model(image)
        part.load_state_dict(before)


@pytest.mark.parametrize("head", ["mask_rcnn", pytest.param("cascade_mask_rcnn", marks=pytest.mark.slow)])
def test_nothing_is_found_where_no_score_is_high_enough(head):
    model = made(head, conventions="openmmlab").eval()
    heads = model.network.roi_heads
    getattr(heads, "stages", [heads])[-1].score_thresh = 1.0
    with torch.no_grad():
        (found,) = model([torch.rand(3, 40, 50)])
    assert found["boxes"].shape == (0, 4) and found["masks"].shape == (0, 1, 40, 50)
