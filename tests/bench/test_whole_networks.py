"""Whole networks against their hosts with softmax."""

import pytest
import torch

from subquad import SubquadError
from subquad.benchmarks import NetworkRow, faster_from, measure_networks, networks_table
from subquad.cli import main


def test_networks_are_measured_against_their_host_with_softmax(capsys, tmp_path):
    output = tmp_path / "rows.csv"
    sizes = ["--img-size", "16", "32", "--repeats", "1", "--output", str(output)]
    assert main(["bench", "--model", "deit_micro", "agent_deit_tiny", *sizes]) == 0
    shown = capsys.readouterr().out
    assert "Faster than the same host with softmax" in shown and max(map(len, shown.splitlines())) <= 120
    assert len(output.read_text().splitlines()) == 5


def test_rows_hold_what_their_names_say():
    (row,) = measure_networks(["linear_deit_tiny"], [32], repeats=2, batch_size=3, backward=True)
    assert row.gain == row.reference_ms / row.ms and row.images_per_s == pytest.approx(3000 / row.ms)
    assert row.reference == "deit_tiny with softmax"
    heard = []
    assert not measure_networks(["deit_micro"], [16], repeats=1, max_seconds=0, log=heard.append)
    assert "left out from 16 px on" in heard[0]


def test_a_network_of_softmax_alone_is_not_faster_than_itself():
    """It was timed twice, and the noise between both was called its gain."""
    (row,) = rows = measure_networks(["deit_micro"], [8], repeats=1)
    assert row.reference == "deit_micro" and row.gain == 1 and row.reference_ms == row.ms
    assert "deit_micro at no size measured" in networks_table(rows)
    assert measure_networks(["softmax_deit_tiny"], [16], repeats=1)[0].reference == "softmax_deit_tiny"


def test_from_which_size_on_a_network_is_faster():
    rows = [NetworkRow("a", px, 1, "fp32", 1, 1, 1, 0, "s", gain, 1, gain) for px, gain in ((224, 0.5), (448, 2.0))]
    assert faster_from(rows)["a", 1, "fp32"] == pytest.approx((224 * 448) ** 0.5)
    assert "from about 317 px on" in networks_table(rows)
    assert [*faster_from(rows[:1]).values(), *faster_from(rows[1:]).values()] == [None, 448]


def test_an_unknown_network_is_one_line():
    with pytest.raises(SubquadError, match="unknown model 'agent_deit_tny': did you mean agent_deit_tiny"):
        measure_networks(["agent_deit_tny"], [32])
    with pytest.raises(SubquadError, match="batch_size must be a whole number of at least 1, got 0"):
        measure_networks(["deit_micro"], [32], batch_size=0)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["fpn", "retinanet"])
def test_networks_are_measured_under_a_dense_head(head):
    (row,) = measure_networks(["agent_pvt_tiny"], [64], head=head, repeats=1)
    (alone,) = measure_networks(["agent_pvt_tiny"], [64], repeats=1)
    # not by the clock: other work on the machine may take longer than a head
    assert row.peak_mb > alone.peak_mb and row.reference == "pvt_tiny with softmax"


def test_a_dense_head_that_can_not_be_measured_is_one_line(capsys):
    with pytest.raises(SubquadError, match="unknown head 'fpm': did you mean fpn"):
        measure_networks(["agent_pvt_tiny"], [64], head="fpm")
    with pytest.raises(SubquadError, match="leave out --backward"):
        measure_networks(["agent_pvt_tiny"], [64], head="fpn", backward=True)
    assert main(["bench", "--head", "fpn"]) == 2 and "name them with --model" in capsys.readouterr().err


@pytest.mark.slow
def test_networks_are_compiled_where_that_is_asked_for(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, mode: compiled.append(mode) or model)
    settings = {"repeats": 1, "backward": True}
    assert measure_networks(["linear_deit_tiny"], [32], **settings) and not compiled
    (row,) = measure_networks(["linear_deit_tiny"], [32], compile=True, **settings)
    # and its reference
    assert compiled == ["reduce-overhead"] * 2 and row.gain is not None


def test_a_unet_is_not_compiled(capsys):
    assert main(["bench", "--unet", "sd15", "--compile"]) == 2
    assert "leave it out beside --unet" in capsys.readouterr().err
