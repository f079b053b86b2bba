"""The faults of `scripts/faults/`, read: what `scripts/mutants.py` puts in. See the README there."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "scripts" / "faults"


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in `file`, at its only place, or at the first behind the text `after`."""

    file: str
    old: str
    new: str
    after: str
    equivalent: str
    tests: tuple[str, ...]

    @property
    def line(self) -> str:
        """In one line."""
        return f"{self.file}: {self.old} -> {self.new}"

    def patched(self, text: str) -> str:
        """The file with the fault; raises LookupError where the row is stale."""
        start = 0
        if self.after:
            if text.count(self.after) != 1:
                raise LookupError(f"'{self.after}' is there {text.count(self.after)} times")
            start = text.index(self.after) + len(self.after)
        elif text.count(self.old) != 1:
            raise LookupError(f"'{self.old}' is there {text.count(self.old)} times")
        place = text.find(self.old, start)
        if place < 0:
            raise LookupError(f"'{self.old}' is not behind '{self.after}'")
        return text[:place] + self.new + text[place + len(self.old) :]


def read_room(path: Path) -> tuple[list[str], list[Fault]]:
    """The tests and the faults of a room, see faults/README.md."""
    tests: list[str] = []
    faults: list[Fault] = []
    file, own, after, old = "", (), "", ""
    for line in path.read_text(encoding="utf-8").splitlines():
        sign, _, rest = line.partition(" ")
        if line.startswith("tests:"):
            tests = rest.split()
        elif sign == "==":
            file, _, named = rest.partition(" < ")
            own = tuple(named.split())
            if missing := [name for name in own if not (ROOT / name).exists()]:
                raise SystemExit(f"{path}: there is no {missing[0]}")
        elif sign == "@":
            after = rest
        elif sign == "-":
            old = rest
        elif sign == "+":
            faults.append(Fault(file, old, rest, after, "", own))
            after = ""
        elif sign == "~":
            faults[-1] = Fault(*[*vars(faults[-1]).values()][:4], rest, own)
        elif line.strip() and sign != "#":
            raise SystemExit(f"{path}: no such line: {line}")
    return tests, faults


def rooms() -> list[str]:
    """All of them."""
    return sorted(path.stem for path in FAULTS.glob("*.txt"))


def digest(fault: Fault, tests: list[str]) -> str:
    """Changes with the fault, its file, and the tests."""
    sums = hashlib.sha256(repr((fault, tests)).encode())
    sums.update((ROOT / "src" / "subquad" / fault.file).read_bytes())
    for name in tests:
        for path in sorted((ROOT / name).rglob("*.py")) if (ROOT / name).is_dir() else [ROOT / name]:
            sums.update(path.read_bytes())
    return sums.hexdigest()[:16]
