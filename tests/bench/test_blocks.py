"""What mechanisms are measured against computes the same as they do, and the figures are what they are called."""

import csv
import json

import pytest
import torch
from mechanisms import build, inputs_of

from subquad import ATTENTION, SubquadError, TokenGrid
from subquad.bench import BlockRow, blocks_table, describe_device, measure_blocks, save_rows
from subquad.bench.textbook import TEXTBOOK
from subquad.cli import main

every_mechanism = pytest.mark.parametrize("name", ATTENTION)


@every_mechanism
@pytest.mark.parametrize("grid", [TokenGrid(4, 7), TokenGrid(6, 6)], ids=str)
def test_the_textbook_form_computes_what_the_mechanism_does(name, grid):
    module, supply = build(name, grid), inputs_of(build(name, grid), grid)
    expected = module(**supply, grid=grid, kv_grid=grid)
    torch.testing.assert_close(TEXTBOOK[name](module, supply, grid), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("backward", [False, True])
def test_every_mechanism_is_measured_against_all_it_is_compared_with(backward):
    rows = measure_blocks(list(ATTENTION), [16, 36], dim=16, num_heads=2, repeats=2, backward=backward)
    assert [(row.mechanism, row.tokens) for row in rows] == [(name, n) for n in (16, 36) for name in ATTENTION]
    for row in rows:
        assert row.over_projections == row.block_ms / row.projections_ms > 0
        assert row.textbook_gain == row.textbook_ms / row.core_ms > 0 and row.peak_mb > 0
        assert row.softmax_gain == row.softmax_ms / row.core_ms > 0


def test_softmax_is_left_out_where_it_would_take_too_long():
    (row,) = measure_blocks(["linear", "softmax"], [64], dim=16, num_heads=2, repeats=1, max_softmax_tokens=49)
    assert row.mechanism == "linear" and row.softmax_ms is None and row.softmax_gain is None
    assert "None" not in blocks_table([row])


def test_softmax_is_compared_with_where_its_textbook_form_would_fill_the_memory():
    linear, softmax = measure_blocks(["linear", "softmax"], [4225], dim=2, num_heads=1, repeats=1)
    assert linear.softmax_gain > 0 and softmax.textbook_ms is None and softmax.textbook_gain is None
    assert "None" not in blocks_table([linear, softmax])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mechanisms": ["agnet"]}, "unknown attention 'agnet'"),
        ({"tokens": [200]}, "200 tokens make no square grid: use 196 or 225"),
        ({"dtype": "fp64"}, "unknown dtype 'fp64'"),
        ({"num_heads": 5}, "5 heads do not divide a width of 192"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(settings, message):
    with pytest.raises(SubquadError, match=message):
        measure_blocks(**{"mechanisms": ["linear"], "tokens": [16], "repeats": 1} | settings)


def test_rows_are_written_as_csv_or_json(tmp_path):
    row = BlockRow("linear", 16, 2.0, 1.0, 0.5, 1.0, None, 2.0, 2.0, None, 0.1, 3.0)
    save_rows([row], tmp_path / "rows.csv", {})
    with (tmp_path / "rows.csv").open() as file:
        assert next(csv.DictReader(file))["over_projections"] == "2.0"
    save_rows([row], tmp_path / "rows.json", {"device": "here"})
    assert json.loads((tmp_path / "rows.json").read_text())["about"] == {"device": "here"}
    with pytest.raises(SubquadError, match=r"written as \.csv or \.json, got rows\.txt"):
        save_rows([row], tmp_path / "rows.txt", {})


def test_the_command_prints_the_table_and_names_the_device(capsys, tmp_path):
    sizes = ["--tokens", "16", "--dim", "16", "--num-heads", "2", "--repeats", "1"]
    assert main(["bench", "--attention", "linear", "agent", *sizes, "--output", str(tmp_path / "b.csv")]) == 0
    shown = capsys.readouterr().out
    assert "agent" in shown and "CPU (" in shown and max(map(len, shown.splitlines())) < 120
    assert main(["bench", *sizes, "--device", "nowhere"]) == 2
    assert "device 'nowhere' can't be used" in capsys.readouterr().err
    assert describe_device("cpu").startswith("CPU")
