"""`scripts/evidence.py`: what it trains can be trained, is trained once, and its page says how many seeds there are."""

import sys
import threading
from pathlib import Path

import pytest
import torch

from subquad.attention import ATTENTION
from subquad.data.archives import locked
from subquad.grid import TokenGrid
from subquad.tasks import task_named
from subquad.tasks.recipe_files import load_recipe


@pytest.fixture
def evidence(monkeypatch):
    """The script, and mechanisms that are gone afterwards."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    monkeypatch.setattr(ATTENTION, "_entries", dict(ATTENTION.loaded))
    import evidence

    monkeypatch.setattr(evidence.os, "nice", lambda step: None)
    monkeypatch.setattr(evidence.signal, "signal", lambda *words: None)
    monkeypatch.setattr(torch.backends.cuda, "enable_flash_sdp", lambda wanted: None)
    return evidence


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

    one = {"epochs": 1, "warmup_epochs": 0}
    rows = evidence_tables.plain("softmax", "linear:local=true")
    table = evidence_tables.Evidence("digits", "Digits", "classify", "digits", None, one, rows, (0, 1))
    monkeypatch.setattr(evidence_tables, "TABLES", (table,))
    monkeypatch.setattr(evidence_page, "TABLES", (table,))
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
    assert "linear_localtrue-s0: " in call("--speed")
    assert all(run["ms"] > 0 for name, run in evidence.read(tmp_path / "done.json").items() if name.endswith("s0"))
