"""The shapes of an operation's tensors: said once, and the same for every backend.

Axes are written as letters, the same letter for the same number: "b h n d". Besides letters there are numbers ("1"),
products ("h*d", "2*d"), "..." for any axes in front, "?n" for an axis of n or of 1 that is broadcast, and "|" between
alternatives. Nothing else is broadcast: what the eager form would stretch, a kernel would read beyond its end.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from subquad.errors import SubquadError, shown
from subquad.tracing import is_exporting, is_traced

REMEMBERED = 4096
"""Combinations of shapes that an operation remembers to have checked."""

Form = tuple[str, ...]
Sizes = dict[str, Any]


class Shapes:
    """What shapes the tensors of an operation have, in the order in which `check` takes them.

    Args:
        title: of the operation, for people.
        forms: name of each tensor → its axes, e.g. q="b h n d"; a tensor may be None at a call.
    """

    def __init__(self, title: str, **forms: str) -> None:
        self.title, self.texts = title, forms
        self.forms = [[tuple(form.split()) for form in text.split("|")] for text in forms.values()]
        self._fitting: set[tuple[Any, ...]] = set()

    def extended(self, title: str | None = None, **forms: str) -> "Shapes":
        """These tensors and more behind them."""
        return Shapes(title or self.title, **self.texts, **forms)

    def without(self, *names: str, title: str | None = None) -> "Shapes":
        """All tensors but these."""
        return Shapes(title or self.title, **{name: text for name, text in self.texts.items() if name not in names})

    def check(self, *tensors: Tensor | None, **sizes: int) -> None:
        """Raise SubquadError, in one line with the numbers, where the tensors do not fit each other and `sizes`."""
        if is_exporting():
            # sizes are symbols, and a comparison would hold the export to it
            return
        for place, tensor in enumerate(tensors):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise SubquadError(f"{self.title} takes tensors, got {list(self.texts)[place]} {shown(tensor)}")
        shapes: Any = [None if tensor is None else tensor.shape for tensor in tensors]
        if is_traced():
            self._compare(shapes, sizes)
            return
        key = *shapes, *sizes.values()
        try:
            if key in self._fitting:
                return
        except TypeError:
            # sizes that are symbols have no hash
            self._compare(shapes, sizes)
            return
        self._compare(shapes, sizes)
        if len(self._fitting) >= REMEMBERED:
            self._fitting.clear()
        self._fitting.add(key)

    def _compare(self, shapes: Sequence[Sequence[int] | None], sizes: Sizes) -> None:
        sizes = dict(sizes)
        for place, shape in enumerate(shapes):
            if shape is None:
                continue
            troubles = []
            for form in self.forms[place]:
                bound = dict(sizes)
                trouble = _bind(form, tuple(shape), bound)
                if trouble is None:
                    sizes = bound
                    break
                troubles.append(trouble)
            else:
                # of several alternatives the one with as many axes is meant
                self._refuse(place, min(troubles)[1], shapes)

    def _refuse(self, place: int, trouble: str, shapes: Sequence[Sequence[int] | None]) -> None:
        there = [(name, tuple(shape)) for name, shape in zip(self.texts, shapes, strict=True) if shape is not None]
        wanted = ", ".join(f"{name} {_in_brackets(self.texts[name])}" for name, _ in there)
        got = ", ".join(f"{name} {shape}" for name, shape in there)
        raise SubquadError(f"{self.title} takes {wanted}, got {got}: {list(self.texts)[place]} {trouble}")


def _in_brackets(text: str) -> str:
    """A form as people write shapes: (b, h, n, d)."""
    return " or ".join(f"({', '.join(form.split())})" for form in text.split("|"))


def _bind(form: Form, shape: tuple[int, ...], sizes: Sizes) -> tuple[bool, str] | None:
    """Add what `shape` says of the letters of `form` to `sizes`.

    Where it does not fit: whether there are more or fewer axes, and what is wrong.
    """
    if form[0] == "...":
        count = len(form) - 1
        if len(shape) < count:
            return True, f"has {len(shape)} axes, less than {count}"
        front, shape, form = shape[: len(shape) - count], shape[len(shape) - count :], form[1:]
        if front != sizes.setdefault("...", front):
            return False, f"begins with {front} where {sizes['...']} is wanted"
    if len(shape) != len(form):
        return True, f"has {len(shape)} axes where {len(form)} are wanted"
    for axis, size in zip(form, shape, strict=True):
        broadcast = axis.startswith("?")
        name = axis.lstrip("?")
        wanted = _wanted(name, sizes)
        if broadcast and size == 1:
            continue
        if wanted is None:
            sizes[name] = size
        elif size != wanted:
            stretched = "; expand it first" if size == 1 else ""
            return False, f"has {size} where {name} = {wanted} is wanted{stretched}"
    return None


def _wanted(axis: str, sizes: Sizes) -> Any:
    """How long an axis has to be, as far as it is known."""
    if axis.isdigit():
        return int(axis)
    if "+" in axis:
        name, more = axis.split("+")
        return sizes[name] + int(more)
    if "*" not in axis:
        return sizes.get(axis)
    product = 1
    for factor in axis.split("*"):
        product = product * (int(factor) if factor.isdigit() else sizes[factor])
    return product
