"""A converted network's whole file is opened alone: it says how its teacher is made, and needs nothing else of it."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import subquad
from subquad.conversion import save_converted, save_delta
from subquad.errors import SubquadError
from subquad.runs import open_trained
from subquad.tasks import TASKS, ImageNetwork

# networks are trained and written here
pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parents[1] / "fixtures" / "runs"
RUNS = {
    json.loads(path.read_text())["task"]: path.parent
    for path in sorted(FIXTURES.glob("*/run.json"))
    if "lavit" not in path.parent.name  # whose layers hand on their scores
}
OF_IMAGES = sorted(set(RUNS) & set(TASKS) - {"lra"})
FILES = {
    "named": ("vit_tiny_patch16_224", {"num_classes": 3}, 224),
    "dinov2": ("vit_small_patch14_dinov2", {"num_classes": 0}, 70),
    "swin": ("swin_tiny_patch4_window7_224", {"num_classes": 3}, 224),
}


def numbers(model):
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def kept_alone(opened, folder, attention="linear", **settings):
    """The file of a student of what was opened, and the student."""
    torch.manual_seed(1)
    student = subquad.convert(opened.model, attention, **settings).eval()
    for parameter in student.parameters():
        parameter.data.add_(0.01 * torch.randn_like(parameter))
    save_converted(student, folder / "student.safetensors", about={"made": opened.made})
    return folder / "student.safetensors", student


def test_there_is_a_run_of_every_task_that_takes_images():
    assert OF_IMAGES and all(hasattr(TASKS[name], "opened") for name in OF_IMAGES)


@pytest.mark.parametrize("task", OF_IMAGES)
def test_students_of_ours_need_no_teacher(task, tmp_path):
    teacher = open_trained(RUNS[task], device="cpu")
    file, student = kept_alone(teacher, tmp_path)
    alone = open_trained(file, device="cpu")
    assert (type(alone), alone.task, alone.classes, alone.data) == (
        type(teacher),
        teacher.task,
        teacher.classes,
        teacher.data,
    )
    assert not alone.model.training
    assert_close(numbers(alone.model), numbers(student), rtol=0, atol=0)
    if isinstance(alone, ImageNetwork):
        assert alone.input == teacher.input
    assert alone.image_network().input == teacher.image_network().input
    for key in ("mean", "std"):
        assert tuple(alone.model.pretrained_cfg[key]) == tuple(teacher.model.pretrained_cfg[key])
    # a change of it is still a change of the teacher's weights
    save_delta(alone.model, tmp_path / "delta.safetensors", teacher=teacher.model)
    it = r"a classifier \(`subquad eval`, `subquad predict`\)" if task == "classify" else f"for `subquad {task}`"
    with pytest.raises(SubquadError, match=f"it is {it}, not "):
        open_trained(file, task=next(name for name in TASKS if name != task))


@pytest.mark.parametrize("kind", FILES)
def test_students_of_timms_need_no_teacher(kind, tmp_path):
    name, settings, px = FILES[kind]
    model = timm.create_model(name, **settings)
    save_file(model.state_dict(), tmp_path / "teacher.safetensors")
    size = None if kind == "swin" else px
    teacher = open_trained(f"timm/{name}={tmp_path / 'teacher.safetensors'}", img_size=size, device="cpu")
    file, student = kept_alone(teacher, tmp_path, img_size=px)
    (tmp_path / "teacher.safetensors").unlink()
    alone = open_trained(file, device="cpu")
    assert alone.input == teacher.input
    images = torch.randn(1, 3, px, px)
    assert_close(alone.model(images), student(images), rtol=0, atol=0)


def rewritten(file, change):
    """The file with another note, as a stranger may write it."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        note = json.loads(opened.metadata()["subquad"])
    change(note)
    save_file(load_file(file), file, metadata={"format": "pt", "subquad": json.dumps(note)})


WRONG = {
    "says nothing": (lambda note: note.update(made={}), "does not say how the network was made"),
    "no arguments": (lambda note: note.update(made=[1]), "does not say how the network was made"),
    "nobody's": (lambda note: note["made"].update(timm="vit_of_nobody"), "vit_of_nobody"),
    "no name": (lambda note: note["made"].update(timm=["vit"]), "does not say how the network was made"),
    "deep": (lambda note: note["made"]["note"]["creation"].update(depth=10**6), "depth = 1000000"),
    "wide": (lambda note: note["made"]["note"]["creation"].update(embed_dim=3 * 2**12), r"makes a network of \d+"),
    "unknown": (lambda note: note["made"]["note"]["creation"].update(wings=2), "its note makes no network: .*wings"),
    "for loading": (lambda note: note["made"]["note"]["creation"].update(pretrained=True), "argument pretrained"),
    "another": (lambda note: note["made"]["note"]["creation"].update(depth=11), "does not fit"),
    "input": (lambda note: note["made"]["note"]["input"].update(img_size="large"), "img_size"),
    "task": (lambda note: note["made"]["note"]["creation"].update(task="fly"), "'fly'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_notes_of_strangers_are_refused_in_one_line(wrong, tmp_path):
    name, settings, _ = FILES["named"]
    save_file(timm.create_model(name, **settings).state_dict(), tmp_path / "teacher.safetensors")
    teacher = open_trained(f"timm/{name}={tmp_path / 'teacher.safetensors'}", device="cpu")
    file, _ = kept_alone(teacher, tmp_path)
    change, said = WRONG[wrong]
    rewritten(file, change)
    with pytest.raises(SubquadError, match=said) as caught:
        open_trained(file, device="cpu")
    assert len(str(caught.value).splitlines()) == 1
