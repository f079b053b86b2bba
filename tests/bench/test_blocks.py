"""What mechanisms are measured against computes the same as they do, and the figures are what they are called."""

import csv
import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from mechanisms import build, inputs_of

import subquad
from subquad import ATTENTION, SubquadError, TokenGrid
from subquad.attention import traits_of
from subquad.benchmarks import (
    blocks_table,
    describe_device,
    faster_than_softmax,
    measure_blocks,
    measure_networks,
    save_rows,
)
from subquad.benchmarks.floors import moved_bytes
from subquad.benchmarks.layers_on_squares import layer_on_tokens
from subquad.benchmarks.textbook import TEXTBOOK
from subquad.cli import main
from subquad.models.assembling import settings_of
from subquad.models.layers import projected_by
from subquad.pages import bench_picture

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", TEXTBOOK)
@pytest.mark.parametrize("grid", [TokenGrid(4, 7), TokenGrid(6, 6)], ids=str)
def test_the_textbook_form_computes_what_the_mechanism_does(name, grid):
    module, supply = build(name, grid), inputs_of(build(name, grid), grid)
    expected = module(**supply, grid=grid, kv_grid=grid)
    torch.testing.assert_close(TEXTBOOK[name](module, supply, grid), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", TEXTBOOK)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_textbook_form_computes_half_precision(name, dtype):
    grid = TokenGrid(4, 7)
    module = build(name, grid).to(dtype)
    supply = {
        k: x.to(dtype) if x is not None and x.is_floating_point() else x for k, x in inputs_of(module, grid).items()
    }
    y = TEXTBOOK[name](module, supply, grid)
    assert y.dtype == dtype and y.isfinite().all()


def test_a_mechanism_that_no_textbook_has_is_measured_without(monkeypatch):
    monkeypatch.delitem(TEXTBOOK, "linear")
    linear, _ = rows = measure_blocks(["linear", "pola"], [16], dim=16, num_heads=2, repeats=1)
    assert linear.textbook_ms is None and linear.textbook_gain is None and linear.softmax_gain > 0
    assert "None" not in blocks_table(rows)


@pytest.mark.parametrize("backward", [False, True])
def test_every_mechanism_is_measured_against_all_it_is_compared_with(backward):
    rows = measure_blocks(list(ATTENTION), [16, 36], dim=16, num_heads=2, repeats=2, backward=backward)
    assert [(row.mechanism, row.tokens) for row in rows] == [(name, n) for n in (16, 36) for name in ATTENTION]
    for row in rows:
        assert row.over_projections == row.block_ms / row.projections_ms > 0
        assert row.textbook_gain == (row.textbook_ms / row.core_ms if row.mechanism in TEXTBOOK else None)
        assert row.peak_mb > 0
        assert row.softmax_gain == row.softmax_ms / row.core_ms > 0


BRANCHED = [name for name in ATTENTION if "local" in settings_of(name)]


@pytest.mark.parametrize("name", BRANCHED)
def test_settings_behind_a_name_are_those_of_the_layer_that_is_timed(name):
    shape, device = (1, 16, 16), torch.device("cpu")
    with_branch, without = (
        layer_on_tokens(f"{name}:local={said}", shape, 2, device=device)[0].inner for said in ("true", "false")
    )
    own = {key for key, _ in with_branch.named_parameters()} - {key for key, _ in without.named_parameters()}
    assert own and all("local" in key for key in own)
    forced, *_ = layer_on_tokens(f"{name}:local=true", shape, 2, device=device, settings={"local": False})
    assert not own & {key for key, _ in forced.inner.named_parameters()}


@pytest.mark.parametrize("ops", [[], ["--ops"]], ids=str)
def test_a_mechanism_with_settings_is_a_row_of_its_own(ops, tmp_path, capsys):
    """It was no mechanism that is known, though create_model and train take it."""
    names = ["inline", "inline:local=false", "linear:feature_map=elu,local=true"]
    sizes = ["--tokens", "16", "25", "--dim", "16", "--num-heads", "2", "--repeats", "1"]
    assert main(["bench", "--attention", *names, *sizes, *ops, "--picture", str(tmp_path / "lines.svg")]) == 0
    said = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if "|" not in line]
    assert [line for line in said if len(line) == 2 and line[0] in names and line[1] in ("16", "25")] == [
        [name, number] for number in ("16", "25") for name in names
    ]
    rows = subquad.bench(names[1:], [16], dim=16, num_heads=2, repeats=1)
    assert [row.mechanism for row in rows] == names[1:] and {row.textbook_ms for row in rows} == {None}


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
        ({"mechanisms": ["agnet:local=false"]}, "unknown attention 'agnet'"),
        ({"mechanisms": ["inline:locl=false"]}, "unknown setting of inline attention 'locl': did you mean local"),
        ({"mechanisms": ["inline:local=maybe"]}, "local must be true or false, got 'maybe'"),
        ({"mechanisms": ["inline+softmax"]}, "unknown attention 'inline.softmax'"),
        ({"tokens": [200]}, "200 tokens make no square grid: use 196 or 225"),
        ({"dtype": "fp64"}, "unknown dtype 'fp64'"),
        ({"num_heads": 5}, "5 heads do not divide a width of 192"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"parts": ("blocks",)}, "unknown part of a layer 'blocks': did you mean block"),
        ({"parts": ("textbook",)}, "parts that are timed must have block or core: got textbook"),
        ({"parts": ("block",), "ops": True}, "must have core, as operations alone have no block: got block"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(settings, message):
    with pytest.raises(SubquadError, match=message):
        measure_blocks(**{"mechanisms": ["linear"], "tokens": [16], "repeats": 1} | settings)


def test_what_lies_between_the_projections_may_be_timed_alone():
    (row,) = measure_blocks(["linear"], [16], dim=16, num_heads=2, repeats=1, parts=("core",))
    assert row.block_ms is None and row.images_per_s == pytest.approx(1000 / row.core_ms)


@pytest.mark.parametrize("flag", [["--output", "rows.csv"], ["--output", "rows.json"], ["--picture", "lines.svg"]])
def test_softmax_that_was_asked_for_is_not_left_out_without_a_word(flag, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    assert measure_blocks(["softmax"], [25], dim=2, num_heads=1, max_softmax_tokens=16, log=said.append) == []
    assert said[-1] == "softmax is left out from 25 tokens on: it is timed up to 16"
    sizes = ["--tokens", "17689", "--dim", "2", "--num-heads", "1", "--repeats", "1"]
    assert main(["bench", "--attention", "softmax", *sizes, *flag]) == 2
    assert "nothing was measured that could be" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_rows_are_written_as_csv_or_json(tmp_path):
    (row,) = measure_blocks(["linear"], [16], dim=16, num_heads=2, repeats=1)
    save_rows([row], tmp_path / "rows.csv", {})
    with (tmp_path / "rows.csv").open() as file:
        assert float(next(csv.DictReader(file))["over_projections"]) == row.over_projections
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


def test_operations_alone_are_measured_against_a_copy_of_their_tokens():
    rows = measure_blocks(list(ATTENTION), [16], dim=16, num_heads=2, repeats=1, ops=True)
    copied = {name: len(projected_by(cls)) + 1 for name, cls in ATTENTION.items()}
    # heads that a mechanism has beside the two
    copied = {name: count * (2 + traits_of(ATTENTION[name]).extra_heads) for name, count in copied.items()}
    each = [row.floor_ms / copied[row.mechanism] for row in rows]
    assert each == pytest.approx([each[0]] * len(rows))
    for row in rows:
        assert (
            row.block_ms is None
            and row.over_projections is None
            and bool(row.textbook_gain) == (row.mechanism in TEXTBOOK)
        )
        assert row.of_floor == row.floor_ms / row.core_ms > 0
    assert "÷proj" not in blocks_table(rows)


def test_bytes_that_must_move_are_those_of_inputs_outputs_and_their_gradients():
    shape, numbers = (2, 10, 8), 160
    assert moved_bytes(3, shape, torch.float32, backward=False) == 4 * (3 + 1) * numbers
    assert moved_bytes(3, shape, torch.bfloat16, backward=True) == 2 * (4 + 3 + 1 + 3) * numbers


def test_the_length_from_which_on_a_layer_is_faster_than_softmax():
    rows = measure_blocks(["linear"], [16, 64], dim=8, num_heads=1, repeats=1)
    slow, fast = (replace(row, block_ms=ms, softmax_block_ms=4.0) for row, ms in zip(rows, (8.0, 2.0), strict=True))
    assert faster_than_softmax([slow, fast])["linear", 1, "fp32"] == pytest.approx(32)
    assert [*faster_than_softmax([slow]).values(), *faster_than_softmax([fast]).values()] == [None, 64]
    assert "linear from about 32 tokens on" in blocks_table([slow, fast])


def test_lines_cross_on_logarithmic_axes():
    (row,) = measure_blocks(["linear"], [4], dim=8, num_heads=1, repeats=1)
    softmax, lines = [1, 16, 256], {"late": [4, 16 / 4, 16], "never": [2, 32, 512], "always": [0.5, 1, 2]}
    rows = [
        replace(row, mechanism=name, tokens=4 ** (k + 1), block_ms=ms, softmax_block_ms=softmax[k])
        for name, line in lines.items()
        for k, ms in reversed(list(enumerate(line)))
    ]
    found = {name: length for (name, *_), length in faster_than_softmax(rows).items()}
    assert found == {"late": pytest.approx(8), "never": None, "always": 4}


@pytest.mark.slow
def test_a_picture_shows_every_mechanism_and_softmax(tmp_path):
    rows = measure_blocks(["linear", "agent"], [16, 36], dim=8, num_heads=1, repeats=1)
    bench_picture(rows, tmp_path / "bench.svg")
    names = {"".join(text.itertext()) for text in ElementTree.parse(tmp_path / "bench.svg").iter(f"{SVG}text")}
    assert {"tokens", "milliseconds"} <= names
    assert all(any(name in shown for shown in names) for name in ("linear", "agent", "softmax"))
    bench_picture(measure_networks(["linear_deit_tiny"], [32, 64], repeats=1), tmp_path / "networks.svg")
    assert "px" in (tmp_path / "networks.svg").read_text()


def test_a_file_that_can_not_be_written_is_refused_before_anything_is_measured(capsys, tmp_path):
    for flag, name, known in (
        ("--output", "rows.txt", ".csv or .json"),
        ("--picture", "p.gif", ".svg or .png or .pdf"),
    ):
        assert main(["bench", flag, str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert f"written as {known}, got {name}" in said.err and "passes" not in said.out


@pytest.mark.slow
def test_compiled_layers_are_measured():
    (row,) = measure_blocks(["linear"], [16], dim=16, num_heads=2, repeats=1, compile=True)
    assert row.over_projections > 1 and row.textbook_gain > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "what", [["--attention", "linear", "--tokens", "16"], ["--model", "linear_deit_tiny", "--img-size", "32"]]
)
def test_graphs_without_a_gpu_are_one_line(what, capsys):
    assert main(["bench", "--graphs", *what]) == 2
    said = capsys.readouterr().err
    assert "CUDA graphs are recorded on a CUDA device, and cpu is none" in said and said.count("\n") == 1
    assert main(["bench", "--graphs", "--compile", *what]) == 2
    assert main(["bench", "--graphs", "--unet", "sd15"]) == 2
