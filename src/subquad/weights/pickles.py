"""A reader of pickles that makes tensors, numbers, text and plain containers, and nothing else.

Training scripts pickle their configuration beside the weights (a yacs CfgNode, an argparse Namespace), so that
PyTorch's own `weights_only` refuses the file; and Python's unpickler, however it is confined, sets attributes on what
it is told to. This one is a machine of its own for the operations of a pickle. A name in a file is a pair of words and
is looked up in `MAKERS` alone; nothing is imported, called or changed that the file names. What is no weight becomes
`UNREAD`, which takes everything and keeps nothing.
"""

import pickletools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from subquad.weights.stand_ins import UNREAD, made, named, put_entries
from subquad.weights.stored import UnreadableError

MOST_OPERATIONS = 2_000_000
"""Of a pickle: some 25 for a tensor, so that 80,000 tensors are read, and a file of nothing else takes seconds."""

MOST_BYTES = 2**28
"""Of a pickle without its tensors' numbers."""

MOST_LINE = 4000
"""Characters of what ends with its line: numbers and names in pickles of the first kind."""


class Confined:
    """A file as `pickletools` reads it, which hands out no more than `MOST_BYTES`."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.left = file, MOST_BYTES

    def read(self, count: int) -> bytes:
        """The next bytes."""
        self.left -= count
        if self.left < 0:
            raise UnreadableError(f"more than {MOST_BYTES >> 20} MB beside the tensors")
        return self.file.read(count)

    def readline(self) -> bytes:
        """The next line."""
        line = self.file.readline(MOST_LINE)
        self.left -= len(line)
        if len(line) == MOST_LINE or self.left < 0:
            raise UnreadableError(f"a line of more than {MOST_LINE} characters")
        return line


def read_one(file: BinaryIO, storage_of: Callable[[Any], Any]) -> Any:
    """The content of one pickle, up to its end; tensors are described, not read.

    Args:
        file: read from where it is.
        storage_of: what a persistent id stands for.

    Raises:
        UnreadableError: or another ValueError, LookupError or TypeError, if it is no pickle or is damaged.
    """
    machine = Machine(storage_of)
    # what it wants of a file is read and readline
    stream: Any = Confined(file)
    for count, (operation, argument, _) in enumerate(pickletools.genops(stream)):
        if count == MOST_OPERATIONS:
            raise UnreadableError(f"more than {MOST_OPERATIONS} objects beside the tensors")
        step = STEPS.get(operation.name)
        if step is None:
            raise UnreadableError(f"an operation that torch.save does not write ({operation.name})")
        step(machine, argument)
    return machine.result


class Machine:
    """The stack, the marks and the memory of a pickle; `on_…` is what an operation does."""

    def __init__(self, storage_of: Callable[[Any], Any]) -> None:
        self.storage_of = storage_of
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memory: dict[int, Any] = {}
        self.result: Any = UNREAD

    def take(self, count: int) -> tuple[Any, ...]:
        """The last objects of the stack."""
        if len(self.stack) < count:
            raise UnreadableError("an operation without its operands")
        taken = tuple(self.stack[-count:])
        del self.stack[-count:]
        return taken

    def since_mark(self) -> list[Any]:
        """All objects since the last mark, which goes with them."""
        if not self.below:
            raise UnreadableError("an end without its beginning")
        taken, self.stack = self.stack, self.below.pop()
        return taken

    def extend(self, items: Sequence[Any]) -> None:
        """Put items into the list that is last on the stack."""
        if type(self.stack[-1]) is list:
            self.stack[-1].extend(items)
        elif self.stack[-1] is not UNREAD:
            raise UnreadableError("items of a list that is none")

    def fill(self, items: Sequence[Any]) -> None:
        """Put keys and values, in turn, into the dict that is last on the stack."""
        if type(self.stack[-1]) is dict:
            put_entries(self.stack[-1], items[::2], items[1::2])
        elif self.stack[-1] is not UNREAD:
            raise UnreadableError("entries of a dict that is none")

    def on_nothing(self, argument: Any) -> None:
        pass

    def on_value(self, argument: Any) -> None:
        self.stack.append(argument)

    def on_unread(self, argument: Any) -> None:
        self.stack.append(UNREAD)

    def on_text_of_python_2(self, argument: str) -> None:
        # bytes, which is what text was: UTF-8, or else left as the bytes' own characters
        with suppress(UnicodeError):
            argument = argument.encode("latin-1").decode()
        self.stack.append(argument)

    def on_true(self, argument: Any) -> None:
        self.stack.append(True)

    def on_false(self, argument: Any) -> None:
        self.stack.append(False)

    def on_empty_list(self, argument: Any) -> None:
        self.stack.append([])

    def on_empty_dict(self, argument: Any) -> None:
        self.stack.append({})

    def on_empty_tuple(self, argument: Any) -> None:
        self.stack.append(())

    def on_tuple1(self, argument: Any) -> None:
        self.stack.append(self.take(1))

    def on_tuple2(self, argument: Any) -> None:
        self.stack.append(self.take(2))

    def on_tuple3(self, argument: Any) -> None:
        self.stack.append(self.take(3))

    def on_mark(self, argument: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def on_tuple(self, argument: Any) -> None:
        items = self.since_mark()
        self.stack.append(tuple(items))

    def on_list(self, argument: Any) -> None:
        items = self.since_mark()
        self.stack.append(items)

    def on_dict(self, argument: Any) -> None:
        items = self.since_mark()
        self.stack.append({})
        self.fill(items)

    def on_frozenset(self, argument: Any) -> None:
        self.since_mark()
        self.stack.append(UNREAD)

    def on_pop(self, argument: Any) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def on_pop_mark(self, argument: Any) -> None:
        self.since_mark()

    def on_dup(self, argument: Any) -> None:
        self.stack.append(self.stack[-1])

    def on_append(self, argument: Any) -> None:
        self.extend(self.take(1))

    def on_appends(self, argument: Any) -> None:
        self.extend(self.since_mark())

    def on_setitem(self, argument: Any) -> None:
        self.fill(self.take(2))

    def on_setitems(self, argument: Any) -> None:
        self.fill(self.since_mark())

    def on_put(self, argument: int) -> None:
        if not 0 <= argument < 2**32:
            raise UnreadableError("an object is remembered beyond all places")
        self.memory[argument] = self.stack[-1]

    def on_memoize(self, argument: Any) -> None:
        self.memory[len(self.memory)] = self.stack[-1]

    def on_get(self, argument: int) -> None:
        if argument not in self.memory:
            raise UnreadableError("an object is asked for that was not remembered")
        self.stack.append(self.memory[argument])

    def on_global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.stack.append(named(module, name))

    def on_stack_global(self, argument: Any) -> None:
        self.stack.append(named(*self.take(2)))

    def on_reduce(self, argument: Any) -> None:
        self.stack.append(made(*self.take(2)))

    def on_newobj_ex(self, argument: Any) -> None:
        kind, arguments, _ = self.take(3)
        self.stack.append(made(kind, arguments))

    def on_obj(self, argument: Any) -> None:
        kind, *arguments = self.since_mark()
        self.stack.append(made(kind, tuple(arguments)))

    def on_inst(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        arguments = self.since_mark()
        self.stack.append(made(named(module, name), tuple(arguments)))

    def on_build(self, argument: Any) -> None:
        # the state of an object: none that is made here has any
        self.take(1)

    def on_binpersid(self, argument: Any) -> None:
        (identity,) = self.take(1)
        # of whole networks, whose code is not read
        is_network = type(identity) is tuple and identity[:1] == ("module",)
        self.stack.append(UNREAD if is_network else self.storage_of(identity))

    def on_stop(self, argument: Any) -> None:
        (self.result,) = self.take(1)


STEPS: dict[str, Callable[[Machine, Any], None]] = {
    name.removeprefix("on_").upper(): step for name, step in vars(Machine).items() if name.startswith("on_")
}
"""What each operation does, by the name that `pickletools` has for it."""

for _step, _names in {
    Machine.on_nothing: "PROTO FRAME",
    Machine.on_value: "NONE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
    "UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8",
    Machine.on_unread: "EMPTY_SET SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8 EXT1 EXT2 EXT4",
    Machine.on_text_of_python_2: "STRING BINSTRING SHORT_BINSTRING",
    Machine.on_true: "NEWTRUE",
    Machine.on_false: "NEWFALSE",
    Machine.on_put: "BINPUT LONG_BINPUT",
    Machine.on_get: "BINGET LONG_BINGET",
    Machine.on_reduce: "NEWOBJ",
    # items of a set
    Machine.on_pop_mark: "ADDITEMS",
}.items():
    STEPS |= dict.fromkeys(_names.split(), _step)
