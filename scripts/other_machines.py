"""The CPU kernels on other machines than this one: what they computed here, computed there again.

    python scripts/other_machines.py
    python scripts/other_machines.py --only aarch64 sanitized --threads 1 16

Layers of every mechanism run here, forward and backward, and each call of a kernel is written down: its arguments, what
stood in memory, and what stands there afterwards. A program of the same source and those calls is then compiled for
each kind of machine and run in this one (x86-64-v2, -v3, -v4 as far as the processor goes), in an emulator that has no
more than the machine (qemu-user), and under the address and undefined behaviour sanitizers, where every tensor is a
block of memory of its own. Needs g++; Debian's g++-aarch64-linux-gnu and qemu-user for the others.
Several Python threads that call kernels at once have to get to the bit what each gets alone.
"""

import argparse
import ctypes
import functools
import itertools
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

import subquad
from subquad import ATTENTION, TokenGrid, ops
from subquad.attention import traits_of
from subquad.kernels import replaying
from subquad.kernels.cpu import library
from subquad.kernels.cpu.shipping import PORTABLE_FLAGS, SOURCES
from subquad.models.layers import SelfAttention
from subquad.ops.branch_at_once import projection
from subquad.ops.linear_formula import linear_answers, linear_sums
from subquad.ops.turning import turned_tokens
from subquad.rope import Rotation, rope_of
from subquad.substituting import substituted

GRIDS = (
    (TokenGrid(5, 7, 1), 24, 2),
    (TokenGrid(14, 14), 64, 2),
    (TokenGrid(1, 23), 40, 5),
    (TokenGrid(9, 4, 2), 130, 1),
)
"""Where layers stand, their width and their heads: narrow and wide heads, rests of every vector, prefix tokens."""

TOLERANCES = {4: 1e-4, 2: 2e-2}
"""Of the norm, by the bytes of a token's number: sums run in another order where vectors have another length."""

NOTHING = 1e-3
"""Of the largest norm that a call gives: what is below it is measured as if it had it, as a gradient that is nothing
(of a bias that all tokens have) is what rounding left."""

ELEMENTS = ("float", "bf16")
"""What tokens are of: the source is compiled for each, and so is the program."""

PROGRAM = """
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>
#include "kernels.cpp"

struct Block {  // as large as what stands in it, so that a sanitizer sees what is outside
    char* data;
    template <class T> operator T*() const { return reinterpret_cast<T*>(data); }
};

static FILE* memory;
static int worst_call = -1, calls = 0, wrong = 0;
static double worst = 0;

static Block read(long place, long bytes) {
    Block block{static_cast<char*>(std::malloc(bytes ? bytes : 1))};
    std::fseek(memory, place, SEEK_SET);
    if (std::fread(block.data, 1, bytes, memory) != size_t(bytes)) std::abort();
    return block;
}

static double number(const char* data, long i, int size) {
    uint32_t bits = 0;
    if (size == 4) std::memcpy(&bits, data + 4 * i, 4);
    else { uint16_t half; std::memcpy(&half, data + 2 * i, 2); bits = uint32_t(half) << 16; }
    float value; std::memcpy(&value, &bits, 4);
    return value;
}

static void check(
    int call, const char* name, Block got, long place, long bytes, int size, double tolerance, double least) {
    Block wanted = read(place, bytes);
    double off = 0, norm = least * least;
    for (long i = 0; i < bytes / size; i++) {
        const double a = number(got.data, i, size), b = number(wanted.data, i, size);
        if (std::isnan(a) != std::isnan(b)) off = INFINITY;
        else if (a != b) off += (a - b) * (a - b);
        if (std::isfinite(b)) norm += b * b;
    }
    off = std::sqrt(off / (norm > 1e-20 ? norm : 1));
    if (off > worst) worst = off, worst_call = call;
    if (!(off <= tolerance)) wrong++, std::printf("call %d, %s, is off by %.1e\\n", call, name, off);
    std::free(wanted.data);
}

// A call as it is made again: its arguments in a memory, and where its tokens lie told at last
template <class First, class... Rest>
static Answer replayed(Answer (*kernel)(char*, const int64_t*), Answer (*replay)(const Tape*, char* const*),
                       const First& first, const Rest&... rest) {
    std::vector<char> memory;
    std::vector<int64_t> places;
    std::vector<Moving> moving;
    std::vector<char*> moved;
    const auto keep = [&](const auto& one) {
        memory.resize((memory.size() + 15) / 16 * 16);
        places.push_back(memory.size());
        const char* bytes = reinterpret_cast<const char*>(&one);
        memory.insert(memory.end(), bytes, bytes + sizeof one);
        if constexpr (std::is_same_v<std::decay_t<decltype(one)>, AnyTokens>) {
            moving.push_back({places.back(), int64_t(moved.size()), 0});
            moved.push_back(static_cast<char*>(one.data));
            std::memset(&memory[places.back()], 0, sizeof one.data);
        }
    };
    keep(first), (keep(rest), ...);
    const Call call{kernel, places.data()};
    const Tape tape{memory.data(), int64_t(memory.size()), &call, 1, moving.data(), int64_t(moving.size())};
    return replay(&tape, moved.data());
}

static int THREADS;

@CALLS@

int main(int, char** arguments) {
    memory = std::fopen(arguments[1], "rb");
    THREADS = std::atoi(arguments[2]);
    for (void (*each)() : {@NAMES@}) each(), calls++;
    std::printf("%d calls, %d wrong, off by %.1e at most (call %d)\\n", calls, wrong, worst, worst_call);
    return wrong != 0;
}
"""


@dataclass
class Recorder:
    """Stands in for the library and writes down what is called.

    Attributes:
        memory: what stood in all tensors of all calls, before and after.
        calls: of each element, C++ for each call by its name.
        names: the functions that were called.
    """

    memory: bytearray = field(default_factory=bytearray)
    calls: dict[str, dict[str, str]] = field(default_factory=lambda: {element: {} for element in ELEMENTS})
    names: set[str] = field(default_factory=set)
    number: int = 0

    def hear(self, function, *arguments):
        """Call a kernel, and keep what is needed to call it again: each other call as tapes do (source/replay.h)."""
        name = function.__name__
        plain, _, element = name.rpartition("_")
        self.names.add(plain)
        half = element == "bf16"
        blocks: list[tuple[int, int, int, int]] = []
        kinds = parameters_of(name)
        sizes = {"AnyTokens": 2 if half else 4, "Pairs<bool>": 1}
        words = [self.text(one, sizes.get(kind, 4), blocks) for one, kind in zip(arguments, kinds, strict=True)]
        if "threads" not in {field[0] for one in arguments for field in getattr(one, "_fields_", ())}:
            words[-1] = "THREADS"  # the last argument of those without a shape
        answer = function(*arguments)  # raises where lengths do not fit
        lines = [f"Block b{i} = read({place}, {length});" for i, (_, place, length, _) in enumerate(blocks)]
        again = f"{name}({', '.join(words)})"
        if self.number % 2:
            self.names.add("replay")
            kept = [f"{kind}{word if word[0] == '{' else f'({word})'}" for kind, word in zip(kinds, words, strict=True)]
            again = f"replayed({name}_unpacked, replay_{element}, {', '.join(kept)})"
        lines.append(f'if ({again} != DONE) wrong++, std::puts("call {self.number} answers otherwise");')
        # bf16 operands of products are rounded where a processor has such products, whatever their sums are kept in
        tolerance = TOLERANCES[2 if half else 4]
        written = []
        for i, (address, place, length, size) in enumerate(blocks):
            after = ctypes.string_at(address, length)
            if after != self.memory[place : place + length]:
                written.append((f"b{i}, {self.kept(after)}, {length}, {size}", norm_of(after, size)))
        least = NOTHING * max((norm for _, norm in written), default=0)
        lines += [f'check({self.number}, "{name}", {what}, {tolerance}, {least!r});' for what, _ in written]
        lines += [f"std::free(b{i}.data);" for i in range(len(blocks))]
        # a function each, as compilers take far longer for one that is long
        self.calls[element][f"call_{self.number}"] = "\n    ".join(lines)
        self.number += 1
        return answer

    def kept(self, content: bytes) -> int:
        """Where the content stands now."""
        self.memory += content
        return len(self.memory) - len(content)

    def text(self, value, size: int, blocks) -> str:
        """An argument as C++ has it; what it points to, of so many bytes a number, becomes a block."""
        if not isinstance(value, ctypes.Structure):
            number = value.value if hasattr(value, "value") else value
            return repr(number) if isinstance(number, float) else f"{number}"
        size = 2 if getattr(value, "halves", 0) else size
        words = []
        for name, _ in value._fields_:
            part = getattr(value, name)
            if name in ("data", "written"):
                words.append(self.block(part, extent(value) * size, size, blocks) if part else "nullptr")
            elif name == "threads":
                words.append("THREADS")
            else:
                words.append(self.text(part, 4, blocks))
        return "{" + ", ".join(words) + "}"

    def block(self, address: int, length: int, size: int, blocks) -> str:
        """A piece of memory as it is now; the one that it is already, for what is computed in place."""
        for i, (known, _, extent, _) in enumerate(blocks):
            if (known, extent) == (address, length):
                return f"b{i}"
        blocks.append((address, self.kept(ctypes.string_at(address, length)), length, size))
        return f"b{len(blocks) - 1}"


def norm_of(content: bytes, size: int) -> float:
    """The norm of numbers of so many bytes; 0 where one is not finite."""
    numbers = torch.frombuffer(bytearray(content), dtype=torch.float32 if size == 4 else torch.bfloat16)
    norm = float(numbers.double().norm())
    return norm if math.isfinite(norm) else 0.0


@functools.cache
def parameters_of(name: str) -> list[str]:
    """The types of a kernel's arguments, as the source says."""
    plain = name.rpartition("_")[0]
    for path in sorted(SOURCES.glob("*.h")):
        if found := re.search(rf"^KERNEL\(\s*{plain},\s*\((.*?)\)", path.read_text(), re.MULTILINE | re.DOTALL):
            return [parameter.split()[0] for parameter in found[1].split(",")]
    raise SystemExit(f"the source has no kernel {plain}")


def extent(value) -> int:
    """How many numbers lie between the first and the last that are pointed to."""
    if hasattr(value, "query"):
        strides = value.batch, value.head, value.query, value.key
        sizes, last = (value.images, value.heads, value.queries, value.keys), 1
    elif not hasattr(value, "token"):
        return value.count
    elif hasattr(value, "agent"):
        strides, sizes, last = (value.head, value.token, value.agent), (value.heads, value.tokens, value.agents), 1
    else:
        strides, sizes, last = (
            (value.batch, value.head, value.token),
            (value.images, value.heads, value.count),
            value.width,
        )
    return sum(stride * (size - 1) for stride, size in zip(strides, sizes, strict=True)) + last


def layers():
    """Layers of every mechanism, and tokens for them, in fp32 and bf16."""
    for name in sorted(ATTENTION):
        for grid, dim, heads in GRIDS:
            for dtype in (torch.float32, torch.bfloat16):
                torch.manual_seed(0)
                try:
                    layer = SelfAttention(dim, heads, ATTENTION[name], grid=grid).to(dtype)
                except subquad.SubquadError:
                    continue  # it refuses such a grid
                yield name, layer, torch.randn(2, grid.num_tokens, dim).to(dtype), grid


def rotation_for(layer, grid):
    """A rotation for a mechanism that takes one, otherwise none."""
    width = layer.qkv.in_features // layer.num_heads
    if "rotation" not in layer.inner.inputs or width % 4:
        return None
    rope = rope_of("mlla" if layer.num_heads > 2 else "mala", width, layer.num_heads)
    return rope(grid, torch.device("cpu"), feature_width=traits_of(layer.inner).feature_width)


def run_layers() -> None:
    """Forward as inference does it, forward and backward as training does it, and both with what turns features."""
    for _, layer, x, grid in layers():
        for rotation in (None, rotation_for(layer, grid)):
            with torch.no_grad():
                layer(x, grid=grid, rotation=rotation)
            layer(x.requires_grad_(), grid=grid, rotation=rotation).square().mean().backward()
    settings = {"img_size": 16, "patch_size": 4, "embed_dim": 40, "num_heads": 2, "depths": (1,)}
    for attention, dtype in itertools.product(("softmax", "linear", "inline"), (torch.float32, torch.bfloat16)):
        model = subquad.create_model("deit_micro", attention=attention, **settings)
        subquad.optimize(model, dtype)(torch.randn(3, 3, 16, 16).to(dtype))
    for (grid, dim, heads), dtype in itertools.product(GRIDS, (torch.float32, torch.bfloat16)):
        run_parts(torch.randn(2, heads, grid.num_tokens, dim // heads).to(dtype), grid)


def run_parts(x, grid):
    """Kernels that whole layers need for streams, for tokens that are padded and for windows."""
    n = grid.num_tokens
    for forbidden in (None, torch.rand(2, 1, n, n) < 0.5, torch.rand(1, n) < 0.5):
        tokens, bias = x.detach().requires_grad_(), torch.randn(x.shape[1], n, n).requires_grad_()
        ops.softmax_attention(tokens, x, x, forbidden, bias).square().mean().backward()
    with torch.no_grad():
        linear_answers(x, linear_sums(x, x), grid.num_tokens)
        for interleaved in (True, False) if x.shape[3] % 2 == 0 else ():
            turned_tokens(Rotation(*torch.randn(2, n, x.shape[3]), interleaved), x)
        width = x.shape[3]
        for some, bias in ((x.flatten(0, 1), torch.randn(2 * width + 3)), (x[:, 0, :, : width - 1], None)):
            weight = torch.randn(2 * width + 3, some.shape[2]).to(x.dtype)
            projection(some, weight, None if bias is None else bias.to(x.dtype))
        if not grid.prefix and min(grid.shape) > 1:
            ops.convolve_windows(x, torch.randn(x.shape[3], x.shape[3], 2, 2).to(x.dtype), grid)


@dataclass(frozen=True)
class Machine:
    """How a program is compiled, and what runs it."""

    compiler: str
    flags: tuple[str, ...]
    runner: tuple[str, ...] = ()
    features: tuple[str, ...] = ()


STATIC = ("-fopenmp", "-static")
MACHINES = {
    "x86-64": Machine("g++", ("-march=x86-64", *STATIC)),
    "x86-64-v2": Machine("g++", ("-march=x86-64-v2", *STATIC), features=("sse4_2",)),
    "x86-64-v3": Machine("g++", ("-march=x86-64-v3", *STATIC), features=("avx2", "fma")),
    "x86-64-v4": Machine("g++", ("-march=x86-64-v4", *STATIC), features=("avx512f", "avx512bw", "avx512vl")),
    "native": Machine("g++", ("-march=native", *STATIC)),
    "sanitized": Machine(
        "g++", ("-march=native", "-fopenmp", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    ),
    "nehalem": Machine("g++", ("-march=x86-64-v2", *STATIC), ("qemu-x86_64", "-cpu", "Nehalem")),
    "haswell": Machine("g++", ("-march=x86-64-v3", *STATIC), ("qemu-x86_64", "-cpu", "Haswell")),
    "aarch64": Machine("aarch64-linux-gnu-g++", ("-march=armv8-a", *STATIC), ("qemu-aarch64",)),
}
"""The first ones run as they are; the last in an emulator that has no more than such a processor."""


def tried(name: str, machine: Machine, place: Path, threads: list[int]) -> bool:
    """Compile and run, and print what came out; False where something is wrong."""
    flags = set(Path("/proc/cpuinfo").read_text().split()) if machine.features else set()
    if missing := [tool for tool in (machine.compiler, *machine.runner[:1]) if shutil.which(tool) is None]:
        print(f"{name:10} not tried: there is no {missing[0]}")
        return True
    if machine.compiler == "g++" and platform.machine() != "x86_64" and name not in ("native", "sanitized"):
        print(f"{name:10} not tried on {platform.machine()}")
        return True
    if absent := [feature for feature in machine.features if feature not in flags]:
        print(f"{name:10} not tried: this processor has no {', '.join(absent)}")
        return True
    portable = [flag for flag in PORTABLE_FLAGS if flag not in ("-shared", "-fPIC")]
    right = True
    for element in ELEMENTS:
        program, source = str(place / f"{name}-{element}"), str(place / f"replay-{element}.cpp")
        words = [machine.compiler, *portable, f"-DELEMENT={element}", *machine.flags, f"-I{SOURCES}", source]
        done = subprocess.run([*words, "-o", program], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name:10} {element:5} does not compile:\n{done.stderr[-2000:]}")
            return False
        for count in threads:
            words = [*machine.runner, program, str(place / "memory.bin"), str(count)]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            said = (done.stdout + (done.stderr[-3000:] if done.returncode else "")).strip()
            ended = f" (ends with {done.returncode})" if done.returncode else ""
            print(f"{name:10} {element:5} {count:2} threads: {said}{ended}", flush=True)
            right &= done.returncode == 0
    return right


def threads_agree(at_once: int = 8, rounds: int = 3) -> bool:
    """Whether Python threads that compute at the same time get what each gets alone, to the bit."""
    torch.set_num_threads(1)
    cases = [(layer.eval(), x, grid) for _, layer, x, grid in layers()]

    def answer(case):
        with torch.no_grad():
            return case[0](case[1], grid=case[2])

    alone = [answer(case) for case in cases]
    with ThreadPoolExecutor(at_once) as pool:
        together = list(pool.map(answer, cases * rounds))
    wrong = sum(not torch.equal(a, b) for a, b in zip(alone * rounds, together, strict=True))
    print(f"{at_once} Python threads at once: {len(together)} calls of layers, {wrong} differ from the same alone")
    return wrong == 0


def main() -> None:
    """Record, compile, run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2, 16])
    arguments = parser.parse_args()
    os.nice(10)
    if library.missing():
        raise SystemExit(f"there are no kernels here to compare with: {library.missing()}")
    torch.set_num_threads(1)
    recorder = Recorder()
    # blocks go the steps that are made again, but are not made again out of hearing
    with library.heard_by(recorder.hear), substituted(replaying, "may_replay", lambda tokens: False):
        run_layers()
    if left := sorted(set(library.functions()) - recorder.names):
        raise SystemExit(f"no layer calls {', '.join(left)}: add a case")
    print(f"recorded {recorder.number} calls of {len(recorder.names)} kernels, {len(recorder.memory) / 2**20:.0f} MB")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "memory.bin").write_bytes(recorder.memory)
        for element, calls in recorder.calls.items():
            functions = [f"static void {name}() {{\n    {lines}\n}}" for name, lines in calls.items()]
            program = PROGRAM.replace("@CALLS@", "\n".join(functions)).replace("@NAMES@", ", ".join(calls))
            (place / f"replay-{element}.cpp").write_text(program)
        right = [tried(name, MACHINES[name], place, arguments.threads) for name in arguments.only]
    sys.exit(not all([*right, threads_agree()]))


if __name__ == "__main__":
    main()
