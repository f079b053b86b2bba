"""What a time is of: warm passes alone, in turns, and ratios with the right number on top."""

import itertools

import pytest
import torch

from subquad import timing
from subquad.benchmarks import blocks, floors, measure_blocks, measure_networks
from subquad.benchmarks import whole_networks as networks_module
from subquad.benchmarks.layers_on_squares import last_descent
from subquad.benchmarks.pipeline_costs import _summary
from subquad.benchmarks.whole_networks import NetworkRow, faster_from
from subquad.diffusion.folder import ImageRow
from subquad.timing import interleaved_ms, warmed_up

CPU = torch.device("cpu")


def test_passes_take_turns_and_are_counted_in_milliseconds(monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 0.25 * next(seconds))
    order = []
    times = interleaved_ms({name: lambda name=name: order.append(name) for name in "abc"}, 4, CPU)
    assert times == {name: [250.0] * 4 for name in "abc"}
    assert all(sorted(order[k : k + 3]) == ["a", "b", "c"] for k in range(0, 12, 3)) and len(order) == 12


@pytest.fixture
def warm(monkeypatch):
    """Instead of times, how often each pass had run before it was timed."""
    runs, seen = {}, {}

    def counted(module, wrap):
        real = getattr(module, wrap)

        def wrapped(*arguments, **settings):
            run, place = real(*arguments, **settings), (module, len(runs))
            runs[place] = 0

            def pass_of_it():
                runs[place] += 1
                return run()

            return pass_of_it

        monkeypatch.setattr(module, wrap, wrapped)

    def times(passes, repeats, device):
        seen.update(runs)
        return {key: [1.0] * repeats for key in passes}

    for module, wrap in ((blocks, "timed_pass"), (networks_module, "_pass")):
        counted(module, wrap)
        monkeypatch.setattr(module, "interleaved_ms", times)
    return seen


def test_every_pass_has_run_before_it_is_timed(warm):
    measure_blocks(["softmax", "linear"], [16], dim=16, num_heads=2, repeats=2)
    measure_networks(["deit_micro"], [16], repeats=2)
    assert {module for module, _ in warm} == {blocks, networks_module}
    assert all(count >= 1 for count in warm.values())


def test_what_is_too_slow_the_first_time_is_left_out_and_said(monkeypatch):
    ran = []
    monkeypatch.setattr(timing, "seconds_of", lambda run, device: run() or {"a": 1.0, "b": 5.0}[ran[-1]])
    passes = {name: lambda name=name: ran.append(name) for name in "ab"}
    kept, slow = warmed_up(passes, CPU, is_too_slow=lambda s: s > 2)
    assert kept == {"a": passes["a"]} and slow == {"b": 5.0} and ran == ["a", "b"]
    assert warmed_up(passes, CPU) == (passes, {})


def test_a_copy_is_warm_and_counts_what_is_read_and_what_is_written(monkeypatch):
    calls = []

    def seconds_of(run, device):
        calls.append(run)
        return 0.5

    monkeypatch.setattr(floors, "seconds_of", seconds_of)
    monkeypatch.setattr(floors, "COPIED", {"cpu": 2**20})
    assert floors.copy_gb_per_s(CPU, repeats=3) == pytest.approx(2 * 2**20 / 0.5 / 1e9) and len(calls) == 3


def test_ratios_have_what_is_beaten_on_top():
    times = {
        ("agent", "core"): [2.0, 2.0, 3.0],
        ("agent", "block"): [8.0, 10.0, 12.0],
        ("agent", "projections"): [5.0] * 3,
        ("agent", "textbook"): [6.0] * 3,
        ("softmax", "core"): [8.0] * 3,
        ("softmax", "block"): [20.0] * 3,
    }
    row = blocks._row("agent", 16, 4, "fp32", times, "block", 1.0, 7.0)
    assert (row.over_projections, row.of_floor, row.textbook_gain, row.softmax_gain) == (2.0, 0.5, 3.0, 4.0)
    assert (row.images_per_s, row.spread, row.softmax_block_ms) == (400.0, 0.4, 20.0)


def test_faster_from_is_the_last_crossing():
    assert last_descent([(10, 2.0), (20, 0.5), (40, 2.0), (80, 0.5)]) == pytest.approx(40 * 2**0.5)
    assert last_descent([(10, 0.5), (20, 0.7)]) == 10 and last_descent([(10, 0.5), (20, 1.0)]) is None
    network = {"network": "a", "batch_size": 1, "dtype": "fp32", "ms": 1.0, "images_per_s": 1.0, "peak_mb": 1.0}
    other = {"spread": 0.0, "reference": "b", "reference_ms": 1.0, "reference_mb": 1.0}
    rows = [NetworkRow(px=px, gain=gain, **network, **other) for px, gain in ((64, 0.5), (128, 2.0))]
    assert faster_from(rows)[("a", 1, "fp32")] == pytest.approx(64 * 2**0.5)


def test_a_method_gains_what_the_first_one_takes_longer_on_the_same_image():
    def row(prompt, method, seconds, **more):
        return ImageRow(prompt, 0, method, "file", seconds, **more)

    rows = [row("a", "softmax", 4.0), row("b", "softmax", 9.0)]
    rows += [row("a", "agent", 2.0, psnr=20.0, difference=3.0), row("b", "agent", 3.0, psnr=30.0, difference=5.0)]
    first, second = _summary(rows, ["softmax", "agent"], {"agent": 7.0})
    assert (first.gain, first.psnr, first.seconds, first.peak_mb) == (None, None, 6.5, None)
    assert (second.gain, second.psnr, second.difference, second.seconds, second.peak_mb) == (2.5, 25.0, 4.0, 2.5, 7.0)
