"""What the released detectors and segmenters computed, whole and in parts: ours compute the same numbers."""

import json
from pathlib import Path

import pytest
import torch
from dense_networks import backbone, input_of, state_of
from made_weights import make_input
from test_goldens import assert_as_recorded
from torchvision.models.detection.image_list import ImageList

import subquad
from subquad.tasks.byte_resizing import resize_bytes, size_within
from subquad.tasks.detection import openmmlab_parts as parts
from subquad.tasks.detection.detectors import build_detector
from subquad.tasks.detection.openmmlab_detectors import DEVIATIONS, RETINANET_SCALES, RPN_SCALE
from subquad.tasks.segmentation.intersection_over_union import segment
from subquad.tasks.segmentation.segmenters import build_segmenter

pytestmark = pytest.mark.whole
FOLDER = Path(__file__).parent
FUNCTIONS = json.loads((FOLDER / "dense_functions.json").read_text())
DETECTORS = {
    "dense_mask_rcnn": "agent_pvt_tiny",
    "dense_cascade_mask_rcnn": "agent_swin_tiny",
    "dense_retinanet": "agent_pvt_tiny",
}
SEGMENTERS = {
    "dense_fpn": "agent_pvt_tiny",
    "dense_fpn_odd": "agent_pvt_tiny",
    "dense_upernet": "agent_swin_tiny",
    "dense_upernet_small": "agent_swin_tiny",
}


def numbers(values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, expected, atol=1e-7):
    torch.testing.assert_close(found.double(), numbers(expected), rtol=1e-8, atol=atol)


def golden(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def loaded(network, record):
    network = network.double().eval()
    adapted = subquad.load_checkpoint(network, state_of(record))
    assert adapted.family and not adapted.resized
    return network


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SEGMENTERS))
@pytest.mark.thinned(2)
def test_segmenters_compute_what_the_released_ones_do(name):
    record = golden(name)
    head, outputs = name.split("_")[1], record["outputs"]
    model = loaded(
        build_segmenter(backbone(SEGMENTERS[name]), head=head, num_classes=150, conventions="openmmlab"), record
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == record["num_params"]
    x = input_of(record)
    with torch.no_grad():
        maps = model.pyramid(x)
        for k, image in enumerate(maps):
            assert_as_recorded(image, outputs[f"stage{k + 1}"])
        assert_as_recorded(model.head(model.decoder([x, x, *maps])), outputs["logits"])
        if "auxiliary_logits" in outputs:
            assert_as_recorded(model.auxiliary(maps[2]), outputs["auxiliary_logits"])
        assert_as_recorded(model(x), outputs["input_size_logits"])
        logits = segment(model, x[0], record["image"]["ori_shape"])
    assert_as_recorded(logits[None], outputs["ori_size_logits"])
    labels = logits.argmax(0).flatten()
    assert labels[record["label_map"]["index"]].tolist() == record["label_map"]["value"]
    assert labels.bincount(minlength=150).tolist() == record["label_map"]["histogram"]


def found_in(model, record):
    """What a detector finds in a recorded image, which is resized and normed already."""
    x, image = input_of(record).to(next(model.parameters()).dtype), record["image"]
    model.network.transform.forward = lambda images, targets=None: (ImageList(x, [tuple(image["img_shape"])]), targets)
    with torch.no_grad():
        return model([x.new_zeros(3, *image["ori_shape"])])[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * ("cascade" in name)) for name in sorted(DETECTORS)]
)
def test_detectors_compute_what_the_released_ones_do(name):
    record = golden(name)
    head, outputs, expected = name.removeprefix("dense_"), record["outputs"], record["detections"]
    model = loaded(
        build_detector(backbone(DETECTORS[name]), head=head, num_classes=80, conventions="openmmlab"), record
    )
    x, network = input_of(record), model.network
    with torch.no_grad():
        levels = network.backbone(x)
        for k, image in enumerate(levels.values()):
            assert_as_recorded(image, outputs[f"fpn{k}"])
        if head == "retinanet":
            check_retinanet(network.head, list(levels.values()), outputs)
        else:
            check_two_stages(network, x, levels, record)
    found = found_in(model, record)
    close(found["boxes"], expected["boxes"], atol=1e-6)
    close(found["scores"], expected["scores"])
    assert (found["labels"] - 1).tolist() == expected["labels"]
    if "mask_area" in expected:
        masks = found["masks"][:, 0]
        assert masks.sum((1, 2)).tolist() == expected["mask_area"]
        for mask, centroid in zip(masks, expected["mask_centroid"], strict=True):
            if mask.any():
                close(mask.nonzero().double().mean(0), centroid, atol=1e-6)
    single = found_in(model.float(), record)
    torch.testing.assert_close(single["boxes"].double(), found["boxes"], rtol=0, atol=0.01)
    assert torch.equal(single["labels"], found["labels"])


def check_retinanet(head, levels, outputs):
    """Logits by level, ours with a class more in each anchor, which nothing has."""
    for k, level in enumerate(levels):
        answers = head([level])
        height, width = level.shape[-2:]
        logits = answers["cls_logits"].view(1, height, width, 9, 81)
        assert bool((logits[..., 0] == -1e4).all())
        assert_as_recorded(logits[..., 1:].flatten(3).permute(0, 3, 1, 2), outputs[f"retina_cls{k}"])
        boxes = answers["bbox_regression"].view(1, height, width, 36).permute(0, 3, 1, 2)
        assert_as_recorded(boxes, outputs[f"retina_reg{k}"])


def check_two_stages(network, x, levels, record):
    """The RPN's maps and proposals, and the heads on boxes that were recorded as well."""
    outputs, shape = record["outputs"], tuple(record["image"]["img_shape"])
    for k, (logits, differences) in enumerate(zip(*network.rpn.head(list(levels.values())), strict=True)):
        assert_as_recorded(logits, outputs[f"rpn_cls{k}"])
        assert_as_recorded(differences, outputs[f"rpn_reg{k}"])
    (proposals,), _ = network.rpn(ImageList(x, [shape]), levels)
    assert list(proposals.shape) == [1000, 4]
    recorded = outputs["proposals"]
    for place, value in zip(recorded["index"], recorded["value"], strict=True):
        if place % 5 < 4:
            assert proposals[place // 5, place % 5].item() == pytest.approx(value, rel=1e-7, abs=1e-6)
    boxes = [numbers(record["boxes"])]
    stages = getattr(network.roi_heads, "stages", [network.roi_heads])
    for k, heads in enumerate(stages):
        own = f"{k}" if len(stages) > 1 else ""
        features = heads.box_roi_pool(levels, boxes, [shape])
        assert_as_recorded(features, outputs["roi_feat_7"])
        logits, differences = heads.box_predictor(heads.box_head(features))
        assert_as_recorded(logits.roll(-1, 1), outputs[f"box_cls{own}"])
        assert_as_recorded(differences[:, 4:], outputs[f"box_reg{own}"])
        decoded = parts.clip_boxes_to_image(heads.box_coder.decode(differences, boxes), shape)
        assert_as_recorded(decoded[:, 1:].flatten(1), outputs[f"box_decoded{own}"], atol=1e-6)
        if f"box_refined{k}" in outputs:
            (refined,) = network.roi_heads.refined(heads, logits, differences, boxes, [shape])
            assert_as_recorded(refined, outputs[f"box_refined{k}"], atol=1e-6)
        features = heads.mask_roi_pool(levels, boxes, [shape])
        assert_as_recorded(features, outputs["roi_feat_14"])
        masks = heads.mask_predictor(heads.mask_head(features))
        assert_as_recorded(masks[:, 1:], outputs[f"mask_logits{own}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, row",
    [
        ("dense_mask_rcnn", "agent_pvt_tiny/mask_rcnn_1x"),
        ("dense_retinanet", "agent_pvt_tiny/retinanet_1x"),
        ("dense_fpn_odd", "agent_pvt_tiny/fpn_40k"),
        ("dense_upernet_small", "agent_swin_tiny/upernet_160k"),
    ],
)
@pytest.mark.thinned(2)
def test_files_of_the_authors_open_as_networks_that_find_what_was_recorded(name, row, tmp_path, monkeypatch):
    record = golden(name)
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SUBQUAD_WEIGHTS", str(tmp_path))
    (tmp_path / row).parent.mkdir()
    state = {key: tensor.float() for key, tensor in state_of(record).items()}
    torch.save({"meta": {"CLASSES": ("wall",)}, "state_dict": state}, tmp_path / f"{row}.pth")
    model = subquad.open_trained(f"pretrained/{row}", device="cpu").model
    if "detections" in record:
        found, expected = found_in(model, record), record["detections"]
        close(found["boxes"], expected["boxes"], atol=0.01)
        assert (found["labels"] - 1).tolist() == expected["labels"]
        return
    with torch.no_grad():
        logits = segment(model, input_of(record)[0].float(), record["image"]["ori_shape"])
    assert_as_recorded(logits[None], record["outputs"]["ori_size_logits"], rtol=1e-4, atol=1e-4)


def test_anchors_are_the_released_ones():
    for strides, scales, record, level in (
        ((4, 8, 16, 32, 64), (RPN_SCALE,), FUNCTIONS["anchors_rpn"], ("grid_level2_of_3x4", 2, (3, 4))),
        ((8, 16, 32, 64, 128), RETINANET_SCALES, FUNCTIONS["anchors_retinanet"], ("grid_level4_of_2x2", 4, (2, 2))),
    ):
        anchors = parts.StridedAnchors(strides, scales)
        close(torch.stack(anchors.bases), record["base"], atol=1e-6)
        name, k, size = level
        # as many maps as levels, all others empty
        maps = [torch.zeros(1, 1, *(size if j == k else (0, 0)), dtype=torch.float64) for j in range(len(strides))]
        (found,) = anchors(ImageList(torch.zeros(1, 3, 8, 8), [(8, 8)]), maps)
        close(found, record[name], atol=1e-5)


@pytest.mark.parametrize("stage", ["rpn_retinanet", "stage0", "stage1", "stage2"])
def test_boxes_are_decoded_as_released(stage):
    record = FUNCTIONS["decode"]
    deviations = record[stage]["stds"]
    assert stage == "rpn_retinanet" or tuple(deviations) == DEVIATIONS[int(stage[-1])]
    coder = parts.ClampedCoder(deviations)
    deltas = numbers(record["deltas"]) * record[stage]["deltas_times"]
    boxes = coder.decode_single(deltas, numbers(record["boxes"]))
    close(boxes, record[stage]["unclipped"], atol=1e-6)
    close(parts.clip_boxes_to_image(boxes, tuple(record["max_shape"])), record[stage]["clipped"], atol=1e-6)


def test_features_of_boxes_are_the_released_ones():
    levels = FUNCTIONS["levels"]
    assert parts.levels_of(numbers(levels["boxes"])).tolist() == levels["level"]
    record, image = FUNCTIONS["roi_align"], make_input([1, 4, 24, 32], "map")
    boxes = numbers(record["boxes"])
    for side in (7, 14):
        found = parts.roi_align(image, [boxes], side, 1 / 4, sampling_ratio=0, aligned=True)
        assert_as_recorded(found, record[f"out{side}"])
    # every box at its level, in the order that they came in
    maps = {str(k): image[..., :: 2**k, :: 2**k].repeat(2, 1, 1, 1) for k in range(4)}
    assert parts.levels_of(boxes).tolist() == [0, 0, 0, 0, 1, 0]
    several = parts.AlignedPooler(7)(maps, [boxes[:4], boxes[4:]], None)
    alone = [parts.AlignedPooler(7)(maps, [box[None]], None) for box in boxes]
    torch.testing.assert_close(several, torch.cat(alone))
    assert parts.AlignedPooler(7)(maps, [boxes[:0]], None).shape == (0, 4, 7, 7)


def test_boxes_are_suppressed_as_released():
    record = FUNCTIONS["multiclass_nms"]
    z = make_input([300, 20], "nms_boxes").view(300, 5, 4)
    centre = make_input([300, 2], "nms_centres")[:, None] * 40 + 90 + z[..., :2] * 6
    size = z[..., 2:].abs() * 8 + 30
    boxes = torch.cat([centre - size / 2, centre + size / 2], dim=-1)
    scores = (2 * make_input([300, 6], "nms_logits")).softmax(-1).roll(1, 1)
    background = boxes.new_zeros(300, 1, 4)
    # far from every border, so that clipping changes nothing
    moved = torch.cat([background, boxes + 500], dim=1)
    found, kept, labels = parts.chosen(moved, scores, (2000, 2000), threshold=0.05, overlap=0.5, most=100)
    assert int((scores[:, 1:] > 0.05).sum()) == record["candidates"] and len(found) == record["kept"]
    close(found - 500, record["boxes"], atol=1e-6)
    close(kept, record["scores"])
    assert (labels - 1).tolist() == record["labels"]


def test_masks_are_pasted_as_released():
    record = FUNCTIONS["paste"]
    masks = make_input([6, 28, 28], "mask").sigmoid().float()[:, None]
    boxes, values = torch.tensor(record["boxes"]), torch.zeros(6, *record["image"])
    for k, (mask, box) in enumerate(zip(masks, boxes, strict=True)):
        rows, columns, shares = parts.sampled(mask, box, record["image"])
        values[k, rows, columns] = shares[0]
    assert_as_recorded(values, record["values"], rtol=0, atol=2e-6)
    assert parts.pasted(masks, boxes, record["image"]).sum((1, 2, 3)).tolist() == record["area"]
    # beside the image, empty, and of no numbers
    nowhere = torch.tensor([[200.0, 10, 220, 30], [10, 10, 10, 10], [-9, -9, -3, -3], [torch.nan] * 4])
    assert not parts.pasted(masks[:4], nowhere, record["image"]).any()


def test_images_are_brought_to_the_networks_as_released():
    for row in FUNCTIONS["sizes"]:
        (long, short), (width, height) = row["scale"], row["width_height"]
        assert size_within((height, width), short, long)[::-1] == tuple(row["new_width_height"])
    record = FUNCTIONS["preprocess"]
    y, x = torch.meshgrid(torch.arange(375.0), torch.arange(500.0), indexing="ij")
    waves = [127.5 + 127 * torch.sin(0.05 * (c + 1) * x.double() + 0.07 * y.double()) for c in range(3)]
    picture = torch.stack(waves).floor().to(torch.uint8)
    assert resize_bytes(picture, (375, 500)) is picture
    transform = parts.ByteTransform((800,), 1333, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]).eval()
    images, _ = transform([picture / 255])
    assert images.image_sizes == [tuple(record["img_shape"])]
    assert_as_recorded(images.tensors[0], record["values"], rtol=0, atol=1e-6)
    close(parts.factors_of((375, 500), (800, 1067)), record["scale_factor"])
