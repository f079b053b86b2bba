"""Weight files of strangers and real ones: read bit for bit, or refused in one line that names the file."""

import collections
import datetime
import os
import random
import struct
import tarfile
import types
import warnings
import zipfile

import numpy as np
import pytest
import torch
from hosts import small
from made_files import refused, zipped
from safetensors.torch import save_file
from weight_grammar import Maker, header_of

from subquad import convert
from subquad.conversion import save_converted
from subquad.errors import SubquadError
from subquad.models import load_checkpoint, read_weights, restore_model, save_weights
from subquad.weights.files import write_tensors

LEGACY = {"_use_new_zipfile_serialization": False}
FORMATS = {"zip": {}, "zip with protocol 4": {"pickle_protocol": 4}, "in a row": LEGACY}
every_format = pytest.mark.parametrize("how", FORMATS.values(), ids=FORMATS.keys())


class Configuration(dict):
    """Stands for yacs' CfgNode."""


def everything():
    """What trainers pickle beside their weights, and weights of every kind."""
    base = torch.randn(10, 10)
    noted, tagged = torch.nn.Parameter(torch.randn(2)), torch.randn(3)
    noted.note, tagged.note = "an attribute", [1]
    weights = collections.OrderedDict(
        view=base[2:5, ::2],
        turned=base.t(),
        parameter=torch.nn.Parameter(torch.randn(3)),
        noted=noted,
        tagged=tagged,
        number=torch.tensor(3.5),
        empty=torch.empty(0, 5),
        expanded=torch.arange(3.0).expand(4, 3),
    )
    kinds = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64}
    for kind in kinds | {torch.float16, torch.bfloat16, torch.float64, torch.complex128}:
        weights[str(kind)] = (10 * torch.randn(7)).to(kind)
    weights._metadata = {"": {"version": 1}}
    configuration = Configuration(MODEL=Configuration(TYPE="agent"), itself=[])
    configuration["itself"].append(configuration)
    return {
        "model": weights,
        "args": types.SimpleNamespace(lr=0.1, names=["a", ("b", None, True)]),
        "config": configuration,
        "numbers": [np.float64(3), np.arange(5), 2**100, -1, 1.5, b"bytes", {1, 2}, frozenset("ab")],
        "date": datetime.datetime(2026, 1, 1),
        "more": [
            collections.defaultdict(list, a=[1]),
            torch.device("cpu"),
            torch.float32,
            torch.Size([1]),
            {(1, 2): 3},
        ],
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"params": [0]}]},
    }


@every_format
def test_a_real_file_is_read_bit_for_bit_as_torch_reads_it(tmp_path, how):
    torch.save(everything(), tmp_path / "run.pth", **how)
    expected = torch.load(tmp_path / "run.pth", weights_only=False)["model"]
    read, _ = read_weights(tmp_path / "run.pth")
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape), name
        assert read[name].stride() == tensor.stride() or not tensor.numel(), name
        same = [value.contiguous().flatten().view(torch.uint8) for value in (read[name], tensor.detach())]
        assert torch.equal(*same), name
    assert read["view"].untyped_storage().data_ptr() == read["turned"].untyped_storage().data_ptr()


def test_kinds_that_have_no_storage_class_and_the_other_byte_order_are_read(tmp_path):
    weights = {str(kind): torch.arange(4).to(kind) for kind in (torch.uint16, torch.uint32, torch.float8_e4m3fn)}
    weights |= {"float": torch.randn(3), "complex": torch.randn(3, dtype=torch.complex64), "bool": torch.tensor([True])}
    torch.save(weights, tmp_path / "little.pth")
    with zipfile.ZipFile(tmp_path / "little.pth") as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    swapped = dict(zip(weights, (2, 4, 1, 4, 4, 1), strict=True))
    for key, width in enumerate(swapped.values()):
        numbers = np.frombuffer(records[f"data/{key}"], np.uint8).reshape(-1, width)
        records[f"data/{key}"] = numbers[:, ::-1].tobytes()
    big = zipped(tmp_path, records | {"byteorder": b"big"})
    for path in (tmp_path / "little.pth", big):
        read = read_weights(path)[0]
        assert all(torch.equal(read[name].view(torch.uint8), weights[name].view(torch.uint8)) for name in weights), path


def test_other_kinds_of_tensors_are_refused_by_name(tmp_path):
    plain = torch.ones(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantised tensors are deprecated
        quantised = torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8)
    for strange, word in ((quantised, "quantised"), (plain.to_sparse(), "sparse"), (plain.to("meta"), "meta")):
        torch.save({"good": plain, "strange": strange}, tmp_path / "strange.pth")
        refused(tmp_path / "strange.pth", f"strange is an? .*{word}.* tensor, which is not read")
        torch.save({"model": {"good": plain}, "beside": strange}, tmp_path / "beside.pth")
        assert torch.equal(read_weights(tmp_path / "beside.pth")[0]["good"], plain)


def test_archives_that_are_no_weights_are_refused(tmp_path):
    with tarfile.open(tmp_path / "old.pth", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(__file__, "storages")
    refused(tmp_path / "old.pth", "tar archive, as PyTorch wrote before")
    refused(zipped(tmp_path, {"code.py": b""}), "0 records data.pkl")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "network.pth")
    refused(tmp_path / "network.pth", "holds no weights")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "network.pth", **LEGACY)
    refused(tmp_path / "network.pth", "holds no weights")


@pytest.mark.parametrize("name", ["network.onnx", "network.xml", "network.pt2"])
def test_networks_for_engines_are_told_what_takes_them(name, tmp_path):
    """They were said to be damaged."""
    (tmp_path / name).write_bytes(b"<?xml")
    reason = rf"{name} is no weight file but, by its name, a network written for an engine: .* --engine {name}` judges"
    with pytest.raises(SubquadError, match=reason):
        read_weights(tmp_path / name)
    # whatever it is called, what can be read is read
    torch.save({"a": torch.ones(2)}, tmp_path / name)
    assert read_weights(tmp_path / name)[0].keys() == {"a"}


def test_a_changed_byte_in_a_zip_archive_is_never_read(tmp_path):
    maker, chance = Maker(tmp_path), random.Random(0)
    for _ in range(120):
        content = bytearray(maker.zip)
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        (tmp_path / "flipped.pth").write_bytes(content)
        try:
            read = read_weights(tmp_path / "flipped.pth")[0]
        except SubquadError:
            continue
        assert read.keys() == maker.original.keys()
        assert all(torch.equal(read[name], maker.original[name]) for name in read)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@pytest.mark.timeout(20)
def test_what_is_no_file_is_refused_at_once(tmp_path, suffix, monkeypatch):
    (folder := tmp_path / f"folder.{suffix}").mkdir()
    os.mkfifo(pipe := tmp_path / f"pipe.{suffix}")
    (device := tmp_path / f"device.{suffix}").symlink_to("/dev/zero")
    refused(folder, "it is a folder")
    refused(pipe, "it is a device or a pipe")
    refused(device, "it is a device or a pipe")
    refused(tmp_path / f"missing.{suffix}", "no weight file at")
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(SubquadError, match="no weight file at") as caught:
            read_weights(tmp_path / f"{name}.{suffix}")
        assert str(caught.value).isprintable()
    (loop := tmp_path / f"loop.{suffix}").symlink_to(tmp_path / f"loop.{suffix}")
    with pytest.raises(SubquadError, match="no weight file at"):
        read_weights(loop)
    (kept := tmp_path / f"kept.{suffix}").write_bytes(bytes(50))
    kept.chmod(0)
    if os.geteuid():
        refused(kept, "cannot read .*: Permission denied")
    for content in (
        b"",
        b"text of a page\n" * 10,
        b"\x00" * 100,
        b"\xff" * 100,
        b"PK\x03\x04" + bytes(50),
        b"\x80\x02}.",
    ):
        (tmp_path / f"odd.{suffix}").write_bytes(content)
        refused(tmp_path / f"odd.{suffix}", "odd")


@pytest.mark.parametrize("name", ["weights.pth", "weights"])
def test_weights_are_not_written_under_a_name_that_none_opens(name, tmp_path):
    with pytest.raises(SubquadError, match=f"weights are written as .safetensors, got {name}"):
        save_weights(torch.nn.Linear(2, 2), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_safetensors_that_lie_are_refused(tmp_path):
    path = tmp_path / "file.safetensors"
    save_weights(small("vit"), path)
    whole = path.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(path, "no safetensors file or is cut short")
    for length in (0, 1, 2**20, 2**27, 2**32, 2**63, 2**64 - 1):
        path.write_bytes(struct.pack("<Q", length) + whole[8:])
        refused(path, "no safetensors file or is cut short")
    for number in range(100):
        path.write_bytes(header_of(random.Random(number), {}))
        try:
            read_weights(path)
        except SubquadError as error:
            assert str(error).isprintable()


@every_format
def test_weights_of_another_kind_are_named_with_both_kinds(tmp_path, how):
    model = small("vit")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    name = "stages.0.blocks.0.norm1.weight"
    cases = {
        torch.complex64: "is complex64, the model's float32",
        torch.int64: "is int64, the model's float32",
        torch.bool: "is bool, the model's float32",
        torch.float16: None,
        torch.bfloat16: None,
        torch.float64: None,
    }
    for kind, complaint in cases.items():
        torch.save(before | {name: before[name].to(kind)}, tmp_path / "other.pth", **how)
        if complaint is None:
            load_checkpoint(model, tmp_path / "other.pth")
            continue
        message = refused(tmp_path / "other.pth", complaint, lambda path: load_checkpoint(model, path))
        assert name in message and "1 of another kind" in message
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_counters_that_were_averaged_are_still_counters():
    model = small("softnet")
    counters = [name for name in model.state_dict() if name.endswith("num_batches_tracked")]
    assert counters
    load_checkpoint(model, {name: value.float() for name, value in model.state_dict().items()})
    with pytest.raises(SubquadError, match=r"num_batches_tracked is float32, the model's int64"):
        load_checkpoint(model, model.state_dict() | {counters[0]: torch.tensor(0.5)})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_and_named(tmp_path, number):
    model, broken = small("vit"), small("vit")
    broken.norm.weight.data[3] = number
    save_weights(broken, tmp_path / "broken.safetensors")
    torch.save(broken.state_dict(), tmp_path / "broken.pth")
    before = model.norm.weight.clone()
    for path in (tmp_path / "broken.safetensors", tmp_path / "broken.pth"):
        refused(path, r"weights that are not finite: norm\.weight", lambda path: load_checkpoint(model, path))
    assert torch.equal(model.norm.weight, before)
    half = {name: value.half() for name, value in broken.state_dict().items()}
    with pytest.raises(SubquadError, match="not finite"):
        load_checkpoint(model, half)


def test_entries_with_two_names_or_none_are_refused(tmp_path):
    path, ones = tmp_path / "names.pth", torch.ones(2)
    for entries, reason in (
        ({"module.a": ones, "a": ones}, "two entries for a, with and without a wrapper's prefix"),
        ({"module._orig_mod.a": ones, "_orig_mod.a": ones}, "two entries for a"),
        ({"a\nb": ones}, "too long or not printable"),
        ({"\x1b[31m": ones}, "too long or not printable"),
        ({"a" * 501: ones}, "too long"),
        ({1: ones}, "whose name is no text"),
        ({"a": torch.empty(2**40, 0)}, "is of 0 stored numbers"),
    ):
        torch.save(entries, path)
        refused(path, reason)
    released = {"blocks.0.norm1.weight": ones, "blocks.0.attn.proj.bias": ones, "blocks.0.attn.dwc.bias": ones}
    released |= {"blocks.0.attn.inner.local.bias": ones}
    with pytest.raises(SubquadError, match=r"two entries are stages\.0\.blocks\.0\.attn\.inner\.local\.bias"):
        load_checkpoint(small("vit"), released)


def test_tables_of_a_shape_that_no_table_has_are_one_line():
    model = small("vit", "agent", depths=(1,))
    tables = [name for name in model.state_dict() if "bias." in name or name.endswith("table")]
    assert len(tables) > 2
    for name in (name for name in tables if ".blocks.0." in name or "blocks" not in name):
        for shape in ((), (0,), (1, 0, 3), (1, 7), (3, 5, 7, 9), (1, 6, 24)):
            with pytest.raises(SubquadError) as caught:
                load_checkpoint(model, model.state_dict() | {name: torch.zeros(shape)})
            assert str(caught.value).isprintable(), (name, shape)


def test_a_folder_of_runs_names_one_of_them(tmp_path):
    save_weights(small("vit"), tmp_path / "b" / "best.safetensors")
    (tmp_path / "a").mkdir()
    with pytest.raises(SubquadError, match=r"holds no best\.safetensors: name a run folder .*, as .*/b$"):
        restore_model(tmp_path)
    with pytest.raises(SubquadError, match=r"or a finished conversion$"):
        restore_model(tmp_path / "a")


WRAPPED = ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.")


@pytest.mark.parametrize("prefix", WRAPPED)
@pytest.mark.parametrize("form", ["pickle", "safetensors", "our safetensors", "dict", "dict of a trainer"])
def test_what_wrappers_put_in_front_is_taken_off_whatever_the_form(tmp_path, prefix, form):
    model, other = small("vit", num_classes=3), small("vit", num_classes=3)
    state = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
    if prefix == "module.":
        # of torch.optim.swa_utils.AveragedModel
        state["n_averaged"] = torch.tensor(7)
    if form == "pickle":
        torch.save(state, source := tmp_path / "x.pth")
    elif form == "safetensors":
        save_file(state, source := tmp_path / "x.safetensors")
    elif form == "our safetensors":
        write_tensors(state, source := tmp_path / "x.safetensors", "{}")
    else:
        source = state if form == "dict" else {"epoch": 3, "state_dict": state}
    load_checkpoint(other, source)
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "wrap",
    [
        torch.nn.DataParallel,
        torch.optim.swa_utils.AveragedModel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: torch.nn.DataParallel(torch.compile(model, backend="eager")),
    ],
    ids=["parallel", "averaged", "compiled", "both"],
)
def test_wrapped_networks_are_written_and_loaded_as_what_they_wrap(tmp_path, wrap):
    model, other = small("vit", num_classes=3), small("vit", num_classes=3)
    save_weights(wrap(model), file := tmp_path / "x.safetensors")
    load_checkpoint(wrapped := wrap(other), file)
    opened, _ = restore_model(file)
    for network in (wrapped.module if isinstance(wrapped, torch.optim.swa_utils.AveragedModel) else other, opened):
        state = network.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_a_network_without_memory_is_not_said_to_have_weights(tmp_path):
    save_weights(small("vit", num_classes=3), file := tmp_path / "x.safetensors")
    with torch.device("meta"):
        sketch = small("vit", num_classes=3)
    with pytest.raises(SubquadError, match="meta device"):
        load_checkpoint(sketch, file)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"weights": {"a": 1}, "epoch": 3}, "holds no weights, but 'weights' of type dict"),
        ({"head.weight": np.zeros(3)}, "holds no weights, but 'head.weight' of type ndarray"),
        ({3: torch.zeros(3)}, "holds no weights, but '3' of type Tensor"),
        ({}, "missing"),
        (None, "a state dict, got NoneType"),
        (torch.nn.Linear(1, 1), r"a state dict, got Linear: take its state_dict\(\)"),
    ],
)
def test_dicts_that_hold_no_weights_are_told_what_they_hold(source, message):
    with pytest.raises(SubquadError, match=message) as caught:
        load_checkpoint(small("vit", num_classes=3), source)
    assert "\n" not in str(caught.value)


def test_weights_without_a_classifier_start_all_but_the_classifier():
    model, other = small("vit", num_classes=3), small("vit", num_classes=3)
    before = other.head.weight.clone()
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")}
    load_checkpoint(other, state, head=None)
    assert torch.equal(other.head.weight, before) and torch.equal(other.norm.weight, model.norm.weight)
    with pytest.raises(SubquadError, match="2 missing"):
        load_checkpoint(other, state)


@pytest.mark.parametrize("mask", [0o022, 0o007, 0o077])
def test_weight_files_are_read_by_whom_the_users_mask_allows(mask, tmp_path):
    model, before = small("vit", num_classes=3), os.umask(mask)
    try:
        save_weights(model, tmp_path / "a.safetensors")
        save_converted(convert(model, "linear"), tmp_path / "b.safetensors")
        (tmp_path / "text").touch()
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert modes == dict.fromkeys(["a.safetensors", "b.safetensors", "text"], 0o666 & ~mask)


def test_files_of_the_same_weights_are_the_same_bytes(tmp_path):
    model, note = (
        small("vit", num_classes=3),
        {"data": '\u00e4\u2028\x7f\n"\\\x01', "classes": ["b", "a"], "z": 1, "y": 2},
    )
    student = convert(small("vit", num_classes=3), "linear")
    for name in "abcdefgh":
        save_weights(model, tmp_path / f"{name}.safetensors", note)
        save_converted(student, tmp_path / f"{name}-converted.safetensors")
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 2
    state, read = read_weights(tmp_path / "a.safetensors")
    assert read.items() >= note.items() and all(torch.equal(state[key], one) for key, one in model.state_dict().items())
