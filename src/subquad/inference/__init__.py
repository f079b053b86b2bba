"""Networks made ready for inference: weights in the dtype that is computed in, and steps that can be one made one.

What a kernel computes in one step no hook on the steps sees, so that this has to be asked for.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from subquad.besides import Network
from subquad.errors import SubquadError, shown
from subquad.inference import mlla_blocks, own_blocks
from subquad.inference.foreign_halves import KnowsFewSteps
from subquad.inference.quick_linear import QuickLinear
from subquad.kernels import multipliers
from subquad.models.backbone import Backbone
from subquad.models.layers import Block
from subquad.models.map_layers import PositionConv
from subquad.models.stages import Stage

OF_TIMM = "timm.models.vision_transformer"
OF_TRANSFORMERS = "transformers.modeling_utils"


def optimize(model: Network, dtype: torch.dtype | None = None) -> Network:
    """The same network, changed in place, for inference: in evaluation, without gradients, in `dtype` if given.

    Plain MLPs of our blocks are computed with their norm and their residual in one step where there is a kernel for it,
    those with a convolution of the map within in three, and so is what lies around linear attention: norm, projections,
    residual. Around other mechanisms, where all tokens attend to all, norm and projection are one step, projection and
    residual another, in fp32 where the mechanism is one as well. Blocks that are kernels alone are one call of the
    library from the second time on, and what is between its steps stays with the thread, up to 256 MB. The same goes
    for blocks of timm's and transformers' plain networks (ViT, DeiT, DINOv2, RADIO, SigLIP, CLIP), converted or as they
    are, and for converted ones of Swin; with rotary positions (DINOv3, EVA) and in windows (Swin, ours and timm's) each
    half of a block is a step or a few, and of timm's BEiT and ViTs with relative positions the MLP's half is one. Of
    timm's PVTv2 and transformers' SegFormer the MLP's half is three steps, around converted layers the other one too.
    Converted networks of ours are of as few steps as those made so. Blocks look at their parts at each call, so that
    what is put into them afterwards, or listens, is computed or called; what could not be of few steps is not until it
    is asked for again.
    Where PyTorch's products in fp32 use half of a processor's multipliers (AMD's from Zen 5 on), the linear layers of
    any network, ours or not, are multiplied by our kernel, `QuickLinear`. PyTorch's `quantize_dynamic` knows layers by
    their class alone and passes these by: quantize first.
    Parameters keep their names and can be loaded and saved as before; `model.train()` goes back to the single steps.
    On CPUs `torch.bfloat16` is up to twice as fast as fp32 where the processor multiplies it; images are to be of that
    dtype as well, and others are refused (by timm's networks in PyTorch's words; transformers' ViT makes them of it).
    Raises SubquadError for a dtype that is none of networks, and for what is no network.
    """
    if not isinstance(model, nn.Module):
        raise SubquadError(
            f"{shown(model)} is no network: subquad.create_model makes one, subquad.open_trained opens it"
        )
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
            own_blocks.fuse_embed(module)
        if isinstance(module, Block):
            own_blocks.fuse(module)
            mlla_blocks.fuse(module)
        if isinstance(module, PositionConv):
            own_blocks.fuse_position(module)
    if OF_TIMM in sys.modules:  # else there is none of its networks, and to import them takes a second
        from subquad.inference import pyramid_blocks, timm_blocks

        timm_blocks.fuse_all(model)
        pyramid_blocks.fuse_all(model)
    if OF_TRANSFORMERS in sys.modules:
        from subquad.inference import older_blocks, transformers_blocks

        transformers_blocks.fuse_all(model)
        older_blocks.fuse_all(model)
    if multipliers.products_lag():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = QuickLinear
    return model


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
