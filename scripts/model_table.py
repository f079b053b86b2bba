"""Write the table of docs/models.md, and the sizes that `subquad list models` shows. What stands there is measured.

python scripts/model_table.py  # rows that are missing
python scripts/model_table.py --all  # all of them, which takes some minutes
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import subquad
from subquad.models import NETWORKS, VARIANTS
from subquad.models.listing import SIZES, known_sizes, pattern_of, sizes_of
from subquad.models.networks import SOURCES
from subquad.tasks.network_costs import count_macs, count_parameters

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- table -->\n", "<!-- end -->"


def newton_macs(model: nn.Module, size: tuple[int, int]) -> int:
    """Multiply-adds of SOFT's Newton steps, two products of m × m matrices each, for one image."""
    total = 0

    def add(module: Any, _: Any, supply: dict[str, Any]) -> None:
        nonlocal total
        rows, columns = (side // window for side, window in zip(supply["grid"].shape, module.window, strict=True))
        total += module.num_heads * 2 * module.newton_steps * (rows * columns) ** 3

    for module in model.modules():
        if hasattr(module, "newton_steps"):
            module.register_forward_pre_hook(add, with_kwargs=True)
    model(torch.zeros(1, 3, *size, device="meta"))
    return total


def row(name: str) -> str:
    """One line of the table."""
    network = NETWORKS[name]
    model = subquad.create_model(name, device="meta").eval()
    macs = count_macs(model, model.img_size)
    steps = newton_macs(model, model.img_size)
    measured = f"{macs / 1e9:.2f}" + (f" ({(macs - steps) / 1e9:.2f})" if steps else "")
    cells = [
        f"`{name}`",
        network.label or pattern_of(network.attention),
        "×".join(map(str, model.img_size)),
        f"{count_parameters(model) / 1e6:.3f}",
        measured,
        "" if network.gmacs is None else f"{network.gmacs}",
        "" if network.top1 is None else f"{network.top1}",
        SOURCES.get(network.source, ""),
    ]
    return f"| {' | '.join(cells)} |"


def known_rows(page: str) -> dict[str, str]:
    """The rows that a page has, by the names of their networks."""
    return {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="measure rows that are there already as well")
    everything = parser.parse_args().all
    known = {} if everything or not SIZES.exists() else known_sizes()
    sizes = {name: known.get(name) or sizes_of(name) for name in dict.fromkeys((*VARIANTS, *NETWORKS))}
    rows = (f"{json.dumps(name)}: {json.dumps(counted)}" for name, counted in sizes.items())
    SIZES.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    measured = {} if everything else known_rows(PAGE.read_text())
    heads = ["network", "mechanisms", "px", "params M", "MACs G", "published G", "top-1 %", "weights"]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |"]
    lines += [measured.get(name) or row(name) for name in NETWORKS]
    page = PAGE.read_text()
    table = "\n".join(lines)
    page = re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{table}\n{END}", page, flags=re.DOTALL)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
