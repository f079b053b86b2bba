"""Train what the findings rest on, in the background, and write docs/evidence.md: every cell with its seeds and spread.

    python scripts/evidence.py --data DATA --code FROZEN      # go on where it was, from a frozen copy of this commit
    python scripts/evidence.py --status                       # what is done, in hours
    python scripts/evidence.py --page                         # docs/evidence.md from what is done

DATA is the folder with cifar10.tar.xz, camvid.tar and pennfudan.tar. Runs lie in `--output`, go on where they were
broken off (Ctrl-C and SIGTERM end one after its last whole epoch) and are trained at the lowest priority, on one thread
where there is no GPU; call it once for each core: several share a folder, each takes what no other one holds. What has
finished is one entry in docs/evidence.json, which is committed, and is not trained again anywhere. With `--code` all of
it runs from a git worktree of the commit that is checked out when it is made, so that work in the tree does not disturb
it. `--minutes` begins no run after so many, and ends the one that is under way.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DONE = ROOT / "docs" / "evidence.json"
PAGE = ROOT / "docs" / "evidence.md"
HEAD = """# Evidence

What was trained to judge the papers' claims, written by `python scripts/evidence.py --page` from `docs/evidence.json`.
Means ± standard deviations of the last epoch over so many seeds; *against* is the paired difference to the first row
over the seeds that both have, with its 95 % interval (Student's t) from two seeds on. An empty cell was not trained.
Speed is no measurement: runs share a machine with other work.

    python scripts/evidence.py --data DATA --code FROZEN
    python scripts/evidence.py --status"""
KEPT = ("images_per_second", "train_seconds", "peak_memory_mb", "params", "macs", "epochs")


def main() -> None:
    """Train what is missing, or say what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the archives")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "evidence", help="folder of the runs")
    parser.add_argument("--done", type=Path, default=DONE, help=argparse.SUPPRESS)
    parser.add_argument("--code", type=Path, help="a git worktree to train from; made if it is not there")
    parser.add_argument("--tables", nargs="+", help="only these")
    parser.add_argument("--minutes", type=float, help="for so long")
    parser.add_argument("--status", action="store_true", help="only print what is done")
    parser.add_argument("--page", action="store_true", help="only write docs/evidence.md")
    arguments = parser.parse_args()
    if arguments.status:
        print(status(arguments))
    elif arguments.page:
        PAGE.write_text(page(read(arguments.done)))
    elif arguments.data is None:
        parser.error("--data is needed to train: the folder with cifar10.tar.xz, camvid.tar and pennfudan.tar")
    elif arguments.code is not None:
        from_frozen(arguments)
    else:
        campaign(arguments)


def from_frozen(arguments: argparse.Namespace) -> None:
    """Run this script as it stands in a worktree, which is made of what is checked out if it is not there."""
    code = arguments.code.resolve()
    if not code.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(code), "HEAD"], cwd=ROOT, check=True)
    words = [sys.executable, str(code / "scripts" / "evidence.py"), "--data", str(arguments.data.resolve())]
    words += ["--output", str(arguments.output.resolve()), "--done", str(arguments.done.resolve())]
    words += ["--tables", *arguments.tables] if arguments.tables else []
    words += ["--minutes", str(arguments.minutes)] if arguments.minutes else []
    os.execvpe(sys.executable, words, {**os.environ, "PYTHONPATH": str(code / "src")})


def campaign(arguments: argparse.Namespace) -> None:
    """Train one cell after another, the first that is not done and that no other process holds."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.nice(19)
    import torch
    from ablated_attention import register
    from evidence_tables import cells

    from subquad.errors import SubquadError
    from subquad.holding import holding

    register()
    # PyTorch's fused attention is slow in bf16 backward at few tokens on a CPU
    torch.backends.cuda.enable_flash_sdp(torch.cuda.is_available())
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(round(60 * arguments.minutes) if arguments.minutes else 0)
    for cell in cells(arguments.tables):
        if cell.name in read(arguments.done):
            continue
        print(f"— {cell.name}", flush=True)
        try:
            summary = trained(cell, arguments)
        except SubquadError as error:
            if str(error).startswith("interrupted"):
                sys.exit(f"evidence: {error}")
            # another process has it, or it can't be: the others can
            print(f"{cell.name}: {error}", flush=True)
            continue
        with holding(arguments.done.parent):
            write(arguments.done, {**read(arguments.done), cell.name: summary})


def trained(cell: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """What is kept of a cell's run, trained to its end."""
    from subquad.tasks import task_named
    from subquad.tasks.recipe_files import load_recipe
    from subquad.training import train

    table, task = cell.table, task_named(cell.table.task)
    changes = {**table.changes, **cell.row.changes}
    if table.archive is not None:
        archive = str(arguments.data / table.archive)
        changes |= {"data": archive} if table.task in ("segment", "detect") else {"data_dir": archive}
    recipe = load_recipe(table.recipe, task.recipe_class)
    recipe = recipe.replace(attention=cell.row.attention, seed=cell.seed, **changes)
    folder = arguments.output / cell.name
    summary = train(recipe, folder, resume=(folder / "recipe.yaml").is_file(), log=lambda line: print(line, flush=True))
    metric = task.columns[0].entry
    facts = json.loads((folder / "run.json").read_text())
    return {
        "metric": metric,
        "value": summary[f"last_{metric}"],
        **{name: summary[name] for name in KEPT if name in summary},
        "device": facts["device"],
        "torch": facts["versions"]["torch"],
        "commit": commit(),
        "date": date.today().isoformat(),
    }


def commit() -> str:
    """What this script was checked out with."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout.strip()


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Every cell that is done, by name."""
    return json.loads(path.read_text()) if path.is_file() else {}


def write(path: Path, done: dict[str, dict[str, Any]]) -> None:
    """All of them, a line each, so that changes are read as such."""
    from subquad.writing import write_text

    lines = [f"  {json.dumps(name)}: {json.dumps(done[name])}" for name in sorted(done)]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def status(arguments: argparse.Namespace) -> str:
    """How much of each table is done."""
    from evidence_tables import TABLES, cells

    done, lines = read(arguments.done), []
    for table in TABLES:
        names = [cell.name for cell in cells([table.name])]
        hours = sum(done[name]["train_seconds"] for name in names if name in done) / 3600
        lines.append(f"{table.name:10}  {sum(name in done for name in names):3} of {len(names):3} runs  {hours:6.1f} h")
    return "\n".join(lines)


def page(done: dict[str, dict[str, Any]]) -> str:
    """docs/evidence.md."""
    from evidence_tables import TABLES

    lines = [HEAD]
    for table in TABLES:
        lines += ["", f"## {table.title}", "", *table_lines(table, done)]
    return "\n".join(lines) + "\n"


def table_lines(table: Any, done: dict[str, dict[str, Any]]) -> list[str]:
    """A table in Markdown, and what it was made with."""
    from evidence_tables import Cell

    def of(row: Any) -> dict[int, dict[str, Any]]:
        cells = {seed: Cell(table, row, seed).name for seed in table.seeds}
        return {seed: done[name] for seed, name in cells.items() if name in done}

    found = {row.name: of(row) for row in table.rows}
    runs = [run for row in found.values() for run in row.values()]
    if not runs:
        return ["Not trained yet."]
    first = found[table.rows[0].name]
    lines = [
        f"| | {runs[0]['metric']} | seeds | against {table.rows[0].name} | parameters | MACs | hours |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table.rows:
        own = found[row.name]
        if not own:
            lines.append(f"| {row.name} | | 0 | | | | |")
            continue
        values = [run["value"] for run in own.values()]
        apart = [own[seed]["value"] - first[seed]["value"] for seed in own if seed in first and own is not first]
        one, hours = next(iter(own.values())), sum(run["train_seconds"] for run in own.values()) / 3600
        lines.append(
            f"| {row.name} | {spread(values)} | {len(own)} | {interval(apart)} | {one['params'] / 1e6:.2f} M "
            f"| {one['macs'] / 1e6:.1f} M | {hours:.1f} |"
        )
    days, devices = ({run[key] for run in runs} for key in ("date", "device"))
    versions = ", ".join(sorted({run["torch"] for run in runs}))
    span = min(days) if len(days) == 1 else f"{min(days)} to {max(days)}"
    return [*lines, "", f"{span}, torch {versions}, {'; '.join(sorted(devices))}."]


def spread(values: list[float]) -> str:
    """Mean ± standard deviation."""
    return f"{statistics.fmean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def interval(apart: list[float]) -> str:
    """The mean of paired differences, with its 95 % interval where there are two or more."""
    if not apart:
        return ""
    mean = statistics.fmean(apart)
    if len(apart) == 1:
        return f"{mean:+.2f}"
    from scipy.stats import t

    half = t.ppf(0.975, len(apart) - 1) * statistics.stdev(apart) / len(apart) ** 0.5
    return f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"


if __name__ == "__main__":
    main()
