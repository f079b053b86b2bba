"""What each task makes of a batch and of a judgement, and where its network starts from."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import worlds
from safetensors.torch import load_file

from subquad import SubquadError
from subquad.tasks.backbone_arguments import DENSE_AGENTS, backbone_arguments
from subquad.tasks.detection import DetectRecipe
from subquad.tasks.detection.detection_task import Detection
from subquad.tasks.segmentation import SegmentRecipe
from subquad.tasks.segmentation.segmentation_task import Segmentation
from subquad.tasks.sequences.lra_task import LongRange, LraRecipe
from subquad.tasks.task_table import make_task
from subquad.training import tested_comparison, train
from subquad.training.tested_comparison import compare_tested


def test_a_network_adds_its_own_loss_to_the_cross_entropy(tiny):
    task = make_task(tiny.replace(model="lavit_deit_tiny", depth=2, drop_path=0.0))
    model, images, labels = task.model.train(), torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    model.stages[0].blocks[0].attn.qkv.weight.data.normal_()
    loss = task.loss(model, (images, labels))
    own = model.auxiliary_loss()
    plain = task.objective.loss(model(images), labels)
    assert own > 0.01
    torch.testing.assert_close(loss - own, plain)


def test_weights_of_other_classes_start_everything_but_the_head(tiny, tmp_path):
    still = {"lr": 0.0, "warmup_lr": 0.0, "epochs": 1}
    train(tiny.replace(epochs=1), tmp_path / "ten")
    start = tmp_path / "ten" / "last.safetensors"
    train(tiny.replace(**still, num_classes=12, initial_checkpoint=str(start)), tmp_path / "twelve")
    first, second = load_file(start), load_file(tmp_path / "twelve" / "last.safetensors")
    for name, weight in second.items():
        assert len(weight) == 12 if name.startswith("head.") else torch.equal(weight, first[name]), name


def segmenting(logits, labels, **more):
    """What the task of segmentation makes of these logits."""
    holder = SimpleNamespace(model=SimpleNamespace(pyramid=SimpleNamespace(backbone=object())), **more)
    return Segmentation.loss(holder, lambda images: logits, (torch.zeros(2, 3, 4, 4), labels))


def test_pixels_without_a_class_are_neither_in_the_sum_nor_in_the_count():
    logits, auxiliary, labels = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    labels[:, :3] = 255
    first, second = (F.cross_entropy(one, labels, ignore_index=255) for one in (logits, auxiliary))
    torch.testing.assert_close(segmenting(logits, labels), first)
    # the second head counts 0.4, as the papers have it
    torch.testing.assert_close(segmenting((logits, auxiliary), labels), first + 0.4 * second)


@pytest.mark.parametrize("slide", [True, False])
def test_a_segmenter_is_judged_through_windows_where_the_recipe_says_so(slide, monkeypatch):
    seen = {}

    def evaluate(*arguments, **settings):
        seen.update(settings)
        return SimpleNamespace(miou=1.0, accuracy=2.0, class_accuracy=3.0)

    monkeypatch.setattr("subquad.tasks.segmentation.segmentation_task.evaluate_segmentation", evaluate)
    recipe = SegmentRecipe(slide=slide)
    task = SimpleNamespace(recipe=recipe, input=SimpleNamespace(crop=(32, 48)), num_classes=3)
    row = Segmentation.judge(task, None, None, torch.device("cpu"), None)
    assert seen["window"] == ((32, 48) if slide else None)
    assert row == {"miou": 1.0, "accuracy": 2.0, "class_accuracy": 3.0}


def test_a_number_of_classes_that_the_data_do_not_have_is_refused(tmp_path):
    recipe = DetectRecipe(data=str(worlds.objects(tmp_path / "objects")), num_classes=3, head="retinanet")
    with pytest.raises(SubquadError, match="has 2 classes, not 3"):
        Detection(recipe)


def test_sizes_that_no_object_has_count_nothing(monkeypatch):
    found = SimpleNamespace(box={"ap": 40.0, "ap_large": float("nan")}, mask={"ap": 30.0})
    monkeypatch.setattr("subquad.tasks.detection.detection_task.evaluate_detection", lambda *_, **__: found)
    task = SimpleNamespace(eval_images=SimpleNamespace(truth={}), masks=True)
    row = Detection.judge(task, None, None, torch.device("cpu"), None)
    assert row == {"box_ap": 40.0, "box_ap_large": 0.0, "mask_ap": 30.0}


@pytest.mark.parametrize("host", DENSE_AGENTS)
def test_dense_networks_have_the_agents_of_their_own_host(host):
    recipe = SegmentRecipe(model=f"{host}_tiny", attention="agent")
    assert backbone_arguments(recipe, True)["pooled_agents"] == list(DENSE_AGENTS[host])
    assert "pooled_agents" not in backbone_arguments(recipe, False)


def test_every_seed_of_the_arena_is_judged_by_its_own_run(monkeypatch, tmp_path):
    runs = ["softmax-s0", "softmax-s1"]
    row = {"mechanism": "softmax", "runs": runs, "top1_mean": 50.0, "params": 1, "train_seconds": 1.0}
    monkeypatch.setattr(tested_comparison, "compare", lambda *_: [row])
    monkeypatch.setattr(tested_comparison, "open_trained", lambda run, task: run)
    accuracies = {"softmax-s0": 30.0, "softmax-s1": 40.0}
    judged = lambda run, **_: {"top1": accuracies[run.name], "loss": 1.0, "count": 7}  # noqa: E731
    monkeypatch.setattr(LongRange, "test", judged)
    monkeypatch.setattr(LongRange, "guesses", lambda facts: {"chance": 10.0})
    table = compare_tested(LraRecipe(), ["softmax"], [0, 1], tmp_path)
    assert table.rows[0].accuracies == (30.0, 40.0) and table.rows[0].text == "35.00 ± 7.07"
