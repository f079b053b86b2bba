"""Runs as folders of the Hugging Face hub: they open in timm and here, with a card that says what they are."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch

import subquad
from subquad import SubquadError
from subquad.cli import main
from subquad.conversion import Plan, convert_run
from subquad.runs import hub_folder, save_for_hf

RUN = Path(__file__).parents[1] / "fixtures" / "runs" / "classify"


def test_a_run_opens_from_its_folder_in_timm_and_here(tmp_path, capsys):
    assert main(["upload", str(RUN), f"local-dir:{tmp_path / 'hub'}"]) == 0
    assert sorted(path.name for path in (tmp_path / "hub").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    trained = subquad.open_trained(RUN, device="cpu")
    images = torch.randn(2, 3, *trained.input.img_size)
    theirs = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True).eval()
    ours = subquad.open_trained(f"local-dir:{tmp_path / 'hub'}", device="cpu")
    with torch.inference_mode():
        assert torch.equal(theirs(images), trained.model(images))
        assert torch.equal(ours.model(images), trained.model(images))
    assert ours.classes == trained.classes and ours.input == trained.input
    by_path = subquad.open_trained(tmp_path / "hub", device="cpu")
    assert by_path.classes == trained.classes and torch.equal(by_path.model(images), trained.model(images))
    config = timm.data.resolve_model_data_config(theirs)
    assert tuple(config["input_size"][1:]) == trained.input.img_size and config["crop_pct"] == trained.input.crop_pct
    card = (tmp_path / "hub" / "README.md").read_text()
    facts = json.loads((RUN / "run.json").read_text())
    assert facts["command"] in card and (RUN / "recipe.yaml").read_text().strip() in card
    assert card.startswith("---\nlibrary_name: timm\n") and "top-1 %" in card and "agent attention" in card


def test_timm_moves_tables_of_oblong_images_from_the_grid_that_they_stand_on(tmp_path):
    made = subquad.create_model("deit_tiny", img_size=(64, 256), depths=[1], embed_dim=16, num_heads=2, num_classes=2)
    seen = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "squash"}
    subquad.save_weights(
        made, file := tmp_path / "x.safetensors", {"task": "classify", "classes": ["a", "b"], "input": seen}
    )
    folder = subquad.runs.save_for_hf(file, tmp_path / "hub")
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=128)
    made.set_input_size((128, 128))
    name = "stages.0.pos_embed.table"
    torch.testing.assert_close(theirs.state_dict()[name], made.state_dict()[name])


@pytest.mark.parametrize("classes", [["a", "b", "c"], []])
def test_every_output_has_a_name_for_timm(classes, tmp_path):
    model = subquad.create_model("deit_tiny", depth=1, img_size=32, num_classes=5)
    pixels = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "center"}
    note = {"task": "classify", "classes": classes, "input": pixels}
    subquad.save_weights(model, tmp_path / "a.safetensors", note)
    save_for_hf(tmp_path / "a.safetensors", tmp_path / "hub")
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert config["label_names"] == classes + [f"class {place}" for place in range(len(classes), 5)]


def test_weights_are_never_beside_what_was_said_of_others(tmp_path, monkeypatch):
    """A kill left the names of another network's classes beside them, which timm takes for theirs."""
    folder = save_for_hf(RUN, tmp_path / "hub")

    def interrupted(path, content, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(hub_folder, "write_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_for_hf(RUN, folder)
    assert not (folder / "config.json").exists()


def test_a_folder_without_a_name_is_not_the_one_that_one_stands_in(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["upload", str(RUN), "local-dir:"]) == 2
    assert "names no folder" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors"])
def test_files_of_somebody_else_are_not_written_over(name, tmp_path, capsys):
    """A project's README was replaced by the model card, without a word."""
    (tmp_path / name).write_text("# mine, about subquad")
    assert main(["upload", str(RUN), f"local-dir:{tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path} has {name} of somebody else" in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "# mine, about subquad"


def test_what_was_not_trained_here_is_refused_with_what_is_uploaded(tmp_path, capsys):
    """It was told to say timm/NAME --weights FILE, which `upload` does not take."""
    model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=12, num_heads=2, num_classes=2, img_size=32)
    timm.models.save_for_hf(model, tmp_path / "my-vit", safe_serialization=True)
    assert main(["upload", str(tmp_path / "my-vit"), f"local-dir:{tmp_path / 'hub'}"]) == 2
    said = capsys.readouterr().err
    assert "what was trained or converted here is uploaded" in said and "--weights" not in said
    assert not (tmp_path / "hub").exists()


def test_a_conversion_opens_from_its_folder_without_its_teacher(tmp_path, capsys):
    teacher = shutil.copytree(RUN, tmp_path / "teacher")
    plan = Plan(str(teacher), "digits", attention="linear", align_updates=0, distil_updates=0, batch_size=16)
    convert_run(plan, tmp_path / "student", max_judged=20)
    # what lay there was opened in the student's place
    save_for_hf(RUN, tmp_path / "hub")
    assert main(["upload", str(tmp_path / "student"), f"local-dir:{tmp_path / 'hub'}"]) == 0
    assert not (tmp_path / "hub/config.json").exists()
    student = subquad.open_trained(tmp_path / "student", device="cpu")
    shutil.rmtree(teacher)
    said = capsys.readouterr().out
    assert f"the weights and the model card are in {tmp_path / 'hub'}" in said
    for place in (tmp_path / "hub", f"local-dir:{tmp_path / 'hub'}"):
        opened = subquad.open_trained(place, device="cpu")
    images = torch.randn(2, 3, *student.input.img_size)
    with torch.inference_mode():
        assert torch.equal(opened.model(images), student.model(images))
    assert opened.classes == student.classes
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "# teacher, linear attention" in card and "| swapped | " in card and "(digits)" in card
    assert str(tmp_path) not in card
    (tmp_path / "student" / "student.safetensors").unlink()
    assert main(["upload", str(tmp_path / "student"), f"local-dir:{tmp_path / 'none'}"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not (tmp_path / "none").exists()


def test_a_repository_gets_the_same_files_and_is_opened_by_its_name(tmp_path, monkeypatch, capsys):
    made = {}

    class Hub:
        def __init__(self, **settings):
            pass

        def create_repo(self, name, private, exist_ok):
            made["repository"] = name, private
            return f"https://huggingface.co/{name}"

        def upload_folder(self, repo_id, folder_path, commit_message):
            for file in Path(folder_path).iterdir():
                (tmp_path / file.name).write_bytes(file.read_bytes())

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file, revision: tmp_path / file)
    assert main(["upload", str(RUN), "me/mine", "--private"]) == 0
    assert made["repository"] == ("me/mine", True) and "huggingface.co/me/mine" in capsys.readouterr().out
    opened, trained = subquad.open_trained("hf-hub:me/mine@main"), subquad.open_trained(RUN)
    assert opened.fingerprint == trained.fingerprint


def test_a_hub_that_refuses_is_one_line(tmp_path, monkeypatch):
    def refuse(*arguments, **settings):
        raise OSError("401 Client Error.\nRepository Not Found")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    for act in (lambda: subquad.open_trained("hf-hub:me/none"), lambda: subquad.runs.upload(RUN, "me/none")):
        with pytest.raises(SubquadError, match=r"me/none can't be .*401 Client Error. Repository Not Found"):
            act()
    with pytest.raises(SubquadError, match=r"me/none .* Not Found; `hf auth login` .* local-dir:FOLDER"):
        subquad.runs.upload(RUN, "me/none")
    with pytest.raises(SubquadError, match="no weight file at"):
        subquad.open_trained(f"local-dir:{tmp_path}")
    with pytest.raises(SubquadError):
        subquad.runs.save_for_hf(RUN.parent / "segment", tmp_path / "hub")
    assert not (tmp_path / "hub").exists()
