"""Export every mechanism in every host to every format, as it is and for any batch and size, and write what holds.

python scripts/export_matrix.py --output matrix.json                      # hours; goes on where it was broken off
python scripts/export_matrix.py --output matrix.json --host vit --again   # what failed there once more
python scripts/export_matrix.py --output matrix.json --table

Networks are tiny and have random numbers in every parameter. A mechanism in a host is a process of its own, which has
all formats written of one program, so that one that fails or hangs costs no more. Cells that are in the file already
are not measured again. A cell is how far the engine is off from PyTorch at most, by the largest number: at the size
that it was made for and, where sizes may change, at one that was not traced.
"""

import argparse
import functools
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "models"))

FIRST, LAST = ("vit", "swin", "pvt"), ("pvt_v2", "cswin")
"""Hosts that come before and behind the others."""
DYNAMIC = ("batch", "size")
Cell = dict[str, Any]


def hosts() -> list[str]:
    """A small network of every host, in the order in which they are measured."""
    from hosts import CLASSES, SMALL

    one_of_each = {CLASSES[kind]: kind for kind in reversed(SMALL)}.values()
    return [*FIRST, *(kind for kind in one_of_each if kind not in FIRST + LAST), *LAST]


def mechanisms_of(host: str, wanted: list[str]) -> list[str]:
    """Those that a host takes; of one whose design is the idea, its own, under the name of the first."""
    from hosts import CLASSES

    return wanted if CLASSES[host].takes_mechanisms else wanted[:1]


def measure(host: str, mechanism: str, formats: list[str], dynamic: tuple[str, ...]) -> dict[str, Cell]:
    """By format the largest difference and the seconds that it took, or why there is none."""
    import torch
    from hosts import fewest, small

    from subquad.errors import reason_of
    from subquad.exports import EXPORTERS, export, exporting, onnx_format, openvino_format
    from subquad.exports.exporting import least_pixels
    from subquad.substituting import substituted

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = small(host, mechanism, **fewest(host))
    if least_pixels(model) > min(model.img_size):
        # windows and stripes are whole, and several, from here on
        model = small(host, mechanism, **fewest(host), img_size=224)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    # all formats are written of one program, and OpenVINO's is made of the same ONNX
    traced = functools.cache(lambda: exporting_program(model, torch.zeros(1, 3, *model.img_size), dynamic, least))
    exporting_program, least = exporting.program_of, least_pixels(model)
    write, written = onnx_format.write, {}

    def write_once(program: Any, path: Path) -> None:
        if not written:
            write(program, path)
            written["onnx"] = path.read_bytes()
        path.write_bytes(written["onnx"])

    cells = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        substituted(exporting, "program_of", lambda *_: traced()),
        substituted(openvino_format.onnx_format, "write", write_once),
    ):
        for format in formats:
            start = time.perf_counter()
            path = Path(folder) / f"network{EXPORTERS[format].suffix}"
            try:
                done = export(model, path, format=format, dynamic=dynamic)
                cells[format] = {"off": done.difference}
            except Exception as error:
                cells[format] = {"error": reason_of(error)[:400]}
            cells[format]["seconds"] = round(time.perf_counter() - start, 1)
    return cells


def warm_up() -> None:
    """Import what every process needs, and fill the tables that are made at the first use."""
    import onnxruntime  # noqa: F401
    import openvino  # noqa: F401
    import torch
    from hosts import small

    from subquad.exports.onnx_format import write
    from subquad.exports.programs import program_of

    torch.set_num_threads(1)
    program = program_of(small("vit", "linear", depths=(1,)).eval(), torch.zeros(1, 3, 64, 64), DYNAMIC, 17)
    with tempfile.TemporaryDirectory() as folder:
        write(program, Path(folder) / "network.onnx")


def in_a_process(*cell: Any, limit: float) -> dict[str, Cell]:
    """`measure` in a process of its own, for at most `limit` seconds."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=lambda: results.put(measure(*cell)))
    child.start()
    ended = time.monotonic() + limit
    while child.is_alive() and results.empty() and time.monotonic() < ended:
        time.sleep(0.1)
    if not results.empty():
        found: dict[str, Cell] = results.get()
        child.join()
        return found
    reason = f"not done after {limit:.0f} s" if child.is_alive() else f"ended with status {child.exitcode}"
    child.kill()
    child.join()
    return {format: {"error": reason} for format in cell[2]}


def name_of(host: str, mechanism: str, format: str, dynamic: tuple[str, ...]) -> str:
    """A cell's name in the file."""
    return " ".join((host, mechanism, format, "dynamic" if dynamic else "static"))


def table(cells: dict[str, Cell], mechanisms: list[str], formats: list[str], dynamic: tuple[str, ...]) -> str:
    """The cells as Markdown: a row for each host and format, a column for each mechanism."""
    lines = ["| | " + " | ".join(mechanisms) + " |", "|---" * (len(mechanisms) + 1) + "|"]
    for format in formats:
        for host in hosts():
            row = [cells.get(name_of(host, mechanism, format, dynamic), {}) for mechanism in mechanisms]
            if any(row):
                lines.append(f"| {host}, {format} | " + " | ".join(map(shown, row)) + " |")
    return "\n".join(lines)


def shown(cell: Cell) -> str:
    """What stands in a cell of the table; nothing where it was not measured."""
    if "off" not in cell:
        return "fails" if cell else ""
    return f"{cell['off']:.0e}" if cell["off"] else "0"


def main() -> None:
    """Measure what is asked for and not there yet, or print the tables."""
    from subquad import ATTENTION
    from subquad.exports import EXPORTERS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", nargs="+", choices=list(EXPORTERS), default=["pt2", "onnx", "openvino"])
    parser.add_argument("--host", nargs="+", choices=hosts(), default=hosts())
    parser.add_argument("--attention", nargs="+", choices=list(ATTENTION), default=list(ATTENTION))
    parser.add_argument("--sizes", nargs="+", choices=("dynamic", "static"), default=["dynamic", "static"])
    parser.add_argument("--limit", type=float, default=900, help="seconds of a mechanism in a host")
    parser.add_argument("--output", type=Path, default=Path("export_matrix.json"))
    parser.add_argument("--again", action="store_true", help="measure cells that failed once more")
    parser.add_argument("--table", action="store_true", help="print the tables of the file, and measure nothing")
    arguments = parser.parse_args()
    cells: dict[str, Cell] = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    kinds = [DYNAMIC if kind == "dynamic" else () for kind in arguments.sizes]
    if not arguments.table:
        warm_up()
    for dynamic in () if arguments.table else kinds:
        for host in arguments.host:
            for mechanism in mechanisms_of(host, arguments.attention):
                names = {format: name_of(host, mechanism, format, dynamic) for format in arguments.format}
                tried = {name for name in names.values() if name in cells}
                tried -= {name for name in tried if arguments.again and "error" in cells[name]}
                if missing := [format for format, name in names.items() if name not in tried]:
                    found = in_a_process(host, mechanism, missing, dynamic, limit=arguments.limit)
                    cells |= {names[format]: cell for format, cell in found.items()}
                    print(host, mechanism, "dynamic" if dynamic else "static", found, flush=True)
                    arguments.output.write_text(json.dumps(cells, indent=1))
    for dynamic in kinds:
        print(f"\n{'dynamic' if dynamic else 'static'}\n\n{table(cells, list(ATTENTION), list(EXPORTERS), dynamic)}")


if __name__ == "__main__":
    main()
