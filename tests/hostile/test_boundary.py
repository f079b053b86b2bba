"""Whatever a user, a file, a library or the machine does to a command: one line on stderr, a status, and no trace."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from subquad import SubquadError, starting
from subquad.cli import main
from subquad.cli.boundary import CAUSED_OUTSIDE, Terminated
from subquad.reading import LONGEST, MOST_BYTES, parse_yaml, read_yaml

LAUGHS = "a: &a [x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 8)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
DOCUMENTS = {
    "deep lists": "a: " + "[" * 60_000,
    "deep tables": "a: " + "{" * 60_000,
    "deep blocks": "\n".join(" " * k + "a:" for k in range(400)),
    "questions": "? " * 60_000,
    "laughs": LAUGHS,
    "of itself": "a: &a [*a]",
    "long numbers": "a: " + "9" * (LONGEST + 1),
    "sixties": "a: " + ":".join(["1"] * LONGEST),
    "days": "a: 2020-13-45",
    "twice": "a: 1\na: 2",
    "lists as keys": "? [a, b]\n: 1",
    "two documents": "a: 1\n---\nb: 2",
    "a program": "!!python/object/apply:os.system [ls]",
    "zero bytes": "a: \x00",
    "open quotes": '"' + "\\x41" * 20_000,
    "many entries": "[" + "1," * 60_000 + "]",
    "too much": "a: " + "x y " * MOST_BYTES,
}


@pytest.fixture
def failing(monkeypatch):
    """A command that does nothing but raise."""

    class Failing:
        def __init__(self, error):
            self.error = error

        def parse(self, argv):
            def run(arguments):
                raise self.error

            return argparse.Namespace(run=run)

    return lambda error: monkeypatch.setattr("subquad.cli.make_parser", lambda argv: Failing(error))


def raised(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


ERRORS = [
    (SubquadError("twelve is more than eleven"), 2, "twelve is more than eleven"),
    (OSError(28, "No space left on device", "runs/x/last.pt"), 2, "runs/x/last.pt: No space left on device"),
    (PermissionError(13, "Permission denied", "runs"), 2, "runs: Permission denied"),
    (raised(lambda: Path("x" * 5000).stat()), 2, "File name too long"),
    (raised(lambda: b"\xff".decode("utf-8")), 2, "invalid start byte"),
    (raised(lambda: "\udcff".encode()), 2, "surrogates not allowed"),
    (raised(lambda: yaml.safe_load("a: [")), 2, "flow"),
    (raised(lambda: json.loads("{")), 2, "Expecting property name"),
    (zipfile.BadZipFile("Bad magic number for central directory"), 2, "Bad magic number"),
    (ImportError("No module named 'diffusers'"), 2, "No module named 'diffusers'"),
    (EOFError(), 2, "EOFError"),
    (MemoryError(), 2, "not enough memory"),
    (raised(lambda: torch.empty(2**60)), 2, "not enough memory"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), 2, "not enough memory"),
    (RecursionError("maximum recursion depth exceeded"), 2, "nested too deeply"),
    (SubquadError("two\nlines\r\nand a third"), 2, "two lines and a third"),
    (TypeError("'NoneType' object is not\niterable"), 1, "TypeError: 'NoneType' object is not iterable"),
    (AssertionError(), 1, "AssertionError"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (Terminated(), 143, "terminated"),
]


@pytest.mark.parametrize(("error", "status", "words"), ERRORS, ids=[type(error).__name__ for error, *_ in ERRORS])
def test_every_exception_is_one_line_with_its_reason_and_the_trace_only_where_it_is_asked_for(
    error, status, words, failing, capsys, monkeypatch
):
    failing(error)
    monkeypatch.delenv("SUBQUAD_DEBUG", raising=False)
    assert main(["list"]) == status
    said = capsys.readouterr().err
    assert said.startswith("subquad: ") and said.count("\n") == 1 and words in said, said
    assert ("fault of subquad" in said and "--debug" in said) == (status == 1)
    assert main(["list", "--debug"]) == status
    assert "Traceback" in (shown := capsys.readouterr().err) and shown.endswith(said)
    monkeypatch.setenv("SUBQUAD_DEBUG", "1")
    assert main(["list"]) == status and "Traceback" in capsys.readouterr().err


def test_what_libraries_raise_over_files_is_nobodys_fault():
    assert OSError in CAUSED_OUTSIDE and not any(issubclass(kind, SubquadError) for kind in CAUSED_OUTSIDE)


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_yaml_that_is_deep_huge_or_odd_is_refused_at_once_in_one_line(document, tmp_path, capsys):
    file = tmp_path / "a.yaml"
    file.write_text(document)
    start = time.process_time()
    with pytest.raises(SubquadError) as caught:
        read_yaml(file)
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)
    assert main(["train", "--config", str(file), "--output", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == f"subquad: {caught.value}\n" and not (tmp_path / "runs").exists()
    assert time.process_time() - start < 1
    with pytest.raises(SubquadError):
        parse_yaml(document)


def test_yaml_as_people_write_it_is_read(tmp_path):
    text = "base: &base {lr: 1e-3, img_size: [8, 12]}\nown:\n  <<: *base\n  lr: 0.5\n  data: grün\n"
    assert parse_yaml(text)["own"] == {"lr": 0.5, "img_size": [8, 12], "data": "grün"}
    file = tmp_path / "a.yaml"
    file.write_text("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n")
    with pytest.raises(SubquadError, match="c is there twice, line 5, column 3"):
        read_yaml(file)
    file.write_bytes(b"a: \xff")
    with pytest.raises(SubquadError, match=r"not YAML: .*invalid start byte"):
        read_yaml(file)
    with pytest.raises(SubquadError, match="Is a directory"):
        read_yaml(tmp_path)


def test_text_that_a_terminal_has_no_letters_for_is_shown_all_the_same(failing, monkeypatch, tmp_path):
    with (tmp_path / "out").open("w", encoding="ascii") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        run = argparse.Namespace(run=lambda _: sys.stdout.write("grün \udcff\n"))
        monkeypatch.setattr("subquad.cli.make_parser", lambda argv: argparse.Namespace(parse=lambda _: run))
        assert main(["list"]) == 0
    assert (tmp_path / "out").read_text() == "gr\\xfcn \\udcff\n"


def program(*argv, how=("-m", "subquad"), **settings):
    stdout = settings.pop("stdout", subprocess.PIPE)
    return subprocess.Popen([sys.executable, *how, *argv], stderr=subprocess.PIPE, stdout=stdout, **settings)


@pytest.mark.slow
def test_a_full_disk_below_the_output_is_one_line():
    with Path("/dev/full").open("w") as full:
        process = program("list", "mechanisms", stdout=full)
        assert process.communicate()[1] == b"subquad: No space left on device\n" and process.returncode == 2


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=str)
def test_a_command_works_where_nobody_listens(closed, tmp_path):
    # as of `>&-`, and of daemons that close what they are started with
    code = (
        f"import os; [os.close(number) for number in {closed}]\n"
        "import sys; sys.stdin = sys.stdout = sys.stderr = None; sys.argv[0] = 'subquad'\n"
        "from subquad.starting import open_what_is_closed\n"
        "open_what_is_closed()\n"
        "os.write(1, b'for nobody'); os.write(2, b'for nobody'); print('nor this'); sys.stderr.isatty()\n"
        f"open({str(tmp_path / 'kept')!r}, 'w').write('whole')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "kept").read_text() == "whole"


def test_main_without_streams_does_what_it_is_asked(failing, monkeypatch):
    heard = []
    run = argparse.Namespace(run=lambda _: heard.append(sys.stdout.write("for nobody")))
    monkeypatch.setattr("subquad.cli.make_parser", lambda argv: argparse.Namespace(parse=lambda _: run))
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["list"]) == 0 and heard
    failing(SubquadError("a mistake"))
    assert main(["list"]) == 2
    sys.stdout.close()
    sys.stderr.close()


SCRIPT = "import sys; sys.argv[0] = '/usr/bin/subquad'; from subquad.cli import main; sys.exit(main())"


@pytest.mark.slow
@pytest.mark.parametrize("how", [("-m", "subquad"), ("-c", SCRIPT)], ids=["module", "script"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_in_the_first_seconds_ends_in_one_line(how, number, tmp_path):
    for place, delay in enumerate((0.0, 0.3, 1.0, 2.0)):
        # from when on Python has read this package's first lines: what is before is Python's own
        process = program("train", "--data", "digits", "--output", str(tmp_path), how=how, env=os.environ)
        handled = Path(f"/proc/{process.pid}/status")
        while not _catches(handled):
            time.sleep(0.005)
        time.sleep(delay)
        process.send_signal(number)
        said = process.communicate()[1].decode()
        assert said.startswith("subquad: ") and said.count("\n") == 1, (place, said)
        # once the run has begun, the line says how to go on with it
        assert process.returncode in (128 + number, 2), place


def test_processes_that_a_command_started_leave_the_line_to_it(monkeypatch):
    said = []
    monkeypatch.setattr(os, "write", lambda number, line: said.append(line))
    monkeypatch.setattr(os, "_exit", said.append)
    for parent, lines in ((None, [b"subquad: terminated\n"]), (object(), [])):
        monkeypatch.setattr("multiprocessing.process.parent_process", lambda parent=parent: parent)
        said.clear()
        starting._end(signal.SIGTERM, None)
        assert said == [*lines, 143]


def _catches(status):
    """Whether a process sees to SIGTERM by itself, as this package does and Python does not."""
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1
