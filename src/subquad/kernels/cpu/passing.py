"""How tensors are handed to a kernel."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Tokens(ctypes.Structure):
    """`AnyTokens` of kernels/cpu/source/tokens.h."""

    _fields_ = [("data", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("batch", "head", "token", "images", "heads", "count", "width")]


class Shape(ctypes.Structure):
    """`Shape` of kernels/cpu/source/tokens.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "heads", "queries", "keys", "width")]
    _fields_ += [("threads", ctypes.c_int32)]


class Numbers(ctypes.Structure):
    """`Numbers` of kernels/cpu/source/tokens.h."""

    _fields_ = [("data", ctypes.c_void_p), ("count", ctypes.c_int64)]


class AnyNumbers(ctypes.Structure):
    """`AnyNumbers` of kernels/cpu/source/tokens.h."""

    _fields_ = [("data", ctypes.c_void_p), ("count", ctypes.c_int64), ("halves", ctypes.c_int32)]


class AnyNorm(ctypes.Structure):
    """`AnyNorm` of kernels/cpu/source/branches.h."""

    _fields_ = [("weight", AnyNumbers), ("bias", AnyNumbers), ("eps", ctypes.c_float)]


class Map(ctypes.Structure):
    """`Map` of kernels/cpu/source/local.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("height", "width", "prefix")]


class Blocks(ctypes.Structure):
    """`Blocks` of kernels/cpu/source/mhla.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("height", "width", "rows", "columns")]


class Filters(ctypes.Structure):
    """`AnyFilters` of kernels/cpu/source/mixer_parts.h."""

    _fields_ = [("weight", AnyNumbers), ("bias", AnyNumbers)]
    _fields_ += [(name, ctypes.c_int64) for name in ("count", "each", "size")]


class Predictor(ctypes.Structure):
    """`AnyPredictor` of kernels/cpu/source/inline.h."""

    _fields_ = [(name, AnyNumbers) for name in ("first", "first_bias", "second", "second_bias")]

    @classmethod
    def of(cls, *parameters: Tensor) -> "Predictor":
        """Weights and biases of its two layers, which live as long as what is handed over."""
        numbers = tuple(map(as_it_lies, parameters))
        predictor = cls(*numbers)
        predictor.owner = numbers
        return predictor


class Turning(ctypes.Structure):
    """`Turning` of kernels/cpu/source/feature_maps.h."""

    _fields_ = [("cos", Numbers), ("sin", Numbers), ("heads", ctypes.c_int64)]


STILL = Turning(Numbers(), Numbers(), 1)
"""No rotation."""


def tokens_of(x: Tensor | None) -> Tokens:
    """(b, h, n, d) whose channels lie side by side."""
    if x is None:
        return Tokens()
    batch, head, token, _ = x.stride()
    return Tokens(x.data_ptr(), batch, head, token, *x.shape)


def images_of(x: Tensor) -> tuple[Tokens, Shape]:
    """Images' tokens (b, n, c) as those of one head of each, and their sizes; they live as long as what is given."""
    x = x.contiguous()
    b, n, c = x.shape
    tokens = Tokens(x.data_ptr(), n * c, n * c, c, b, 1, n, c)
    tokens.owner = x
    return tokens, Shape(b, 1, n, n, c, torch.get_num_threads())


def rows_of(x: Tensor) -> tuple[Tokens, Shape]:
    """Tokens (b, n, c) as those of one head of one image, and their sizes; see `images_of`."""
    b, n, c = x.shape
    tokens = weight_of(x.reshape(b * n, c))
    return tokens, Shape(1, 1, b * n, b * n, c, torch.get_num_threads())


def weight_of(x: Tensor) -> Tokens:
    """A matrix (n, c) as the tokens of one head of one image, which live as long as what is given."""
    x = x.contiguous()
    n, c = x.shape
    tokens = Tokens(x.data_ptr(), n * c, n * c, c, 1, 1, n, c)
    tokens.owner = x
    return tokens


def shape_of(q: Tensor, k: Tensor) -> Shape:
    """Give the sizes of queries and keys, and how many threads there are."""
    b, h, n, d = q.shape
    return Shape(b, h, n, k.shape[2], d, torch.get_num_threads())


ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "quick_gelu": 2, "nothing": 3, "silu": 4}
"""What activations.h knows of."""


def map_of(x: Tensor, shape: Sequence[int]) -> Map:
    """The map of `shape` that tokens (b, h, n, d) stand on, behind a prefix."""
    height, width = shape
    return Map(height, width, x.shape[2] - height * width)


def of_one_dtype(*tokens: Tensor | None) -> tuple[Any, ...]:
    """Tokens as kernels want them: all fp32 or all bf16. Where they differ, as under autocast, all become fp32."""
    if len({x.dtype for x in tokens if x is not None}) == 1:
        return tokens
    return tuple(None if x is None else x.float() for x in tokens)


class Bias(ctypes.Structure):
    """`AnyBias` of kernels/cpu/source/places.h."""

    _fields_ = [("written", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("head", "token", "agent", "heads", "tokens", "agents")]
    _fields_ += [(name, AnyNumbers) for name in ("block", "rows", "columns", "prefix")]
    _fields_ += [("side", ctypes.c_int64), ("map", Map)]


class BiasGradient(ctypes.Structure):
    """`BiasGradient` of kernels/cpu/source/places.h."""

    _fields_ = [(name, Numbers) for name in ("images", "block", "rows", "columns", "prefix")]


class Kept(ctypes.Structure):
    """`Kept` of kernels/cpu/source/agent.h."""

    _fields_ = [(name, Numbers) for name in ("values", "most", "total")]


class Pairs(ctypes.Structure):
    """`Pairs` of kernels/cpu/source/softmax.h."""

    _fields_ = [("data", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("batch", "head", "query", "key")]
    _fields_ += [(name, ctypes.c_int64) for name in ("images", "heads", "queries", "keys")]


def pairs_of(x: Tensor | None, shape: Sequence[int]) -> Pairs:
    """Numbers of pairs that are broadcast to (b, h, n, m), which live as long as what is handed over.

    Raises:
        ValueError: they are not of four axes.
    """
    if x is None:
        return Pairs()
    if x.dim() != 4:
        raise ValueError(f"numbers of pairs (b, h, n, m) have four axes, got {tuple(x.shape)}")
    whole = x.expand(shape)
    pairs = Pairs(x.data_ptr(), *whole.stride(), *shape)
    pairs.owner = x
    return pairs


def numbers_of(x: Tensor | None) -> Numbers:
    """A contiguous tensor in fp32, which lives as long as what is handed over."""
    if x is None:
        return Numbers()
    assert x.is_contiguous() and x.dtype == torch.float32
    numbers = Numbers(x.data_ptr(), x.numel())
    numbers.owner = x
    return numbers


def parameter_of(x: Tensor | None) -> Numbers:
    """A tensor that is only read, of any dtype and layout: parameters may be fp32 beside tokens in bf16 and reverse."""
    return numbers_of(None if x is None else x.float().contiguous())


def turning_of(cos: Tensor | None, sin: Tensor | None) -> Turning:
    """Tables of a rotation, (n, d) or (h, n, d), which live as long as what is handed over."""
    if cos is None:
        return STILL
    tables = parameter_of(cos), parameter_of(sin)
    turning = Turning(*tables, 1 if cos.dim() == 2 else cos.shape[0])
    turning.owner = tables
    return turning


def bias_of(written: Tensor) -> Bias:
    """A bias (h, a, n) that is written out, which lives as long as what is handed over."""
    written = written.float()
    (heads, agents, tokens), (head, agent, token) = written.shape, written.stride()
    bias = Bias(written.data_ptr(), head, token, agent, heads, tokens, agents)
    bias.owner = written
    return bias


def bias_of_tables(block: Tensor, rows: Tensor, columns: Tensor, prefix: Tensor | None) -> Bias:
    """A bias of its tables, which live as long as what is handed over."""
    tables = tuple(map(as_it_lies, (block, rows, columns, prefix)))
    bias = Bias(None, *(0,) * 6, *tables)
    bias.side = block.shape[2]
    bias.map = Map(rows.shape[2], columns.shape[2], 0 if prefix is None else prefix.shape[2])
    bias.owner = tables
    return bias


def as_it_lies(x: Tensor | None) -> AnyNumbers:
    """A parameter that kernels widen themselves, which lives as long as what is handed over; see `AnyNumbers`."""
    if x is None:
        return AnyNumbers()
    x = (x if x.dtype in (torch.float32, torch.bfloat16) else x.float()).contiguous()
    numbers = AnyNumbers(x.data_ptr(), x.numel(), x.dtype == torch.bfloat16)
    numbers.owner = x
    return numbers


def norm_of(weight: Tensor | None, bias: Tensor | None, eps: float) -> AnyNorm:
    """A LayerNorm's parameters (c,), which live as long as what is handed over; none where there is no norm."""
    parameters = as_it_lies(weight), as_it_lies(bias)
    norm = AnyNorm(*parameters, eps)
    norm.owner = parameters
    return norm


def filters_of(weight: Tensor, bias: Tensor | None, whose: str, like: Tensor) -> Filters:
    """Depthwise filters (f, 1, w, w) and biases (f,) of tokens (b, h, n, d), which live as long as what is handed over.

    `whose` they are is a name of `mixer_operators.FILTERS`.
    """
    numbers = as_it_lies(weight), as_it_lies(bias)
    filters = Filters(*numbers, len(weight), like.shape[3] if whose == "head" else 1, weight.shape[3])
    filters.owner = numbers
    return filters


def long(*numbers: int) -> list[ctypes.c_int64]:
    """Numbers as C has them."""
    return [ctypes.c_int64(number) for number in numbers]
