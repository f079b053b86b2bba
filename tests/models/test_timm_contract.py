"""timm's own contract tests, over one network of each host; `make timm-contract` runs them over all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "timm_contract.py"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_network_of_each_host_passes_timms_own_tests():
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    fetched = subprocess.run([sys.executable, SCRIPT, "--fetch"], env=environment, capture_output=True, text=True)
    if fetched.returncode == 3:
        pytest.skip(f"timm's tests can't be had here: {fetched.stderr.strip()}")
    run = subprocess.run([sys.executable, SCRIPT, "--fast"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert " passed" in run.stdout and "failed" not in run.stdout
