"""Parameters and multiply-adds of a network, as the papers print them."""

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from subquad.inference import in_evaluation
from subquad.kernels import use_backend
from subquad.models.stated_inputs import image_channels


def count_parameters(model: nn.Module) -> int:
    """Numbers that are learned."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, img_size: tuple[int, int]) -> int:
    """Multiply-adds of one image, as the papers print them (the counter counts two operations for each)."""
    return count_macs_of(model, torch.zeros(1, image_channels(model), *img_size))


def count_macs_of(model: nn.Module, batch: Tensor) -> int:
    """Multiply-adds of one pass over a batch, on the device that the model is on."""
    device = next(model.parameters()).device
    # the same on every machine: the eager forms, as older torch counts nothing for its fused attention on the CPU
    with (
        in_evaluation(model),
        torch.no_grad(),
        use_backend("eager"),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        model(batch.to(device))
    return counter.get_total_flops() // 2
