"""What a process frees stays with it where that is asked for."""

import os
import platform
import subprocess
import sys

import pytest

import subquad

FAULTS = """
import resource
import torch
import subquad
if {keeps}:
    print(subquad.keep_memory())
def use():
    # more than glibc ever keeps of itself
    torch.empty(16 << 20).fill_(1)
for _ in range(5):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(code: str, **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_memory_that_is_kept_is_not_taken_anew():
    kept, faults = run(FAULTS.format(keeps=True))
    (without,) = run(FAULTS.format(keeps=False))
    assert kept == "True" and int(faults) < 1000
    # each page three times, unless the system hands out larger ones
    assert int(without) > 10 * int(faults)


@pytest.mark.parametrize("variable", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"])
def test_what_variables_say_stays(variable, monkeypatch):
    monkeypatch.setenv(variable, "131072")
    assert not subquad.keep_memory()


def test_what_tunables_say_stays(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert not subquad.keep_memory()


def test_another_c_library_is_left_alone(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("subquad.keeping_memory.ctypes.CDLL", lambda _: object())
    assert not subquad.keep_memory()
