"""Modules that are of another class besides their own, which pickles and copies make again."""

from typing import Any, ClassVar, TypeVar

from torch import nn

Network = TypeVar("Network", bound=nn.Module)
"""What is changed in place stays, to a type checker, what it was."""


class Besides(nn.Module):
    """What such another class is derived from."""

    made_of: ClassVar[tuple[Any, ...]] = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _bare, self.made_of, self.__dict__


def class_besides(kind: type[nn.Module], cls: type[nn.Module], name: str, **attributes: Any) -> type[nn.Module]:
    """A class of this name that is `kind` first, a class derived from `Besides`, and `cls` behind it."""
    return type(name, (kind, cls), {**attributes, "made_of": (kind, cls, name, attributes)})


def _bare(kind: type[nn.Module], cls: type[nn.Module], name: str, attributes: dict[str, Any]) -> nn.Module:
    made = class_besides(kind, cls, name, **attributes)
    return made.__new__(made)
