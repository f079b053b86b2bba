"""Run folders: one writer, nothing left behind, nothing stuck, and damage that is noticed."""

import argparse
import ast
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from run_parts import draw, listing, little_garbage, short  # noqa: F401
from safetensors.torch import load_file, save_file

from subquad.cli import main, make_parser
from subquad.data.archives import unpack
from subquad.diffusion.folder import ImageFolder
from subquad.errors import SubquadError
from subquad.holding import LOCK, holding
from subquad.models import create_model, read_weights, save_weights
from subquad.runs.run_folder import RunFolder
from subquad.runs.run_state import State, load_state, save_state
from subquad.tasks.task import Task
from subquad.training import running, train
from subquad.training.loop import Trainer
from subquad.weights.digest import DIGEST
from subquad.writing import WriteError, json_text, replacing, write_json, write_text

SOURCE = Path(__file__).parents[2] / "src" / "subquad"
DEAD = 2**22 - 3  # above what systems give out by default


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def run(pictures, tmp_path_factory):
    """A finished run, to be copied."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(short(pictures), folder)
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def same(first, second):
    """Whether two runs have learned the same, bit for bit."""
    for name in ("last.safetensors", "best.safetensors"):
        one, other = load_file(first / name), load_file(second / name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), name
    learned = ("epoch", "train_loss", "eval_loss", "eval_top1", "lr")
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (first, second)]
    assert [[row[key] for key in learned] for row in rows[0]] == [[row[key] for key in learned] for row in rows[1]]
    return True


def complaint(capsys, *argv):
    assert main([str(word) for word in argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("subquad: ") and said.count("\n") == 1, said
    return said


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


def failing_now():
    raise SubquadError("made to fail")


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


def short_of(run):
    from subquad.tasks import load_recipe
    from subquad.tasks.classification import Recipe

    return load_recipe(run / "recipe.yaml", Recipe)


def test_images_that_were_never_made_do_not_bind_the_next_settings(tmp_path):
    write_json(tmp_path / "settings.json", {"model": "a", "peaks_mb": {"softmax": 3.0}})
    assert ImageFolder(tmp_path, {"model": "b"}).peaks == {}
    for name, content in (("settings.json", "{"), ("settings.json", "[]"), ("images.jsonl", "{}\n")):
        write_json(tmp_path / "settings.json", {"model": "b", "peaks_mb": {}})
        (tmp_path / name).write_text(content)
        with pytest.raises(SubquadError, match="is damaged"):
            ImageFolder(tmp_path, {"model": "b"})


# damage is noticed


def flipped(content, place, bit):
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def state_of(content, path):
    path.write_bytes(content)
    return load_state(path)


def equal(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second


def some_bits(size, count):
    return [(int(place), int(place) % 8) for place in torch.linspace(0, size - 1, count).long()]


def test_no_flipped_bit_of_a_state_gives_another_state(tmp_path):
    model = torch.nn.Linear(5, 7)
    state = State(1, 2, 3, 4.0, 0, model.state_dict(), {"state": {0: torch.rand(5)}}, {}, {}, [{"epoch": 0}])
    save_state(state, tmp_path / "last.pt")
    content, whole = (tmp_path / "last.pt").read_bytes(), load_state(tmp_path / "last.pt")
    noticed = 0
    for place, bit in some_bits(len(content), 300):
        try:
            assert equal(vars(state_of(flipped(content, place, bit), tmp_path / "x.pt")), vars(whole)), place
        except SubquadError as error:
            assert "\n" not in str(error)
            noticed += 1
    # what fills the file up to the next 64 bytes is nobody's
    assert noticed > 50
    place = content.index(model.weight.detach().numpy().tobytes())
    with pytest.raises(SubquadError, match=r"checksum of .* is wrong"):
        state_of(flipped(content, place, 3), tmp_path / "x.pt")


def test_no_flipped_bit_of_a_weight_file_gives_other_weights(tmp_path):
    model = create_model("linear_deit_tiny", num_classes=2, depths=(1,), embed_dim=16, num_heads=1)
    save_weights(model, tmp_path / "a.safetensors", {"classes": ["dark", "light"]})
    content, (weights, note) = (tmp_path / "a.safetensors").read_bytes(), read_weights(tmp_path / "a.safetensors")
    header = int.from_bytes(content[:8], "little") + 8
    places = [*some_bits(header, 200), *((header + place, bit) for place, bit in some_bits(len(content) - header, 40))]
    noticed = 0
    for place, bit in places:
        (tmp_path / "b.safetensors").write_bytes(flipped(content, place, bit))
        try:
            other, said = read_weights(tmp_path / "b.safetensors")
        except SubquadError as error:
            assert "\n" not in str(error)
            noticed += 1
        else:
            # the digest's own name is all that may be lost
            assert equal(weights, other) and said == note, place
    assert noticed > 200


def test_files_of_earlier_versions_open(copy, tmp_path):
    weights, note = read_weights(copy / "last.safetensors")
    save_file(weights, tmp_path / "old.safetensors", metadata={"format": "pt", "subquad": json.dumps(note)})
    assert equal(read_weights(tmp_path / "old.safetensors")[0], weights)
    old = torch.load(copy / "last.pt", weights_only=True)
    del old["rows"]
    torch.save(old, copy / "last.pt")
    (copy / "summary.json").unlink()
    assert train(short_of(copy), copy, resume=True)["epochs"] == 2


def test_the_digest_is_in_every_weight_file_that_is_written(run):
    from safetensors import safe_open

    for file in run.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert len(opened.metadata()[DIGEST]) == 64


DAMAGES = {
    "empty": lambda file: file.write_bytes(b""),
    "garbage": lambda file: file.write_bytes(bytes(range(256)) * 3),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "null": lambda file: file.write_text("null\n"),
    "a list": lambda file: file.write_text("[1]\n"),
    "another": lambda file: file.write_text('{"epoch": "x", "settings": 3}\n'),
    "missing": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "no one's": lambda file: (file.unlink(), file.symlink_to("nowhere")),
}
FILES = ("recipe.yaml", "run.json", "metrics.jsonl", "metrics.csv", "last.pt", "best.safetensors", "summary.json")


def damaged(copy, file, damage):
    """A run of which one file is damaged, broken off."""
    if file != "summary.json":
        (copy / "summary.json").unlink()
    DAMAGES[damage](copy / file)
    return copy


def quietly(capsys, *argv):
    """Carry out a command that ends well or in one line."""
    code = main([str(word) for word in argv])
    said = capsys.readouterr().err
    assert code in (0, 2), said
    assert said.count("\n") == (code == 2) and "Traceback" not in said, said
    return code


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_gone_on_with_or_refused_in_one_line(damage, run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Trainer, "_epoch", lambda self, epoch: failing_now())
    codes = {}
    for file in FILES:
        copy = damaged(shutil.copytree(run, tmp_path / file), file, damage)
        codes[file] = quietly(capsys, "train", "--resume", copy)
        quietly(capsys, "report", copy, "--no-scaling", "--output", tmp_path / "page.html")
    # what follows from the state is written anew, where something can be
    if damage not in ("a folder", "no one's"):
        assert codes["run.json"] == codes["metrics.jsonl"] == codes["summary.json"] == 0
    assert codes["recipe.yaml"] == codes["last.pt"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_no_command_ends_in_a_trace_over_a_damaged_run(file, run, pictures, tmp_path, capsys):
    image = next((pictures / "val").rglob("*.png"))
    for damage in ("garbage", "empty", "another", "a folder"):
        folder = tmp_path / damage
        copy = damaged(shutil.copytree(run, folder / "linear-s42"), file, damage)
        quietly(capsys, "eval", copy)
        quietly(capsys, "predict", image, "--checkpoint", copy)
        quietly(capsys, "analyze", copy, "--images", image, "--measures", "entropy", "--output", folder / "analysis")
        quietly(capsys, "train", "--config", copy / "recipe.yaml", "--output", folder, "--experiment", copy.name)
        recipe = ["--config", run / "recipe.yaml", "--attention", "linear", "--seeds", "42"]
        quietly(capsys, "compare", *recipe, "--output", tmp_path, "--experiment", folder.name)


@pytest.mark.slow
def test_a_state_of_another_network_is_one_line(pictures, copy, tmp_path, capsys):
    train(short(pictures, embed_dim=16, epochs=1), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "last.pt", copy / "last.pt")
    (copy / "summary.json").unlink()
    assert "does not fit the recipe beside it" in complaint(capsys, "train", "--resume", copy)


def test_what_is_missing_is_not_quietly_made_anew(copy, capsys):
    (copy / "summary.json").unlink()
    (copy / "best.safetensors").rename(copy / "mine")
    assert "best.safetensors, the weights of epoch" in complaint(capsys, "train", "--resume", copy)
    (copy / "mine").rename(copy / "best.safetensors")
    (copy / "last.pt").unlink()
    assert "last.pt is missing, 2 epochs" in complaint(capsys, "train", "--resume", copy)


def test_the_best_epoch_is_restored(pictures, tmp_path):
    """With the best of an earlier epoch, which no later one reaches."""
    run = tmp_path / "run"
    train(short(pictures, epochs=1), run)
    state = load_state(run / "last.pt")
    state.best, state.best_epoch = 101.0, 7
    save_state(state, run / "last.pt")
    (run / "summary.json").unlink()
    (run / "best.safetensors").write_bytes(b"kept")
    summary = train(short(pictures, epochs=1), run, resume=True)
    assert (summary["best_top1"], summary["best_epoch"]) == (101.0, 7)
    # and an epoch more, which is not better
    recipe = short(pictures)
    (run / "recipe.yaml").write_text(recipe.to_yaml())
    (run / "summary.json").unlink()
    summary = train(recipe, run, resume=True)
    assert (summary["best_top1"], summary["best_epoch"], summary["epochs"]) == (101.0, 7, 2)
    assert (run / "best.safetensors").read_bytes() == b"kept"


# a full disk


@pytest.fixture
def small_disk():
    """Files may not grow beyond some size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_last_epoch_and_says_how_to_go_on(pictures, run, tmp_path, small_disk):
    folder = tmp_path / "x"

    def fill(line):
        if line.startswith("epoch 1/"):
            small_disk((folder / "last.pt").stat().st_size - 1000)

    with pytest.raises(
        WriteError, match=r"last\.pt can't be written: File too large; 1 of 2 epochs are kept, .*goes on"
    ):
        train(short(pictures), folder, log=fill)
    small_disk(resource.RLIM_INFINITY)
    train(short(pictures), folder, resume=True)
    assert same(folder, run)


@pytest.mark.slow
def test_a_disk_that_is_full_at_once_leaves_nothing(pictures, tmp_path, small_disk):
    with pytest.raises(WriteError, match=r"best\.safetensors can't be written: File too large; no epoch is kept"):
        train(short(pictures), tmp_path / "x", log=lambda line: small_disk(2000))
    small_disk(resource.RLIM_INFINITY)
    assert listing(tmp_path) == []


def test_weights_on_a_full_disk_are_one_line(tmp_path, small_disk):
    model = torch.nn.Linear(100, 100)
    small_disk(1000)
    with pytest.raises(WriteError, match=r"a\.safetensors can't be written: File too large"):
        save_weights(model, tmp_path / "a.safetensors")
    # pytest writes its dots before it tears down, maybe into a file
    small_disk(resource.RLIM_INFINITY)
    assert listing(tmp_path) == []


# numbers that are none


def test_json_has_no_word_that_readers_do_not_know():
    content = {"a": [math.nan, 1.5, (math.inf, {"b": -math.inf})], "c": "ü", "d": None, "e": True}
    assert json_text(content) == '{"a": [null, 1.5, [null, {"b": null}]], "c": "ü", "d": null, "e": true}'


def test_all_json_is_made_in_one_place():
    """Where it is strict; elsewhere it may be made only to be read back at once, or to compare."""
    allowed = {"writing.py", "runs/run_records.py"}
    for file in SOURCE.rglob("*.py"):
        if "json.dump" not in (text := file.read_text()):
            continue
        tree = ast.parse(text)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        loaded = {id(each) for node in calls if ast.unparse(node.func) == "json.loads" for each in node.args}
        made = [node for node in calls if ast.unparse(node.func) in ("json.dumps", "json.dump")]
        stray = [node.lineno for node in made if id(node) not in loaded]
        assert str(file.relative_to(SOURCE)) in allowed or not stray, f"{file}: {stray}"


def test_weights_that_are_no_numbers_after_the_last_update_are_not_kept(pictures, tmp_path, monkeypatch):
    whole = Trainer._train

    def spoil(self, epoch):
        result = whole(self, epoch)
        if epoch:
            next(self.bare.parameters()).data.view(-1)[0] = math.inf
        return result

    monkeypatch.setattr(Trainer, "_train", spoil)
    with pytest.raises(SubquadError, match=r"the weights are not finite after epoch 2.*1 whole epochs are kept"):
        train(short(pictures), tmp_path / "x")
    assert load_state(tmp_path / "x" / "last.pt").epochs == 1


# batches of nothing but broken images


def test_batches_without_images_update_nothing_and_do_not_count(pictures, tmp_path, monkeypatch):
    folder = shutil.copytree(pictures, tmp_path / "pictures")
    for file in (folder / "train" / "dark").iterdir():
        file.write_bytes(b"broken")
    steps, seen, whole = [], [], Trainer._step

    def step(self, batch):
        seen.append(len(batch[0]))
        before = [parameter.detach().clone() for parameter in self.bare.parameters()]
        loss, counts = whole(self, batch)
        moved = any(not torch.equal(a, b) for a, b in zip(before, self.bare.parameters(), strict=True))
        assert moved == bool(seen[-1]) == bool(counts)
        steps.append(float(loss) if counts else None)
        return torch.stack([loss, counts])

    monkeypatch.setattr(Trainer, "_step", step)
    train(short(folder, batch_size=1, epochs=1, weight_decay=0.5), tmp_path / "run")
    losses = [loss for loss in steps if loss is not None]
    assert 0 in seen and len(losses) == 8
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_an_epoch_without_an_image_stops_in_one_line_and_leaves_nothing(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(Task, "size", lambda self, batch: 0)
    with pytest.raises(SubquadError, match=r"none of the 16 training images of epoch 1 can be read"):
        train(short(pictures), tmp_path / "run")
    assert listing(tmp_path) == []


def test_a_new_run_is_not_begun_where_another_one_is(copy, capsys):
    folder = RunFolder(copy)
    with pytest.raises(SubquadError, match="exists already: go on with --resume"):
        folder.check_new()
