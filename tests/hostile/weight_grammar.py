"""Weight files that nobody wrote: a grammar of pickles, zips, headers and notes, and real files with bytes changed."""

import argparse
import collections
import io
import json
import pickle
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

import subquad
from subquad.models import save_weights
from subquad.weights import notes, stored, torch_files

NAMES = [
    *(f"{module} {name}" for module, name in stored.MAKERS),
    *(f"torch._utils {name}" for name in stored.STRANGE),
    *(f"torch {name}" for name in (*stored.STORAGES, "float32", "Size", "device", "load", "Tensor", "UntypedStorage")),
    *("collections OrderedDict", "torch.storage UntypedStorage", "torch._tensor _rebuild_from_type_v2"),
    *("torch.nn.modules.module Module", "torch.serialization load", "torch.jit load", "torch.hub load"),
    *("builtins exec", "builtins eval", "builtins getattr", "builtins open", "__builtin__ setattr", "posix system"),
    *("os remove", "subprocess Popen", "copyreg _reconstructor", "copyreg add_extension", "copy_reg __newobj__"),
    *("subquad.weights.pickles UNREAD", "subquad.weights.stored MAKERS", "pathlib Path", "_codecs encode", "x y", " "),
]
ATTRIBUTES = ["__name__", "dump_patches", "__class__", "__dict__", "__setstate__", "__code__", "MAKERS", "a.weight", ""]
SIMPLE = [getattr(pickle, name) for name in ("NONE", "NEWTRUE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET")]
ACTIONS = [
    getattr(pickle, name)
    for name in [
        "APPEND",
        "APPENDS",
        "SETITEM",
        "SETITEMS",
        "BUILD",
        "REDUCE",
        "NEWOBJ",
        "NEWOBJ_EX",
        "OBJ",
        "POP",
        "POP_MARK",
        "MARK",
        "DUP",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "LIST",
        "DICT",
        "FROZENSET",
        "ADDITEMS",
        "MEMOIZE",
        "STACK_GLOBAL",
        "BINPERSID",
        "STOP",
        "NEXT_BUFFER",
        "READONLY_BUFFER",
    ]
]
BOMBS = [
    pickle.LONG4 + struct.pack("<i", 2**31 - 1),
    pickle.LONG4 + struct.pack("<i", -5),
    pickle.BINUNICODE8 + struct.pack("<Q", 2**62),
    pickle.BINBYTES8 + struct.pack("<Q", 2**40),
    pickle.BYTEARRAY8 + struct.pack("<Q", 2**40),
    pickle.BINBYTES + struct.pack("<I", 2**32 - 1),
    pickle.NONE + pickle.LONG_BINPUT + struct.pack("<I", 2**32 - 1),
    pickle.NONE + pickle.PUT + b"9" * 30 + b"\n",
    pickle.INT + b"9" * 5000 + b"\n",
    pickle.LONG + b"9" * 3900 + b"L\n",
    pickle.FLOAT + b"1e999\n",
    pickle.UNICODE + b"\\ud800\n",
    pickle.EMPTY_TUPLE + pickle.TUPLE1 * 3000,
    pickle.EMPTY_TUPLE + (pickle.DUP + pickle.TUPLE2) * 60,
    pickle.EMPTY_DICT + pickle.EMPTY_TUPLE + (pickle.DUP + pickle.TUPLE2) * 60 + pickle.NONE + pickle.SETITEM,
    pickle.EMPTY_LIST + pickle.MEMOIZE + pickle.DUP + pickle.APPEND,
    pickle.MARK * 2000 + pickle.LIST * 2000,
    pickle.FRAME + struct.pack("<Q", 2**63),
    pickle.EXT4 + struct.pack("<i", -1),
    pickle.PERSID + b"/tmp/x\n",
    pickle.GET + b"-1\n",
    pickle.STRING + b"'\\x41'\n",
]

STORED = {"0": bytes(range(48)), "1": b"\x02\xff" * 24, "2": bytes(range(9))}
"""The numbers of all tensors."""


class Grammar:
    """Pickles of one random generator: most parts make sense, some do not."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.noisy = chance.choice([0, 0, 0, 0.3, 1])
        self.odd = chance.choice([0, 0.02, 0.3])
        self.storages: dict[str, int] = {}

    def pickle(self) -> bytes:
        """A whole one."""
        content = self.state() if self.chance.random() < 0.5 else self.value(4)
        wrapped = pickle.EMPTY_DICT + self.text("model") + content + pickle.SETITEM
        return b"\x80\x02" + (wrapped if self.chance.random() < 0.3 else content) + self.noise() + pickle.STOP

    def state(self) -> bytes:
        """Names and tensors."""
        entries = (self.text(self.chance.choice(["a", "b.weight", "c", "é"])) for _ in range(4))
        pairs = b"".join(name + (self.value(2) if self.is_odd() else self.tensor()) for name in entries)
        return self.name("collections OrderedDict") + b")R" + pickle.MARK + pairs + pickle.SETITEMS

    def value(self, depth: int) -> bytes:
        """What pushes one object, if all is well."""
        if depth <= 0:
            return self.leaf()
        inner = [self.value(depth - 1) for _ in range(self.chance.randrange(3))]
        shape = self.chance.randrange(10)
        if shape == 0:
            return pickle.MARK + b"".join(inner) + pickle.TUPLE + self.noise()
        if shape == 1:
            return pickle.EMPTY_LIST + pickle.MARK + b"".join(inner) + pickle.APPENDS + self.noise()
        if shape == 2:
            return pickle.EMPTY_DICT + self.leaf() + self.value(depth - 1) + pickle.SETITEM
        if shape == 3:
            return self.name() + pickle.MARK + b"".join(inner) + pickle.TUPLE + pickle.REDUCE
        if shape == 4:
            return self.value(depth - 1) + self.attributes() + pickle.BUILD
        if shape == 5:
            return self.name() + self.attributes() + pickle.BUILD
        if shape == 6:
            source = self.text("/tmp/attack"), self.text("text")
            return pickle.MARK + self.text("module") + self.name() + b"".join(source) + pickle.TUPLE + pickle.BINPERSID
        if shape == 7:
            return self.tensor()
        return self.chance.choice(BOMBS) if self.chance.random() < 0.2 else self.leaf()

    def attributes(self) -> bytes:
        """The state of an object, as a dict, or in slots."""
        name, value = self.text(self.chance.choice(ATTRIBUTES)), self.leaf()
        entries = pickle.EMPTY_DICT + name + value + pickle.SETITEM
        return entries if self.chance.random() < 0.6 else pickle.NONE + entries + pickle.TUPLE2

    def leaf(self) -> bytes:
        """A number, text, name or constant."""
        kind = self.chance.randrange(6)
        if kind == 0:
            return self.number(self.chance.choice([0, 1, 255, -1, 2**31, 2**63, 2**200, 1001]))
        if kind == 1:
            return self.text(self.chance.choice([*ATTRIBUTES, "storage", "module", "0", "cpu", "\x1b[31m", "x" * 300]))
        return self.name() if kind == 2 else self.chance.choice(SIMPLE)

    def tensor(self) -> bytes:
        """A tensor of a storage, mostly within its bounds."""
        kind, key, count = self.chance.choice(
            [("FloatStorage", "0", 12), ("LongStorage", "1", 6), ("BoolStorage", "2", 9)]
        )
        if self.is_odd():
            kind = self.chance.choice([*stored.STORAGES])
        if self.is_odd():
            key, count = self.chance.choice(["0", "1", "../0", "", "9"]), self.chance.choice([0, -1, 3, 2**40, 2**62])
        self.storages.setdefault(key, count)
        pid = pickle.MARK + self.text("storage") + self.name(f"torch {kind}") + self.text(key) + self.text("cpu")
        pid += self.number(count) + pickle.TUPLE + pickle.BINPERSID
        size = [self.chance.choice([0, 1, 3, 4, 2**20]) if self.is_odd() else 2 for _ in range(2)]
        stride = [self.chance.choice([0, 5, 2**33, -1]) if self.is_odd() else step for step in (3, 1)]
        maker = "torch._utils _rebuild_tensor_v2"
        if self.is_odd():
            maker = self.chance.choice([name for name in NAMES if "_rebuild" in name])
        sides = [pickle.MARK + b"".join(map(self.number, sides)) + pickle.TUPLE for sides in (size, stride)]
        start = self.chance.choice([1, 5, 11, -1]) if self.is_odd() else 0
        arguments = pid + self.number(start) + b"".join(sides)
        arguments += pickle.NEWFALSE + pickle.EMPTY_DICT + self.noise()
        return self.name(maker) + pickle.MARK + arguments + pickle.TUPLE + pickle.REDUCE + self.noise()

    def is_odd(self) -> bool:
        """Whether something is not as it should be."""
        return self.chance.random() < self.odd

    def noise(self) -> bytes:
        """Now and then an operation that has no business here."""
        draw = self.chance.random()
        if draw < 0.1 * self.noisy:
            return self.chance.choice(ACTIONS)
        return self.chance.choice(BOMBS) if draw < 0.12 * self.noisy else b""

    def name(self, words: str | None = None) -> bytes:
        """A module and a name in it."""
        module, _, name = (words or self.chance.choice(NAMES)).partition(" ")
        if self.chance.random() < 0.3:
            return self.text(module) + self.text(name) + pickle.STACK_GLOBAL
        return pickle.GLOBAL + f"{module}\n{name}\n".encode()

    def text(self, words: str) -> bytes:
        """Text, in one of its forms."""
        coded = words.encode("utf-8", "surrogatepass")
        if self.chance.random() < 0.2 and len(coded) < 256:
            return pickle.SHORT_BINSTRING + bytes([len(coded)]) + coded
        return pickle.BINUNICODE + struct.pack("<I", len(coded)) + coded

    def number(self, value: int) -> bytes:
        """A whole number, in one of its forms."""
        if 0 <= value < 256:
            return pickle.BININT1 + bytes([value])
        coded = pickle.encode_long(value)
        return pickle.LONG1 + bytes([len(coded)]) + coded


def zipped(records: dict[str, bytes], chance: random.Random) -> bytes:
    """A zip archive as torch.save writes it, or nearly so."""
    method = zipfile.ZIP_DEFLATED if chance.random() < 0.02 else zipfile.ZIP_STORED
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive:
        for name, content in records.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content, method)
    return target.getvalue()


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Bytes with some changed, left out, doubled or cut off."""
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        place = chance.randrange(len(changed)) if len(changed) > 1 else 0
        kind = chance.randrange(10)
        if kind < 5:
            changed[place : place + 1] = bytes([chance.randrange(256)])
        elif kind < 7:
            changed[place : place + 1] = bytes([changed[place] ^ (1 << chance.randrange(8))]) if changed else b""
        elif kind == 7:
            del changed[place : place + chance.randrange(1, 20)]
        elif kind == 8:
            changed[place:place] = changed[place : place + chance.randrange(1, 20)]
        else:
            del changed[place:]
    return bytes(changed)


def json_of(chance: random.Random, depth: int = 3) -> Any:
    """Some JSON."""
    kind = chance.randrange(9)
    if depth and kind == 0:
        return [json_of(chance, depth - 1) for _ in range(chance.randrange(4))]
    if depth and kind == 1:
        words = [
            *notes.KINDS,
            "name",
            "task",
            "depths",
            "img_size",
            "attention",
            "embed_dim",
            "num_heads",
            "checkpoint",
        ]
        return {chance.choice(words): json_of(chance, depth - 1) for _ in range(chance.randrange(4))}
    numbers = [0, -1, 1, 8, 16, 10**9, 1e308, float("nan"), float("inf"), 0.5]
    return chance.choice([*numbers, "deit_tiny", "softmax", "classify", "segment", "\n", "", None, True, "x" * 200])


def header_of(chance: random.Random, note: Any) -> bytes:
    """A safetensors file with a header that is nearly right."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "subquad": json.dumps(note)}}
    for name in ("a", "b"):
        start = chance.choice([0, 8, -1, 2**40]) if chance.random() < 0.2 else 8 * (name == "b")
        shape = [chance.choice([2, 0, 2**40, -1])] if chance.random() < 0.2 else [2]
        kind = chance.choice(["F32", "F64", "I8", "BOOL", "F4", "x", 3]) if chance.random() < 0.3 else "F32"
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, start + 8]}
    if chance.random() < 0.1:
        header[chance.choice(["", "\n", "__metadata__"])] = json_of(chance)
    text = json.dumps(header).encode()
    length = len(text) if chance.random() < 0.9 else chance.choice([0, 1, 2**32, 2**63, len(text) + 1])
    return struct.pack("<Q", length % 2**64) + text + bytes(16 if chance.random() < 0.9 else chance.randrange(40))


class Maker:
    """Files by number; `original` is what a zip archive has, whatever bytes of it are changed."""

    def __init__(self, folder: Path) -> None:
        self.network = subquad.create_model(
            "deit_tiny", embed_dim=8, num_heads=1, depths=(1,), img_size=16, num_classes=2
        )
        # what libraries load when they are first needed
        self.network(torch.zeros(1, 3, 16, 16))
        self.original = {"a": torch.arange(12.0).view(3, 4), "b.weight": torch.arange(5), "c": torch.randn(3).half()}
        content = {"model": collections.OrderedDict(self.original), "args": argparse.Namespace(lr=0.1, names=["a"])}
        torch.save(content, folder / "zip.pth")
        torch.save(content, folder / "row.pth", _use_new_zipfile_serialization=False)
        save_weights(self.network, folder / "ours.safetensors", {"classes": ["a", "b"], "input": {}})
        self.zip, self.row, self.ours = (
            (folder / name).read_bytes() for name in ("zip.pth", "row.pth", "ours.safetensors")
        )
        with zipfile.ZipFile(io.BytesIO(self.zip)) as archive:
            self.records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
        self.before = b"".join(
            pickle.dumps(value, 2) for value in (torch_files.MAGIC_NUMBER, 1001, {"little_endian": True})
        )

    def make(self, chance: random.Random) -> tuple[str, str, bytes]:
        """Kind, ending and bytes of a file."""
        draw = chance.random()
        if draw < 0.4:
            grammar = Grammar(chance)
            records = {"data.pkl": grammar.pickle()} | {f"data/{key}": content for key, content in STORED.items()}
            if grammar.is_odd():
                records["byteorder"] = chance.choice([b"big", b"little", b"x"])
            return "zip grammar", "pth", zipped(records, chance)
        if draw < 0.65:
            grammar = Grammar(chance)
            content = grammar.pickle()
            keys: Any = list(grammar.storages)
            if grammar.is_odd():
                keys = chance.choice([["0"], ["0", "1"], ["1"], [], ["0", "0"], ["x"], 3])
            counts = [2**40 if grammar.is_odd() else count for count in grammar.storages.values()]
            parts = zip(counts, grammar.storages, strict=True)
            tail = b"".join(struct.pack("<q", count) + STORED.get(key, b"") for count, key in parts)
            return "row grammar", "pth", self.before + content + pickle.dumps(keys, 2) + tail
        if draw < 0.75:
            return "zip mutated", "pth", mutated(self.zip, chance)
        if draw < 0.83:
            return "row mutated", "pth", mutated(self.row, chance)
        if draw < 0.91:
            records = self.records | {"data.pkl": mutated(self.records["data.pkl"], chance)}
            return "pickle mutated", "pth", zipped(records, chance)
        if draw < 0.97:
            return "safetensors grammar", "safetensors", header_of(chance, json_of(chance))
        if draw < 0.99:
            return "safetensors mutated", "safetensors", mutated(self.ours, chance)
        return "note", "safetensors", self.noted(chance)

    def noted(self, chance: random.Random) -> bytes:
        """Our own file with another note."""
        length = struct.unpack("<Q", self.ours[:8])[0]
        header = json.loads(self.ours[8 : 8 + length])
        note = json.loads(header["__metadata__"]["subquad"])
        note["creation"][chance.choice([*note["creation"], "task", "drop_rate", "patch_size"])] = json_of(chance)
        if chance.random() < 0.3:
            note[chance.choice([*notes.KINDS])] = json_of(chance)
        header["__metadata__"]["subquad"] = json.dumps(note)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + self.ours[8 + length :]
