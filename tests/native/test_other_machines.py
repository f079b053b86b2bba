"""scripts/other_machines.py, which is run by hand, hears every kernel that there is."""

from pathlib import Path

import pytest
import torch

from subquad.kernels import unavailable
from subquad.kernels.cpu.library import functions, heard_by

pytestmark = pytest.mark.skipif(unavailable("native") is not None, reason=f"no kernels: {unavailable('native')}")


@pytest.mark.slow
def test_its_layers_call_every_kernel(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    import other_machines

    names = set()

    def hear(kernel, *arguments):
        names.add(kernel.__name__.rpartition("_")[0])
        return kernel(*arguments)

    monkeypatch.setattr(other_machines.replaying, "may_replay", lambda tokens: False)
    torch.manual_seed(0)
    with heard_by(hear):
        other_machines.run_layers()
    # tapes are made again by the script itself
    assert names == set(functions()) - {"replay"}
