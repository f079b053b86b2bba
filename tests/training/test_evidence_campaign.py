"""`scripts/evidence.py`: what it trains can be trained, is trained once, and its page says how many seeds there are."""

import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch

from subquad import use_backend
from subquad.analysis import measure_network
from subquad.attention import ATTENTION, PolaAttention
from subquad.data.archives import locked
from subquad.grid import TokenGrid
from subquad.models import create_model
from subquad.substituting import substituted
from subquad.tasks import task_named
from subquad.tasks.recipe_files import load_recipe


@pytest.fixture
def evidence(monkeypatch):
    """The script, and mechanisms that are gone afterwards."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    monkeypatch.setattr(ATTENTION, "_entries", dict(ATTENTION.loaded))
    import evidence

    monkeypatch.setattr(evidence, "give_way", lambda: None)
    monkeypatch.setattr(evidence.signal, "signal", lambda *words: None)
    monkeypatch.setattr(torch.backends.cuda, "enable_flash_sdp", lambda wanted: None)
    return evidence


def test_a_row_that_is_not_there_ends_the_script(evidence):
    from evidence_tables import cells

    assert next(cells(["reach"], ["linear_localtrue"])).row.attention == "linear:local=true"
    with pytest.raises(SystemExit, match=r"there is no linear_local, of .*linear_localtrue"):
        next(cells(["reach"], ["linear_local"]))


def test_a_mechanism_without_a_part_is_what_its_weights_say(evidence):
    from ablated_attention import ABLATED

    grid, generator = TokenGrid(3, 4), torch.Generator().manual_seed(0)
    absent = torch.arange(12) > torch.tensor([[11], [7]])
    for name, cls in ABLATED.items():
        layer = cls(8, 2, grid=grid, kv_grid=grid).double()
        layer.local = None
        supply = {word: torch.randn(2, 2, 12, 4, dtype=torch.float64, generator=generator) for word in "qkvg"}
        supply |= {"x": torch.randn(2, 12, 8, dtype=torch.float64, generator=generator), "padding": absent}
        given = {word: supply[word] for word in cls.inputs}
        y = layer(**given, grid=grid, kv_grid=grid)
        weights = layer.weights(**{w: t for w, t in given.items() if w != "v"}, grid=grid, kv_grid=grid)
        values = supply["v"].chunk(weights.shape[2], dim=-1)
        expected = torch.cat([weights[:, :, s] @ part for s, part in enumerate(values)], dim=-1)
        expected = expected * supply["g"] if "g" in cls.inputs else expected
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10, msg=name)


def test_entropy_with_other_powers_changes_nothing_else(evidence):
    from findings import by_layer, entropy_with

    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = create_model("deit_tiny", attention="pola", num_classes=2, **sizes).eval()
    batches = torch.randn(4, 3, 16, 16).split(2)
    # untrained powers are 3
    own = by_layer(model, batches, "entropy")["entropy"]
    assert entropy_with(model, batches, 3.0) == pytest.approx(own)
    assert all(one > other for one, other in zip(entropy_with(model, batches, 1.0), own, strict=True))
    assert by_layer(model, batches, "entropy")["entropy"] == own
    # what later layers get is what earlier ones give with these powers, whoever computes it
    with substituted(PolaAttention, "powers", lambda layer: torch.full_like(layer.power, 2.0)), use_backend("eager"):
        replaced = by_layer(model, batches, "entropy")["entropy"]
    assert entropy_with(model, batches, 2.0) == pytest.approx(replaced, rel=1e-4)
    # nor does it matter which powers could have been learned, if any
    narrow = create_model("deit_tiny", attention="pola:alpha=0", num_classes=2, **sizes).eval()
    narrow.load_state_dict(model.state_dict())
    assert entropy_with(narrow, batches, 2.0) == pytest.approx(replaced, rel=1e-4)


def test_results_wait_for_each_other(evidence, tmp_path):
    path = tmp_path / "done.json"
    threads = [threading.Thread(target=evidence.keep, args=(path, {f"t/row-s{seed}": {}})) for seed in range(8)]
    with locked(path):
        for thread in threads:
            thread.start()
        evidence.write(path, {"t/other-s0": {}})
    for thread in threads:
        thread.join()
    assert evidence.read(path).keys() == {"t/other-s0", *(f"t/row-s{seed}" for seed in range(8))}


def test_tables_are_of_tasks_columns_and_data(evidence):
    from evidence_tables import TABLES, cells

    names = [table.name for table in TABLES]
    assert len(set(names)) == len(names)
    for table in TABLES:
        assert table.metric in (None, *(column.entry for column in task_named(table.task).columns))
        evidence.recipe_of(next(cells([table.name])), Path("data"))


def test_rows_with_a_part_changed_stand_beside_the_whole_seed_by_seed(evidence):
    from evidence_page import parts_lines
    from evidence_tables import TABLES

    changed = [(table, row) for table in TABLES for row in table.rows if row.whole]
    assert {table.name for table, _ in changed} == {"ablations", "brief", "reach"}
    for table, row in changed:
        rows = {other.name: other for other in table.rows}
        assert rows[row.whole].whole is None and row.attention != rows[row.whole].attention, row
    table = next(table for table in TABLES if table.name == "brief")
    found = {row.name: {} for row in table.rows}
    found |= {"inline": {0: {"value": 70.0}, 1: {"value": 71.0}}, "inline_localfalse": {1: {"value": 69.5}}}
    assert parts_lines(table, found)[-1] == "| inline_localfalse | inline | -1.5 | 1 |"


def test_a_mechanism_without_a_part_is_that_whoever_computes_it(evidence):
    from ablated_attention import ABLATED

    grid, generator = TokenGrid(4, 4), torch.Generator().manual_seed(0)
    supply = {word: torch.randn(2, 2, 16, 8, generator=generator) for word in "qkvg"}
    supply |= {"x": torch.randn(2, 16, 16, generator=generator), "padding": None}
    for name, cls in ABLATED.items():
        layer, given = cls(16, 2, grid=grid, kv_grid=grid), {word: supply[word] for word in cls.inputs}
        with torch.no_grad():
            y = layer(**given, grid=grid, kv_grid=grid)
            with use_backend("eager"):
                expected = layer(**given, grid=grid, kv_grid=grid)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_a_mechanism_without_a_part_is_measured(evidence):
    from ablated_attention import ABLATED, register

    register()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for name in ABLATED:
        model = create_model("deit_tiny", attention=name, img_size=32, patch_size=8, depth=1, num_classes=3)
        assert measure_network(model.eval(), [images]), name


@pytest.mark.slow
def test_every_row_is_a_network(evidence):
    from ablated_attention import register
    from evidence_tables import TABLES

    register()
    for table in TABLES:
        task = task_named(table.task)
        recipe = load_recipe(table.recipe, task.recipe_class)
        for row in table.rows:
            task.check_network(recipe.replace(attention=row.attention, **table.changes, **row.changes))
        assert len({row.name for row in table.rows}) == len(table.rows)


@pytest.mark.slow
def test_what_is_done_is_not_trained_again(evidence, tmp_path, monkeypatch, capsys):
    import evidence_page
    import evidence_tables

    one = {"epochs": 1, "warmup_epochs": 0, "max_train_images": 128}
    rows = evidence_tables.plain("softmax", "linear:local=true")
    table = evidence_tables.Evidence(
        "digits", "Digits", "classify", "digits", None, one, rows, (0, 1), looked_into=True
    )
    monkeypatch.setattr(evidence_tables, "TABLES", (table,))
    monkeypatch.setattr(evidence_page, "TABLES", (table,))
    monkeypatch.setattr(evidence, "LOOKED_AT", 16)
    files = ["--output", str(tmp_path / "runs"), "--done", str(tmp_path / "done.json")]

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["evidence.py", *files, *words])
        evidence.main()
        return capsys.readouterr().out

    assert "0 of   4 runs" in call("--status")
    told = [line for line in call("--data", str(tmp_path)).splitlines() if line.startswith("—")]
    # a seed of all rows before the next one
    assert told == [f"— digits/{row}-s{seed}" for seed in (0, 1) for row in ("softmax", "linear_localtrue")]
    assert "4 of   4 runs" in call("--status")
    assert "—" not in call("--data", str(tmp_path))
    lines = evidence_page.page(evidence.read(tmp_path / "done.json")).splitlines()
    row = next(line for line in lines if line.startswith("| linear_localtrue"))
    assert "±" in row and "| 2 |" in row and " to " in row
    found = (done := evidence.read(tmp_path / "done.json"))["digits/softmax-s0"]["findings"]
    assert found["images"] == 16 and found["confused"] >= 0 and 0 <= found["removed"]["local 49"] <= 100
    assert "—" not in call("--analyze")
    # what was trained before it was looked into, and where it is gone is trained again
    unseen = [name for name in done if name.endswith("s0")]
    for name in unseen:
        done[name] = {"ms": 2.0, **done[name]}
        del done[name]["findings"]
    shutil.rmtree(tmp_path / "runs" / unseen[0])
    evidence.write(tmp_path / "done.json", done)
    assert "—" not in call("--data", str(tmp_path)) and call("--analyze").split("— ")[1:] == [f"{unseen[1]}\n"]
    assert f"— {unseen[0]}\n" in (told := call("--analyze", "--data", str(tmp_path))) and told.count("—") == 1
    again = evidence.read(tmp_path / "done.json")
    assert all(again[name]["ms"] == 2.0 and again[name]["findings"] for name in unseen)
    assert again[unseen[0]]["value"] == done[unseen[0]]["value"]
    assert "Means over layers" in evidence_page.page(evidence.read(tmp_path / "done.json"))
    assert "linear_localtrue-s0: " in call("--speed")
    timed = [run for name, run in evidence.read(tmp_path / "done.json").items() if name.endswith("s0")]
    assert len(timed) == 2 and all(run[key] > 0 for run in timed for key in evidence_page.COSTS)
    # more than a number for each of the images' pixels
    assert all(run["step_mb"] > run["step_batch"] * 64 * 4 / 2**20 for run in timed)
