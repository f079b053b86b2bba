"""A network made ready for inference: weights in the dtype that is computed in, and steps that can be one made one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from subquad import instructions
from subquad.besides import Network
from subquad.errors import SubquadError, network_within, shown
from subquad.inference import (
    mlla_blocks,
    older_blocks,
    own_blocks,
    pyramid_blocks,
    timm_blocks,
    transformers_blocks,
    widened,
)
from subquad.inference.foreign_halves import KnowsFewSteps
from subquad.inference.quick_linear import QuickLinear
from subquad.kernels import multipliers
from subquad.models.backbone import Backbone
from subquad.models.layers import Block
from subquad.models.map_layers import PositionConv
from subquad.models.stages import Stage

FOREIGN_BLOCKS = (timm_blocks, pyramid_blocks, transformers_blocks, older_blocks)
"""Files that know blocks of other libraries, by the full names of their classes where a library may not be there."""


def optimize(model: Network, dtype: torch.dtype | None = None) -> Network:
    """The same network, changed in place, for inference: in evaluation, without gradients, in `dtype` if given.

    Blocks look at their parts at each call, so that what is put into them afterwards, or listens, is computed or
    called; what could not be of few steps is not until it is asked for again. Parameters keep their names and can be
    loaded and saved as before; `model.train()` goes back to the single steps.

    What becomes one step, where there is a kernel for it:

    - the MLP of a block of ours with its norm and its residual; with a convolution of the map within three steps;
    - norm, projections and residual around linear attention, and around any mechanism that is one kernel in fp32;
      around others norm and projection are one step, projection and residual another;
    - blocks of timm's and transformers' plain networks (ViT, DeiT, DINOv2, RADIO, SigLIP, CLIP), converted or as they
      are, and converted ones of Swin; with rotary positions (DINOv3, EVA) and in windows (Swin, ours and timm's) each
      half is a step or a few; of timm's BEiT and ViTs with relative positions the MLP's half is one; of timm's PVTv2
      and SegFormer (transformers' and MiT of segmentation_models_pytorch) that is three, and so is the other half
      around converted layers.

    Blocks that are kernels alone are one call of the library from the second time on, and what is between its steps
    stays with the thread, up to 256 MB. Where PyTorch's products in fp32 use half of a processor's multipliers (AMD's
    from Zen 5 on), the linear layers of any network, ours or not, are multiplied by our kernel, `QuickLinear`;
    PyTorch's `quantize_dynamic` knows layers by their class alone and passes these by: quantize first.

    On CPUs `torch.bfloat16` is up to twice as fast as fp32 where the processor multiplies it; images are to be of that
    dtype as well, and others are refused (by timm's networks in PyTorch's words; transformers' ViT makes them of it).
    Without AVX-512 PyTorch multiplies bf16 in plain loops, and fp16 on most processors: linear layers and convolutions
    of any network compute in fp32 there, and round what comes of it (`inference/widened.py`).

    Raises:
        SubquadError: the dtype is none of networks, or `model` is no network.
    """
    if not isinstance(model, nn.Module):
        hint = network_within(model) or ": subquad.create_model makes one, subquad.open_trained opens it"
        raise SubquadError(f"{shown(model)} is no network{hint}")
    if dtype is not None:
        check_computes(dtype)
    model.eval().requires_grad_(False)
    if dtype is not None:
        model.to(dtype)
    for module in model.modules():
        if isinstance(module, Backbone):
            module.wants_own_dtype = True
        if isinstance(module, KnowsFewSteps):
            module.wants_few_steps = True
        if isinstance(module, Stage):
            own_blocks.fuse_stage(module)
        if isinstance(module, Block):
            own_blocks.fuse(module)
            mlla_blocks.fuse(module)
        if isinstance(module, PositionConv):
            own_blocks.fuse_position(module)
    for blocks in FOREIGN_BLOCKS:
        blocks.fuse_all(model)
    for module in model.modules():
        if type(module) in (nn.Linear, nn.Conv2d) and (multiplies := _multiplier_of(module)):
            module.__class__ = multiplies
    return model


def _multiplier_of(layer: Any) -> Any:
    """The class that multiplies better than PyTorch's where this runs, in a layer's dtype; None where none does."""
    if instructions.loops_over(layer.weight.dtype):
        return widened.CLASSES[type(layer)]
    lags = layer.weight.dtype == torch.float32 and multipliers.products_lag()
    return QuickLinear if lags and type(layer) is nn.Linear else None


def check_computes(dtype: Any) -> None:
    """Raise SubquadError where no network computes in a dtype."""
    # numbers of eight bits are for keeping: PyTorch casts to them, and computes nothing of them
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        named = dtype if isinstance(dtype, torch.dtype) else shown(dtype)
        raise SubquadError(f"a network computes in torch.float32, torch.bfloat16 or torch.float16, not in {named}")


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Let a network be in evaluation for a while; afterwards each of its modules is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
