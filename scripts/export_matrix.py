"""Export every mechanism in every host to every format, as it is and for any batch and size, and write what holds.

    python scripts/export_matrix.py                     # hours; goes on where it was broken off
    python scripts/export_matrix.py --host vit --again  # what failed there once more
    python scripts/export_matrix.py --page              # the tables of docs/deployment.md, of docs/export_matrix.json

Networks are tiny and have random numbers in every parameter. A mechanism in a host is a process of its own, which has
all formats written of one program, so that one that fails or hangs costs no more. Cells that are in the file already
are not measured again, unless `--output` names another. A cell is how far the engine is off from PyTorch at most, by
the largest number: at the size that it was made for and, where sizes may change, at one that was not traced.
"""

import argparse
import functools
import json
import multiprocessing
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "models"))

DONE, PAGE = ROOT / "docs" / "export_matrix.json", ROOT / "docs" / "deployment.md"
START, END = "<!-- matrix: written by scripts/export_matrix.py --page -->", "<!-- end of matrix -->"
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
    images = torch.zeros(1, 3, *model.img_size)
    # all formats are written of one program, and OpenVINO's is made of the same ONNX
    traced = functools.cache(lambda: exporting_program(model, (images,), dynamic, least=least))
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
        substituted(exporting, "program_of", lambda *_, **__: traced()),
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
    program = program_of(small("vit", "linear", depths=(1,)).eval(), (torch.zeros(1, 3, 64, 64),), DYNAMIC, least=17)
    with tempfile.TemporaryDirectory() as folder:
        write(program, Path(folder) / "network.onnx")


def in_a_process(*cell: Any, limit: float) -> dict[str, Cell]:
    """`measure` in a process of its own, for at most `limit` seconds."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=lambda: results.put(measure(*cell)))
    child.start()
    # counted by what was waited: time in which all of this was stopped is none of the cell's
    for _ in range(int(10 * limit)):
        if not child.is_alive() or not results.empty():
            break
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


def with_tables(text: str, cells: dict[str, Cell]) -> str:
    """A page whose part between the marks is what the cells say."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{tables(cells)}\n\n{END}{after}"


def tables(cells: dict[str, Cell]) -> str:
    """The cells as Markdown, of sizes that may change and of others: a row for each host and format that has any."""
    from subquad import ATTENTION
    from subquad.exports import EXPORTERS

    parts, mechanisms = [], list(ATTENTION)
    for dynamic, title in ((DYNAMIC, "Any batch and size"), ((), "One batch and size")):
        of_kind = {
            f"{host}, {format}": [cells.get(name_of(host, mechanism, format, dynamic), {}) for mechanism in mechanisms]
            for format in EXPORTERS
            for host in hosts()
        }
        rows = [f"| {title} | {' | '.join(map(shown, row))} |" for title, row in of_kind.items() if any(row)]
        if rows:
            head = [f"| {title} | {' | '.join(mechanisms)} |", "|---" * (len(mechanisms) + 1) + "|"]
            parts.append("\n".join([*head, *rows]))
    return "\n\n".join([*parts, summary(cells)])


def summary(cells: dict[str, Cell]) -> str:
    """How many there are, which is furthest off, what fails, and when they were measured with what."""
    off = {name: cell["off"] for name, cell in cells.items() if "off" in cell}
    worst = max(off, key=lambda name: off[name])
    failing = [f"{name}: {cell['error']}" for name, cell in cells.items() if "error" in cell]
    days, versions = (sorted({cell[key] for cell in cells.values()}) for key in ("date", "torch"))
    said = (
        f"{len(off)} cells, {off[worst]:.0e} at most ({worst}), {days[0]} to {days[-1]}, torch {', '.join(versions)}."
    )
    return "\n".join([said, *(f"- fails: {one}" for one in failing)])


def shown(cell: Cell) -> str:
    """What stands in a cell of the table; nothing where it was not measured."""
    if "off" not in cell:
        return "fails" if cell else ""
    return f"{cell['off']:.0e}" if cell["off"] else "0"


def main() -> None:
    """Measure what is asked for and not there yet, or write the tables."""
    import torch

    from subquad import ATTENTION
    from subquad.exports import EXPORTERS
    from subquad.writing import write_text

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", nargs="+", choices=list(EXPORTERS), default=["pt2", "onnx", "openvino"])
    parser.add_argument("--host", nargs="+", choices=hosts(), default=hosts())
    parser.add_argument("--attention", nargs="+", choices=list(ATTENTION), default=list(ATTENTION))
    parser.add_argument("--sizes", nargs="+", choices=("dynamic", "static"), default=["dynamic", "static"])
    parser.add_argument("--limit", type=float, default=900, help="seconds of a mechanism in a host")
    parser.add_argument("--output", type=Path, default=DONE, help="file of the cells")
    parser.add_argument("--again", action="store_true", help="measure cells that failed once more")
    parser.add_argument("--page", action="store_true", help="only write the tables of docs/deployment.md")
    arguments = parser.parse_args()
    cells: dict[str, Cell] = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    if arguments.page:
        if not cells:
            raise SystemExit(f"export_matrix: {arguments.output} has no cells yet: --page comes behind measuring")
        write_text(PAGE, with_tables(PAGE.read_text(), cells))
        return
    warm_up()
    today = {"date": date.today().isoformat(), "torch": torch.__version__.partition("+")[0]}
    for dynamic in [DYNAMIC if kind == "dynamic" else () for kind in arguments.sizes]:
        for host in arguments.host:
            for mechanism in mechanisms_of(host, arguments.attention):
                names = {format: name_of(host, mechanism, format, dynamic) for format in arguments.format}
                tried = {name for name in names.values() if name in cells}
                tried -= {name for name in tried if arguments.again and "error" in cells[name]}
                if missing := [format for format, name in names.items() if name not in tried]:
                    found = in_a_process(host, mechanism, missing, dynamic, limit=arguments.limit)
                    cells |= {names[format]: {**cell, **today} for format, cell in found.items()}
                    print(host, mechanism, "dynamic" if dynamic else "static", found, flush=True)
                    lines = [f"  {json.dumps(name)}: {json.dumps(cells[name])}" for name in sorted(cells)]
                    write_text(arguments.output, "{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
