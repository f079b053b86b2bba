"""Damage of runs and of weight files is noticed: flipped bits, other files, what is missing."""

import json
import shutil

import pytest
import torch
from run_parts import complaint, failing_now, little_garbage, short, short_of  # noqa: F401
from safetensors.torch import save_file

from subquad.cli import main
from subquad.errors import SubquadError
from subquad.models import create_model, read_weights, save_weights
from subquad.runs.run_state import State, load_state, save_state
from subquad.training import train
from subquad.training.loop import Trainer
from subquad.weights.digest import DIGEST

# damage is noticed


def flipped(content, place, bit):
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def state_of(content, path):
    path.write_bytes(content)
    return load_state(path)


def equal(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second


def some_bits(size, count):
    return [(int(place), int(place) % 8) for place in torch.linspace(0, size - 1, count).long()]


def test_no_flipped_bit_of_a_state_gives_another_state(tmp_path):
    model = torch.nn.Linear(5, 7)
    state = State(1, 2, 3, 4.0, 0, model.state_dict(), {"state": {0: torch.rand(5)}}, {}, {}, [{"epoch": 0}])
    save_state(state, tmp_path / "last.pt")
    content, whole = (tmp_path / "last.pt").read_bytes(), load_state(tmp_path / "last.pt")
    noticed = 0
    for place, bit in some_bits(len(content), 300):
        try:
            assert equal(vars(state_of(flipped(content, place, bit), tmp_path / "x.pt")), vars(whole)), place
        except SubquadError as error:
            assert "\n" not in str(error)
            noticed += 1
    # what fills the file up to the next 64 bytes is nobody's
    assert noticed > 50
    place = content.index(model.weight.detach().numpy().tobytes())
    with pytest.raises(SubquadError, match=r"checksum of .* is wrong"):
        state_of(flipped(content, place, 3), tmp_path / "x.pt")


def test_no_flipped_bit_of_a_weight_file_gives_other_weights(tmp_path):
    model = create_model("linear_deit_tiny", num_classes=2, depths=(1,), embed_dim=16, num_heads=1)
    save_weights(model, tmp_path / "a.safetensors", {"classes": ["dark", "light"]})
    content, (weights, note) = (tmp_path / "a.safetensors").read_bytes(), read_weights(tmp_path / "a.safetensors")
    header = int.from_bytes(content[:8], "little") + 8
    places = [*some_bits(header, 200), *((header + place, bit) for place, bit in some_bits(len(content) - header, 40))]
    noticed = 0
    for place, bit in places:
        (tmp_path / "b.safetensors").write_bytes(flipped(content, place, bit))
        try:
            other, said = read_weights(tmp_path / "b.safetensors")
        except SubquadError as error:
            assert "\n" not in str(error)
            noticed += 1
        else:
            # the digest's own name is all that may be lost
            assert equal(weights, other) and said == note, place
    assert noticed > 200


def test_files_of_earlier_versions_open(copy, tmp_path):
    weights, note = read_weights(copy / "last.safetensors")
    save_file(weights, tmp_path / "old.safetensors", metadata={"format": "pt", "subquad": json.dumps(note)})
    assert equal(read_weights(tmp_path / "old.safetensors")[0], weights)
    old = torch.load(copy / "last.pt", weights_only=True)
    del old["rows"]
    torch.save(old, copy / "last.pt")
    (copy / "summary.json").unlink()
    assert train(short_of(copy), copy, resume=True)["epochs"] == 2


def test_the_digest_is_in_every_weight_file_that_is_written(run):
    from safetensors import safe_open

    for file in run.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert len(opened.metadata()[DIGEST]) == 64


DAMAGES = {
    "empty": lambda file: file.write_bytes(b""),
    "garbage": lambda file: file.write_bytes(bytes(range(256)) * 3),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "null": lambda file: file.write_text("null\n"),
    "a list": lambda file: file.write_text("[1]\n"),
    "another": lambda file: file.write_text('{"epoch": "x", "settings": 3}\n'),
    "missing": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "no one's": lambda file: (file.unlink(), file.symlink_to("nowhere")),
}
FILES = ("recipe.yaml", "run.json", "metrics.jsonl", "metrics.csv", "last.pt", "best.safetensors", "summary.json")


def damaged(copy, file, damage):
    """A run of which one file is damaged, broken off."""
    if file != "summary.json":
        (copy / "summary.json").unlink()
    DAMAGES[damage](copy / file)
    return copy


def quietly(capsys, *argv):
    """Carry out a command that ends well or in one line."""
    code = main([str(word) for word in argv])
    said = capsys.readouterr().err
    assert code in (0, 2), said
    assert said.count("\n") == (code == 2) and "Traceback" not in said, said
    return code


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_gone_on_with_or_refused_in_one_line(damage, run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Trainer, "_epoch", lambda self, epoch: failing_now())
    codes = {}
    for file in FILES:
        copy = damaged(shutil.copytree(run, tmp_path / file), file, damage)
        codes[file] = quietly(capsys, "train", "--resume", copy)
        quietly(capsys, "report", copy, "--no-scaling", "--output", tmp_path / "page.html")
    # what follows from the state is written anew, where something can be
    if damage not in ("a folder", "no one's"):
        assert codes["run.json"] == codes["metrics.jsonl"] == codes["summary.json"] == 0
    assert codes["recipe.yaml"] == codes["last.pt"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_no_command_ends_in_a_trace_over_a_damaged_run(file, run, pictures, tmp_path, capsys):
    image = next((pictures / "val").rglob("*.png"))
    for damage in ("garbage", "empty", "another", "a folder"):
        folder = tmp_path / damage
        copy = damaged(shutil.copytree(run, folder / "linear-s42"), file, damage)
        quietly(capsys, "eval", copy)
        quietly(capsys, "predict", image, "--checkpoint", copy)
        quietly(capsys, "analyze", copy, "--images", image, "--measures", "entropy", "--output", folder / "analysis")
        quietly(capsys, "train", "--config", copy / "recipe.yaml", "--output", folder, "--experiment", copy.name)
        recipe = ["--config", run / "recipe.yaml", "--attention", "linear", "--seeds", "42"]
        quietly(capsys, "compare", *recipe, "--output", tmp_path, "--experiment", folder.name)


@pytest.mark.slow
def test_a_state_of_another_network_is_one_line(pictures, copy, tmp_path, capsys):
    train(short(pictures, embed_dim=16, epochs=1), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "last.pt", copy / "last.pt")
    (copy / "summary.json").unlink()
    assert "does not fit the recipe beside it" in complaint(capsys, "train", "--resume", copy)


def test_what_is_missing_is_not_quietly_made_anew(copy, capsys):
    (copy / "summary.json").unlink()
    (copy / "best.safetensors").rename(copy / "mine")
    assert "best.safetensors, the weights of epoch" in complaint(capsys, "train", "--resume", copy)
    (copy / "mine").rename(copy / "best.safetensors")
    (copy / "last.pt").unlink()
    assert "last.pt is missing, 2 epochs" in complaint(capsys, "train", "--resume", copy)


def test_the_best_epoch_is_restored(pictures, tmp_path):
    """With the best of an earlier epoch, which no later one reaches."""
    run = tmp_path / "run"
    train(short(pictures, epochs=1), run)
    state = load_state(run / "last.pt")
    state.best, state.best_epoch = 101.0, 7
    save_state(state, run / "last.pt")
    (run / "summary.json").unlink()
    (run / "best.safetensors").write_bytes(b"kept")
    summary = train(short(pictures, epochs=1), run, resume=True)
    assert (summary["best_top1"], summary["best_epoch"]) == (101.0, 7)
    # and an epoch more, which is not better
    recipe = short(pictures)
    (run / "recipe.yaml").write_text(recipe.to_yaml())
    (run / "summary.json").unlink()
    summary = train(recipe, run, resume=True)
    assert (summary["best_top1"], summary["best_epoch"], summary["epochs"]) == (101.0, 7, 2)
    assert (run / "best.safetensors").read_bytes() == b"kept"
