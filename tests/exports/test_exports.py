"""What is written is checked before it is kept, errors are one line, and engines stand in for the network."""

import errno
import importlib.util
import json
import logging
import os
import resource
import shutil
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from hosts import small
from torch import nn

import subquad
from subquad import SubquadError, api
from subquad.data import InputConfig
from subquad.exports import (
    EXPORTERS,
    Exporter,
    export,
    exporting,
    notes_of,
    onnx_format,
    open_exported,
    programs,
    register_exporter,
)
from subquad.exports.checking import checked_shapes, largest_difference, other_sides, other_sides_of_maps, tried_images
from subquad.exports.engine_networks import InEngine
from subquad.exports.exporting import least_pixels
from subquad.exports.taken_sizes import TAKES, checked, said_of
from subquad.models.stated_inputs import stated_size
from subquad.tasks import task_named
from subquad.tasks.segmentation.scene_transforms import SceneInput
from subquad.tasks.segmentation.trained_segmenter import TrainedSegmenter


class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


def test_a_network_of_one_size_alone_is_told_so(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=24, num_heads=2, num_classes=3).eval()
    with pytest.raises(SubquadError, match=r"one size alone, leave size out .*dynamic_img_size=True") as raised:
        export(model, tmp_path / "one.pt2", format="pt2", img_size=224, dynamic="size")
    assert "\n" not in str(raised.value) and not list(tmp_path.iterdir())
    with pytest.raises(SubquadError, match="can't be written as pt2") as raised:
        export(Broken(), tmp_path / "one.pt2", format="pt2", img_size=32)
    assert "one size alone" not in str(raised.value)


class Broken(torch.nn.Module):
    def forward(self, x):
        return x if float(x.sum()) > 0 else -x


@pytest.mark.slow
def test_a_network_whose_code_makes_a_number_of_the_batch_is_told_so(tmp_path):
    class Numbered(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 4))

        def forward(self, images):
            return self.token.expand(len(images), -1) + images.mean((1, 2, 3))[:, None]

    with pytest.raises(SubquadError, match=r"makes a number of the batch, as len\(images\) and int\(…\) do"):
        export(Numbered(), tmp_path / "n.pt2", format="pt2", img_size=32, dynamic="batch")
    export(Numbered(), tmp_path / "n.pt2", format="pt2", img_size=32)


def test_the_largest_difference_of_all_sizes_is_told():
    def run(images):
        return Mean()(images) + (0.5 if len(images) == 1 else 0)

    tried = tried_images([(1, 8, 8), (3, 8, 8)], 3, torch.float32)
    assert largest_difference(Mean(), run, tried, torch.float32, 100) > 0.1
    with pytest.raises(SubquadError, match=r"is off by .* at 1 × 8 × 8 px, more than 1e-04"):
        largest_difference(Mean(), run, tried, torch.float32, 1e-4)
    with pytest.raises(SubquadError, match=r"gives \(1, 2\) at 1 × 8 × 8 px, not \(1, 3\)"):
        largest_difference(Mean(), lambda x: Mean()(x)[:, :2], tried, torch.float32, 1e-4)
    with pytest.raises(SubquadError, match="does not run at 1 × 8 × 8 px: no"):
        largest_difference(Mean(), lambda x: throw(ValueError("no")), tried, torch.float32, 1e-4)


class Nothing(torch.nn.Module):
    def forward(self, x):
        return x.mean((2, 3))[:, :0]


def test_a_network_that_gives_no_finite_numbers_is_said_to_be_what_is_wrong(tmp_path):
    for value, name in ((torch.nan, "n.pt2"), (torch.inf, "m.pt2")):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), Mean())
        torch.nn.init.constant_(model[0].bias, value)
        with pytest.raises(SubquadError, match=r"network itself gives numbers that are not finite at 1 × 8 × 8 px, in"):
            export(model, tmp_path / name, format="pt2", img_size=8)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 4, 1), Mean())
    torch.nn.init.constant_(model[0].bias, 6e4)
    torch.nn.init.constant_(model[1].weight, 100)
    with pytest.raises(SubquadError, match=r"not finite .*, in torch\.float16: its weights .* or name a wider dtype"):
        subquad.export(model, tmp_path / "n.pt2", format="pt2", img_size=8, dtype="fp16")
    with pytest.raises(SubquadError, match=r"the network gives no numbers, but \(1, 0\)"):
        export(Nothing(), tmp_path / "n.pt2", format="pt2", img_size=8)
    assert not list(tmp_path.iterdir())


def throw(error):
    raise error


def test_what_may_change_is_tried_at_what_was_not_traced():
    own = (1, 32, 32)
    assert other_sides(17, 1) == (54, 103) and other_sides_of_maps(16, 8) == (24, 40)
    assert checked_shapes((32, 32), 1, (), (54, 103)) == [own]
    assert checked_shapes((32, 32), 1, ("batch",), (54, 103)) == [own, (3, 32, 32)]
    assert checked_shapes((32, 32), 1, ("size",), (54, 103)) == [own, (1, 54, 103)]


def test_a_program_of_any_size_takes_two_patches_and_whole_windows():
    model = Mean()
    assert least_pixels(model) == 2
    model.feature_info = [{"reduction": 4}, {"reduction": 16}]
    assert least_pixels(model) == 17
    assert least_pixels(torch.nn.Sequential(model)) == 17
    model.least_size = 97
    assert least_pixels(model) == least_pixels(torch.nn.Sequential(model)) == 97


class Patches(torch.nn.Module):
    """Tokens of somebody's own, of images of any size; what it is made for, it says as others do."""

    def __init__(self, **said):
        super().__init__()
        vars(self).update(said)
        self.proj = torch.nn.Conv2d(3, 8, 16, stride=16)
        self.mix = torch.nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return self.mix(self.proj(x)).flatten(2).mT


def test_a_program_of_any_size_takes_two_patches_of_somebodys_own(tmp_path):
    # not 17, as its convolution leaves out what is not a whole patch
    assert least_pixels(Patches()) == 32
    written = export(Patches(), tmp_path / "n.pt2", format="pt2", img_size=48, dynamic="batch,size")
    assert written.least == 32 and written.shapes[1] == (3, 69, 118)


def test_a_network_is_written_for_the_images_that_it_says_it_is_made_for():
    wide, other = (32, 48), SimpleNamespace(image_size=64)
    for said, size in (
        ({"img_size": 32}, (32, 32)),
        ({"image_size": 32}, (32, 32)),
        ({"config": SimpleNamespace(image_size=[32, 48])}, wide),
        ({"img_size": [32, 48]}, wide),
        ({"pretrained_cfg": {"input_size": (3, 32, 48)}}, wide),
        ({"pretrained_cfg": {"input_size": (3, 8, 8)}, "subquad_conversion": SimpleNamespace(img_size=wide)}, wide),
        ({"patch_embed": SimpleNamespace(img_size=wide), "config": other}, wide),
        ({"img_size": wide, "config": other}, wide),
        ({"config": {}, "image_size": 32}, (32, 32)),
        ({"subquad_conversion": SimpleNamespace(img_size=wide)}, wide),
        ({"subquad_conversion": SimpleNamespace(img_size=None), "image_size": 32}, (32, 32)),
    ):
        assert stated_size(Patches(**said)) == size
        assert stated_size(torch.nn.Sequential(torch.nn.Identity(), Patches(**said))) == size
    for said in ({}, {"img_size": None}, {"config": SimpleNamespace(image_size="large")}, {"img_size": (1, 2, 3)}):
        assert stated_size(Patches(**said)) is None


class Dropped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("training", [False, True])
def test_networks_are_written_as_they_are_asked_and_stay_as_they_were(training, tmp_path):
    model = Dropped().train(training)
    assert export(model, tmp_path / "n.pt2", format="pt2", img_size=8).difference == 0
    assert model.training is training
    with pytest.raises(SubquadError, match=r"the network is torch.float32: bring it to torch.float16 first"):
        export(model, tmp_path / "n.pt2", format="pt2", img_size=8, dtype="fp16")
    assert model.training is training


class Several(torch.nn.Module):
    def forward(self, x):
        return [x.mean((2, 3)), x.amax((2, 3))]


class Halves(torch.nn.Module):
    def forward(self, x):
        return x.view(*x.shape[:3], 2, 4).mean((2, 3, 4))


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (Several(), {}, "gives a list of 2, and what is written gives one tensor: wrap it"),
        (Halves(), {"img_size": 9}, "the network itself does not take images of 1 × 3 × 9 × 9: shape"),
        (Mean(), {"img_size": None}, "does not say what images it was made for: name their pixels, img_size="),
        (Mean(), {"img_size": True}, "img_size must be a whole number of at least 1 or a list of 2 .*, got True"),
        (Mean(), {"img_size": (8, 0)}, r"img_size must be .* whole numbers of at least 1, got \(8, 0\)"),
        (Mean(), {"batch": 0}, "batch must be a whole number of at least 1, got 0"),
        (Mean(), {"batch": 2.5}, "batch must be a whole number of at least 1, got 2.5"),
        (
            Mean(),
            {"batch": 4097, "dynamic": "batch"},
            "any number of images has at most 4096, got 4097: leave batch out",
        ),
        (Mean(), {"img_size": (8, 16385), "dynamic": "size"}, "any size has sides of at most 16384 px, got 8×16385"),
        (Patches().to("meta"), {"img_size": 32}, "on meta, where no weights are: model.to_empty.* and load them first"),
        (Mean(), {"dynamic": "batch,sizes"}, "what may change is batch or size, got 'sizes'"),
    ],
)
def test_networks_and_numbers_that_can_not_be_written_are_one_line(model, settings, message, tmp_path):
    with pytest.raises(SubquadError, match=message) as raised:
        export(model, tmp_path / "n.pt2", **{"format": "pt2", "img_size": 8} | settings)
    assert "\n" not in str(raised.value) and not list(tmp_path.iterdir())


def test_what_may_change_can_be_one_text(tmp_path):
    for dynamic, shapes in [("batch", ((1, 8, 8), (3, 8, 8))), ("batch, size", ((1, 8, 8), (3, 39, 88)))]:
        assert export(Mean(), tmp_path / "n.pt2", format="pt2", img_size=8, dynamic=dynamic).shapes == shapes


def test_a_network_that_says_nothing_of_its_channels_has_those_of_its_first_convolution(tmp_path):
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), Mean())
    assert export(model, tmp_path / "n.pt2", format="pt2", img_size=8).difference == 0


@pytest.mark.parametrize("channels", [1, 5])
def test_a_network_behind_a_convolution_of_somebodys_own_takes_its_channels(channels, tmp_path):
    behind = subquad.create_model("deit_tiny", img_size=32, embed_dim=24, depths=(1,), num_heads=2, num_classes=5)
    exported = export(torch.nn.Sequential(torch.nn.Conv2d(channels, 3, 1), behind), tmp_path / "a.pt2", format="pt2")
    assert torch.export.load(exported.path).module()(torch.zeros(1, channels, 32, 32)).shape == (1, 5)


def test_each_part_of_a_network_stays_in_the_mode_that_it_was_in(tmp_path):
    model = Dropped().train()
    model.layers[1].eval()
    export(model, tmp_path / "n.pt2", format="pt2", img_size=8)
    assert model.training and model.layers.training and not model.layers[1].training


@pytest.mark.parametrize(("name", "value"), [("OPTIONS", "torch.no_such_module"), ("OBLIVIOUS", "no_such_option")])
def test_a_pytorch_without_its_option_exports_what_it_can(name, value, monkeypatch, tmp_path):
    monkeypatch.setattr(programs, name, value)
    assert export(Mean(), tmp_path / "mean.pt2", format="pt2", img_size=8, dynamic=["batch"]).difference == 0


def test_the_option_of_this_pytorch_is_set_while_a_network_is_traced():
    options = pytest.importorskip(programs.OPTIONS)
    with programs.sizes_without_guards():
        assert getattr(options, programs.OBLIVIOUS) is True
    assert getattr(options, programs.OBLIVIOUS) is False


def test_what_is_written_is_checked_and_not_kept_where_it_is_wrong(tmp_path, monkeypatch):
    right = EXPORTERS["pt2"]
    wrong = Exporter("wrong", ".pt2", (), right.write, lambda path: lambda x: Mean()(x) + 1)
    monkeypatch.setitem(EXPORTERS, "wrong", wrong)
    with pytest.raises(SubquadError, match="is off by"):
        export(Mean(), tmp_path / "mean.pt2", format="wrong", img_size=8)
    assert not list(tmp_path.iterdir())
    written = export(Mean(), tmp_path / "mean.pt2", format="pt2", img_size=8, dynamic=["batch"])
    assert written.shapes == ((1, 8, 8), (3, 8, 8)) and written.difference == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mean.pt2"]


def test_a_full_disk_is_one_line_and_does_not_end_the_process(tmp_path, small_disk):
    network = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(), nn.Linear(32, 9000))
    small_disk(1_000_000)
    with pytest.raises(SubquadError, match=r"^it can't be written as pt2: .*File too large") as raised:
        export(network, tmp_path / "n.pt2", format="pt2", img_size=8, notes={"task": "none"})
    small_disk(resource.RLIM_INFINITY)
    assert "\n" not in str(raised.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", [name for name in EXPORTERS if name != "aoti"])
def test_a_file_that_finds_no_room_is_named_with_its_folder(tmp_path, small_disk, format):
    """It was "OSError: File too large", of a file that had no name."""
    small_disk(4096)
    with pytest.raises(
        SubquadError, match=rf" {format}: .* wide\.\w+ among .* {tempfile.gettempdir()}: File .*: set TMP"
    ):
        export(nn.Conv2d(3, 1000, 3), tmp_path / f"wide{EXPORTERS[format].suffix}", format=format, img_size=8)
    assert not list(tmp_path.iterdir())


def test_little_room_for_temporary_files_is_said_and_how_to_name_another_place(tmp_path, monkeypatch):
    def write(program, path):
        raise RuntimeError("iostream error")

    monkeypatch.setitem(EXPORTERS, "failing", Exporter("failing", ".pt2", (), write, None))
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**21))
    with pytest.raises(SubquadError, match=rf"iostream error; {place} has room for 2 MiB more: set TMPDIR"):
        export(Mean(), tmp_path / "mean.pt2", format="failing", img_size=8)
    place.rmdir()
    with pytest.raises(SubquadError, match=r"no place for temporary files \(No such file or directory\): set TMPDIR"):
        export(Mean(), tmp_path / "mean.pt2", format="failing", img_size=8)
    assert not list(tmp_path.iterdir())


def test_int8_may_be_further_off_and_is_made_of_the_file(tmp_path, monkeypatch):
    made = []
    rough = Exporter(
        "rough",
        ".pt2",
        (),
        EXPORTERS["pt2"].write,
        lambda path: lambda x: 1.1 * Mean()(x),
        (),
        {"dynamic": made.append},
    )
    monkeypatch.setitem(EXPORTERS, "rough", rough)
    path = tmp_path / "mean.pt2"
    with pytest.raises(SubquadError, match=r"is off by 1\.0e-01"):
        export(Mean(), path, format="rough", img_size=8)
    assert not made
    assert export(Mean(), path, format="rough", img_size=8, int8="dynamic").difference == pytest.approx(0.1, rel=1e-3)
    assert [file.name for file in made] == [path.name]


def parts_of(monkeypatch, content):
    """A format of three files that hold the same."""

    def write(program, path):
        for file in (path, path.with_suffix(".abc"), path.with_suffix(".zyx")):
            file.write_bytes(content)

    monkeypatch.setitem(EXPORTERS, "three", Exporter("three", ".pt2", (), write, lambda path: Mean()))


def test_what_belongs_to_a_file_is_in_place_before_it(tmp_path, monkeypatch):
    moved, replace = [], Path.replace

    def move(self, target):
        moved.append(target.name)
        return replace(self, target)

    parts_of(monkeypatch, b"1")
    monkeypatch.setattr(Path, "replace", move)
    export(Mean(), tmp_path / "mean.pt2", format="three", img_size=8)
    assert sorted(moved[:2]) == ["mean.abc", "mean.zyx"] and moved[2:] == ["mean.pt2"]


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_file_is_never_beside_those_of_another_network(moves, tmp_path, monkeypatch):
    """A kill, or a disk that is full, left OpenVINO's old .xml beside the new .bin, which opens without a word."""
    parts_of(monkeypatch, b"1")
    export(Mean(), tmp_path / "mean.pt2", format="three", img_size=8)
    parts_of(monkeypatch, b"2")
    moved, replace = [], Path.replace

    def move(self, target):
        if len(moved) == moves:
            raise KeyboardInterrupt
        moved.append(target)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", move)
    with pytest.raises(KeyboardInterrupt):
        export(Mean(), tmp_path / "mean.pt2", format="three", img_size=8)
    assert not (tmp_path / "mean.pt2").exists() and all(not file.name.startswith(".") for file in tmp_path.iterdir())


def test_a_disk_that_is_full_leaves_all_files_as_they_were(tmp_path, monkeypatch):
    parts_of(monkeypatch, b"1")
    export(Mean(), tmp_path / "mean.pt2", format="three", img_size=8)
    parts_of(monkeypatch, b"2")
    copy = shutil.copyfile

    def full(source, target):
        if target.name.startswith(".mean.pt2"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(SubquadError, match=r"mean\.pt2 can't be written: No space left on device"):
        export(Mean(), tmp_path / "mean.pt2", format="three", img_size=8)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == dict.fromkeys(
        ("mean.abc", "mean.pt2", "mean.zyx"), b"1"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "onx"}, "unknown format 'onx': did you mean onnx"),
        ({"format": "missing"}, "needs no_such_package: pip install 'subquad\\[export\\]'"),
        ({"format": "pt2", "dynamic": ["sizes"]}, "may change is batch or size, got 'sizes'"),
        ({"format": "pt2", "dtype": "int8"}, "unknown dtype"),
        ({"format": "pt2", "img_size": (16, 24), "dynamic": ["size"]}, "takes at least 17 px, got 16×24"),
        ({"format": "onnx", "int8": "weights"}, "onnx is not written with int8 weights: pt2, aoti can be"),
        ({"format": "onnx", "dtype": "bf16"}, "onnx is not written in bf16, but in fp32, fp16: pt2, openvino, aoti"),
        ({"format": "pt2", "int8": "all"}, "unknown int8 'all'"),
        ({"format": "openvino"}, "openvino is written as .xml, got n.pt2"),
    ],
)
def test_mistakes_are_one_line(settings, message, tmp_path, monkeypatch):
    monkeypatch.setitem(EXPORTERS, "missing", Exporter("", ".pt2", ("no_such_package",), None, None))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "no_such_package" else name)
    model = small("vit", "linear", depths=(1,), patch_size=16, img_size=32)
    with pytest.raises(SubquadError, match=message) as raised:
        export(model, tmp_path / "n.pt2", **settings)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_what_is_no_name_no_network_or_no_file_is_one_line(tmp_path):
    for call, message in (
        (lambda: subquad.export(Mean(), tmp_path / "n.pt2", format=None), "format is a name, one of aoti, .*got None"),
        (lambda: subquad.export(Mean(), tmp_path / "n.pt2", format=["pt2"]), "format is a name, one of aoti"),
        (lambda: export(None, tmp_path / "n.pt2", format="pt2"), "model must be of Module, got None"),
        (lambda: subquad.export(None, tmp_path / "n.pt2", format="pt2"), "a run folder or a name, got None"),
        (lambda: subquad.export(Mean(), tmp_path / "n.pt2", format="pt2", dtype=None), "dtype"),
        (lambda: export(Mean(), None, format="pt2"), "path must be a path or text, got None"),
        (lambda: export(Mean(), tmp_path / "n.pt2", format="pt2", dtype=None), "dtype must be text, got None"),
        (lambda: export(Mean(), tmp_path / "n.pt2", format="pt2", dynamic=None), "dynamic must be text or a list"),
        (lambda: open_exported(None), "path must be a path or text, got None"),
        (lambda: open_exported(tmp_path / "n.pt2", format=3), "format must be text, got 3"),
    ):
        with pytest.raises(SubquadError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_formats_can_be_added_and_not_replaced(monkeypatch):
    monkeypatch.setattr(EXPORTERS, "_entries", dict(EXPORTERS._entries))
    other = Exporter("other", ".other", (), None, None)
    register_exporter("other", other)
    with pytest.raises(SubquadError, match="a format 'pt2' already"):
        register_exporter("pt2", other)


def test_the_function_takes_names_and_networks(tmp_path):
    model = small("vit", "linear", depths=(1,), patch_size=16, img_size=32)
    written = subquad.export(model, tmp_path / "n.pt2", format="pt2", dtype="bf16")
    assert written.path.exists() and next(model.parameters()).dtype == torch.float32
    with pytest.raises(SubquadError, match="unknown network or run 'agent_deit_tny': did you mean agent_deit_tiny"):
        subquad.export("agent_deit_tny", format="pt2")
    with pytest.raises(SubquadError, match="no-such-run"):
        subquad.export(tmp_path / "no-such-run", format="pt2")


def test_a_file_is_named_as_the_network_within_its_wrappers_or_as_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    network = Patches()
    opened = SimpleNamespace(model=network, task="classify", classes=())
    monkeypatch.setattr(api, "open_trained", lambda source, img_size, device: opened)
    for source in (network, torch.optim.swa_utils.AveragedModel(network), torch.nn.DataParallel(network)):
        assert str(subquad.export(source, format="pt2", img_size=32).path) == "patches.pt2"
    (tmp_path / "mine" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine")
    for source in (".", "below/.."):
        assert str(subquad.export(source, format="pt2", img_size=32).path) == "mine.pt2"


@pytest.mark.slow
def test_a_folder_of_a_network_of_one_size_is_opened_for_the_size_that_it_is_written_for(tmp_path, monkeypatch):
    small = {"depths": (1,), "embed_dim": 8, "num_heads": (1,), "num_classes": 10}
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, **small)
    timm.models.save_for_hf(model, tmp_path / "swin", model_args={"img_size": 56, **small})
    path = tmp_path / "n.pt2"
    written = subquad.export(tmp_path / "swin", path, format="pt2", img_size=(112, 56), batch=2)
    assert written.shapes == ((2, 112, 56),)
    assert json.loads(notes_in(path, "pt2", ["img_size"])["img_size"]) == [112, 56]
    # and judged at it, beside its file and alone
    monkeypatch.setattr(task_named("classify"), "evaluate", lambda trained, **settings: trained)
    for engine in (path, None):
        trained = subquad.evaluate(tmp_path / "swin", img_size=(112, 56), engine=engine)
        assert trained.model(torch.zeros(2, 3, 112, 56)).shape == (2, 10)


@pytest.mark.slow
@pytest.mark.parametrize(("format", "what"), [("pt2", "weights"), ("onnx", "dynamic")])
def test_int8_of_a_network_without_linear_layers_is_refused(format, what, tmp_path):
    # nothing would be of int8, without a word
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), Mean())
    with pytest.raises(SubquadError, match="no linear layers that could be in int8: leave int8 out"):
        export(model, tmp_path / f"n{EXPORTERS[format].suffix}", format=format, img_size=8, int8=what)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_int8_of_onnx_is_made_of_fp32_and_leaves_logging_as_it_is(tmp_path):
    pytest.importorskip("onnxruntime")
    model = torch.nn.Sequential(Mean(), torch.nn.Linear(3, 3))
    with pytest.raises(SubquadError, match="int8 dynamic of onnx is made of fp32 alone, got fp16") as raised:
        export(model.half(), tmp_path / "n.onnx", img_size=8, dtype="fp16", int8="dynamic")
    assert "\n" not in str(raised.value) and not list(tmp_path.iterdir())
    logging.disable(logging.INFO)
    try:
        export(model.float(), tmp_path / "n.onnx", img_size=8, int8="dynamic")
        assert logging.root.manager.disable == logging.INFO
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("content", ["nothing", "cut", "emptied"])
def test_broken_files_are_one_line_without_the_traces_that_pytorch_logs(content, tmp_path, capfd):
    path = tmp_path / "bad.pt2"
    if content == "nothing":
        path.write_bytes(b"nothing")
    else:
        export(Mean(), whole := tmp_path / "mean.pt2", format="pt2", img_size=8)
        path.write_bytes(whole.read_bytes()[:2000])
    if content == "emptied":
        with zipfile.ZipFile(whole) as there, zipfile.ZipFile(path, "w") as without:
            for name in there.namelist():
                without.writestr(name, b"{}" if name.endswith(".json") else there.read(name))
    capfd.readouterr()
    with pytest.raises(SubquadError, match=r"^[^\n]*bad.pt2 can't be opened as pt2 or aoti: [^\n]*$"):
        open_exported(path)
    assert capfd.readouterr() == ("", "")
    assert not logging.root.manager.disable


def test_files_are_opened_by_their_suffix_or_by_the_format_that_is_named(tmp_path):
    export(Mean(), tmp_path / "mean.pt2", format="pt2", img_size=8)
    (tmp_path / "mean.txt").write_bytes((tmp_path / "mean.pt2").read_bytes())
    images = torch.randn(1, 3, 8, 8)
    for named in (open_exported(tmp_path / "mean.pt2"), open_exported(tmp_path / "mean.txt", "pt2")):
        torch.testing.assert_close(named(images), Mean()(images), rtol=0, atol=0)
    (tmp_path / "bad.pt2").write_bytes(b"nothing")
    for name, message in [
        ("none.pt2", "there is no file"),
        ("mean.txt", r"what was exported ends in .onnx, .pt2, .xml"),
        ("bad.pt2", r"can't be opened as pt2 or aoti"),
    ]:
        with pytest.raises(SubquadError, match=message):
            open_exported(tmp_path / name)
    with pytest.raises(SubquadError, match="unknown format 'pt'"):
        open_exported(tmp_path / "mean.pt2", "pt")


def test_what_was_compiled_gets_images_that_it_takes_alone():
    """Compiled code looks at neither sizes nor dtypes, and reads past the end of what is smaller."""
    sized = programs.program_of(Mean(), (torch.zeros(1, 3, 16, 16),), ["batch", "size"], least=9)
    halved = programs.program_of(Mean(), (torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16),), [], least=9)
    any_size, fixed = (checked(Mean(), said_of(program)[TAKES]) for program in (sized, halved))
    assert any_size(torch.zeros(5, 3, 9, 70)).shape == (5, 3)
    assert fixed(torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16)).shape == (2, 3)
    for run, shape, dtype, message in (
        (any_size, (1, 3, 8, 70), torch.float32, "height 9 to 16384, width 9 to 16384, got 1 × 3 × 8"),
        (any_size, (1, 1, 9, 70), torch.float32, "channels 3"),
        (any_size, (1, 3, 9, 70), torch.float16, "images of torch.float32"),
        (fixed, (1, 3, 8, 8), torch.bfloat16, "batch 2, channels 3, height 8, width 8, got 1 × 3 × 8 × 8"),
        (fixed, (2, 3, 8, 8), torch.float32, "images of torch.bfloat16"),
        (fixed, (3, 8, 8), torch.bfloat16, "got 3 × 8 × 8"),
    ):
        with pytest.raises(SubquadError, match=message) as raised:
            run(torch.zeros(shape, dtype=dtype))
        assert "\n" not in str(raised.value)
    assert checked(Mean(), None)(torch.zeros(1, 3, 4, 4)).shape == (1, 3)


@pytest.mark.slow
def test_a_compiled_file_of_a_number_of_images_is_handed_that_number(tmp_path):
    path = tmp_path / "two.pt2"
    export(Mean(), path, format="aoti", img_size=8, batch=2, notes={"classes": ["a"]})
    run, images = open_exported(path, "aoti"), torch.randn(3, 3, 8, 8)
    assert notes_in(path, "aoti", ["classes"])["classes"] == '["a"]'
    for wrong in (images, images[:1], images[:2].double(), images[:2, :, :4, :4]):
        with pytest.raises(SubquadError, match="batch 2, channels 3, height 8, width 8, got"):
            run(wrong)
    engine = InEngine(Mean(), run)
    answers = torch.cat([engine(images[:2]), engine(images[2:])])
    torch.testing.assert_close(answers, Mean()(images), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("format", ["pt2", "onnx", "openvino"])
def test_threads_may_call_one_opened_file_at_the_same_time(format, tmp_path):
    for package in EXPORTERS[format].needs:
        pytest.importorskip(package)
    path = tmp_path / f"n{EXPORTERS[format].suffix}"
    # so many numbers that calls overlap
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 4, 3, padding=1), Mean())
    export(model, path, format=format, img_size=64)
    run = open_exported(path, format)
    images = torch.randn(8, 1, 3, 64, 64)
    with torch.no_grad():
        wanted = [model(one) for one in images]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(run, images.repeat(10, 1, 1, 1, 1)))
    torch.testing.assert_close(torch.stack(answers), torch.stack(wanted * 10), rtol=1e-4, atol=1e-5)


def test_mixed_precision_around_an_export_is_not_written_down(tmp_path):
    model = subquad.create_model("deit_micro", attention="linear", img_size=8, depth=1, in_chans=3).eval()
    with torch.autocast("cpu", torch.bfloat16):
        written = export(model, tmp_path / "n.pt2", format="pt2", img_size=8)
        assert torch.is_autocast_enabled("cpu")
    images = torch.randn(1, 3, 8, 8)
    answer = open_exported(written.path)(images)
    assert answer.dtype == torch.float32
    torch.testing.assert_close(answer, model(images), rtol=1e-5, atol=1e-6)


def test_a_network_in_bf16_may_be_handed_whole_numbers_first(tmp_path):
    for package in EXPORTERS["openvino"].needs:
        pytest.importorskip(package)

    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(4, 4)

        def forward(self, steps, x):
            return self.proj(x) + steps[:, None].to(x.dtype)

    model = Added().bfloat16().eval()
    given = {"steps": torch.arange(2), "x": torch.randn(2, 4)}
    path = tmp_path / "n.xml"
    export(model, path, format="openvino", dtype="bf16", given=given, takes=["steps", "x"])
    steps, x = torch.tensor([3, 1]), torch.randn(2, 4).bfloat16()
    torch.testing.assert_close(open_exported(path)(steps, x), model(steps, x), rtol=2e-2, atol=2e-2)


def test_what_a_file_takes_is_named_once_each(tmp_path):
    with pytest.raises(SubquadError, match="what is taken is named once each, got input again"):
        export(
            nn.Linear(4, 4), tmp_path / "n.pt2", format="pt2", given={"input": torch.zeros(2, 4)}, takes=["input"] * 2
        )


def notes_in(path, format, names):
    """What a file says beside its numbers, read as somebody without this library reads it."""
    if format == "pt2":
        texts = dict.fromkeys(names, "")
        torch.export.load(path, extra_files=texts)
        return texts
    if format == "aoti":
        return torch._inductor.aoti_load_package(str(path)).get_metadata()
    if format == "onnx":
        onnxruntime = pytest.importorskip("onnxruntime")
        return onnxruntime.InferenceSession(str(path)).get_modelmeta().custom_metadata_map
    openvino = pytest.importorskip("openvino")
    model = openvino.Core().read_model(path)
    return {name: model.get_rt_info(["subquad", name]).astype(str) for name in names}


DESCRIBED = [name for name, one in EXPORTERS.items() if one.describe is not None]


# compiling takes longer than the others together
@pytest.mark.slow
@pytest.mark.parametrize("format", DESCRIBED)
def test_notes_are_read_in_the_format_itself(format, tmp_path):
    notes = {"task": "classify", "classes": ["a", 'ü "b"'], "mean": (0.5, 0.25, 0.125), "crop_pct": 0.9}
    path = tmp_path / f"n{EXPORTERS[format].suffix}"
    export(Mean(), path, format=format, img_size=8, notes=notes)
    told = notes_in(path, format, notes)
    assert told["task"] == "classify"
    for name in ("classes", "mean", "crop_pct"):
        assert json.loads(told[name]) == json.loads(json.dumps(notes[name]))
    images = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(open_exported(path, format)(images), Mean()(images), rtol=1e-5, atol=1e-6)


class Products(torch.nn.Sequential):
    """A network that has weights of more than a few bytes."""

    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(192, 256), torch.nn.GELU(), torch.nn.Linear(256, 7))


@pytest.mark.parametrize(("format", "int8"), [("onnx", None), ("onnx", "dynamic"), ("openvino", None)])
def test_weights_that_no_file_of_onnx_holds_stand_beside_it(format, int8, tmp_path, monkeypatch):
    for package in (*EXPORTERS["onnx"].needs, *EXPORTERS[format].needs):
        pytest.importorskip(package)
    monkeypatch.setattr(onnx_format, "MOST_INSIDE", 1000)
    torch.manual_seed(0)
    model, path = Products().eval(), tmp_path / f"n{EXPORTERS[format].suffix}"
    export(model, path, format=format, img_size=8, dynamic="batch", int8=int8, notes={"a": "b"})
    data = tmp_path / ("n.bin" if format == "openvino" else "n.onnx.data")
    assert {file.name for file in tmp_path.iterdir()} == {path.name, data.name} and data.stat().st_size > 40_000
    assert str(notes_in(path, format, ["a"])["a"]) == "b"
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in (path, data):
        file.rename(moved / file.name)
    images = torch.randn(3, 3, 8, 8)
    found = open_exported(moved / path.name)(images)
    torch.testing.assert_close(found, model(images), rtol=1e-4, atol=0.1 if int8 else 1e-5)
    (moved / data.name).unlink()
    with pytest.raises(SubquadError, match=rf"there is no .*{data.name}, which holds the weights of {path.name}: move"):
        open_exported(moved / path.name)


# what is compiled says how, with the folders of the compiler
@pytest.mark.slow
@pytest.mark.parametrize("format", sorted(EXPORTERS.keys() - {"aoti"}))
def test_files_do_not_say_where_the_code_stood_that_wrote_them(format, tmp_path):
    path = tmp_path / f"n{EXPORTERS[format].suffix}"
    export(Mean(), path, format=format, img_size=8)
    files = [file.read_bytes() for file in tmp_path.iterdir()]
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            files = [archive.read(name) for name in archive.namelist()]
    for folder in (__file__, torch.__file__, subquad.__file__):
        assert not [file for file in files if str(Path(folder).parent).encode() in file]


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ({"mean": torch.zeros(2)}, r"the note 'mean' must be JSON \(.*\), got tensor\(\[0\., 0\.\]\): Object of type"),
        ({"classes": {"a"}}, "the note 'classes' must be JSON .*, got {'a'}"),
        ({"a": {(1, 2): 3}}, "the note 'a' must be JSON .*: keys must be str"),
        ({3: "a"}, "notes have names, texts such as 'classes', got 3"),
        ({"": "a"}, "notes have names, .*, got ''"),
        # OpenVINO's file held "a" alone
        ({"author": "a\0b"}, r"the note 'author' has the character '\\x00', which files do not hold: leave it out"),
        ({"a\0b": "c"}, r"the note 'a\\x00b' has the character"),
        ({"file": "a\udcff"}, r"the note 'file' has the character '\\udcff'"),
    ],
)
def test_notes_that_no_file_can_hold_are_one_line_before_anything_is_traced(notes, message, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "program_of", None)
    with pytest.raises(SubquadError, match=message) as raised:
        export(Mean(), tmp_path / "n.pt2", format="pt2", img_size=8, notes=notes)
    assert "\n" not in str(raised.value)


def test_notes_of_a_segmenter_say_how_scenes_are_resized():
    seen = SceneInput((48, 64), 48, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    trained = TrainedSegmenter("segment", Mean(), ("sky", "road"), None, None, torch.device("cpu"), seen, False)
    notes = notes_of(trained, (96, 96))
    assert notes["classes"] == ["sky", "road"] and notes["short_side"] == 48 and notes["crop"] == (48, 64)
    # a size in training is no segmenter's, which takes any
    assert "img_size" not in notes


@pytest.mark.slow
def test_what_was_exported_is_judged_in_its_engine(tmp_path):
    run = tmp_path / "run"
    subquad.train("digits", run, attention="linear", epochs=1)
    written = subquad.export(run, tmp_path / "n.pt2", format="pt2", dynamic=["batch"])
    trained = subquad.open_trained(run)
    notes = notes_in(written.path, "pt2", ["task", "classes", "img_size", "mean", "std", "interpolation", "crop_pct"])
    assert notes["task"] == "classify" and json.loads(notes["classes"]) == list(trained.classes)
    seen = {name: json.loads(notes[name]) for name in ("img_size", "mean", "std", "crop_pct")}
    assert InputConfig(**seen, interpolation=notes["interpolation"]) == trained.input
    there, here = subquad.evaluate(run, engine=written.path), subquad.evaluate(run)
    assert there.result.top1 == here.result.top1 and (there.result.confusion == here.result.confusion).all()
    for engine, message in [
        (tmp_path / "none.onnx", "there is no file"),
        (run / "best.safetensors", "what was exported ends in .onnx, .pt2, .xml"),
    ]:
        with pytest.raises(SubquadError, match=message):
            subquad.evaluate(run, engine=engine)
    (tmp_path / "bad.pt2").write_bytes(b"nothing")
    with pytest.raises(SubquadError, match=r"can't be opened as pt2 or aoti"):
        open_exported(tmp_path / "bad.pt2")
    fixed = subquad.export(run, tmp_path / "one.pt2", format="pt2")
    with pytest.raises(SubquadError, match=r"does not take .*--dynamic batch"):
        subquad.evaluate(run, engine=fixed.path)
    # a whole number of eights, and some more
    eight = subquad.export(run, tmp_path / "eight.pt2", format="pt2", batch=8)
    halved = subquad.export(run, tmp_path / "half.pt2", format="pt2", dtype="bf16", dynamic=["batch"])
    for file, settings in ((fixed, {"batch_size": 1}), (eight, {"batch_size": 8}), (halved, {})):
        assert abs(subquad.evaluate(run, engine=file.path, **settings).result.top1 - here.result.top1) < 1
    subquad.train("digits", tmp_path / "other", attention="softmax", epochs=1, seed=1)
    with pytest.raises(SubquadError, match=r"n\.pt2 is off by .*: it was written of another network"):
        subquad.evaluate(tmp_path / "other", engine=written.path)


class Answers(torch.nn.Module):
    """A network of four numbers an image."""

    def forward(self, x):
        return x.mean((2, 3)).repeat(1, 4)[:, :4]


def test_a_file_answers_for_the_network_that_it_was_written_of_alone():
    network, images = Answers(), torch.randn(5, 3, 8, 8)
    assert torch.equal(InEngine(network, network)(images), network(images))
    for run, message in (
        (lambda x: -network(x), "n.pt2 is off by 2 of the network's largest number: it was written of another network"),
        (lambda x: network(x)[:, :2], r"n.pt2 gives \(5, 2\) and the network \(5, 4\): it is of another one"),
        (lambda x: network(x) * torch.nan, "n.pt2 is off by nan"),
        (
            lambda x: throw(ValueError("no")),
            r"n.pt2 does not take 5 images of 8×8 px: .*--batch-size .*has them\): no",
        ),
    ):
        with pytest.raises(SubquadError, match=message):
            InEngine(network, run, "n.pt2")(images)
    with pytest.raises(SubquadError, match="does not take 1 image of 8×8 px"):
        InEngine(network, lambda x: throw(ValueError("no")), "n.pt2")(images[:1])
    with pytest.raises(SubquadError, match="networks that take lists of images, as detectors do"):
        InEngine(network, network)(list(images))


def test_a_file_gets_images_of_its_dtype_and_as_many_as_it_was_written_for():
    network, seen = Answers(), []

    def run(images):
        if images.dtype != torch.bfloat16 or len(images) != 4:
            raise ValueError(f"not {len(images)} of {images.dtype}")
        seen.append(len(images))
        return network(images)

    engine, images = InEngine(network, run), torch.randn(7, 3, 8, 8).bfloat16().float()
    answers = torch.cat([engine(images[:4]), engine(images[4:])])
    assert answers.dtype == torch.float32 and seen == [4, 4]
    torch.testing.assert_close(answers, network(images), rtol=1e-2, atol=1e-2)
    with pytest.raises(SubquadError, match="does not take 3 images"):
        InEngine(network, run)(images[4:])


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_an_optimized_network_is_written_for_any_batch(attention, tmp_path):
    """Its tokens were held to the number of images that was traced."""
    sizes = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2}
    model = subquad.optimize(subquad.create_model("deit_tiny", attention=attention, **sizes), torch.bfloat16)
    assert export(model, tmp_path / "a.pt2", format="pt2", dtype="bf16", dynamic="batch").shapes[-1][0] > 1


class Passing(nn.Module):
    """A wrapper of any arguments, as LoRA of peft is."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, *args, **kwargs):
        return self.network(*args, **kwargs)


@pytest.mark.parametrize("dynamic", ["", "batch", "batch,size"])
def test_a_wrapper_that_takes_any_arguments_is_written(dynamic, tmp_path):
    written = export(Passing(Mean()), tmp_path / "a.pt2", format="pt2", img_size=32, dynamic=dynamic)
    assert written.difference < 1e-6


@pytest.mark.slow
def test_the_answer_of_a_folder_of_transformers_is_chosen_by_name(tmp_path):
    """It was the last tokens, whatever was said, and called a classifier."""
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    network = Dinov2Model(Dinov2Config(**sizes, num_hidden_layers=1)).eval()
    network.save_pretrained(tmp_path / "folder")
    BitImageProcessor(size={"height": 32, "width": 32}, do_center_crop=False).save_pretrained(tmp_path / "folder")
    settings = {"format": "pt2", "img_size": 32}
    api.export(tmp_path / "folder", tmp_path / "a.pt2", **settings, answer="pooler_output")
    run, x = open_exported(tmp_path / "a.pt2"), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(run(x), network(x).pooler_output, rtol=1e-4, atol=1e-5)
    assert "task" not in notes_of(subquad.open_trained(tmp_path / "folder"))
    with pytest.raises(SubquadError, match=r"gives last_hidden_state, pooler_output by name, .* got 'other'"):
        api.export(tmp_path / "folder", tmp_path / "b.pt2", **settings, answer="other")


@pytest.mark.slow
def test_a_network_that_is_told_of_other_sizes_is_told_so(tmp_path):
    """transformers' SigLIP was held to one size, and the way out that was named is timm's."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    network = SiglipVisionModel(SiglipVisionConfig(**sizes, num_hidden_layers=1)).eval()
    student = subquad.convert(network, "linear")
    written = export(student, tmp_path / "a.pt2", format="pt2", dynamic="batch,size", answer="pooler_output")
    assert len({shape[1:] for shape in written.shapes}) > 1
