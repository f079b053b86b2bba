"""What `scripts/evidence.py` trains: tables, their rows, and in which order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from subquad.attention import ATTENTION, traits_of

SEEDS = (0, 1, 2)

CIFAR10 = {"amp": "bf16", "epochs": 10}
"""On all 50,000 images, as `cifar10_small` has it otherwise."""


@dataclass(frozen=True)
class Row:
    """A mechanism in a table, with what its recipe has of its own."""

    name: str
    attention: str
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """A table: a recipe of a task, rows that differ in their mechanism, and a run for each of them and each seed.

    Attributes:
        name: of its folder and its cells.
        title: on the page.
        task: of `subquad.tasks.TASKS`.
        recipe: one that comes with it.
        archive: the file of `--data` that it is trained on; None for data that are drawn.
        changes: what the recipe has otherwise.
        rows: the first is what the others are compared with.
        seeds: of each row.
    """

    name: str
    title: str
    task: str
    recipe: str
    archive: str | None
    changes: Mapping[str, Any]
    rows: tuple[Row, ...]
    seeds: tuple[int, ...] = SEEDS


@dataclass(frozen=True)
class Cell:
    """One run."""

    table: Evidence
    row: Row
    seed: int

    @property
    def name(self) -> str:
        """Of its folder and of its entry in the file of what is done."""
        return f"{self.table.name}/{self.row.name}-s{self.seed}"


def plain(*mechanisms: str) -> tuple[Row, ...]:
    """A row for each mechanism, named as it is."""
    return tuple(Row(name.replace(":", "_").replace("=", ""), name) for name in mechanisms)


def all_mechanisms() -> tuple[Row, ...]:
    """A row for each, softmax first; where class tokens are refused the network has none."""
    without = {"settings": {"class_token": False}}
    names = ["softmax", *(name for name in ATTENTION if name != "softmax")]
    return tuple(Row(name, name, without if "prefix" in traits_of(ATTENTION[name]).refuses else {}) for name in names)


def ablations() -> tuple[Row, ...]:
    """Each mechanism of the papers, whole and without what it is said to rest on; softmax and linear beside them."""
    return (
        *plain("softmax", "linear", "linear:local=true"),
        *plain("inline", "inline_uncentred", "inline:local=false"),
        *plain("agent", "agent_unbiased", "agent:local=false"),
        *plain(*(f"agent:num_agents={count}" for count in (9, 16, 25))),
        *plain("pola", "pola_one_sided", "pola_fixed:alpha=0", "pola_fixed", "pola_ungated", "pola:local=false"),
        *plain("soft", *(f"soft:inverse={inverse}" for inverse in ("plain", "cholesky")), "soft:local=false"),
    )


def sequences(*mechanisms: str) -> tuple[Row, ...]:
    """Mechanisms that take sequences of several lengths."""
    refusing = [name for name in ATTENTION if "padding" in traits_of(ATTENTION[name]).refuses]
    chosen = mechanisms or ("softmax", *(name for name in ATTENTION if name != "softmax"))
    return plain(*(name for name in chosen if name not in refusing))


DENSE = ("softmax", "linear", "inline", "agent", "pola")

TABLES = (
    Evidence(
        "cifar10", "CIFAR-10, 10 epochs", "classify", "cifar10_small", "cifar10.tar.xz", CIFAR10, all_mechanisms()
    ),
    Evidence(
        "ablations",
        "What the papers rest on (CIFAR-10, 10 epochs)",
        "classify",
        "cifar10_small",
        "cifar10.tar.xz",
        CIFAR10,
        ablations(),
    ),
    Evidence("listops", "ListOps, 64 to 256 tokens, 1,000 updates", "lra", "listops_small", None, {}, sequences()),
    Evidence("camvid", "CamVid, 20 epochs", "segment", "camvid_small", "camvid.tar", {}, plain(*DENSE)),
    Evidence("pennfudan", "Penn-Fudan, 25 epochs", "detect", "pennfudan_small", "pennfudan.tar", {}, plain(*DENSE)),
    Evidence(
        "deep",
        "Twelve blocks (CIFAR-10, 10 epochs)",
        "classify",
        "cifar10_small",
        "cifar10.tar.xz",
        {**CIFAR10, "depth": 12},
        plain("softmax", "linear", "inline", "pola"),
    ),
    Evidence(
        "pixels",
        "CIFAR-10 in grey, pixel by pixel (LRA), 2,000 updates",
        "lra",
        "image",
        "cifar10.tar.xz",
        {"epochs": 10, "updates_per_epoch": 200, "batch_size": 32, "lr": 1e-3},
        sequences("softmax", "linear", "inline", "agent", "pola"),
    ),
    Evidence(
        "inline224",
        "InLine-DeiT-T at 224 px from images of 32 px (its walk-through, 100 epochs)",
        "classify",
        "cifar10",
        "cifar10.tar.xz",
        {"amp": "bf16", "workers": 0},
        plain("inline"),
        (42,),
    ),
)
"""In the order in which they are trained, one seed of all before the next one."""


def cells(names: list[str] | None = None) -> Iterator[Cell]:
    """All runs of these tables, or of all, in their order."""
    tables = [table for table in TABLES if names is None or table.name in names]
    for round in range(max((len(table.seeds) for table in tables), default=0)):
        for table in tables:
            if round < len(table.seeds):
                yield from (Cell(table, row, table.seeds[round]) for row in table.rows)
