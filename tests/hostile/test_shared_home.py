"""Kernels in a $SUBQUAD_HOME that others can write to: only what this user wrote, and whole, is ever loaded."""

import ctypes
import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from subquad import SubquadError
from subquad.data.archives import data_home
from subquad.home import home
from subquad.kernels.cpu import library
from subquad.writing import WriteError

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"no kernels: {library.missing()}")


def compiler():
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))))


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    """A home with a compiled library, by copy; the number of compilations; and what is loaded."""
    # of these sources: the folder may hold libraries of other versions
    content = (library._own_folder() / f"{library._fingerprint(compiler())}.so").read_bytes()
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_run", lambda command: command[-1].endswith(".so") and made(command[-1]))
    compilations = []

    def made(path):
        compilations.append(path)
        Path(path).write_bytes(content[: -library.DIGEST_SIZE])

    def state():
        library._state.cache_clear()
        return library._state()

    yield state, compilations, tmp_path / "native" / f"user-{os.geteuid()}"
    library._state.cache_clear()


def test_a_library_is_compiled_once_and_nobody_else_may_write_it(own_home):
    state, compilations, folder = own_home
    assert isinstance(state(), ctypes.CDLL) and isinstance(state(), ctypes.CDLL)
    assert len(compilations) == 1
    (file,) = folder.iterdir()
    assert not file.stat().st_mode & 0o077 and not folder.stat().st_mode & 0o077


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-5000]),
        lambda file: file.write_bytes(file.read_bytes()[:3000] + b"\0" + file.read_bytes()[3001:]),
        lambda file: file.write_bytes(os.urandom(20000)),
        lambda file: file.chmod(0o777),
        lambda file: (file.rename(file.with_suffix(".elsewhere")), file.symlink_to(file.with_suffix(".elsewhere"))),
        lambda file: (file.unlink(), os.mkfifo(file)),
    ],
    ids=["empty", "truncated", "a byte", "noise", "writable", "a link", "a pipe"],
)
def test_a_damaged_or_foreign_library_is_compiled_again(own_home, damage, tmp_path):
    state, compilations, folder = own_home
    state()
    (file,) = folder.iterdir()
    # what is loaded is mapped, and ends the process by a bus error where it is cut off: another file of its name is
    shutil.copy2(file, tmp_path / "copy")
    (tmp_path / "copy").replace(file)
    damage(file)
    assert isinstance(state(), ctypes.CDLL)
    assert len(compilations) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_planted_is_not_loaded(own_home):
    state, compilations, folder = own_home
    state()
    (file,) = folder.iterdir()
    os.chown(file, 65534, 65534)
    assert isinstance(state(), ctypes.CDLL) and len(compilations) == 2
    os.chown(folder, 65534, 65534)
    assert state() == f"{folder} belongs to somebody else: set SUBQUAD_HOME to a folder of your own"


def test_a_home_that_cannot_be_written_to_is_a_reason_and_not_a_trace(own_home, monkeypatch, tmp_path):
    state, _, _ = own_home
    (tmp_path / "file").touch()
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "file"))
    reason = state()
    assert isinstance(reason, str) and "\n" not in reason and "file" in reason


def test_another_library_at_the_same_descriptor_is_not_taken_for_the_first(own_home, tmp_path, monkeypatch):
    """What is loaded already is found by its name, and a descriptor's number is soon another file's."""
    state, _, folder = own_home
    state()
    (file,) = folder.iterdir()
    first = library._loaded(file)
    source, other = tmp_path / "other.cpp", folder / "other.so"
    source.write_text('extern "C" int only_here() { return 7; }')
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", other, source], check=True)
    other.write_bytes(other.read_bytes() + library.digest_of(other.read_bytes()))
    assert first is not None and library._loaded(other).only_here() == 7


def test_a_disk_without_room_for_kernels_is_a_reason_and_not_a_trace(own_home, monkeypatch):
    state, _, _ = own_home

    def full(*_):
        raise WriteError("kernels.so can't be written: No space left on device")

    monkeypatch.setattr(library, "replacing", full)
    assert state() == "kernels.so can't be written: No space left on device"


def test_a_library_on_a_disk_that_is_not_to_be_written_to_is_loaded(own_home, monkeypatch):
    state, compilations, _ = own_home
    state()

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "chmod", refuse)
    assert isinstance(state(), ctypes.CDLL) and len(compilations) == 1


@pytest.mark.parametrize("name", [None, "~", "~/there", "~nobody-of-that-name/there"])
def test_a_user_without_a_home_has_a_reason_for_no_kernels(own_home, monkeypatch, name):
    state, _, _ = own_home
    monkeypatch.delenv("SUBQUAD_HOME")
    if name is not None:
        monkeypatch.setenv("SUBQUAD_HOME", name)

    def nowhere(path):
        # as Python does for a user that the system has no entry of
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nowhere)
    assert "set SUBQUAD_HOME" in state()
    with pytest.raises(SubquadError, match="set SUBQUAD_HOME"):
        data_home()


def test_what_a_compiler_says_in_another_encoding_is_a_reason(tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_bytes(b"#!/bin/sh\nprintf 'error: f\\374r' >&2\nexit 1\n")
    compiler.chmod(0o700)
    with pytest.raises(library.NotBuiltError, match="error: f"):
        library._run([str(compiler)])


def test_a_home_may_be_named_as_a_shell_would(monkeypatch, tmp_path):
    # where no shell reads the variable: in unit files, containers and quotes
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SUBQUAD_HOME", "~/cache of mine")
    assert home() == tmp_path / "cache of mine"
