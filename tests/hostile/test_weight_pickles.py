"""Pickles in weight files: whatever they ask for, nothing is written, run or changed, and nothing grows."""

import random
import resource
import struct
import time
import warnings
import zipfile

import pytest
import torch
from made_files import in_a_row, pushing, refused, state, tensor, zipped
from watching import Watch, try_file, working_in
from weight_grammar import BOMBS, Grammar, Maker

from subquad.models import read_weights
from subquad.weights import pickles


@pytest.fixture(scope="module")
def watch(tmp_path_factory):
    """A watch that has seen a few files, so that all is loaded."""
    folder = tmp_path_factory.mktemp("watched")
    (empty := folder / "empty").mkdir()
    watch = Watch(empty)
    "".encode("raw_unicode_escape")
    for path in (in_a_row(folder, state(tensor())), folder / "missing.pth"):
        watch.call(read_weights, path)
    for number in range(60):
        path = zipped(folder, {"data.pkl": Grammar(random.Random(number)).pickle()})
        watch.call(read_weights, path)
    torch.save({"a": torch.ones(1)}, folder / "saved.pth")
    watch.events.clear()
    watch.settled()
    return watch


def attacks():
    text, source, path = pushing("attack", "text", "attack")
    # names of what a file may name, of what it may not, and of ours
    targets = ["ctorch\nUntypedStorage\n", "ctorch._utils\n_rebuild_tensor_v2\n", "ctorch\nFloatStorage\n"]
    targets += [
        "ccollections\nOrderedDict\n",
        "ctorch.nn.modules.module\nModule\n",
        "cbuiltins\nexec\n",
        "ctorch\nTensor\n",
    ]
    targets += [
        "csubquad.models.pickles\nUNREAD\n",
        "ctorch.nn.parameter\nParameter\n",
        "csubquad.errors\nSubquadError\n",
    ]
    for target in targets:
        pushed = target.encode()
        attributes = b"}(" + b"".join(pushing("__name__", "attack", "dump_patches")) + b"\x88u"
        yield pushed + attributes + b"b"
        yield pushed + b"N" + attributes + b"\x86b"
        # what made torch write a file: a class that asks for patches, and its source
        yield b"(" + pushing("module")[0] + pushed + attributes + b"b" + path + source + b"tQ"
        yield pushed + b"(" + text + b"tR"
        yield pushed + b")\x81"
        yield pushed + b"(tR" + attributes + b"b"


@pytest.mark.parametrize("inside", ["zip", "in a row"])
def test_a_pickle_changes_and_writes_nothing(tmp_path, watch, inside):
    with working_in(watch.folder):
        for attack in attacks():
            content = (
                state(tensor(), attack) if attack.endswith(b"Q") else b"\x80\x02" + attack + b"0" + state(tensor())[2:]
            )
            if inside == "zip":
                path = zipped(tmp_path, {"data.pkl": content, "data/0": bytes(48)})
            else:
                path = in_a_row(tmp_path, content)
            watch.call(read_weights, path)
            assert not watch.complaints() and not watch.changes(), content
        torch.save({"a": torch.ones(1)}, tmp_path / "saved.pth")
        assert torch.load(tmp_path / "saved.pth")["a"] == 1


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: repr(bomb[:12]))
def test_no_operation_takes_memory_or_time_that_the_file_does_not_have(tmp_path, watch, bomb):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    for content in (b"\x80\x02" + bomb + b".", state(tensor(), bomb), b"\x80\x02" + bomb + b"0" + state(tensor())[2:]):
        watch.call(read_weights, in_a_row(tmp_path, content))
    assert time.perf_counter() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    assert not watch.complaints()


def test_pickles_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(pickles, "MOST_OPERATIONS", 1000)
    refused(in_a_row(tmp_path, b"\x80\x02" + b"N0" * 1000 + b"."), "more than 1000 objects")
    monkeypatch.setattr(pickles, "MOST_BYTES", 1 << 20)
    refused(in_a_row(tmp_path, b"\x80\x02" + pushing("x" * (1 << 20))[0] + b"."), "more than 1 MB beside the tensors")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"offset": 1}, "3×4 reaches beyond its storage of 12 numbers"),
        ({"offset": -1}, "no whole numbers"),
        ({"stride": (5, 1)}, "reaches beyond"),
        ({"stride": (2**60, 1)}, "no whole numbers, or too large"),
        ({"stride": (-4, 1)}, "no whole numbers"),
        ({"stride": (1,)}, "2 axes with 1 strides"),
        ({"size": (2**40, 0)}, "1099511627776×0 is of 12 stored numbers"),
        ({"size": (2**20, 1), "stride": (0, 0)}, "1048576×1 is of 12 stored numbers"),
        ({"size": (1,) * 65, "stride": (0,) * 65}, "64 numbers or fewer"),
        ({"count": 13}, "instead of 52|has two sizes"),
        ({"count": 2**47}, "bytes instead of|has two sizes"),
        ({"kind": "DoubleStorage"}, "instead of 96|has two sizes"),
        ({"kind": "QUInt4x2Storage"}, "of an unknown kind"),
        ({"key": "1"}, "no record data/1|no storage 1"),
        ({"key": "../../x"}, r"no record data/\.\./\.\./x|no storage \.\./\.\./x"),
    ],
)
def test_a_tensor_that_is_not_in_its_storage_is_refused(tmp_path, bad, reason):
    content = state(tensor(), tensor(**bad))
    refused(in_a_row(tmp_path, content), reason)
    refused(zipped(tmp_path, {"data.pkl": content, "data/0": bytes(48)}), reason)


def test_storages_are_not_read_twice_over(tmp_path):
    keys = [str(key) for key in range(3)]
    path = zipped(
        tmp_path, {"data.pkl": state(*(tensor(key=key) for key in keys))} | {f"data/{key}": bytes(48) for key in keys}
    )
    content = path.read_bytes()
    # the table says that all records begin where the first one does
    with zipfile.ZipFile(path) as archive:
        starts = {info.filename: info.header_offset for info in archive.infolist()}
    for name, start in starts.items():
        if name.startswith("archive/data/"):
            table = content.index(name.encode(), content.index(b"PK\x01\x02"))
            field = table - 4
            assert struct.unpack("<I", content[field : field + 4])[0] == start
            content = content[:field] + struct.pack("<I", starts["archive/data/0"]) + content[field + 4 :]
    path.write_bytes(content)
    refused(path, "damaged: ")
    bomb = zipped(tmp_path, {"data.pkl": state(tensor()), "data/0": bytes(48)}, zipfile.ZIP_DEFLATED)
    refused(bomb, "is compressed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(path, "w") as archive:
            for content in (state(tensor()), state(tensor())):
                archive.writestr("archive/data.pkl", content)
    refused(path, "two of its records have one name")


def test_the_fuzzer_finds_nothing(tmp_path, watch):
    maker = Maker(tmp_path)
    with working_in(watch.folder):
        for number in range(400):
            kind, _, complaints = try_file(maker, watch, tmp_path, f"test {number}")
            assert not complaints, (number, kind)
        assert not watch.changes()
