"""Weight files made by hand, and what is expected of the complaints about them."""

import pickle
import random
import struct
import zipfile

import pytest
from weight_grammar import Grammar

from subquad.errors import SubquadError
from subquad.models import read_weights
from subquad.weights import torch_files


def refused(path, match, read=read_weights):
    """The complaint about a file: one printable line that names it."""
    with pytest.raises(SubquadError, match=match) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000
    return str(caught.value)


def in_a_row(folder, content, keys=("0",), count=12):
    """A file as before PyTorch 1.6, with a pickle of ours and a storage of `count` numbers."""
    path = folder / "row.pth"
    before = (torch_files.MAGIC_NUMBER, torch_files.PROTOCOL_VERSION, {"little_endian": True})
    tail = pickle.dumps(list(keys), 2) + struct.pack("<q", count) + bytes(4 * count)
    path.write_bytes(b"".join(pickle.dumps(value, 2) for value in before) + content + tail)
    return path


def zipped(folder, records, method=zipfile.ZIP_STORED):
    path = folder / "zip.pth"
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in records.items():
            archive.writestr(f"archive/{name}", content)
    return path


def pushing(*words):
    return [b"X" + struct.pack("<I", len(word)) + word.encode() for word in words]


def tensor(offset=0, size=(3, 4), stride=(4, 1), count=12, kind="FloatStorage", key="0"):
    """Operations that push a tensor."""
    grammar = Grammar(random.Random(0))

    def numbers(values):
        return b"(" + b"".join(map(grammar.number, values)) + b"t"

    pid = b"(" + b"".join(pushing("storage")) + f"ctorch\n{kind}\n".encode() + b"".join(pushing(key, "cpu"))
    pid += grammar.number(count) + b"tQ"
    arguments = pid + grammar.number(offset) + numbers(size) + numbers(stride) + b"\x89}"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"


def state(*tensors):
    """A pickle of a state dict."""
    return b"\x80\x02}(" + b"".join(pushing(chr(97 + k))[0] + part for k, part in enumerate(tensors)) + b"u."
