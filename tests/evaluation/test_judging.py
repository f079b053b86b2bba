"""What is judged by which images, and what is said of it: every choice is heard, every number is of what it says."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import worlds
from PIL import Image
from torch import nn

from subquad import SubquadError, create_model
from subquad.data import InputConfig
from subquad.data.synthetic.listops import Sequences
from subquad.models import save_weights
from subquad.runs import open_trained
from subquad.tasks import ImageNetwork, Trained
from subquad.tasks.accuracy import EvalSums
from subquad.tasks.class_names import check_classes, check_same_classes, check_there_are_two
from subquad.tasks.classification.throughput import measure_throughput
from subquad.tasks.classification.trained_classifier import TrainedClassifier, images_of, judge
from subquad.tasks.detection import average_precision, judge_detector, trained_detector
from subquad.tasks.detection.average_precision import MEASURES, as_coco, evaluate_detection
from subquad.tasks.detection.trained_detector import TrainedDetector, find_objects, precision_text, predict_objects
from subquad.tasks.palette import colour
from subquad.tasks.segmentation import judge_segmenter, predict_scenes
from subquad.tasks.segmentation.intersection_over_union import judge_confusion
from subquad.tasks.segmentation.scene_transforms import SceneInput
from subquad.tasks.segmentation.trained_segmenter import TrainedSegmenter, as_labels, iou_text, overlay
from subquad.tasks.sequences import lra_judging
from subquad.tasks.sequences.lra_judging import guesses, judge_sequences
from subquad.tasks.sequences.sequence_network import create_sequence_model

CPU = torch.device("cpu")


def two_processes(monkeypatch, module, **functions):
    """Let a module take itself for the first of two processes."""
    usual = {"is_available": lambda: True, "is_initialized": lambda: True, "get_rank": lambda: 0}
    monkeypatch.setattr(module, "dist", SimpleNamespace(**usual, get_world_size=lambda: 2, **functions))


def test_all_sums_of_all_processes_are_added(monkeypatch):
    from subquad.tasks import accuracy

    sums = EvalSums(6)
    sums.add(torch.randn(9, 6), torch.arange(9) % 6)
    before = [one.clone() for one in (sums.loss, sums.top5, sums.confusion)]
    two_processes(monkeypatch, accuracy, all_reduce=lambda total: total.mul_(2))
    sums.reduce()
    for one, other in zip((sums.loss, sums.top5, sums.confusion), before, strict=True):
        assert torch.equal(one, 2 * other)


def test_what_another_process_found_is_judged_as_well(monkeypatch):
    judged, told = [], []

    def gather(shares, own):
        shares[:] = [own, ([{"image_id": 2}], [2])]

    two_processes(monkeypatch, average_precision, all_gather_object=gather)

    def judge(truth, entries, masks):
        judged.extend(entries)
        told.extend(image["id"] for image in truth["images"])

    monkeypatch.setattr(average_precision, "judge_objects", judge)
    found = {"boxes": torch.tensor([[1.0, 2, 4, 8]]), "labels": torch.tensor([1]), "scores": torch.tensor([0.5])}
    model = nn.Identity()
    model.forward = lambda images: [found]
    truth = {"images": [{"id": k} for k in (1, 2, 3)], "annotations": []}
    evaluate_detection(model, [([torch.zeros(3, 8, 8)], [{"image_id": 1}])], truth, device="cpu", masks=False)
    # the third one, which nobody could read, is not missed
    assert [entry["image_id"] for entry in judged] == [1, 2] and told == [1, 2]


def test_findings_are_left_top_width_and_height_with_masks_of_what_is_likelier_than_not():
    from faster_coco_eval.core import mask as coding

    masks = torch.tensor([[0.2, 0.6], [0.5, 0.9]])[None, None]
    found = {"boxes": torch.tensor([[1.0, 2, 4, 8]]), "labels": torch.tensor([3]), "scores": torch.tensor([0.5])}
    (entry,) = as_coco(7, found | {"masks": masks})
    assert (entry["image_id"], entry["category_id"], entry["bbox"]) == (7, 3, [1.0, 2.0, 3.0, 6.0])
    assert coding.decode(entry["segmentation"]).tolist() == [[0, 1], [0, 1]]


def test_classes_in_another_order_are_others():
    check_classes("data", ["a", "b"], ("a", "b"))
    with pytest.raises(SubquadError, match="another order"):
        check_classes("data", ["b", "a"], ("a", "b"))
    with pytest.raises(SubquadError, match="3 classes, the model 2, and they differ: c"):
        check_classes("data", ["a", "b", "c"], ("a", "b"))
    with pytest.raises(SubquadError, match="1 classes, the model 2, and they differ: b"):
        check_classes("data", ["a"], ("a", "b"))
    check_same_classes(["a", "b"], ["a", "b"])
    with pytest.raises(SubquadError, match="validation data differ in their classes: another order"):
        check_same_classes(["a", "b"], ["b", "a"])
    with pytest.raises(SubquadError, match="validation data differ in their classes: b"):
        check_same_classes(["a", "b"], ["a"])


def test_guesses_are_made_from_what_was_trained_on_and_judged_on_the_test_set(monkeypatch):
    parts = {"train": [1, 1, 1, 2], "test": [1, 2, 2, 2]}

    def load(split, **settings):
        tokens = np.full((4, 2), 11, np.uint8)
        return Sequences(tokens, np.full(4, 2), np.array(parts[split]))

    monkeypatch.setattr(lra_judging.listops, "load_listops", load)
    assert guesses("listops", {}) == {"chance": 10, "most frequent value": 25, "root operator alone": 25}
    assert guesses("pathfinder", {}) == {"chance": 50} and guesses("image", {}) == {"chance": 10}


def test_the_arena_is_judged_by_the_best_weights_on_the_test_set(monkeypatch, tmp_path):
    sizes = {"vocab_size": 16, "max_length": 24, "num_classes": 10, "embed_dim": 8}
    models = {name: create_sequence_model("linear", **sizes) for name in ("best", "last")}
    note = {"data": "listops", "data_settings": {"count": 200}}
    for name, model in models.items():
        save_weights(model, tmp_path / f"{name}.safetensors", note)
    asked = {}

    def load(task, **settings):
        asked.update(settings, task=task)
        return [(torch.zeros(24, dtype=torch.long), 0)]

    monkeypatch.setattr(lra_judging, "load_sequences", load)
    monkeypatch.setattr(lra_judging, "evaluate", lambda model, loader, **settings: asked.update(settings, model=model))
    judge_sequences(open_trained(tmp_path, task="lra"), data_dir="there", split="test")
    assert asked["split"] == "test" and asked["max_length"] == 24 and asked["data_dir"] == "there"
    assert asked["settings"] == {"count": 200} and asked["num_classes"] == 10
    assert torch.equal(asked["model"].embed.weight, models["best"].embed.weight)


def test_first_passes_warm_up_and_are_not_timed(monkeypatch):
    ends = iter([0.0, 90.0, 90.0, 180.0, 180.0, 181.0, 181.0, 182.0])
    timer = SimpleNamespace(perf_counter=lambda: next(ends))
    monkeypatch.setattr("subquad.timing.time", timer)
    assert measure_throughput(nn.Conv2d(3, 4, 3), (8, 8), 6, "cpu", repeats=2) == 6


class Halves(nn.Module):
    """The second class on the left, the third on the right."""

    def forward(self, x):
        right = (torch.arange(x.shape[-1]) >= x.shape[-1] // 4).float().expand(len(x), *x.shape[-2:])
        return torch.stack([torch.full_like(right, -1.0), 1 - right, right], dim=1)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return worlds.scenes(tmp_path_factory.mktemp("scenes") / "scenes")


def segmenter(data="", **changes):
    given = SceneInput((16, 24), None, (0.5,) * 3, (0.5,) * 3)
    settings = {"slide": False, "data": str(data), "data_dir": None, "device": CPU, "input": given} | changes
    return TrainedSegmenter("segment", Halves(), ("ground", "red", "green"), **settings)


def test_windows_are_looked_through_as_asked_and_else_as_in_training():
    for trained in (True, False):
        windows = [segmenter(slide=trained).window(asked) for asked in (None, True, False)]
        assert windows == [(16, 24) if trained else None, (16, 24), None]


def test_scenes_are_judged_by_the_part_that_is_asked_for(scenes):
    trained = segmenter(scenes)
    assert [judge_segmenter(trained, split=split).count for split in ("validation", "train")] == [3, 6]
    elsewhere = segmenter("nowhere")
    assert judge_segmenter(elsewhere, data=str(scenes)).count == 3


def test_scenes_that_are_broken_are_not_counted(tmp_path):
    folder = worlds.scenes(tmp_path / "scenes")
    (folder / "images" / "validation" / "1.png").write_bytes(b"no image")
    found = judge_segmenter(segmenter(folder))
    assert found.count == 2 and len(found.broken) == 1
    with pytest.raises(SubquadError, match=r"1\.png"):
        judge_segmenter(segmenter(folder), strict=True)


def test_label_maps_and_overlays_are_those_of_the_network(scenes, tmp_path):
    picture = scenes / "images" / "validation" / "0.png"
    (found,) = predict_scenes(segmenter(), [picture], tmp_path)
    assert found.labels.shape == (40, 56)
    assert (found.labels[:, :14] == 1).all() and (found.labels[:, 14:] == 2).all()
    assert found.shares == [("green", 0.75), ("red", 0.25)]
    with Image.open(tmp_path / "0.png") as written:
        assert np.array_equal(np.asarray(written), found.labels + 1)
        shades = np.asarray(written.convert("RGB"))
    list(predict_scenes(segmenter(first_label=0), [picture], tmp_path / "from-0"))
    with Image.open(tmp_path / "from-0/0.png") as written:
        assert np.array_equal(np.asarray(written), found.labels)
        assert np.array_equal(np.asarray(written.convert("RGB")), shades)
    with Image.open(picture) as image:
        base, right = np.asarray(image.convert("RGB"))[20, 50], np.array(colour(2))
    with Image.open(tmp_path / "0-overlay.png") as shown:
        assert np.abs(np.asarray(shown)[20, 50] - (0.45 * base + 0.55 * right)).max() <= 1


def test_nothing_has_no_colour_and_the_label_zero():
    labels = np.array([[0, 255]], np.uint8)
    assert np.asarray(as_labels(labels)).tolist() == [[1, 0]]
    assert np.asarray(as_labels(labels, 0)).tolist() == [[0, 255]]
    picture = Image.new("RGB", (2, 1), (10, 20, 30))
    assert np.asarray(overlay(picture, labels))[0, 1].tolist() == [10, 20, 30]


def test_the_shares_of_classes_are_those_of_the_truth():
    lines = iou_text(judge_confusion(torch.tensor([[6, 2], [0, 2]])), ["a", "b"]).splitlines()
    assert lines[1].split() == ["a", "75.00", "80.00"] and lines[2].split() == ["b", "50.00", "20.00"]


class Finds(nn.Module):
    """Three boxes, of the second, first and second class."""

    has_masks = True

    def forward(self, images, targets=None):
        boxes = torch.tensor([[1.0, 2, 9, 8], [2.0, 3, 9, 8], [3.0, 4, 9, 8]])
        scores = torch.tensor([0.75, 0.5, 0.25])
        return [{"boxes": boxes, "labels": torch.tensor([2, 1, 2]), "scores": scores} for _ in images]


def detector(data=""):
    return TrainedDetector("detect", Finds(), ("red", "green"), str(data), None, CPU)


@pytest.mark.parametrize(("threshold", "count"), [(0.2, 3), (0.25, 3), (0.5, 2), (0.7, 1), (1.0, 0)])
def test_objects_are_those_of_at_least_the_score_that_is_asked_for(threshold, count, tmp_path):
    Image.new("RGB", (16, 12)).save(tmp_path / "a.png")
    assert len(find_objects(detector(), Image.new("RGB", (16, 12)), threshold)["scores"]) == count
    (found,) = predict_objects(detector(), [tmp_path / "a.png"], tmp_path / "out", threshold=threshold)
    expected = [
        ("green", 0.75, 1.0, 2.0, 9.0, 8.0),
        ("red", 0.5, 2.0, 3.0, 9.0, 8.0),
        ("green", 0.25, 3.0, 4.0, 9.0, 8.0),
    ]
    assert found.objects == expected[:count] and found.picture.is_file()


def test_detectors_are_judged_by_the_part_that_is_asked_for_with_their_masks(monkeypatch, tmp_path):
    folder = worlds.objects(tmp_path / "objects")
    asked = {}
    monkeypatch.setattr(trained_detector, "evaluate_detection", lambda *_, **settings: asked.update(settings))
    for split, count in (("validation", 3), ("train", 6)):
        found = judge_detector(detector("nowhere"), data=str(folder), split=split)
        assert found.count == count
    assert asked["masks"] is True
    assert judge_detector(detector(folder)).count == 3


def test_precision_is_printed_by_size_and_class():
    values = dict(zip(MEASURES, (40.0, 50.0, 60.0, float("nan"), 20.0, 10.0), strict=True))
    lines = precision_text(SimpleNamespace(box=values, mask={}, classes=(30.0, 50.0)), ["a", "b"]).splitlines()
    assert lines[1].split() == ["boxes", "40.0", "50.0", "60.0", "20.0", "10.0"]
    assert lines[-2].split() == ["a", "30.0"] and lines[-1].split() == ["b", "50.0"]


class Known:
    """A data set of four images of two classes."""

    classes, transform, broken = ("a", "b"), None, ()

    def __len__(self):
        return 4

    def __getitem__(self, place):
        return torch.zeros(3, 8, 8), place % 2

    def broken_paths(self):
        return []


def test_a_network_is_judged_on_what_is_asked_for(monkeypatch):
    asked = {}

    def load(name, **settings):
        asked.update(settings, name=name)
        return Known()

    monkeypatch.setattr("subquad.tasks.classification.trained_classifier.load_dataset", load)
    model = create_model("deit_tiny", img_size=8, patch_size=4, embed_dim=8, depths=(1,), num_heads=2, num_classes=2)
    trained = ImageNetwork("classify", model, ("a", "b"), "own", "folder", CPU, InputConfig((8, 8)))
    assert judge(trained, split="train", strict=True).result.count == 4
    assert asked == {"name": "own", "split": "train", "data_dir": "folder", "strict": True}
    images_of(trained, data="other")
    assert asked["name"] == "other" and asked["data_dir"] is None
    images_of(trained, data="other", data_dir="there")
    assert asked["data_dir"] == "there" and asked["split"] == "validation"
    with pytest.raises(SubquadError, match="they differ"):
        judge(ImageNetwork("classify", model, ("a", "c"), "own", None, CPU, InputConfig((8, 8))))


def test_images_are_of_the_size_that_is_asked_for(tmp_path):
    model = create_model("deit_tiny", img_size=(8, 12), patch_size=4, embed_dim=8, depths=(1,), num_heads=2)
    save_weights(model, tmp_path / "a.safetensors", {"classes": ["a"], "input": {}})
    assert open_trained(tmp_path / "a.safetensors").input.img_size == (8, 12)
    assert open_trained(tmp_path / "a.safetensors", img_size=16).input.img_size == (16, 16)


def test_weights_in_other_places_have_another_fingerprint():
    first = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    prints = set()
    for layers in ((0, 1), (1, 0)):
        trained = Trained("classify", nn.Sequential(*(first[k] for k in layers)), (), None, None, CPU)
        prints.add(trained.fingerprint)
    with torch.no_grad():
        first[0].weight.copy_(torch.tensor([[1.0, -1.0], [1.0, -1.0]]))
    prints.add(trained.fingerprint)
    assert len(prints) == 3


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_answers_that_are_no_numbers_are_no_accuracy(tmp_path, damage):
    model = create_model("deit_micro", depths=(1,), num_classes=10, img_size=8, patch_size=4).eval()
    with torch.no_grad():
        model.head.bias[3] = damage
    trained = opened_of(model)
    with pytest.raises(SubquadError, match="answers to digits are not finite"):
        judge(trained, batch_size=400)


def opened_of(model):
    classes = tuple(map(str, range(10)))
    return TrainedClassifier("classify", model, classes, "digits", None, CPU, InputConfig((8, 8)))


def test_one_class_alone_is_no_task():
    check_there_are_two("data", ["a", "b"])
    with pytest.raises(SubquadError, match="pictures has one class alone, 'images': nothing is to be told apart"):
        check_there_are_two("pictures", ["images"])
