"""How tensors are handed to a kernel."""

import ctypes
import os

import torch
from torch import Tensor

WHERE = () if os.environ.get("TRITON_INTERPRET") == "1" else ("cpu",)
"""Where these kernels compute: nowhere in a process in which Triton's interpreter stands for a GPU."""


class Tokens(ctypes.Structure):
    """`Tokens` of kernels/tokens.h."""

    _fields_ = [("data", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("batch", "head", "token", "images", "heads", "count", "width")]


class Shape(ctypes.Structure):
    """`Shape` of kernels/tokens.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "heads", "queries", "keys", "width")]
    _fields_ += [("threads", ctypes.c_int32)]


class Numbers(ctypes.Structure):
    """`Numbers` of kernels/tokens.h."""

    _fields_ = [("data", ctypes.c_void_p), ("count", ctypes.c_int64)]


class Map(ctypes.Structure):
    """`Map` of kernels/local.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("height", "width", "prefix")]


def tokens_of(x: Tensor | None) -> Tokens:
    """(b, h, n, d) whose channels lie side by side."""
    if x is None:
        return Tokens()
    batch, head, token, _ = x.stride()
    return Tokens(x.data_ptr(), batch, head, token, *x.shape)


def shape_of(q: Tensor, k: Tensor) -> Shape:
    """Of queries and keys, and how many threads there are."""
    b, h, n, d = q.shape
    return Shape(b, h, n, k.shape[2], d, torch.get_num_threads())


class Bias(ctypes.Structure):
    """`Bias` of kernels/places.h."""

    _fields_ = [("written", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("head", "token", "agent", "heads", "tokens", "agents")]
    _fields_ += [(name, Numbers) for name in ("block", "rows", "columns", "prefix")]
    _fields_ += [("side", ctypes.c_int64), ("map", Map)]


def numbers_of(x: Tensor | None) -> Numbers:
    """A contiguous tensor, which lives as long as what is handed over."""
    if x is None:
        return Numbers()
    assert x.is_contiguous()
    numbers = Numbers(x.data_ptr(), x.numel())
    numbers.owner = x
    return numbers


def bias_of(tensors: list[Tensor]) -> Bias:
    """Of (h, a, n) written out, or of a block, rows, columns and perhaps a prefix."""
    if len(tensors) == 1:
        (heads, agents, tokens), (head, agent, token) = tensors[0].shape, tensors[0].stride()
        return Bias(tensors[0].data_ptr(), head, token, agent, heads, tokens, agents)
    block, rows, columns, *prefix = [table.contiguous() for table in tensors]
    bias = Bias(None, *(0,) * 6, *map(numbers_of, (block, rows, columns, *prefix)))
    bias.side = block.shape[2]
    bias.map = Map(rows.shape[2], columns.shape[2], prefix[0].shape[2] if prefix else 0)
    bias.owner = block, rows, columns, *prefix
    return bias


def long(*numbers: int) -> list[ctypes.c_int64]:
    """Numbers as C has them."""
    return [ctypes.c_int64(number) for number in numbers]
