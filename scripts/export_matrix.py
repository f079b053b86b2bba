"""Export every mechanism in every host to every format, for any batch and size, and write the table of what holds.

python scripts/export_matrix.py --format pt2 onnx openvino --output matrix.json
python scripts/export_matrix.py --output matrix.json --table

Networks are tiny and have random numbers in every parameter; each cell is a process of its own, so that one that fails
or hangs costs a cell. Cells that are in the file already are not measured again. A cell is how far the engine is off
from PyTorch at most, by the largest number, at the size that it was made for and at one that was not traced.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOSTS = ("vit", "pvt", "pvt_v2", "swin", "cswin")
IMAGE = {"swin": 224, "cswin": 224}


def measure(host: str, mechanism: str, format: str, dynamic: list[str]) -> dict[str, object]:
    """A cell: the largest difference and the seconds that it took, or why there is none."""
    sys.path.insert(0, str(ROOT / "tests" / "models"))
    import torch
    from hosts import small

    from subquad.exports import EXPORTERS, export

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = small(host, mechanism, img_size=IMAGE.get(host, 64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"network{EXPORTERS[format].suffix}"
        try:
            written = export(model, path, format=format, dynamic=dynamic)
        except Exception as error:
            return {"error": " ".join(f"{error}".split())[:300]}
        return {"off": written.difference, "seconds": round(time.perf_counter() - start, 1)}


def cell_in_a_process(cell: list[str], limit: float) -> dict[str, object]:
    """`measure` in a process of its own, for at most `limit` seconds."""
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--cell", *cell], capture_output=True, text=True, timeout=limit, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit:.0f} s"}
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 and lines else {"error": done.stderr.strip()[-300:]}


def table(cells: dict[str, dict[str, object]], mechanisms: list[str], formats: list[str]) -> str:
    """The cells as Markdown: a row for each host and format, a column for each mechanism."""
    lines = ["| | " + " | ".join(mechanisms) + " |", "|---" * (len(mechanisms) + 1) + "|"]
    for format in formats:
        for host in HOSTS:
            row = [cells.get(f"{host} {mechanism} {format}", {}) for mechanism in mechanisms]
            if any(row):
                shown = [f"{cell['off']:.0e}" if "off" in cell else "fails" if cell else "" for cell in row]
                lines.append(f"| {host}, {format} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is asked for and not there yet, or print the table."""
    from subquad import ATTENTION
    from subquad.exports import EXPORTERS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", nargs="+", choices=list(EXPORTERS), default=["pt2", "onnx", "openvino"])
    parser.add_argument("--host", nargs="+", choices=HOSTS, default=list(HOSTS))
    parser.add_argument("--attention", nargs="+", choices=list(ATTENTION), default=list(ATTENTION))
    parser.add_argument("--limit", type=float, default=600, help="seconds of a cell")
    parser.add_argument("--output", type=Path, default=Path("export_matrix.json"))
    parser.add_argument("--table", action="store_true", help="print the table of the file, and measure nothing")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(measure(*arguments.cell, ["batch", "size"])))
        return
    cells = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    if not arguments.table:
        for format in arguments.format:
            for host in arguments.host:
                for mechanism in arguments.attention:
                    name = f"{host} {mechanism} {format}"
                    if name in cells:
                        continue
                    cells[name] = cell_in_a_process([host, mechanism, format], arguments.limit)
                    print(name, cells[name], flush=True)
                    arguments.output.write_text(json.dumps(cells, indent=1))
    print(table(cells, arguments.attention, list(EXPORTERS)))


if __name__ == "__main__":
    main()
