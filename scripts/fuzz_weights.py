"""Weight files that nobody wrote, by the million: none may do anything but be read or be refused in one line.

    python scripts/fuzz_weights.py --files 1000000 [--seed 0] [--first 0]

File k of a seed is always the same, so that a run goes on with --first where another one stopped. After each file:
nothing was written, imported, executed or started (an audit hook), nothing but a SubquadError of one line came out,
memory did not grow, and it did not take long; after every 20th nothing has another attribute than before. What is read
of a zip archive in which bytes were changed is what was in it, as its checksums say. Exits with 1 at the first file
that breaks a promise, and keeps it.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hostile"))

from watching import Watch, try_file, working_in
from weight_grammar import Maker

EVERY = 20
"""Files after which attributes are compared: what was changed by one stays so."""

SETTLING = 300
"""Files before memory and modules are compared, as libraries load parts of themselves when they are first needed."""


def main() -> int:
    """Try files and say how many were read and refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument(
        "--keep", type=Path, default=Path("fuzz-failure"), help="where a file that breaks a promise goes"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        return fuzz(Path(folder), arguments)


def fuzz(folder: Path, arguments: argparse.Namespace) -> int:
    """The files of a range, in an empty folder."""
    (empty := folder / "empty").mkdir()
    (made := folder / "made").mkdir()
    maker, watch, counts = Maker(made), Watch(empty), Counter()
    start = time.monotonic()
    keep = arguments.keep.resolve()
    with working_in(empty):
        for number in range(SETTLING):
            try_file(maker, watch, made, f"settling {number}")
        watch.events.clear()
        watch.settled()
        for number in range(arguments.first, arguments.first + arguments.files):
            kind, outcome, complaints = try_file(maker, watch, made, f"{arguments.seed}:{number}")
            counts[kind, outcome] += 1
            if number % EVERY == 0:
                complaints += watch.changes()
            if complaints:
                complaints += watch.changes()
                keep.parent.mkdir(parents=True, exist_ok=True)
                keep.write_bytes(maker.make(random.Random(f"{arguments.seed}:{number}"))[2])
                print(f"file {number} of seed {arguments.seed} ({kind}), kept as {keep}: {'; '.join(complaints)}")
                return 1
            if (number + 1) % 100_000 == 0:
                rate = (number + 1 - arguments.first) / (time.monotonic() - start)
                facts = f"{rate:.0f} a second, slowest {watch.slowest:.2f} s, memory + {watch.grown() >> 20} MB"
                print(f"{number + 1} files, nothing: {facts}", flush=True)
    for (kind, outcome), count in sorted(counts.items()):
        print(f"{kind:22} {outcome:8} {count:8}")
    if changes := watch.changes():
        print("; ".join(changes))
        return 1
    print(f"{arguments.files} files of seed {arguments.seed}: nothing written, run, changed or kept")
    return 0


if __name__ == "__main__":
    sys.exit(main())
