"""The Long Range Arena from the command line: trained, judged on the test set, resumed, and beside what is known."""

import json

import pytest
import torch
from mechanisms import assert_refused, refuses

from subquad import ATTENTION, SubquadError
from subquad.cli import main
from subquad.runs import open_trained
from subquad.tasks import load_recipe, recipe_names
from subquad.tasks.sequences import LongRange, LraRecipe
from subquad.tasks.sequences.lra_data import SEQUENCES
from subquad.tasks.sequences.lra_judging import guesses, judge_sequences
from subquad.tasks.sequences.lra_published import PUBLISHED

SMALL = ["--task", "listops", "--data-settings", "count=200,shortest=5,longest=24", "--max-length", "24"]
SMALL += [
    "--epochs",
    "2",
    "--updates-per-epoch",
    "2",
    "--warmup-updates",
    "1",
    "--batch-size",
    "8",
    "--embed-dim",
    "16",
]


@pytest.fixture
def runs(monkeypatch, tmp_path):
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    return ["--output", str(tmp_path)]


@pytest.mark.slow
def test_mechanisms_are_trained_judged_and_put_beside_what_is_published(runs, tmp_path, capsys):
    command = ["lra", *SMALL, *runs, "--attention", "linear", "agent:num_agents=4", "--seeds", "0", "1"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "root operator alone" in out and "chance" in out
    # what it reads are no images
    assert "2 updates of 8 sequences" in out and "sequences/s" in out and "image" not in out and "img" not in out
    assert "These runs do not compare with what is published" in out
    table = out[out.index("mechanism") :].split("\n\n")[0]
    assert max(map(len, table.splitlines())) <= 80
    folder = tmp_path / "lra-listops"
    content = json.loads((folder / "lra.json").read_text())
    assert [row["mechanism"] for row in content["rows"]] == ["linear", "agent:num_agents=4"]
    assert all(len(row["test"]) == 2 for row in content["rows"])
    assert {"name": "Skyformer", "source": "Chen et al.", "accuracy": 38.69} in content["published"]
    assert "| *root operator alone* |" in (folder / "lra.md").read_text()
    assert content["note"] in (folder / "lra.md").read_text()
    assert "max_length 24 in place of 2048" in content["note"] and "epochs 2 in place of 20" in content["note"]
    run = folder / "linear-s0"
    result = judge_sequences(open_trained(run), split="test").result
    assert result.count == 4 and result.top1 == content["rows"][0]["test"][0]
    # what has finished is kept, and its judgement, too
    (run / "test.json").write_text('{"top1": 77.0, "loss": 0, "count": 4}')
    assert main(command) == 0
    assert json.loads((folder / "lra.json").read_text())["rows"][0]["test"][0] == 77.0
    page = tmp_path / "report.html"
    assert main(["report", str(folder), "--no-scaling", "--output", str(page)]) == 0
    assert "Beside what is known" in page.read_text() and "Skyformer" in page.read_text()
    assert "These runs do not compare with what is published" in page.read_text()
    capsys.readouterr()
    assert main(["analyze", str(folder / "linear-s0"), "--images", str(tmp_path)]) == 2
    assert "it reads sequences" in capsys.readouterr().err
    # it was asked for the size of its images
    assert main(["export", str(folder / "linear-s0"), "--format", "pt2"]) == 2
    assert "it reads sequences" in capsys.readouterr().err


@pytest.mark.parametrize("task", SEQUENCES)
def test_runs_on_other_data_or_for_less_long_say_that_they_do_not_compare_with_what_is_published(task):
    recipe = load_recipe(task, LraRecipe)
    assert not LongRange.unlike_published(recipe.to_dict())
    assert not LongRange.unlike_published(recipe.replace(attention="pola", lr=1e-3, seed=3).to_dict())
    assert "epochs 1 in place of" in LongRange.unlike_published(recipe.replace(epochs=1).to_dict())
    assert "data_settings count=9 in place of" in LongRange.unlike_published(
        {"data": task, "data_settings": {"count": 9}}
    )


def test_settings_that_data_have_not_are_refused_before_the_first_run(runs, tmp_path, capsys):
    """They were behind the heading of a run, and a task without any was said to know "it has none"."""
    for task, setting, said in [
        ("pathfinder", "countt=9", "did you mean count"),
        ("image", "count=9", "the data of image are read and have no settings, got count: leave out data_settings"),
    ]:
        assert main(["lra", "--task", task, "--data-settings", setting, "--attention", "linear", *runs]) == 2
        shown = capsys.readouterr()
        assert said in shown.err and not shown.out and not list(tmp_path.iterdir())


def test_what_is_unlike_the_published_is_said_as_flags_have_it():
    """It was said as Python has it, {'count': 50000} and None."""
    said = LongRange.unlike_published({"data": "image", "data_settings": {}, "max_train_images": 7})
    assert said.endswith(": max_train_images 7 in place of none.")
    usual = load_recipe("listops_small", LraRecipe).to_dict()
    said = LongRange.unlike_published(usual)
    assert "data_settings count=50000,shortest=64,longest=256 in place of none" in said


@pytest.mark.slow
def test_a_broken_off_run_goes_on(runs, tmp_path, monkeypatch, capsys):
    from subquad.training import loop

    command = ["lra", *SMALL, *runs, "--attention", "linear"]
    whole = loop.Trainer._epoch

    def stop_at_second(self, epoch):
        if epoch:
            raise KeyboardInterrupt
        return whole(self, epoch)

    monkeypatch.setattr(loop.Trainer, "_epoch", stop_at_second)
    assert main(command) == 130
    assert "interrupted: 1 of 2 epochs are kept, the same command goes on" in capsys.readouterr().err
    monkeypatch.setattr(loop.Trainer, "_epoch", whole)
    assert main(command) == 0
    broken = open_trained(tmp_path / "lra-listops" / "linear-s0" / "last.safetensors")
    assert main([*command, "--experiment", "unbroken"]) == 0
    unbroken = open_trained(tmp_path / "unbroken" / "linear-s0" / "last.safetensors")
    for one, other in zip(broken.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", recipe_names(LraRecipe))
def test_every_recipe_loads_and_takes_every_mechanism(name):
    from subquad.tasks.sequences.lra_task import LongRange

    recipe = load_recipe(name, LraRecipe)
    what = SEQUENCES[recipe.data]
    for attention, mechanism in ATTENTION.items():
        if what.padded and refuses(attention, "padding"):
            assert_refused(
                attention, lambda attention=attention: network_of(recipe.replace(attention=attention)), "padding"
            )
            continue
        network = LongRange.network(recipe.replace(attention=attention))
        assert {type(block.attn.inner) for block in network.blocks} == {mechanism}
        assert (len(network.blocks), network.max_length) == (recipe.depth, recipe.max_length)
        assert (network.num_classes, network.pairs) == (what.num_classes, what.pairs)
        assert len(network.embed.weight) >= what.symbols


def test_the_usual_set_up_is_as_published():
    recipe = load_recipe("listops", LraRecipe)
    assert sum(p.numel() for p in network_of(recipe).parameters()) == 209_802
    assert recipe.epochs * recipe.updates_per_epoch == 5000 and recipe.warmup_updates == 1000
    pathfinder = load_recipe("pathfinder", LraRecipe)
    assert sum(p.numel() for p in network_of(pathfinder).parameters()) == 173_954
    assert pathfinder.epochs * pathfinder.updates_per_epoch == 62_400


def network_of(recipe):
    from subquad.tasks.sequences.lra_task import LongRange

    return LongRange.network(recipe)


def test_published_tables_have_the_averages_that_are_printed():
    printed = {
        "Tay et al.": (54.39, 46.06, 50.55, 50.67, 51.41, 53.46),
        "Chen et al.": (57.37, 58.56, 58.93, 54.69, 53.73, 58.00, 58.99, 59.05, 59.39),
        "PolaFormer": (58.14, 54.57, 55.08, 56.62, 57.37, 57.90, 59.66, 60.72, 60.47, 60.57),
    }
    for source, averages in printed.items():
        found = [sum(row.on(task) for task in SEQUENCES) / 5 for row in PUBLISHED if row.source == source]
        assert found == pytest.approx(averages, abs=0.011)


@pytest.mark.slow
def test_the_root_operator_alone_is_worth_what_is_known(monkeypatch, tmp_path):
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path))
    found = guesses("listops", {"count": 5000})
    assert found["chance"] == 10
    # of a hundred test expressions only
    assert found["root operator alone"] == pytest.approx(36.3, abs=12)
    assert guesses("pathfinder", {}) == {"chance": 50}


def test_complaints_are_one_line(runs, tmp_path, capsys):
    for wrong, text in [
        (["--task", "listops", "--config", "image"], "the recipe image is for image"),
        (["--task", "text"], "text is not ours to give away"),
        ([*SMALL, "--attention", "sofmax"], "unknown attention 'sofmax'"),
        ([*SMALL, "--vocab-size", "4"], "listops has 16 symbols, a vocab_size of 4 is too few"),
        ([*SMALL, "--updates-per-epoch", "900"], "updates_per_epoch goes from 1 to 24"),
    ]:
        assert main(["lra", *wrong, *runs]) == 2
        err = capsys.readouterr().err
        assert text in err and err.count("\n") == 1, err
    with pytest.raises(SubquadError, match="holds no best"):
        open_trained(tmp_path)
