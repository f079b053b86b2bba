"""Train for as many updates as a day has, with a tiny network, and see what memory does; then with two processes.

    python scripts/endurance.py --folder runs/endurance --updates 100000

With two processes, over gloo, one of them is killed half-way: the other has to end by itself, in one line, and both go
on from the last whole epoch. Prints resident memory as it goes, and by how much it grew after the warm-up.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import time
from pathlib import Path

from kills import end, start, wait

from subquad.tasks.sequences import LraRecipe
from subquad.training import train

PER_EPOCH = 500
"""Updates of an epoch; there is an evaluation after each, and everything is saved."""

SHARE = 0.1
"""What counts as warm-up, and what is compared at the end."""


def recipe(updates: int) -> LraRecipe:
    """A network of one block, on short sequences, which cost least beside the loop itself."""
    return LraRecipe(
        data_settings={"count": 10 * PER_EPOCH, "shortest": 5, "longest": 12},
        max_length=12,
        attention="linear",
        embed_dim=8,
        depth=1,
        num_heads=1,
        batch_size=2,
        epochs=max(2, updates // PER_EPOCH),
        updates_per_epoch=PER_EPOCH,
        warmup_epochs=0,
        clip_grad=1.0,
        lr=1e-4,
        log_interval=10,
    )


def resident_kb() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def watched(home: Path, name: str, wanted: LraRecipe) -> int:
    """Train, and write resident memory after each epoch to a file of this process."""
    folder = home / name
    file = home / f"{name}-{os.environ.get('RANK', '0')}.kb"

    def look(line: str) -> None:
        if line.startswith("epoch"):
            with file.open("a") as sizes:
                sizes.write(f"{resident_kb()}\n")

    train(wanted, folder, resume=(folder / "recipe.yaml").is_file(), log=look)
    return 0


def growth(file: Path) -> str:
    """How memory grew from behind the warm-up to the end."""
    sizes = [int(line) for line in file.read_text().split()]
    few = max(1, round(SHARE * len(sizes)))
    first, last = (statistics.median(part) for part in (sizes[few : 2 * few], sizes[-few:]))
    return (
        f"{len(sizes)} epochs of {PER_EPOCH} updates: {first / 1024:.1f} MB after {few} epochs, "
        f"{last / 1024:.1f} MB at the end, {100 * (last / first - 1):+.2f} %"
    )


def alone(home: Path, updates: int) -> None:
    """One process."""
    log, wanted = home / "log", recipe(updates)
    (home / "one-0.kb").unlink(missing_ok=True)
    shutil.rmtree(home / "one", ignore_errors=True)
    begin = time.monotonic()
    children = start(lambda: watched(home, "one", wanted), log)
    codes = wait(children, 24 * 3600)
    print(f"one process, {time.monotonic() - begin:.0f} s, exit {list(codes.values())}: {growth(home / 'one-0.kb')}")


def together(home: Path, updates: int, chance: random.Random) -> None:
    """Two processes, one of which is killed half-way."""
    log, wanted = home / "log", recipe(updates)
    shutil.rmtree(home / "two", ignore_errors=True)
    sizes = home / "two-0.kb"
    sizes.unlink(missing_ok=True)
    children = start(lambda: watched(home, "two", wanted), log, 2)
    while len(wait(children, 0.5)) == 0:
        if sizes.is_file() and len(sizes.read_text().split()) >= wanted.epochs // 2:
            break
    victim = chance.randrange(2)
    os.kill(children[victim], signal.SIGKILL)
    begin = time.monotonic()
    codes = wait(children, 600)
    said = Path(f"{log}.{1 - victim}").read_text().strip().splitlines()
    print(f"process {victim} of 2 killed: the other ended after {time.monotonic() - begin:.1f} s, {codes}: {said[-1:]}")
    end([child for child in children if child not in codes])
    print(f"two processes, before: {growth(sizes)}")
    sizes.unlink()
    codes = wait(start(lambda: watched(home, "two", wanted), log, 2), 24 * 3600)
    print(f"two processes, gone on: exit {list(codes.values())}, {growth(sizes)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for data and runs")
    parser.add_argument("--updates", type=int, default=100_000, help="of the one process; 0 for none")
    parser.add_argument("--updates-of-two", type=int, default=20_000, help="of the two processes; 0 for none")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    os.environ["SUBQUAD_HOME"] = str(given.folder / "home")
    if given.updates_of_two:
        together(given.folder, given.updates_of_two, random.Random(0))
    if given.updates:
        alone(given.folder, given.updates)
