"""Detectors from folders that transformers' `save_pretrained` wrote: opened, judged, asked for objects, converted."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import worlds
from PIL import Image
from tiny_detectors import KINDS, saved
from torch import nn

import subquad
from subquad import SubquadError
from subquad.conversion import compare_networks, converted_layers
from subquad.tasks.detection import judge_detector, load_objects, predict_objects
from subquad.tasks.detection.object_input import ObjectInput
from subquad.tasks.detection.query_detector import (
    AveragePrecision,
    QueryDetector,
    numbers_in,
    objects_of,
    opened_query_detector,
)
from subquad.tasks.detection.trained_detector import find_objects
from subquad.tasks.detection.transformers_detectors import DetectorOfTransformers

transformers = pytest.importorskip("transformers", "5.1")


def photo(height, width):
    return Image.fromarray(np.random.default_rng(height).integers(0, 255, (height, width, 3), np.uint8))


@pytest.mark.parametrize("name", KINDS)
def test_what_is_found_is_what_the_processor_and_the_network_find(name, tmp_path):
    model, opened = saved(tmp_path, name), subquad.open_trained(tmp_path)
    assert opened.task == "detect" and opened.classes == ("N/A", "red", "green") and not opened.model.training
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    for size in ((48, 64), (100, 57)):
        with torch.no_grad():
            answer = model(**processor(photo(*size), return_tensors="pt"))
        expected = processor.post_process_object_detection(answer, threshold=0.0, target_sizes=[size])[0]
        scores, order = expected["scores"].sort(descending=True, stable=True)
        found = find_objects(opened, photo(*size), 0.0)
        assert found["labels"].tolist() == (expected["labels"][order] + 1).tolist()
        torch.testing.assert_close(found["scores"], scores, rtol=0, atol=1e-5)
        torch.testing.assert_close(found["boxes"], expected["boxes"][order], rtol=1e-5, atol=1e-4)
    looked_at = opened.image_network(64)
    with torch.no_grad():
        assert looked_at.model(torch.randn(1, 3, 64, 64)).isfinite().all()


@pytest.mark.parametrize("kind", ["Detr", "Yolos"])
def test_images_are_as_large_as_the_processor_makes_them(kind):
    processor = getattr(transformers, f"{kind}ImageProcessor")(size={"shortest_edge": 80, "longest_edge": 133})
    steps = 16 if kind == "Yolos" else 1
    about = ObjectInput((0.5,) * 3, (0.5,) * 3, short_side=80, long_side=133, multiple_of=steps)
    sides = np.random.default_rng(0).integers(20, 200, (50, 2)).tolist()
    for height, width in [*sides, [80, 100], [100, 80], [133, 80], [200, 60], [60, 200], [80, 80]]:
        expected = processor(torch.zeros(3, height, width, dtype=torch.uint8), return_tensors="pt")["pixel_values"]
        assert about.size_of(height, width) == tuple(expected.shape[-2:]), (height, width)


def test_an_image_of_which_nothing_would_be_left_is_refused():
    about = ObjectInput((0.5,) * 3, (0.5,) * 3, short_side=64, long_side=96, multiple_of=16)
    with pytest.raises(SubquadError, match="an image of 1000×8 px is less than 16 px thin at a long side of 96"):
        about.size_of(8, 1000)


def test_another_size_is_taken_with_the_same_proportions(tmp_path):
    saved(tmp_path)
    by_edges = subquad.open_trained(tmp_path, img_size=128).input
    assert (by_edges.size, by_edges.short_side, by_edges.long_side, by_edges.multiple_of) == (None, 128, 180, 16)
    both = subquad.open_trained(tmp_path, img_size=(96, 160)).input
    assert (both.short_side, both.long_side) == (96, 160)
    assert subquad.open_trained(tmp_path).image_network().input.img_size == (64, 64)
    saved(tmp_path, size={"height": 48, "width": 80})
    assert subquad.open_trained(tmp_path).input.size == (48, 80)
    assert subquad.open_trained(tmp_path, img_size=(96, 160)).image_network().input.img_size == (96, 160)


class Knowing(nn.Module):
    """Gives the objects of the images that it is asked for, one after the other, by numbers of classes from 0."""

    one_class_each, most_found = True, None
    scores_of = DetectorOfTransformers.scores_of

    def __init__(self, data, numbers, wrong=0.0):
        super().__init__()
        self.answers = nn.Parameter(torch.zeros(0))
        self.truths = iter([self.answer(data.target(place, (64, 48)), numbers, wrong) for place in range(len(data))])

    def answer(self, target, numbers, wrong):
        boxes = target["boxes"] / torch.tensor([64.0, 48, 64, 48]) + wrong
        classes = torch.tensor([numbers[label - 1] for label in target["labels"].tolist()])
        return torch.cat([boxes, nn.functional.one_hot(classes, 4).float()], dim=1)

    def forward(self, x):
        return next(self.truths)[None]


def knowing(data, classes, **more):
    numbers = [classes.index(name) for name in data.classes]
    about = ObjectInput((0.5,) * 3, (0.5,) * 3, size=(32, 32))
    return QueryDetector(
        "detect", Knowing(data, numbers, **more), classes, None, None, torch.device("cpu"), input=about
    )


@pytest.mark.parametrize(
    ("each", "most", "labels", "queries", "scores"),
    [
        (True, None, [2, 3, 1], [1, 0, 2], [0.75, 0.5, 0.25]),
        (False, None, [2, 3, 2], [1, 0, 0], [0.75, 0.5, 0.375]),
        (False, 2, [2, 3], [1, 0], [0.75, 0.5]),
    ],
)
def test_queries_are_of_one_class_each_or_of_several(each, most, labels, queries, scores):
    network = SimpleNamespace(one_class_each=each, most_found=most)
    told = torch.tensor([[0.0, 0.375, 0.5], [0.125, 0.75, 0.0], [0.25, 0.0, 0.125]])
    boxes = torch.tensor([[0.0, 0.25, 0.5, 0.75], [0.5, 0.5, 1.0, 1.0], [0.0, 0.0, 1.0, 0.5]])
    found = objects_of(network, boxes, told, (8, 16), None)
    assert (found["labels"].tolist(), found["scores"].tolist()) == (labels, scores)
    assert found["boxes"].tolist() == (boxes[queries] * torch.tensor([16.0, 8, 16, 8])).tolist()
    # what has no number in the data is not there
    kept = objects_of(network, boxes, told, (8, 16), [0, 0, 7])
    assert kept["labels"].tolist() == [7] and kept["boxes"].tolist() == [[0, 2, 8, 6]]


def test_classes_of_data_are_found_by_their_names(tmp_path):
    folder = worlds.objects(tmp_path, size=(48, 64))
    data = load_objects(folder, split="validation")
    assert data.classes == ("red", "green")
    # as many as COCO's networks have, whose numbers have gaps, in another order, and more than the data
    for classes in (("N/A", "red", "N/A", "green"), ("green", "red", "blue", "N/A")):
        judged = judge_detector(knowing(data, classes), data=str(folder))
        assert judged.classes == ("red", "green") and judged.count == 3
        assert judged.result.box["ap"] == pytest.approx(100) and judged.result.classes == pytest.approx((100, 100))
    off = judge_detector(knowing(data, ("red", "N/A", "green", "blue"), wrong=0.02), data=str(folder))
    assert 0 < off.result.box["ap"] < 90
    with pytest.raises(SubquadError, match=r"has 2 classes, the model 3, and it does not know green: .*id2label"):
        numbers_in("these", data.classes, ("red", "blue", "Green"))
    assert numbers_in("COCO", ("tv", "motorcycle"), ("aeroplane", "motorbike", "tvmonitor", "N/A")) == [0, 2, 1, 0]


@pytest.mark.parametrize("each", [True, False])
def test_a_conversion_is_judged_by_what_the_command_says(each, tmp_path, monkeypatch):
    monkeypatch.setattr(Knowing, "one_class_each", each)
    folder = worlds.objects(tmp_path / "data", size=(48, 64))
    data = load_objects(folder, split="validation")
    detector = knowing(data, ("red", "N/A", "green", "blue"), wrong=0.02)
    answers = torch.stack([detector.model(None)[0] for _ in range(3)])
    left, top, right, bottom = answers[..., :4].unbind(-1)
    boxes = torch.stack([left + right, top + bottom, 2 * (right - left), 2 * (bottom - top)], dim=-1) / 2
    # no object is the last class, where there is one, and the least likely
    logits = nn.functional.pad(40 * answers[..., 4:] - 20, (0, int(each)), value=-40.0).transpose(1, 2)
    numbers = numbers_in("data", data.classes, detector.classes)
    tally = AveragePrecision(detector.model, data.truth, numbers)
    tally.add(boxes[:2], logits[:2], torch.tensor([[0, 48, 64], [1, 48, 64]]))
    tally.add(boxes[2:], logits[2:], torch.tensor([[2, 48, 64]]))
    judged = judge_detector(knowing(data, detector.classes, wrong=0.02), data=str(folder))
    assert tally.share == pytest.approx(judged.result.box["ap"] / 100) and 0 < tally.share < 0.9
    # what is NaN finds nothing
    images = torch.tensor([[place, 48, 64] for place in range(3)])
    for nowhere, untold in ((torch.full_like(boxes, torch.nan), logits), (boxes, torch.full_like(logits, torch.nan))):
        lost = AveragePrecision(detector.model, data.truth, numbers)
        lost.add(nowhere, untold, images)
        assert lost.share == 0 and not lost.entries


@pytest.mark.parametrize("name", ["Yolos", "RTDetr"])
def test_a_folder_is_judged_on_data_and_finds_objects_of_files(name, tmp_path):
    saved(tmp_path / "network", name)
    data = worlds.objects(tmp_path / "data", counts=(1, 2))
    opened = subquad.open_trained(tmp_path / "network", task="detect")
    judged = judge_detector(opened, data=str(data))
    assert judged.count == 2 and judged.result.box["ap"] >= 0 and "green" in judged.text
    found = list(predict_objects(opened, [data / "val2017"], tmp_path / "out", threshold=0.0))
    assert len(found) == 2 and all(len(one.objects) == 6 and one.picture.is_file() for one in found)
    scores = [score for _, score, *_ in found[0].objects]
    assert scores == sorted(scores, reverse=True)
    (data / "annotations" / "instances_val2017.json").rename(data / "annotations" / "instances_test2017.json")
    assert opened.knows_as_data(str(data)) is False
    with pytest.raises(SubquadError, match="does not say what it was trained on"):
        judge_detector(opened)


def test_an_image_at_a_size_that_the_network_does_not_take_is_said_in_one_line(tmp_path):
    saved(tmp_path, "DFine", size={"height": 64, "width": 80})
    with pytest.raises(SubquadError, match="does not run at 80×64 px, to which an image of 64×48 is resized: "):
        find_objects(subquad.open_trained(tmp_path), photo(48, 64), 0.5)


def test_a_file_of_earlier_versions_says_its_processor_by_another_name(tmp_path):
    saved(tmp_path)
    earlier = {"feature_extractor_type": "YolosFeatureExtractor", "size": 64, "max_size": 90, "do_normalize": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(earlier))
    about = subquad.open_trained(tmp_path).input
    assert (about.short_side, about.long_side, about.multiple_of, about.std[0]) == (64, 90, 16, 0.229)


@pytest.mark.parametrize("name", ["Yolos", "RTDetr"])
def test_a_network_is_compared_by_its_queries(name, tmp_path):
    model, opened = saved(tmp_path, name), subquad.open_trained(tmp_path)
    x = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        answer, named, found = model(x), opened.model.features_and_logits(x), opened.model(x)
    each = "logits" if name == "Yolos" else "scores"
    assert list(named) == ["features", "boxes", each] and found.shape == (2, 6, 4 + 3)
    torch.testing.assert_close(named[each].transpose(1, 2), answer.logits)
    torch.testing.assert_close(named["features"], answer.last_hidden_state)
    judged = compare_networks(opened.model, opened.model, [(x, None)], counted=("boxes", each))
    assert judged.error == 0 and judged.student_score is None and judged.agreement == (1 if name == "Yolos" else None)


@pytest.mark.slow
def test_a_detector_is_converted_and_its_student_opened_alone(tmp_path):
    saved(tmp_path / "teacher")
    data = worlds.objects(tmp_path / "data")
    plan = subquad.conversion.Plan(
        str(tmp_path / "teacher"), str(data), attention="linear", align_updates=2, distil_updates=2, batch_size=4
    )
    converted = subquad.conversion.convert_run(plan, tmp_path / "run")
    last = converted.steps["distilled"]
    assert converted.record.on_held_out and last.images == 3 and last.measure == "AP" and last.agreement > 0
    teacher = judge_detector(subquad.open_trained(tmp_path / "teacher"), data=str(data))
    assert last.teacher_score == teacher.result.box["ap"] / 100 and last.student_score is not None
    (tmp_path / "teacher").rename(tmp_path / "gone")
    opened = subquad.open_trained(tmp_path / "run" / "student.safetensors")
    assert type(opened.model).__name__ == "DetectorOfTransformers" and len(converted_layers(opened.model)) == 2
    assert opened.task == "detect" and opened.input.multiple_of == 16 and opened.classes == ("N/A", "red", "green")
    assert judge_detector(opened, data=str(data)).count == 3
    # the whole of it, at another size too, and not what is looked into
    assert isinstance(subquad.open_trained(tmp_path / "run", img_size=(96, 128)), QueryDetector)
    written = subquad.export(tmp_path / "run", tmp_path / "student.onnx", img_size=(64, 80))
    assert written.difference < 1e-4
    judged = subquad.evaluate(tmp_path / "run", engine=written.path, data=str(data))
    assert judged.result.box["ap"] == pytest.approx(judge_detector(opened, data=str(data)).result.box["ap"], abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LwDetr", "RfDetr"])
def test_a_detector_whose_queries_are_chosen_is_fitted_to_the_map_of_its_backbone(name, tmp_path):
    saved(tmp_path / "teacher", name)
    data = worlds.objects(tmp_path / "data")
    network = subquad.open_trained(tmp_path / "teacher").model
    found = network.features_and_logits(torch.randn(2, 3, 64, 96))
    assert found["features"].shape == (2, 16, 4, 6) and list(found) == ["features", "boxes", "scores"]
    plan = subquad.conversion.Plan(
        str(tmp_path / "teacher"), str(data), attention="linear", align_updates=2, distil_updates=2, batch_size=4
    )
    converted = subquad.conversion.convert_run(plan, tmp_path / "run")
    last = converted.steps["distilled"]
    assert last.measure == "AP" and last.student_score is not None and last.error < 1
    (tmp_path / "teacher").rename(tmp_path / "gone")
    opened = subquad.open_trained(tmp_path / "run" / "student.safetensors")
    assert list(converted_layers(opened.model)) == [1] and judge_detector(opened, data=str(data)).count == 3


def test_a_size_that_a_teacher_does_not_run_at_is_one_line_before_anything_is_fitted(tmp_path):
    saved(tmp_path / "teacher", "RfDetr")
    data = str(worlds.objects(tmp_path / "data"))
    plan = subquad.conversion.Plan(str(tmp_path / "teacher"), data, attention="linear", img_size=48, batch_size=2)
    with pytest.raises(SubquadError, match=r"does not run at 48×48 \(.*\): --img-size says another"):
        subquad.conversion.convert_run(plan, tmp_path / "run")


def test_a_detector_whose_attention_is_not_known_is_refused_by_its_name(tmp_path):
    saved(tmp_path / "teacher", "Detr")
    plan = subquad.conversion.Plan(str(tmp_path / "teacher"), str(worlds.objects(tmp_path / "data")), batch_size=2)
    with pytest.raises(SubquadError, match=r"DetrSelfAttention, an attention layer that is not known here"):
        subquad.conversion.convert_run(plan, tmp_path / "run")


@pytest.mark.parametrize(
    "pictures",
    [
        {"pad_size": {"height": 96, "width": 96}},
        {"size": {"max_height": 64, "max_width": 96}},
        {"do_center_crop": True, "crop_size": {"height": 32, "width": 32}},
        {"do_rescale": False},
        {"image_processor_type": "ViTImageProcessor", "size": {"height": 64, "width": 64}},
    ],
)
def test_what_a_processor_does_otherwise_is_refused(pictures, tmp_path):
    saved(tmp_path, **pictures)
    with pytest.raises(SubquadError, match="brings images to the network in another way") as caught:
        subquad.open_trained(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["GroundingDinoForObjectDetection", "PPOCRV6SmallDetForObjectDetection"])
def test_detectors_without_queries_of_classes_are_refused(name, tmp_path):
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    with pytest.raises(SubquadError, match=rf"is of a {name}: commands take detectors whose queries .*, Detr, .*Yolos"):
        subquad.open_trained(tmp_path)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"size": None}, "resized to a size or by a short and a long side"),
        ({"short_side": 32, "long_side": 64}, "resized to a size or by a short and a long side"),
        ({"std": [0.0, 1.0, 1.0]}, "std above 0"),
        ({"multiple_of": 0}, "1 px or more"),
        ({"interpolation": "lanczos"}, "interpolation 'lanczos'"),
        ({"depth": 3}, "a setting depth of the input, which nothing takes"),
    ],
)
def test_a_note_of_no_such_input_is_refused(about, message):
    network = Knowing.__new__(Knowing)
    nn.Module.__init__(network)
    network.answers = nn.Parameter(torch.zeros(1))
    said = {"mean": [0.5] * 3, "std": [0.5] * 3, "size": [32, 32]}
    with pytest.raises(SubquadError, match=message):
        opened_query_detector(network, {"classes": ["red"], "input": said | about})
    with pytest.raises(SubquadError, match="its note is of a detector, and its network is a Linear"):
        opened_query_detector(nn.Linear(1, 1), {"classes": ["red"], "input": said})
