"""What the kernels need of a GPU that is not here: compiled for it, not run.

Triton's interpreter takes much that its compiler refuses, and says nothing of registers and memory.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from subquad.kernels.backends import KERNELS
from subquad.kernels.triton import launch, measured_tiles
from subquad.substituting import substituted

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Needs:
    """What one launch needs: registers and spilled bytes of a thread, bytes of shared memory of a program.

    Attributes:
        idle: products of Hopper's tensor cores that have more warps than rows for them, 16 each: Triton lets the rest
            compute the same rows once more, and some such sums are wrong.
    """

    kernel: str
    registers: int
    spilled: int
    shared: int
    warps: int
    idle: int
    settings: dict[str, Any]


def needs_of(call: Callable[[], Any], capability: tuple[int, int] = (9, 0)) -> list[Needs]:
    """What the kernels that `call` launches, on tensors that may lie on the CPU, need on a GPU of that capability."""
    needs: list[Needs] = []

    def compiled(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        options = {name: settings.pop(name) for name in OPTIONS if name in settings}
        needs.append(_compile(kernel, arguments, settings, options, capability[0] * 10 + capability[1]))

    with substituted(JITFunction, "run", compiled), substituted(measured_tiles, "INTERPRETED", capability[0]):
        call()
    return needs


class _Absent:
    """What Triton asks of a driver before it starts a kernel, of a GPU that is not here."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


@contextmanager
def compiling(processors: int, capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Kernels that are launched on CPU tensors are compiled for such a GPU, into Triton's cache, and not run.

    What a launch is told is what it would be there, number of multiprocessors included, so that the GPU's process of
    the same Triton finds what it needs compiled. Results are what memory held.
    """
    run = JITFunction.run

    def only_compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        return run(self, *arguments, grid=grid, warmup=True, **settings)

    here = replace(KERNELS["triton"], devices=("cpu",), missing=lambda: None, most_channels=lambda: 128)
    before = KERNELS["triton"]
    KERNELS["triton"] = here
    driver.set_active(_Absent(capability[0] * 10 + capability[1]))
    try:
        with (
            substituted(JITFunction, "run", only_compiled),
            substituted(launch, "INTERPRETED_PROCESSORS", processors),
            substituted(measured_tiles, "INTERPRETED", capability[0]),
        ):
            yield
    finally:
        KERNELS["triton"] = before
        driver._active = None


def _compile(
    kernel: Any, arguments: tuple[Any, ...], settings: dict[str, Any], options: dict[str, Any], arch: int
) -> Needs:
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {(kernel.arg_names.index(name),): value for name, value in settings.items()}
    for place, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        signature[name] = _type_of(value)
        parts = enumerate(value) if isinstance(value, tuple) else ()
        constants |= {(place, part): 1 for part, stride in parts if _is_one(stride)}
        if value is None or _is_one(value):
            constants[place,] = value
    signature |= dict.fromkeys(settings, "constexpr")
    divisible = [["tt.divisibility", 16]]
    hints = dict.fromkeys(_aligned(list(signature.values())), divisible)
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=hints)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with _file(binary.asm["cubin"]) as path:
        usage = subprocess.run([DISASSEMBLER, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    registers, spilled = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    idle, warps = _products_with_idle_warps(binary.asm["ttgir"]), options["num_warps"]
    return Needs(kernel.__name__, registers, spilled, binary.metadata.shared, warps, idle, settings)


def _products_with_idle_warps(code: str) -> int:
    """Of Triton's own code for a GPU."""
    layout = r"(#mma\d*) = #ttg\.nvidia_mma<\{versionMajor = 3,.*?warpsPerCTA = \[(\d+)"
    down = {name: 16 * int(warps) for name, warps in re.findall(layout, code)}
    products = re.findall(r"warp_group_dot .*? -> tensor<(\d+)x\d+xf32, (#mma\d*)>", code)
    return sum(down[name] > int(rows) for rows, name in products)


def _type_of(value: Any) -> Any:
    """An argument's type as Triton writes it."""
    if value is None or _is_one(value):
        return "constexpr"
    if isinstance(value, tuple):
        return type(value)(*map(_type_of, value))
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i64" if value >= 2**31 else "i32"


def _is_one(value: Any) -> bool:
    """Whether it is the number that Triton compiles a kernel of its own for."""
    return isinstance(value, int) and value == 1


def _aligned(types: list[Any]) -> Iterator[tuple[int, ...]]:
    """The places of pointers and strides, which are multiples of 16 as a rule."""
    for place, kind in enumerate(types):
        if isinstance(kind, tuple):
            yield from ((place, part) for part in range(len(kind)) if kind[part] != "constexpr")
        elif kind.startswith("*"):
            yield (place,)


@contextmanager
def _file(content: bytes) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(content)
        file.flush()
        yield file.name
