"""Kernels that a wheel brings: taken where they fit the source and the processor and nobody else could write them."""

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from subquad.kernels.cpu import library, openmp, shipping

pytestmark = [
    pytest.mark.skipif(library.missing() is not None, reason=f"no kernels: {library.missing()}"),
    pytest.mark.skipif(platform.machine() not in shipping.LEVELS, reason="nothing is shipped for this machine"),
    pytest.mark.skipif(not openmp.make_visible(), reason="PyTorch's threads are not GNU's"),
]
LEVELS = shipping.LEVELS.get(platform.machine(), {})


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Shipped libraries of all levels, and what is loaded where there is neither a compiler nor a home."""
    # what this machine compiled stands for all of them
    compilers = [found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))]
    made = [library._own_folder() / f"{library._fingerprint(compiler)}.so" for compiler in compilers]
    content = next(path for path in made if path.is_file()).read_bytes()
    monkeypatch.setattr(shipping, "SHIPPED", tmp_path)
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    mode = Path(library.__file__).stat().st_mode & 0o755
    for level in LEVELS:
        file = tmp_path / shipping.library_name(level)
        file.write_bytes(content)
        file.chmod(mode)

    def state():
        library._state.cache_clear()
        return library._state()

    yield state, tmp_path
    library._state.cache_clear()


def test_shipped_kernels_need_no_compiler(shipped):
    state, folder = shipped
    assert isinstance(state(), ctypes.CDLL)
    for file in folder.iterdir():
        file.unlink()
    assert "there is no C++ compiler" in state()


LOADED_FOR_ITSELF = """
import ctypes
seen_by_all, ctypes.RTLD_GLOBAL = ctypes.RTLD_GLOBAL, 0  # as PyTorch's wheels for aarch64 load theirs
import torch
from subquad.kernels.cpu import openmp
ctypes.RTLD_GLOBAL = seen_by_all
print(openmp._is_visible(), openmp.make_visible(), openmp._is_visible())
"""


@pytest.mark.long
@pytest.mark.slow
def test_openmp_that_pytorch_loaded_for_itself_is_found():
    done = subprocess.run([sys.executable, "-c", LOADED_FOR_ITSELF], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]


def test_what_is_called_alike_is_not_taken_for_openmp():
    own = f"{Path(torch.__file__).parent}/lib"
    others = [f"{own}/libarm_compute.so", f"{own}/libnvpl_blas_lp64_gomp.so.0", "[heap]", "/x/libomp-of-another.so"]
    assert openmp.among([*others, f"{own}/libgomp.so.1"]) == Path(own) / "libgomp.so.1"
    assert openmp.among(others[:3]) is None
    assert openmp.loaded() is not None


def damaged(file):
    content = file.read_bytes()
    file.write_bytes(content[:3000] + bytes([content[3000] ^ 1]) + content[3001:])


def linked(file):
    elsewhere = file.with_suffix(".elsewhere")
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "spoil", [damaged, linked, lambda file: file.chmod(0o777)], ids=["a byte", "a link", "writable"]
)
def test_what_could_be_somebody_elses_is_not_loaded(shipped, spoil):
    state, folder = shipped
    for file in sorted(folder.glob("*.so")):
        spoil(file)
    assert "there is no C++ compiler" in state()


def test_a_library_of_another_source_is_not_loaded(shipped, monkeypatch, tmp_path):
    state, _ = shipped
    changed = tmp_path / "source"
    shutil.copytree(shipping.SOURCES, changed)
    (changed / "kernels.cpp").write_text("// another version\n")
    monkeypatch.setattr(shipping, "SOURCES", changed)
    assert "there is no C++ compiler" in state()


@pytest.mark.parametrize("level", LEVELS)
def test_a_processor_gets_the_best_that_it_can_run(monkeypatch, level):
    needs = LEVELS[level]
    monkeypatch.setattr(shipping, "processor", lambda: f"flags : {' '.join(sorted(needs))} other\n")
    assert shipping.shipped_libraries()[0].name == shipping.library_name(level)
    for feature in sorted(needs):
        monkeypatch.setattr(shipping, "processor", lambda less=needs - {feature}: f"flags : {' '.join(less)}")
        assert shipping.library_name(level) not in {path.name for path in shipping.shipped_libraries()}


@pytest.mark.parametrize("machine", sorted(shipping.LEVELS))
def test_a_level_is_a_march_and_what_a_processor_has_beside_it(machine):
    for level in shipping.LEVELS[machine]:
        march, *more = shipping.flags_of(level)
        assert march.startswith("-march=") and "+" not in march
        assert [flag.removeprefix("-m") for flag in more] == level.split("+")[1:]
