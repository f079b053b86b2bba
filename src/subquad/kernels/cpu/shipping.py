"""Which compiled libraries a wheel has, and which of them this processor can run.

`scripts/build_wheels.py` makes them. A library's name says what it needs and of which source it was made: one of
another version is never found, so that who changes the source compiles it. There is no PyTorch here.
"""

import hashlib
import platform
from pathlib import Path

SOURCES = Path(__file__).parent / "source"
SHIPPED = Path(__file__).parent / "shipped"
DIGEST_SIZE = hashlib.sha256().digest_size

PORTABLE_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
"""Of every compiler, for every processor."""

ELEMENTS = ("float", "bf16")
"""Of tokens: the source is compiled once for each."""

_V2 = frozenset(["cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"])
_V3 = _V2 | frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])

LEVELS: dict[str, dict[str, frozenset[str]]] = {
    "x86_64": {"x86-64-v4+avx512bf16": _V4 | {"avx512_bf16"}, "x86-64-v4": _V4, "x86-64-v3": _V3, "x86-64-v2": _V2},
    "aarch64": {"armv8-a": frozenset({"asimd"})},
}
"""Of each kind of machine what is shipped, best first, with what Linux calls what it needs.

A level is a value of -march, and behind "+" what a processor has beside that."""


def shipped_libraries() -> list[Path]:
    """The shipped libraries of this source that this processor can run, best first; they may not be there."""
    needs = LEVELS.get(platform.machine(), {})
    found = set(processor().partition(":")[2].split())
    return [SHIPPED / library_name(level) for level, features in needs.items() if features <= found]


def flags_of(level: str) -> list[str]:
    """What a compiler is told of a level."""
    march, *more = level.split("+")
    return [f"-march={march}", *(f"-m{feature}" for feature in more)]


def library_name(level: str) -> str:
    """The file of the library that was made for a level."""
    return f"{level}-{source_digest()[:16]}.so"


def source_digest() -> str:
    """Changes with the source and with how it is compiled."""
    digest = hashlib.sha256(repr(PORTABLE_FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def digest_of(content: bytes) -> bytes:
    """What stands behind a library, so that a damaged one is known."""
    return hashlib.sha256(content).digest()


def processor() -> str:
    """What the processor can do, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
