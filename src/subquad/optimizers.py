"""The optimizers that training and conversion take: timm's, by name."""

from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers

from subquad.errors import SubquadError, reason_of

# adahessian differentiates gradients, whose graph the loops do not keep
OPTIMIZERS = tuple(name for name in list_optimizers() if name != "adahessian")


def optimizer_of(model_or_params: Any, opt: str, **settings: Any) -> torch.optim.Optimizer:
    """The optimizer of a name, of timm's `create_optimizer_v2`; its own random numbers are the same in all processes.

    Raises:
        SubquadError: it does not take these settings, or needs a package that is not here, in one line.
    """
    if "kron" in opt:
        # else from the generator that dropout draws from, otherwise in each process
        settings = {"deterministic": True} | settings
    try:
        return create_optimizer_v2(model_or_params, opt=opt, **settings)
    except (TypeError, ValueError, AssertionError, RuntimeError, ImportError) as error:
        raise SubquadError(f"optimizer '{opt}' does not take these settings: {reason_of(error)}") from error
