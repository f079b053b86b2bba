"""Processes of torch.distributed that share images train as one process does, with DDP and FSDP2 on top."""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from band_training import network, train

HERE = Path(__file__).parent
LINEAR = {"host": "vit", "attention": "linear", "size": [72, 40]}
AGENT = {"host": "pvt", "attention": "agent", "size": [109, 40]}


def check(folder, cases, count):
    (folder / "cases.json").write_text(json.dumps(cases))
    paths = [str(HERE), str(HERE.parent / "models"), *sys.path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    training = [sys.executable, str(HERE / "band_training.py"), str(folder), str(count)]
    done = subprocess.run(training, env=env, stderr=subprocess.PIPE, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    for i, case in enumerate(cases):
        results = torch.load(folder / f"{i}.pt")
        losses, grads = train(network(case), case)
        assert (results["losses"] - losses).abs().max() < 1e-6, case
        assert results["grads"].keys() == grads.keys()
        largest = max(grad.abs().max() for grad in grads.values())
        worst = max((results["grads"][name] - grad).abs().max() for name, grad in grads.items())
        assert worst < 1e-5 * largest, case


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    check(tmp_path, [LINEAR | {"mesh": [1, 2]}, AGENT | {"mesh": [1, 2]}], 2)


@pytest.mark.long
@pytest.mark.slow
def test_parameters_may_be_sharded_and_blocks_computed_again_and_dropped(tmp_path):
    cases = [
        LINEAR | {"mesh": [1, 2], "sharded": True},
        LINEAR | {"mesh": [1, 2], "checkpointed": True},
        AGENT | {"mesh": [1, 2], "checkpointed": True},
        LINEAR | {"mesh": [1, 2], "drop_path_rate": 0.5},
    ]
    check(tmp_path, cases, 2)


@pytest.mark.thinned(3)
@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4, 8])
def test_several_processes_train_as_one(tmp_path, count):
    meshes = [[1, count], [2, count // 2]] if count % 2 == 0 else [[1, count]]
    cases = [LINEAR | {"mesh": mesh} for mesh in meshes]
    cases += [LINEAR | {"attention": "agent", "mesh": [1, count], "size": [72, 24]}]
    check(tmp_path, [*cases, AGENT | {"mesh": [max(1, count // 4), min(count, 4)]}], count)


def said(line):
    """The number of an update and its loss, of update, loss and seconds."""
    update, loss, _ = line.split()
    return [float(update), float(loss)]


@pytest.mark.long
@pytest.mark.slow
def test_where_one_of_three_is_killed_all_end_in_a_line_and_go_on(tmp_path):
    script = runpy.run_path(str(HERE.parents[1] / "scripts" / "tokens_over_processes.py"))
    settings = ["train", "--size", "64", "128", "--updates", "8"]

    def started(folder, count):
        return script["started"]([*settings, "--folder", str(folder)], count)

    def losses(processes):
        told = [process.communicate(timeout=200) for process in processes]
        assert [process.returncode for process in processes] == [0] * len(told), told
        return [said(line) for line in told[0][0].splitlines()]

    whole = losses(started(tmp_path / "whole", 1))
    processes = started(tmp_path / "killed", 3)
    first = [said(processes[0].stdout.readline()) for _ in range(3)]
    processes[1].kill()
    start = time.monotonic()
    told = [process.communicate(timeout=60) for process in processes]
    assert time.monotonic() - start < 10
    for rank in (0, 2):
        assert processes[rank].returncode == 1
        assert len(told[rank][1].splitlines()) == 1
        assert told[rank][1].startswith(f"process {rank + 1} of 3 does not reach another one any more")
    rest = losses(started(tmp_path / "killed", 3))
    assert 1 <= len(rest) <= 5
    # DDP lays gradients out anew after its first update: of one that goes on other sums are rounded
    assert torch.tensor(first + rest).sub(torch.tensor(whole[:3] + whole[-len(rest) :])).abs().max() < 1e-5
