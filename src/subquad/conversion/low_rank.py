"""Changes of low rank to a network's linear layers while it is distilled, through peft: LoRA, arXiv 2106.09685.

Few parameters have gradients and an optimizer's state then, which is what a large teacher's copy has no memory for. At
the end the changes are added to the weights, and the network has its own layers and names again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from subquad.errors import SubquadError
from subquad.models.layers import is_linear
from subquad.training.order import seeded

RANK = 8
"""Of the changes."""


def check_peft() -> None:
    """Raise SubquadError where peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError:
        raise SubquadError("train='lora' needs peft: pip install peft") from None


@contextmanager
def low_rank_changes(model: nn.Module, *, rank: int = RANK) -> Iterator[list[nn.Parameter]]:
    """The parameters of changes to all linear layers of a network, for the time of the context.

    The changes are added to the weights at its end; where it is left by an exception they are dropped.

    Raises:
        SubquadError: peft is not installed.
    """
    check_peft()
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    names = [name for name, module in model.named_modules() if is_linear(module)]
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    # the same changes at first whenever a fit is begun, or gone on with
    with seeded(rank):
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names), model)
    merge = False
    try:
        yield [parameter for name, parameter in model.named_parameters() if ".lora_" in name]
        merge = True
    finally:
        layers: list[tuple[str, Any]] = [
            (name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)
        ]
        for name, layer in layers:
            if merge:
                layer.merge()
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, layer.get_base_layer())
        if hasattr(model, "peft_config"):
            del model.peft_config
        for parameter, trainable in wanted:
            parameter.requires_grad_(trainable)
