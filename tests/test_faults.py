"""The faults of scripts/faults are of lines that are there: a row that is stale counts nothing."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = sorted(path.stem for path in (ROOT / "scripts" / "faults").glob("*.txt"))


# of all rooms in one test, of which every run has a case
def test_every_fault_can_be_put_in(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from faulty import FAULTS, read_room

    stale = []
    for room in ROOMS:
        _, faults = read_room(FAULTS / f"{room}.txt")
        for fault in faults:
            try:
                fault.patched((ROOT / "src" / "subquad" / fault.file).read_text(encoding="utf-8"))
            except (LookupError, OSError) as error:
                stale.append(f"{room}, {fault.file}: {error}")
    assert not stale, "\n".join(stale)
