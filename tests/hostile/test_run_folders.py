"""Run folders: one writer, nothing left behind, nothing stuck."""

import argparse
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from PIL import Image
from run_parts import complaint, failing_now, listing, little_garbage, same, short, short_of  # noqa: F401

from subquad import writing
from subquad.cli import main, make_parser
from subquad.data.archives import unpack
from subquad.diffusion.folder import ImageFolder, ImageRow
from subquad.errors import SubquadError
from subquad.holding import LOCK, holding
from subquad.runs.run_folder import RunFolder
from subquad.training import running, train
from subquad.training.loop import Trainer
from subquad.weights.downloading import locked
from subquad.writing import replacing, temporary_folder, write_json, write_text

DEAD = 2**22 - 3  # above what systems give out by default


# one writer


class Elsewhere:
    """Another holder of a folder: a thread is as foreign to a lock as a process."""

    def __init__(self, folder):
        self.folder, self.ready, self.done = folder, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.hold)

    def hold(self):
        with holding(self.folder):
            self.ready.set()
            self.done.wait(30)

    def __enter__(self):
        self.thread.start()
        assert self.ready.wait(30)

    def __exit__(self, *error):
        self.done.set()
        self.thread.join()


def commands(parser, before=()):
    """All commands, each with its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield (*before, name), sub
                yield from commands(sub, (*before, name))


TRAINING = {name: sub for name, sub in commands(make_parser()) if "--experiment" in sub._option_string_actions}


@pytest.mark.parametrize("command", TRAINING, ids=" ".join)
def test_what_trains_leaves_a_folder_that_another_process_writes_to(command, pictures, tmp_path, capsys):
    needed = [action for action in TRAINING[command]._actions if action.required]
    flags = [word for action in needed for word in (action.option_strings[0], next(iter(action.choices)))]
    if "--model" in TRAINING[command]._option_string_actions:
        flags += ["--model", "agent_pvt_tiny"] if len(command) > 1 else ["--data", str(pictures)]
    if command[-1] in ("compare", "lra"):
        flags += ["--attention", "linear"]
    with Elsewhere(tmp_path / "x"):
        said = complaint(capsys, *command, *flags, "--output", tmp_path, "--experiment", "x")
        assert f"{tmp_path / 'x'} is being written by process {os.getpid()} on " in said and " since 20" in said
        assert listing(tmp_path / "x") == [LOCK]
    assert not (tmp_path / "x").exists()


def test_other_writers_of_whole_folders_are_held_off_too(copy, tmp_path, capsys):
    from subquad.benchmarks import make_images

    with Elsewhere(tmp_path / "x"):
        assert "is being written by" in complaint(capsys, "analyze", copy, "--output", tmp_path / "x")
        with pytest.raises(SubquadError, match="is being written by"):
            make_images(None, ["a"], tmp_path / "x", methods={"softmax": {}})


def test_a_run_is_gone_on_with_by_one_process_and_read_by_others_meanwhile(copy, tmp_path, capsys):
    (copy / "summary.json").unlink()
    with Elsewhere(copy):
        assert "is being written by" in complaint(capsys, "train", "--resume", copy)
        assert main(["report", str(copy), "--no-scaling", "--output", str(tmp_path / "page.html")]) == 0
        assert main(["eval", str(copy)]) == 0
    assert main(["train", "--resume", str(copy)]) == 0


def test_a_lock_ends_with_its_process_however_its_number_is_used_then(tmp_path):
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / LOCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with pytest.raises(SubquadError, match="is being written by another process"), holding(tmp_path):
            pass
        other.kill()
    # the number of a process that lives
    (tmp_path / LOCK).write_text(f"process {os.getpid()} on here (me) since 2026-01-01 00:00")
    with holding(tmp_path), holding(tmp_path):
        assert f"process {os.getpid()}" in (tmp_path / LOCK).read_text()
    assert listing(tmp_path) == []


def test_only_the_first_of_several_processes_holds_the_folder(tmp_path, monkeypatch):
    with Elsewhere(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with holding(tmp_path):
            pass


@pytest.mark.parametrize("place", ["file", "file/x", "x" * 300])
def test_a_folder_that_can_not_be_is_one_line(place, pictures, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SubquadError, match=r"can't be written to: \w+") as error:
        train(short(pictures), tmp_path / place)
    assert "\n" not in str(error.value) and listing(tmp_path) == ["file"]


def test_a_disk_that_fails_to_lock_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing_with(errno.EIO))
    with pytest.raises(SubquadError, match="x can't be written to: Input/output error"), holding(tmp_path / "x"):
        pass
    assert listing(tmp_path) == []


def test_a_disk_without_locks_is_called_so(pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    archive = shutil.make_archive(str(tmp_path / "pictures"), "tar", pictures)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", failing_with(errno.ENOLCK))
        with holding(tmp_path / "run"):
            pass
        said = r"can't lock [^\n]* \(No locks available\): set SUBQUAD_HOME to a folder on a disk that has locks$"
        with pytest.raises(SubquadError, match=said):
            unpack(Path(archive))
        with pytest.raises(SubquadError, match=said), locked(tmp_path / "home" / "weights"):
            pass
    assert unpack(Path(archive)).is_dir()


def failing_with(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("place", ["disk", "disk/runs/x"])
def test_a_folder_behind_a_link_to_nowhere_is_called_so(place, pictures, tmp_path):
    (tmp_path / "disk").symlink_to("not mounted")
    with pytest.raises(SubquadError, match="disk is a link to not mounted, which is not there"):
        train(short(pictures), tmp_path / place)
    assert listing(tmp_path) == ["disk"]


def test_a_new_run_is_not_begun_where_another_one_is(copy, capsys):
    folder = RunFolder(copy)
    with pytest.raises(SubquadError, match="exists already: go on with --resume"):
        folder.check_new()


# nothing left behind, nothing stuck


BEFORE = "an empty folder", "what a killed process left"


def failing(monkeypatch, where):
    def fail(*args, **kwargs):
        raise SubquadError("made to fail")

    monkeypatch.setattr(*where, fail)


MOMENTS = {
    "set-up": (running, "make_task"),
    "first step": (Trainer, "_step"),
    "first evaluation": (Trainer, "_evaluate"),
    "first save": ("subquad.training.loop.save_state",),
}


@pytest.mark.parametrize(
    ("moment", "before"),
    [*((moment, "nothing") for moment in MOMENTS), *(("set-up", before) for before in BEFORE)],
)
def test_what_fails_before_its_first_epoch_leaves_what_was_there(moment, before, pictures, tmp_path, monkeypatch):
    run = tmp_path / "runs" / "x"
    if before != "nothing":
        run.mkdir(parents=True)
    if before == "what a killed process left":
        (run / "run.json").write_text("{}")
    with monkeypatch.context() as patch:
        failing(patch, MOMENTS[moment])
        with pytest.raises(SubquadError, match="made to fail"):
            train(short(pictures), run)
    assert listing(tmp_path) in ([], ["runs", "runs/x"]) and run.exists() == (before != "nothing")


@pytest.mark.slow
def test_what_fails_later_is_kept_and_gone_on_with(pictures, run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        whole = Trainer._epoch
        patch.setattr(Trainer, "_epoch", lambda self, k: whole(self, k) if not k else failing_now())
        with pytest.raises(SubquadError, match="made to fail"):
            train(short(pictures), tmp_path / "x")
    train(short(pictures), tmp_path / "x", resume=True)
    assert same(tmp_path / "x", run)


def test_a_run_with_something_else_in_its_folder_leaves_that(pictures, tmp_path, monkeypatch):
    def fail(self, batch):
        (tmp_path / "x" / "mine").write_text("")
        raise SubquadError("made to fail")

    monkeypatch.setattr(Trainer, "_step", fail)
    with pytest.raises(SubquadError, match="made to fail"):
        train(short(pictures), tmp_path / "x")
    assert listing(tmp_path) == ["x", "x/mine"]


@pytest.fixture(scope="module")
def moments(pictures, tmp_path_factory):
    """What a run leaves that is killed between any two things that it writes."""
    folder, copies = tmp_path_factory.mktemp("killed") / "run", []
    replace = Path.replace

    def keep(self, target):
        for step in (lambda: None, lambda: replace(self, target)):
            step()
            copies.append(shutil.copytree(folder, folder.with_name(str(len(copies)))))
        return target

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", keep)
        train(short(pictures), folder)
    return copies


def begin_or_go_on(recipe, folder):
    """As a user does: with --resume where there is a run, anew where there is none."""
    return train(recipe, folder, resume=(folder / "recipe.yaml").is_file())


def test_no_moment_leaves_a_run_that_can_neither_be_begun_nor_gone_on_with(moments, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(running._Attempt, "run", lambda self, interruptions, log: {"status": "gone on"})
    assert len(moments) > 20
    for number, killed in enumerate(moments):
        again = shutil.copytree(killed, tmp_path / str(number))
        assert begin_or_go_on(short(pictures), again)["status"] in ("gone on", "finished")


@pytest.mark.slow
def test_a_run_killed_between_any_two_writes_ends_as_an_unbroken_one(moments, pictures, run, tmp_path):
    for number, killed in enumerate(moments):
        again = shutil.copytree(killed, tmp_path / str(number))
        begin_or_go_on(short(pictures), again)
        assert same(again, run)
        assert [name for name in listing(again) if "tfevents" not in name] == [
            name for name in listing(run) if "tfevents" not in name
        ]


def test_what_a_dead_process_left_aside_goes_and_what_a_living_one_writes_stays(tmp_path):
    with replacing(tmp_path / "a") as aside:
        aside.write_text("")
        dead = aside.with_name(aside.name.replace(f".{os.getpid()}-", f".{DEAD}-"))
        alive = aside.with_name(aside.name.replace(f".{os.getpid()}-", f".{os.getppid()}-"))
        elsewhere = aside.with_name(f".a.{DEAD}-00000000.unfinished")
        mine = tmp_path / ".config.12"
        for file in (dead, alive, elsewhere, mine):
            file.write_text("")
    with holding(tmp_path):
        assert listing(tmp_path) == sorted([LOCK, alive.name, elsewhere.name, mine.name, "a"])


def test_a_folder_is_swept_by_the_first_file_that_a_process_writes_there(tmp_path):
    with replacing(tmp_path / "other" / "a") as aside:
        aside.write_text("")
        name = aside.name.replace(f".{os.getpid()}-", f".{DEAD}-")
    (tmp_path / name).write_text("")
    write_text(tmp_path / "b", "b")
    assert listing(tmp_path) == ["b", "other", "other/a"]


def test_temporary_folders_of_killed_processes_go_with_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder("export") as own:
        (own / "network").write_text("")
        for process in (DEAD, os.getppid()):
            (tmp_path / own.name.replace(str(os.getpid()), str(process), 1)).mkdir()
    (dead,) = tmp_path.glob(f"*-{DEAD}-*")
    (dead / "half").write_text("")
    monkeypatch.setattr(writing, "_swept", set())
    with temporary_folder("export"):
        assert not dead.exists() and len(listing(tmp_path)) == 2
    assert len(listing(tmp_path)) == 1


def test_half_an_archive_that_a_killed_process_left_goes_when_it_is_unpacked_again(pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    archive = shutil.make_archive(str(tmp_path / "pictures"), "tar", pictures)
    unpack(Path(archive))
    (whole,) = [path for path in (tmp_path / "home" / "data").iterdir() if path.is_dir()]
    whole.rename(whole.with_name(f".{whole.name}-abc"))
    assert unpack(Path(archive)).is_dir() and not whole.with_name(f".{whole.name}-abc").exists()


def test_what_earlier_versions_left_aside_goes_when_the_run_goes_on(copy):
    (copy / "summary.json").unlink()
    for name in (".last.pt.77", ".metrics.jsonl.78", ".summary.json.1-00000000.unfinished", ".keep.pt.77"):
        (copy / name).write_text("")
    train(short_of(copy), copy, resume=True)
    assert [name for name in listing(copy) if name.startswith(".")] == [".keep.pt.77"]


@pytest.mark.parametrize("prompt", ["one\u2028two", "one\x85two", "one\ntwo"])
def test_a_prompt_with_any_line_end_is_gone_on_with(prompt, tmp_path):
    row = ImageRow(prompt, 0, "softmax", "", 1.0)
    added = ImageFolder(tmp_path, {"model": "a"}).add(Image.new("RGB", (2, 2)), None, row)
    assert ImageFolder(tmp_path, {"model": "a"}).find(prompt, 0, "softmax") == added


def test_images_that_were_never_made_do_not_bind_the_next_settings(tmp_path):
    write_json(tmp_path / "settings.json", {"model": "a", "peaks_mb": {"softmax": 3.0}})
    assert ImageFolder(tmp_path, {"model": "b"}).peaks == {}
    for name, content in (("settings.json", "{"), ("settings.json", "[]"), ("images.jsonl", "{}\n")):
        write_json(tmp_path / "settings.json", {"model": "b", "peaks_mb": {}})
        (tmp_path / name).write_text(content)
        with pytest.raises(SubquadError, match="is damaged"):
            ImageFolder(tmp_path, {"model": "b"})
