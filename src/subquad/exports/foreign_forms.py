"""What other libraries compute in ways that hold a program to the size that was traced, in forms that take any."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

import timm.layers
import torch
from torch import Tensor, nn
from torch.nn import functional

from subquad.positions import linear, means_by_products, resampled, sharp_bicubic
from subquad.substituting import substituted, substituted_here

BY_INT = ("transformers.models.depth_anything.modeling_depth_anything",)
"""Modules that make whole numbers of sizes by Python's `int`, and ask for no type by this name."""


@contextmanager
def forms_of_any_size() -> Iterator[None]:
    """Adaptive means, smooth resampling, DINOv3's rotation and transformers' whole numbers, of sizes that are symbols.

    What a size is rounded to stays a symbol as well. Other threads go on with what libraries compute.
    """
    with ExitStack() as stack:
        stack.enter_context(substituted_here(functional, "adaptive_avg_pool2d", _adaptive_means))
        stack.enter_context(substituted_here(functional, "interpolate", _resampled))
        stack.enter_context(substituted_here(functional, "conv3d", _convolved))
        stack.enter_context(substituted_here(functional, "scaled_dot_product_attention", _attended))
        rotation = getattr(timm.layers, "RotaryEmbeddingDinoV3", None)
        if hasattr(rotation, "_create_embed"):
            stack.enter_context(substituted_here(rotation, "_create_embed", _turns))
        for module in [one for name, one in sys.modules.items() if name.startswith("transformers.models.")]:
            if "torch_int" in vars(module):
                stack.enter_context(substituted(module, "torch_int", _whole))
            if module.__name__ in BY_INT:
                stack.enter_context(substituted(module, "int", _whole))
        yield


MASKED = "attn_mask_probs"
"""The shares of transformers' EoMT's queries that are masked in each of its last blocks."""


@contextmanager
def masks_as_numbers(model: nn.Module) -> Iterator[None]:
    """EoMT asks a buffer whether its queries are masked: numbers inside this context, as a program can't be asked."""
    asked = [(module, module._buffers[MASKED]) for module in model.modules() if MASKED in module._buffers]
    for module, shares in asked:
        del module._buffers[MASKED]
        vars(module)[MASKED] = () if shares is None else tuple(shares.tolist())
    try:
        yield
    finally:
        for module, shares in asked:
            del vars(module)[MASKED]
            module._buffers[MASKED] = shares


def _adaptive_means(input: Tensor, output_size: int | Sequence[int | None]) -> Tensor:
    """In the place of PyTorch's function of this signature: a size of None is that of the image."""
    sizes = (output_size, output_size) if isinstance(output_size, int) else output_size
    height, width = (given if new is None else new for new, given in zip(sizes, input.shape[-2:], strict=True))
    return means_by_products(input, (height, width))


_CONVOLVE = functional.conv3d


def _convolved(input: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any, **settings: Any) -> Tensor:
    """In the place of PyTorch's function: torch.onnx makes a bias of a wrong size where there is none."""
    return _CONVOLVE(input, weight, weight.new_zeros(weight.shape[0]) if bias is None else bias, *more, **settings)


_ATTEND = functional.scaled_dot_product_attention


def _attended(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *more: Any, **settings: Any
) -> Tensor:
    """In the place of PyTorch's function: torch.onnx knows it of four axes, and timm's SAM calls it with three."""
    if query.dim() != 3:
        return _ATTEND(query, key, value, attn_mask, *more, **settings)
    mask = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask[:, None]
    return _ATTEND(query[:, None], key[:, None], value[:, None], mask, *more, **settings)[:, 0]


_INTERPOLATE = functional.interpolate


def _resampled(input: Tensor, size: Any = None, *more: Any, **settings: Any) -> Tensor:
    """In the place of PyTorch's function: resampling that engines compute in other ways, as products.

    That is smooth bicubic resampling, where OpenVINO is off by 2e-3 in timm's tables of positions, and factors that are
    not whole, where ONNX Runtime and OpenVINO are off by 6e-3 in transformers' HY 4-VL.
    """
    if more or input.dim() != 4 or settings.get("align_corners"):
        return _INTERPOLATE(input, size, *more, **settings)
    mode, factors = settings.get("mode"), settings.get("scale_factor")
    if mode == "bicubic" and settings.get("antialias"):
        if isinstance(size, list | tuple):
            return resampled(input, tuple(size), "bicubic", antialias=True)
    elif mode in ("bilinear", "bicubic") and _fractional(factors) and not settings.get("recompute_scale_factor"):
        sides = zip(input.shape[2:], factors, strict=True)
        rows, columns = (_along_line(mode, old, factor, input) for old, factor in sides)
        return rows @ input @ columns.mT
    return _INTERPOLATE(input, size, **settings)


def _fractional(factors: Any) -> TypeGuard[Sequence[float]]:
    """Two numbers, one of them not whole."""
    numbers = isinstance(factors, list | tuple) and all(isinstance(one, float) for one in factors)
    return numbers and not all(one.is_integer() for one in factors)


def _along_line(mode: str, old: int, factor: float, like: Tensor) -> Tensor:
    """The matrix (new, old) of a side that is resampled by a factor, which rounds the new one down."""
    new = math.floor(old * factor)
    if mode == "bicubic":
        return sharp_bicubic(old, new, like, 1 / factor)
    # PyTorch copies a side that stays as long as it is, on CPUs, which is where programs are traced
    return linear(old, new, like, None if new == old else 1 / factor)


def _turns(rope: Any, feat_shape: Sequence[int], no_aug: bool = False) -> Tensor:
    """In the place of timm's method: sines and cosines (n, 2 d) of a map's places, which have no floats of sizes.

    Places are the centres of tokens, on [-1, 1] along each side or along the one that `normalize_coords` names.
    """
    unit = {"separate": None, "min": torch.sym_min, "max": torch.sym_max}[rope.normalize_coords]
    turned = rope.grid_indexing == "xy"
    sides = []
    for size in feat_shape:
        centres = torch.arange(size, device=rope.periods.device).to(rope.periods.dtype) + 0.5 + rope.grid_offset
        sides.append(2 * centres / (size if unit is None else unit(*feat_shape)) - 1)
    rows, columns = torch.meshgrid(*sides, indexing="ij")
    places = torch.stack((columns, rows) if turned else (rows, columns), dim=-1)
    sines, cosines = rope._get_pos_embed_from_coords(places.flatten(0, 1))
    return torch.cat([sines, cosines], dim=-1)


def _whole(size: Any) -> Any:
    """In the place of transformers' function: a whole number, which `int` would make of a symbol the one traced."""
    return size if isinstance(size, torch.SymInt) else int(size)
