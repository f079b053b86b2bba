"""Train what the findings rest on, in the background, and write docs/evidence.md: every cell with its seeds and spread.

    python scripts/evidence.py --data DATA --code FROZEN      # go on where it was, from a frozen copy of this commit
    python scripts/evidence.py --status                       # what is done, in hours
    python scripts/evidence.py --data DATA --cost             # operations of each table, counted
    python scripts/evidence.py --analyze                      # measures of classifiers that were not looked into yet
    python scripts/evidence.py --analyze --data DATA          # trains them again where their folders are gone
    python scripts/evidence.py --speed --tables resolution    # speed of what is done; on a quiet machine
    python scripts/evidence.py --page                         # docs/evidence.md, and the claims of docs/findings.md

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
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from low_priority import give_way

ROOT = Path(__file__).parents[1]
DONE = ROOT / "docs" / "evidence.json"
LOOKED_AT = 1000
"""Held-out images of `--analyze`."""
GFLOPS = 58
"""Operations of a core, by 10^9 a second, that softmax trained with in docs/results.md: 232 img/s on two of them."""
KEPT = ("images_per_second", "train_seconds", "peak_memory_mb", "params", "macs", "epochs")


def main() -> None:
    """Train what is missing, or say what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the archives")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "evidence", help="folder of the runs")
    parser.add_argument("--done", type=Path, default=DONE, help=argparse.SUPPRESS)
    parser.add_argument("--code", type=Path, help="a git worktree to train from; made if it is not there")
    parser.add_argument("--tables", nargs="+", help="only these")
    parser.add_argument("--rows", nargs="+", help="only these rows of them")
    parser.add_argument("--minutes", type=float, help="for so long")
    parser.add_argument("--status", action="store_true", help="only print what is done")
    parser.add_argument("--analyze", action="store_true", help="look into classifiers that are trained")
    parser.add_argument("--cost", action="store_true", help="only count the operations of the tables")
    parser.add_argument("--speed", action="store_true", help="only time the networks that are trained")
    parser.add_argument("--page", action="store_true", help="only write docs/evidence.md and the head of findings.md")
    arguments = parser.parse_args()
    if arguments.status or arguments.page:
        import evidence_page

        done = read(arguments.done)
        if arguments.status:
            print(evidence_page.status(done))
        else:
            evidence_page.write_pages(done, arguments.done.parent)
    elif arguments.speed:
        speeds(arguments)
    elif arguments.analyze and arguments.data is None:
        analyze(arguments)
    elif arguments.cost and arguments.data is not None:
        cost(arguments)
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
    words += ["--rows", *arguments.rows] if arguments.rows else []
    words += ["--minutes", str(arguments.minutes)] if arguments.minutes else []
    words += ["--analyze"] if arguments.analyze else []
    os.execvpe(sys.executable, words, {**os.environ, "PYTHONPATH": str(code / "src")})


def campaign(arguments: argparse.Namespace) -> None:
    """Train one cell after another, the first that is not done and that no other process holds."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    give_way()
    import torch
    from ablated_attention import register
    from evidence_tables import cells

    from subquad.errors import SubquadError

    register()
    # PyTorch's fused attention is slow in bf16 backward at few tokens on a CPU
    torch.backends.cuda.enable_flash_sdp(torch.cuda.is_available())
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(round(60 * arguments.minutes) if arguments.minutes else 0)
    for cell in cells(arguments.tables, arguments.rows):
        before = read(arguments.done).get(cell.name)
        if before is not None and not (arguments.analyze and is_unseen(cell, before)):
            continue
        print(f"— {cell.name}", flush=True)
        try:
            summary = trained(cell, arguments)
            summary |= {"findings": found_in(cell, arguments)} if cell.table.looked_into else {}
        except SubquadError as error:
            if str(error).startswith("interrupted"):
                sys.exit(f"evidence: {error}")
            # another process has it, or it can't be: the others can
            print(f"{cell.name}: {error}", flush=True)
            continue
        except KeyboardInterrupt:
            sys.exit(f"evidence: interrupted while {cell.name} was looked into; the same call goes on with it")
        # what it costs, where that was timed before
        keep(arguments.done, {cell.name: {**(before or {}), **summary}})


def trained(cell: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """What is kept of a cell's run, trained to its end."""
    from subquad.runs.run_folder import RunFolder
    from subquad.tasks import task_named
    from subquad.training import train

    table, task = cell.table, task_named(cell.table.task)
    recipe = recipe_of(cell, arguments.data)
    folder = arguments.output / cell.name
    summary = train(recipe, folder, resume=(folder / "recipe.yaml").is_file(), log=lambda line: print(line, flush=True))
    metric = table.metric or task.columns[0].entry
    last = RunFolder(folder).rows()[-1]
    facts = json.loads((folder / "run.json").read_text())
    return {
        "metric": metric,
        "value": last[f"eval_{metric}"],
        "columns": {one.title: last[f"eval_{one.entry}"] for one in task.columns if f"eval_{one.entry}" in last},
        "title": next(one.title for one in task.columns if one.entry == metric),
        **{name: summary[name] for name in KEPT if name in summary},
        "device": facts["device"],
        "torch": facts["versions"]["torch"],
        "commit": commit(),
        "date": date.today().isoformat(),
    }


def recipe_of(cell: Any, data: Path) -> Any:
    """How a cell is trained, on the archives in a folder."""
    from subquad.tasks import task_named
    from subquad.tasks.recipe_files import load_recipe

    table = cell.table
    changes = {**table.changes, **cell.row.changes}
    if table.archive is not None:
        archive = str(data / table.archive)
        changes |= {"data": archive} if table.task in ("segment", "detect") else {"data_dir": archive}
    recipe = load_recipe(table.recipe, task_named(table.task).recipe_class)
    return recipe.replace(attention=cell.row.attention, seed=cell.seed, **changes)


def analyze(arguments: argparse.Namespace) -> None:
    """Keep what is to be found in trained classifiers whose folders are here and that were not looked into yet."""
    give_way()
    import torch
    from ablated_attention import register
    from evidence_tables import cells

    register()
    torch.set_num_threads(1)
    for cell in cells(arguments.tables, arguments.rows):
        run = read(arguments.done).get(cell.name)
        if run is not None and is_unseen(cell, run) and (arguments.output / cell.name).is_dir():
            print(f"— {cell.name}", flush=True)
            keep(arguments.done, {cell.name: {**run, "findings": found_in(cell, arguments)}})


def is_unseen(cell: Any, run: dict[str, Any]) -> bool:
    """Whether a run that is done should be looked into and was not."""
    return cell.table.looked_into and "findings" not in run


def found_in(cell: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the attention of a cell's network shows, whose folder is here."""
    from findings import findings_of

    archive = cell.table.archive and arguments.data and arguments.data / cell.table.archive
    return findings_of(arguments.output / cell.name, LOOKED_AT, archive or None)


def cost(arguments: argparse.Namespace) -> None:
    """Print the operations of each table: three passes over every image that is seen, evaluation left out."""
    from ablated_attention import register
    from evidence_tables import TABLES, Cell

    from subquad.tasks import make_task

    register()
    for table in TABLES:
        if arguments.tables and table.name not in arguments.tables:
            continue
        each = []
        for row in table.rows:
            recipe = recipe_of(Cell(table, row, table.seeds[0]), arguments.data)
            task = make_task(recipe)
            an_epoch = (recipe.updates_per_epoch or 0) * recipe.batch_size or len(task.train_images)
            each.append(6 * task.macs() * recipe.epochs * an_epoch / 1e15)
        all_seeds = sum(each) * len(table.seeds)
        hours = f"{1e6 * all_seeds / GFLOPS / 3600:.0f} h of a core at {GFLOPS} GFLOP/s"
        runs = f"{len(each) * len(table.seeds)} runs of {min(each):.2f} to {max(each):.2f} PFLOP"
        print(f"{table.name:12}  {runs}: {all_seeds:.1f} PFLOP, {hours}", flush=True)


def speeds(arguments: argparse.Namespace) -> None:
    """Keep what the networks of image tables cost that are trained and whose folders are here, rows in turn."""
    from ablated_attention import register
    from evidence_speeds import measured_speeds
    from evidence_tables import TABLES

    register()
    for table in TABLES:
        if table.task == "lra" or (arguments.tables and table.name not in arguments.tables):
            continue
        done = read(arguments.done)
        costs = measured_speeds(table, done, arguments.output)
        keep(arguments.done, {name: {**done[name], **own} for name, own in costs.items()})
        for name, own in costs.items():
            print(f"{name}: {', '.join(f'{what} {value:.4g}' for what, value in own.items())}", flush=True)


def commit() -> str:
    """What this script was checked out with."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout.strip()


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Every cell that is done, by name."""
    return json.loads(path.read_text()) if path.is_file() else {}


def keep(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Add entries to a file of them; where another process is at it, wait until it is done."""
    from subquad.data.archives import locked

    with locked(path):
        write(path, {**read(path), **entries})


def write(path: Path, done: dict[str, dict[str, Any]]) -> None:
    """All of them, a line each, so that changes are read as such."""
    from subquad.writing import write_text

    lines = [f"  {json.dumps(name)}: {json.dumps(done[name])}" for name in sorted(done)]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
