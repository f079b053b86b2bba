"""Tiles chosen by time: the table, and the search for it with a clock that is made up."""

import itertools
import json

import pytest
import torch
from kernels_here import DEVICE, needs_kernels, relative_error

import subquad
from subquad import SubquadError, ops
from subquad.cli import main
from subquad.kernels import unavailable, use_backend
from subquad.kernels.triton import measured_tiles, tile_table, tuning

pytest.importorskip("triton")
NAME = tile_table.device_name(torch.device(DEVICE))
KEY = "inline.state fp32 d16 n32 h2"


@pytest.fixture(autouse=True)
def table(tmp_path, monkeypatch):
    """The file of this device's table, which is not there yet."""
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path))
    monkeypatch.setattr(tile_table, "_tables", {})
    return tile_table.path_of(NAME)


def tokens(n=32, d=16):
    return torch.randn(3, 1, 2, n, d, device=DEVICE).unbind(0)


def written(path, **changes):
    path.parent.mkdir(exist_ok=True)
    whole = {"version": 1, "device": NAME, "triton": tile_table.version("triton"), "tiles": {KEY: {"num_warps": 2}}}
    path.write_text(json.dumps(whole | changes))


def test_choices_are_kept_by_device_and_shape_and_added_to(table):
    assert tile_table.read_tiles(NAME) == {}
    assert tile_table.keep_tiles(NAME, {KEY: {"BLOCK": 64}}) == table
    tile_table.keep_tiles(NAME, {"other": {}})
    assert tile_table.read_tiles(NAME) == {KEY: {"BLOCK": 64}, "other": {}}
    assert tile_table.path_of("NVIDIA H200 / 141GB").name == "nvidia-h200-141gb.json"
    assert tile_table.read_tiles("another device") == {}


def test_a_choice_stands_in_the_place_of_what_a_kernel_comes_with_and_of_nothing_else(table):
    written(table, tiles={KEY: {"BLOCK": 64, "num_warps": 2}})
    q, _, _ = tokens()
    assert tile_table.with_choice("inline.state", {"BLOCK": 16, "D": 16}, q) == {"BLOCK": 64, "D": 16}
    for other in (q[..., :8], q.half(), torch.cat([q, q], dim=2), torch.cat([q, q, q])):
        assert tile_table.with_choice("inline.state", {"BLOCK": 16}, other) == {"BLOCK": 16}
    assert tile_table.with_choice("inline.state", {"BLOCK": 16}, q, few=9) == {"BLOCK": 16}
    # the next power of 2 of 20 tokens is 32
    assert tile_table.with_choice("inline.state", {"BLOCK": 16}, q[:, :, :20]) == {"BLOCK": 64}
    assert tile_table.with_choice("inline.state", {"BLOCK": 16}, q[:, :, :16]) == {"BLOCK": 16}


@pytest.mark.parametrize("changes", [{"triton": "2.0.0"}, {"device": "another"}, {"version": 2}], ids=str)
def test_a_table_of_something_else_is_as_if_it_were_not_there(table, changes):
    written(table, **changes)
    assert tile_table.read_tiles(NAME) == {}


DAMAGED = {
    "no JSON": "{",
    "not an object": "[]",
    "no tiles": '{"version": 1}',
    "bytes": "\x00\xff",
    "deep": "[" * 100_000,
    "large": " " * (tile_table.LARGEST + 1),
}
WRONG = [{"BLOCK": 17}, {"BLOCK": "64"}, {"num_warps": True}, {"BLOCK": 64.0}, {"D": 16}, [], None, {"BLOCK": 10**400}]


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in DAMAGED.items()])
def test_a_damaged_table_is_one_line_and_kernels_do_without_it(table, text):
    table.parent.mkdir()
    table.write_text(text)
    with pytest.raises(SubquadError, match="is no table of tiles") as caught:
        tile_table.read_tiles(NAME)
    assert "\n" not in str(caught.value) and str(table) in str(caught.value) and len(str(caught.value)) < 600
    q, _, _ = tokens()
    with pytest.warns(UserWarning, match="kernels have the tiles that they come with"):
        assert tile_table.with_choice("inline.state", {"BLOCK": 16}, q) == {"BLOCK": 16}
    # it is said once
    assert tile_table.with_choice("inline.state", {"BLOCK": 16}, q) == {"BLOCK": 16}
    with pytest.raises(SubquadError):
        tile_table.keep_tiles(NAME, {KEY: {}})
    assert table.read_text() == text


@pytest.mark.parametrize("choice", WRONG, ids=lambda choice: str(choice)[:20])
def test_numbers_that_no_kernel_can_have_are_refused(table, choice):
    written(table, tiles={KEY: choice})
    with pytest.raises(SubquadError, match="is no table of tiles"):
        tile_table.read_tiles(NAME)


def test_without_a_gpu_nothing_is_chosen_and_one_line_says_so(capsys, monkeypatch):
    monkeypatch.setattr(tuning, "unavailable", lambda name: "there is no CUDA device")
    with pytest.raises(SubquadError, match="tiles are chosen by time on a CUDA device: there is no CUDA device"):
        subquad.tune(["linear"], [16], dim=16, num_heads=1)
    assert main(["tune", "--attention", "linear", "--tokens", "16"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "there is no CUDA device" in said


@pytest.mark.skipif(unavailable("triton") is None, reason="there is a GPU, or what stands for one")
def test_the_reason_is_that_of_the_backend():
    with pytest.raises(SubquadError, match=unavailable("triton")):
        tuning.check_tunable(torch.device("cuda"))


def timed_by(milliseconds):
    """Kernels are as fast as `milliseconds(key, settings)` says; returns what was tried of each."""
    tried = {}

    def clock(call):
        settings = {}
        inner = tile_table._watcher

        def noting(key, defaults):
            own = inner(key, defaults)
            settings[key] = {name: (defaults | own)[name] for name in tile_table.RANGES if name in defaults}
            return own

        with tile_table.watching(noting):
            call()
        for key, one in settings.items():
            tried.setdefault(key, []).append(one)
        return sum(milliseconds(key, one) for key, one in settings.items())

    return clock, tried


@needs_kernels
def test_the_fastest_tiles_are_found_kept_and_used():
    q, k, v = tokens()
    best = {"BLOCK": 32, "num_warps": 4, "num_stages": 1}
    clock, tried = timed_by(
        lambda key, one: 1 + sum(one[name] != best[name] for name in best) if "state" in key else 1.0
    )
    lines = []
    found = tuning.tune(lambda: ops.inline_attention(q, k, v), device=DEVICE, timer=clock, log=lines.append)
    assert (
        {one.key.split()[0] for one in found} == {"inline.state", "inline.spread"} == {key.split()[0] for key in tried}
    )
    state, spread = sorted(found, key=lambda one: "state" not in one.key)
    assert state.chosen == best and state.default != best and state.chosen_ms < state.default_ms
    # what gains nothing stays as it is, and is not tried again
    assert spread.chosen == spread.default
    assert tile_table.read_tiles(NAME) == {state.key: best, spread.key: {}}
    assert len(lines) == 2 and "nothing better" in "".join(lines)
    assert tuning.tune(lambda: ops.inline_attention(q, k, v), device=DEVICE, timer=clock) == []
    assert len(tuning.tune(lambda: ops.inline_attention(q, k, v), device=DEVICE, timer=clock, again=True)) == 2
    assert tile_table.with_choice("inline.state", {"BLOCK": 16, "num_warps": 8}, k) == {"BLOCK": 32, "num_warps": 4}
    got = ops.inline_attention(q, k, v, backend="triton")
    assert relative_error(got, ops.inline_attention(q.double(), k.double(), v.double())) < 1e-5


@needs_kernels
def test_tiles_that_fail_or_compute_something_else_are_never_chosen(monkeypatch):
    q, k, v = tokens()
    clock, _ = timed_by(lambda key, one: 1.0 if one["BLOCK"] == 16 else 0.1)
    whole = tuning.Call.__call__
    wrong = itertools.count()

    def broken(call):
        blocks = []
        inner = tile_table._watcher
        with tile_table.watching(lambda key, defaults: blocks.append(inner(key, defaults)) or blocks[-1]):
            results = whole(call)
        if any(one.get("BLOCK", 16) != 16 for one in blocks):
            if next(wrong) % 2:
                raise RuntimeError("out of resource: shared memory")
            return [one + 1 for one in results]
        return results

    monkeypatch.setattr(tuning.Call, "__call__", broken)
    found = tuning.tune(lambda: ops.inline_attention(q, k, v), device=DEVICE, timer=clock)
    assert found and all(one.chosen == one.default and one.failed for one in found)


@needs_kernels
def test_what_may_read_beyond_its_tokens_is_never_tried(monkeypatch):
    q, k, v = tokens()
    asked = []
    monkeypatch.setattr(tuning, "may_idle", lambda *settings: asked.append(settings) or True)
    found = tuning.tune(lambda: ops.inline_attention(q, k, v), device=DEVICE, timer=lambda call: 1 / (1 + len(asked)))
    assert len(asked) > 2 and all(one.chosen == one.default and not one.failed for one in found)
    assert {len(settings) for settings in asked} == {3} and asked[0][0].shape == q.shape


def test_on_hopper_no_warps_are_added_to_those_that_a_tile_comes_with(monkeypatch):
    half, default = torch.zeros(1, 1, 4, 64, dtype=torch.float16), {"BLOCK": 64, "num_warps": 8}
    monkeypatch.setattr(measured_tiles, "INTERPRETED", 9)
    trials = ({}, {"BLOCK": 128}, {"BLOCK": 32}, {"num_warps": 16}, {"num_warps": 4}, {"BLOCK": 32, "num_warps": 4})
    risky = [measured_tiles.may_idle(half, default | trial, default) for trial in trials]
    assert risky == [False, False, True, True, False, False]
    assert not measured_tiles.may_idle(half.float(), default | {"num_warps": 16}, default)
    monkeypatch.setattr(measured_tiles, "INTERPRETED", 8)
    assert not measured_tiles.may_idle(half, default | {"num_warps": 16}, default)


@needs_kernels
def test_gradients_and_what_is_changed_in_place_are_tuned_too_and_time_may_be_up():
    grid = subquad.TokenGrid(4, 4)
    q, k, v = (x.requires_grad_() for x in tokens(16))
    weight = torch.randn(32, 3, 3, device=DEVICE)

    def run():
        ops.linear_attention(q, k, v).sum().backward()
        with torch.no_grad():
            ops.add_local(v.clone(), v, weight, grid=grid, kv_grid=grid)

    lines, before = [], v.detach().clone()
    assert tuning.tune(run, device=DEVICE, timer=lambda call: 1.0, minutes=0, log=lines.append) == []
    assert lines == ["the time is up: the next call goes on"]
    names = {call.name for call in tuning.calls_of(run)}
    assert {"local_branch"} < names and any("gradient" in name for name in names)
    for call in tuning.calls_of(run):
        first = [one.clone() for one in call.arguments if isinstance(one, torch.Tensor)]
        call()
        left = [one for one in call.arguments if isinstance(one, torch.Tensor)]
        assert all(map(torch.equal, first, left)), call.name
    assert torch.equal(before, v)


@needs_kernels
def test_a_table_breaks_no_graph_and_holds_inside_compiled_code(table):
    tile_table.keep_tiles(
        NAME, {f"inline.{name} fp32 d16 n32 h2": {"BLOCK": 32} for name in ("state", "spread", "dq", "dk")}
    )
    q, k, v = (x.requires_grad_() for x in tokens())
    seen = []
    compiled = torch.compile(lambda *x: ops.inline_attention(*x), backend="aot_eager", fullgraph=True)
    with use_backend("triton"):
        got = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
        with tile_table.watching(lambda key, defaults: seen.append(key) or {}):
            compiled(q, k, v)
    expected = torch.autograd.grad(ops.inline_attention(q, k, v, backend="eager").sum(), (q, k, v))
    assert seen and all(relative_error(*pair) < 1e-5 for pair in zip(got, expected, strict=True))


@needs_kernels
def test_the_command_tunes_layers_and_networks_and_prints_what_it_gained(monkeypatch, capsys):
    monkeypatch.setattr(tuning, "milliseconds", lambda call: 1.0)
    small = ["--dtype", "fp32", "--device", DEVICE]
    layer = ["tune", "--attention", "linear", "--tokens", "4", "--dim", "16", "--num-heads", "1", *small]
    assert main(layer) == 0
    said = capsys.readouterr().out
    assert "relu.state fp32 d16 n4 h1" in said and "as it comes" in said
    assert main(layer) == 0
    assert "nothing is left to choose" in capsys.readouterr().out
    assert main(["tune", "--model", "deit_tiny", "--attention", "linear"]) == 2
    assert "tune them apart" in capsys.readouterr().err


def test_calls_of_one_shape_are_one(monkeypatch):
    q, _, _ = tokens()
    calls = [tuning.Call("pool", (q, [4, 8], [2, 2])), tuning.Call("pool", (q + 1, [4, 8], [2, 2]))]
    assert calls[0].signature == calls[1].signature != tuning.Call("pool", (q, [8, 4], [2, 2])).signature
