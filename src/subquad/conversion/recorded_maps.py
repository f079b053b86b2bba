"""Whether transformers collects the attention maps of a call.

From its version 5 on networks hand `output_attentions` to no layer: hooks on layers of their own classes collect maps,
and those of layers that were converted are not among them.
"""

import sys
from typing import Any

from torch import nn

from subquad.tracing import is_traced


def are_recorded(original: nn.Module, recorded_as: str | None = None) -> bool:
    """Whether maps of a layer like this one, or of a part of it, are collected in the call that goes on.

    `recorded_as` is the full name of what holds such layers and gives their maps, if something does.
    """
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    # contexts can't be traced
    if capturing is None or is_traced():
        return False
    collector = getattr(capturing, "_active_collector", None)
    collected = None if collector is None else collector.get()
    if not collected or "attentions" not in collected:
        return False
    classes = _recorded_classes(capturing)
    if recorded_as is not None and any(f"{one.__module__}.{one.__qualname__}" == recorded_as for one in classes):
        return True
    return any(isinstance(part, classes) for part in original.modules())


def _recorded_classes(capturing: Any) -> tuple[type, ...]:
    """The classes of whose layers any network that was built collects maps."""
    found: list[type] = []
    for outputs in list(getattr(capturing, "_CAN_RECORD_REGISTRY", {}).values()):
        specs = (outputs or {}).get("attentions") or ()
        for spec in specs if isinstance(specs, list | tuple) else (specs,):
            one = getattr(spec, "target_class", spec)
            if isinstance(one, type):
                found.append(one)
    return tuple(set(found))
