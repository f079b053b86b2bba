"""What stands for the things that a pickle names: words, tensors' descriptions, containers, or `UNREAD`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from subquad.weights.stored import DTYPES, MAKERS, STORAGES, STRANGE, StrangeTensor, UnreadableError


class Unread:
    """Stands for any object that is no weight."""

    __slots__ = ()


UNREAD = Unread()


@dataclass(frozen=True, slots=True)
class Name:
    """What a file names: words, not the thing."""

    module: str
    name: str


def named(module: Any, name: Any) -> Any:
    """What a name in a file stands for: a dtype, that of a storage class, or a pair of words."""
    if type(module) is not str or type(name) is not str:
        raise UnreadableError("a name that is no text")
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    if module in ("torch", "torch.cuda", "torch.storage") and name in STORAGES:
        return STORAGES[name]
    return Name(module, name)


def made(kind: Any, arguments: Any) -> Any:
    """What an object of `kind` is here: a tensor's description, a container, or `UNREAD`."""
    if kind is UNREAD:
        return UNREAD
    if type(kind) is not Name or type(arguments) is not tuple:
        raise UnreadableError("an object that is made of no class")
    if kind.module == "torch._tensor" and kind.name == "_rebuild_from_type_v2":
        # a tensor with attributes: the function that makes it, its class, what it is made of, and they
        kind, _, arguments, _ = arguments
        if type(kind) is not Name or (kind.module, kind.name) not in MAKERS or type(arguments) is not tuple:
            return UNREAD
    words = kind.module, kind.name
    if words in MAKERS:
        return MAKERS[words](arguments)
    if kind.module == "torch._utils" and kind.name in STRANGE:
        return StrangeTensor(STRANGE[kind.name])
    if words == ("collections", "OrderedDict"):
        return ordered_dict(*arguments)
    if words == ("torch", "Size") and len(arguments) == 1 and type(arguments[0]) in (tuple, list):
        return tuple(arguments[0])
    return UNREAD


def ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    """A dict of [key, value] pairs."""
    if type(pairs) not in (tuple, list) or not all(type(pair) in (tuple, list) and len(pair) == 2 for pair in pairs):
        raise UnreadableError("a dict that is not made of pairs")
    entries: dict[Any, Any] = {}
    put_entries(entries, [key for key, _ in pairs], [value for _, value in pairs])
    return entries


def put_entries(entries: dict[Any, Any], keys: Sequence[Any], values: Sequence[Any]) -> None:
    """Put in what has a name or a small number; hashes of other keys can be made to take for ever."""
    if len(keys) != len(values):
        raise UnreadableError("a key without its value")
    for key, value in zip(keys, values, strict=True):
        if type(key) is str or (type(key) is int and abs(key) < 2**62):
            entries[key] = value
