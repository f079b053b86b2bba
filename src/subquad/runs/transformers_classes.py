"""Which classes of transformers commands take, by their names, and networks of them, made and called as ours are."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from subquad.errors import SubquadError
from subquad.tasks import TASKS
from subquad.text import one_line


def make_transformers(name: str, *, config: Any = None, num_classes: int = 0, **more: Any) -> nn.Module:
    """A network of transformers without weights, as the note of a conversion says.

    Raises:
        SubquadError: transformers is not there, or has no such network.
    """
    cls = class_named(name, "its note")
    if not isinstance(config, Mapping) or more:
        raise SubquadError("its note does not say how the network was made")
    labels = {"num_labels": num_classes} if num_classes else {}
    return task_of(name).called_with_images(cls(cls.config_class.from_dict({**config, **labels})))


OTHERS = "others are opened by transformers and given to subquad.convert(network, …)"

NAMING = ("id2label", "label2id", "transformers_version", "architectures", "_name_or_path", "auto_map")
"""What is not about how a network is made; names of classes are in the note itself."""


def of_making(config: Any) -> dict[str, Any]:
    """What a configuration says otherwise than its class, of how the network is made."""
    return {key: value for key, value in config.to_diff_dict().items() if key not in NAMING}


def task_of(name: str) -> Any:
    """The task that a class of transformers of this name is for; None where there is none."""
    return next((task for task in TASKS.usable() if name.endswith(task.of_transformers)), None)


def class_named(name: str, where: str) -> Any:
    """A class of transformers' own for images, of one of the kinds that commands take.

    Raises:
        SubquadError: there is none of this name, or it does something else.
    """
    try:
        import transformers
    except ImportError:
        raise SubquadError(
            f"{where} is of a network of transformers, which is not installed: pip install transformers"
        ) from None
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise SubquadError(f"{where}: transformers {transformers.__version__} has no network '{one_line(name, 60)}'")
    if cls.main_input_name != "pixel_values" or task_of(name) is None:
        raise SubquadError(
            f"{where} is of a {name}: commands take classifiers, semantic segmenters, detectors, networks of depth and "
            f"encoders; {OTHERS}"
        )
    if instead := task_of(name).unlike_foreign(name):
        raise SubquadError(f"{where} is of a {name}: commands take {instead}; {OTHERS}")
    return cls
