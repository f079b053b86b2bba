"""Rotary positions in optimized blocks, and what timm and transformers hand to theirs as a rotation of all tokens."""

import threading
from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels import replayed
from subquad.kernels.declaring import is_heard
from subquad.rope import Rotation, with_signs


def of_one_table(rope: Tensor, prefix: int, *, interleaved: bool) -> Rotation:
    """Timm's table of sines and cosines (…, y·x, 2d) for the tokens behind `prefix`."""
    sin, cos = rope.chunk(2, dim=-1)
    return _behind(prefix, cos, sin, interleaved)


def of_two_tables(cos: Tensor, sin: Tensor, num_tokens: int) -> Rotation:
    """DINOv3's tables (y·x, d) of the map's tokens, the last of `num_tokens`."""
    return _behind(num_tokens - sin.shape[-2], cos, sin, False)


def _behind(prefix: int, cos: Tensor, sin: Tensor, interleaved: bool) -> Rotation:
    """Tokens of the prefix stand nowhere, and do not turn."""
    rows = (0, 0, prefix, 0)
    return Rotation(F.pad(cos, rows, value=1), F.pad(with_signs(sin, interleaved=interleaved), rows), interleaved)


class _Last(threading.local):
    """The rotation that was made last, and what of."""

    tables: tuple[Tensor, ...] = ()
    settings: tuple[object, ...] = ()
    rotation: Rotation | None = None


_LAST = _Last()


def remembered(make: Callable[..., Rotation], *tables: Tensor, **settings: object) -> Rotation:
    """`make(*tables, **settings)`, made once where blocks in a row are handed the same numbers."""
    learned = torch.is_grad_enabled() and any(one.requires_grad for one in tables)
    if learned or is_heard(tables) or any(one.device.type != "cpu" for one in tables):
        return make(*tables, **settings)
    key = (make, *sorted(settings.items()), torch.is_inference_mode_enabled())
    if _LAST.rotation is None or _LAST.settings != key or not all(map(_are_equal, _LAST.tables, tables)):
        made = make(*tables, **settings)
        # kernels read them in fp32
        _LAST.rotation = made._replace(cos=made.cos.float(), sin=made.sin.float()) if _is_half(made.cos) else made
        # whoever made them may write others there
        _LAST.settings, _LAST.tables = key, tuple(one.clone() for one in tables)
    return _LAST.rotation


def replayed_turning(
    block: nn.Module,
    steps: Callable[[Tensor, Rotation | None], Tensor],
    x: Tensor,
    rotation: Rotation | None,
    settings: Hashable = None,
) -> Tensor:
    """A block's `steps(x, rotation)` of tokens x (b, n, c), by a tape where kernels do all of it.

    There is none where images turn in different ways.
    """
    if rotation is None:
        y = replayed(block, "block", lambda x: steps(x, None), x, settings=settings)
    elif rotation.cos.ndim > 3:
        return steps(x, rotation)
    else:
        cos, sin, interleaved = rotation

        def turning(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return steps(x, Rotation(cos, sin, interleaved))

        y = replayed(block, "block", turning, x, cos, sin, settings=(settings, interleaved))
    assert y is not None
    return y


def _is_half(table: Tensor) -> bool:
    return table.dtype in (torch.bfloat16, torch.float16)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
