"""Latency and memory against length: what is counted, what is left out, where lines cross."""

import pytest
import torch

from subquad import ATTENTION, SubquadError
from subquad.attention import traits_of
from subquad.benchmarks import count_scaling, fitted_exponent, growth_text, measure_scaling, peak_memory_mb

MB = 2**18  # fp32 numbers


def test_peak_memory_is_what_lives_at_once():
    x = torch.randn(MB)
    cpu = torch.device("cpu")
    assert peak_memory_mb(lambda: x * 2, cpu) == pytest.approx(1)
    assert peak_memory_mb(lambda: ((x * 2) * 2) * 2, cpu) == pytest.approx(2)
    assert peak_memory_mb(lambda: (x * 2, x * 3, x * 4), cpu) == pytest.approx(3)
    assert peak_memory_mb(lambda: x.view(2, -1).T, cpu) == 0


def test_memory_of_linear_mechanisms_grows_as_the_length_does():
    rows = measure_scaling(list(ATTENTION), [256, 1024], dim=32, num_heads=2, repeats=1)
    peak = {(row.mechanism, row.tokens): row.peak_mb for row in rows}
    for name in (name for name, cls in ATTENTION.items() if not traits_of(cls).quadratic):
        assert peak[name, 1024] < 5.5 * peak[name, 256], name


@pytest.mark.parametrize("backward", [False, True])
def test_every_mechanism_gets_a_row_for_every_length(backward):
    rows = measure_scaling(list(ATTENTION), [16, 64], dim=16, num_heads=2, repeats=2, backward=backward)
    assert {(row.mechanism, row.tokens) for row in rows} == {(name, n) for name in ATTENTION for n in (16, 64)}
    assert all(row.block_ms > 0 and row.spread >= 0 and row.peak_mb > 0 for row in rows)
    assert all(row.core_ms is row.projections_ms is row.floor_ms is None for row in rows)
    softmax = {row.tokens: row.block_ms for row in rows if row.mechanism == "softmax"}
    assert all(row.softmax_block_ms == softmax[row.tokens] for row in rows)


def test_what_does_not_fit_the_time_is_left_out_and_named():
    said = []
    assert measure_scaling(["softmax"], [16, 64], dim=16, num_heads=2, time_budget_s=0, log=said.append) == []
    assert len(said) == 1 and "softmax is left out from 16 tokens on" in said[0]


def test_a_length_that_is_no_square_is_refused_with_the_nearest():
    with pytest.raises(SubquadError, match="50 tokens make no square grid: use 49 or 64"):
        measure_scaling(["softmax"], [50])


def test_the_exponent_is_of_the_longest_lengths():
    law = [(n, 3.0 * n**1.5) for n in (256, 1024, 4096)]
    assert fitted_exponent(law) == pytest.approx(1.5)
    # constant parts decide where there are few tokens
    assert fitted_exponent([(4, 1e9), *law]) == pytest.approx(1.5)
    assert fitted_exponent(law[:1]) is None and fitted_exponent([]) is None


def test_what_is_counted_is_what_is_measured():
    names = ["softmax", "linear"]
    counted = {
        (row.mechanism, row.tokens, row.backward): row for row in count_scaling(names, [64, 256], dim=32, num_heads=2)
    }
    assert len(counted) == 2 * 2 * 2
    for backward in (False, True):
        for row in measure_scaling(["linear"], [256], dim=32, num_heads=2, repeats=1, backward=backward):
            assert counted["linear", 256, backward].peak_mb == pytest.approx(row.peak_mb, rel=0.5)
    # projections 4 n c², scores and answers 2 n² c; the backward pass twice as many
    assert counted["softmax", 256, False].macs == 4 * 256 * 32**2 + 2 * 256**2 * 32
    assert counted["softmax", 256, True].macs == 3 * counted["softmax", 256, False].macs


@pytest.mark.slow
def test_every_mechanism_is_counted():
    rows = count_scaling(list(ATTENTION), [64], dim=32, num_heads=2)
    assert {row.mechanism for row in rows} == set(ATTENTION)
    assert all(row.macs > 0 and row.peak_mb > 0 for row in rows)


def test_exponents_stand_below_a_table_of_several_lengths():
    rows = measure_scaling(["linear"], [16, 64, 256], dim=16, num_heads=2, repeats=1)
    assert growth_text(rows).splitlines()[1].startswith("linear")
    assert growth_text(rows[:1]) == ""
