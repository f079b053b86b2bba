"""Calls of kernels whose arguments lie in a memory.

ctypes hands structures over by libffi, which on aarch64 lets those that no register is left for lie over each other
(libffi issue 694): behind the eighth argument a kernel would write where it is not to. `name_element_unpacked` finds
its arguments itself; x86-64's convention has no such case and needs no copy.
"""

import ctypes
import platform
from collections.abc import Callable
from typing import Any

IS_NEEDED = platform.machine() != "x86_64"
PLAIN_NUMBERS = (ctypes.c_int64, ctypes.c_int32, ctypes.c_float)
_ALIGNED = 16


class ByMemory:
    """A kernel that is called with the same arguments as by ctypes: structures and numbers of C."""

    def __init__(self, name: str, unpacked: Callable[..., int]) -> None:
        self.__name__, self._unpacked = name, unpacked

    def __call__(self, *arguments: Any) -> int:
        """Call it; raises TypeError for what has no size in C."""
        memory, places = bytearray(), []
        for one in arguments:
            if not isinstance(one, (ctypes.Structure, *PLAIN_NUMBERS)):
                raise TypeError(f"{self.__name__} is called with {one!r}, which is no number of C")
            memory += bytes(-len(memory) % _ALIGNED)
            places.append(len(memory))
            memory += bytes(one)
        content = (ctypes.c_char * len(memory)).from_buffer(memory)
        return self._unpacked(content, (ctypes.c_int64 * len(places))(*places))
