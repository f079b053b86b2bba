"""How tensors are handed to a kernel."""

import ctypes
import os

import torch
from torch import Tensor

WHERE = () if os.environ.get("TRITON_INTERPRET") == "1" else ("cpu",)
"""Where these kernels compute: nowhere in a process in which Triton's interpreter stands for a GPU."""


class Tokens(ctypes.Structure):
    """`Tokens` of kernels/tokens.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("token", ctypes.c_int64),
    ]


class Shape(ctypes.Structure):
    """`Shape` of kernels/tokens.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "heads", "queries", "keys", "width")]
    _fields_ += [("threads", ctypes.c_int32)]


class Map(ctypes.Structure):
    """`Map` of kernels/local.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("height", "width", "prefix")]


def tokens_of(x: Tensor | None) -> Tokens:
    """(b, h, n, d) whose channels lie side by side."""
    if x is None:
        return Tokens()
    batch, head, token, _ = x.stride()
    return Tokens(x.data_ptr(), batch, head, token)


def shape_of(q: Tensor, k: Tensor) -> Shape:
    """Of queries and keys, and how many threads there are."""
    b, h, n, d = q.shape
    return Shape(b, h, n, k.shape[2], d, torch.get_num_threads())


class Bias(ctypes.Structure):
    """`Bias` of kernels/places.h."""

    _fields_ = [("written", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("head", "token", "agent")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("block", "rows", "columns", "prefix")]
    _fields_ += [("side", ctypes.c_int64), ("map", Map)]


def pointer_to(x: Tensor | None) -> ctypes.c_void_p:
    """To the numbers of a contiguous tensor, which lives as long as the pointer."""
    assert x is None or x.is_contiguous()
    pointer = ctypes.c_void_p(None if x is None else x.data_ptr())
    pointer.owner = x  # type: ignore[attr-defined]
    return pointer


def bias_of(tensors: list[Tensor]) -> Bias:
    """Of (h, a, n) written out, or of a block, rows, columns and perhaps a prefix."""
    if len(tensors) == 1:
        head, agent, token = tensors[0].stride()
        return Bias(tensors[0].data_ptr(), head, token, agent)
    tables = [table.contiguous() for table in tensors]
    prefix = tables[3].shape[2] if len(tables) == 4 else 0
    bias = Bias(None, 0, 0, 0, *(table.data_ptr() for table in tables))
    bias.side, bias.map = tables[0].shape[2], Map(tables[1].shape[2], tables[2].shape[2], prefix)
    bias.owner = tables
    return bias


def long(*numbers: int) -> list[ctypes.c_int64]:
    """Numbers as C has them."""
    return [ctypes.c_int64(number) for number in numbers]
