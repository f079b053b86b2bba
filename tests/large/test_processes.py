"""Processes of torch.distributed that share images train as one process does, with DDP and FSDP2 on top."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from band_training import network, train

HERE = Path(__file__).parent
LINEAR = {"host": "vit", "attention": "linear", "size": [72, 40]}
AGENT = {"host": "pvt", "attention": "agent", "size": [109, 40]}


def start(folder, cases, count):
    (folder / "cases.json").write_text(json.dumps(cases))
    paths = [str(HERE), str(HERE.parent / "models"), *sys.path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / "band_training.py"), str(folder), str(rank), str(count)],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def check(folder, cases, count):
    processes = start(folder, cases, count)
    told = [process.communicate(timeout=250)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * count, told
    for i, case in enumerate(cases):
        results = torch.load(folder / f"{i}.pt")
        losses, grads = train(network(case), case)
        assert (results["losses"] - losses).abs().max() < 1e-6, case
        assert results["grads"].keys() == grads.keys()
        largest = max(grad.abs().max() for grad in grads.values())
        worst = max((results["grads"][name] - grad).abs().max() for name, grad in grads.items())
        assert worst < 1e-5 * largest, case


def test_two_processes_train_as_one(tmp_path):
    check(tmp_path, [LINEAR | {"mesh": [1, 2]}, AGENT | {"mesh": [1, 2]}], 2)


@pytest.mark.slow
def test_parameters_may_be_sharded_and_blocks_computed_again_and_dropped(tmp_path):
    cases = [
        LINEAR | {"mesh": [1, 2], "sharded": True},
        LINEAR | {"mesh": [1, 2], "checkpointed": True},
        AGENT | {"mesh": [1, 2], "checkpointed": True},
        LINEAR | {"mesh": [1, 2], "drop_path_rate": 0.5},
    ]
    check(tmp_path, cases, 2)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4, 8])
def test_several_processes_train_as_one(tmp_path, count):
    meshes = [[1, count], [2, count // 2]] if count % 2 == 0 else [[1, count]]
    cases = [LINEAR | {"mesh": mesh} for mesh in meshes]
    cases += [LINEAR | {"attention": "agent", "mesh": [1, count], "size": [72, 24]}]
    check(tmp_path, [*cases, AGENT | {"mesh": [max(1, count // 4), min(count, 4)]}], count)
