"""What `scripts/evidence.py` trains: tables, their rows, and in which order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from subquad.attention import ATTENTION, traits_of

SEEDS = (0, 1, 2)

FAST = {"opt": "muon", "lr": 4e-3, "warmup_epochs": 0, "warmup_updates": 100}
"""What docs/convert.md trains its teacher with: further in ten epochs than AdamW."""

CIFAR10 = {"amp": "bf16", "epochs": 10, **FAST}
"""On all 50,000 images, as `cifar10_small` has it otherwise."""


BRIEF = {"amp": "", "epochs": 4, "embed_dim": 64, "depth": 4, "num_heads": 2, **FAST}
"""All 50,000 images through a small network: 17 to 22 minutes of one of two busy cores without bf16 (InLine)."""

PIXELS = {"epochs": 10, "updates_per_epoch": 200, "batch_size": 32, "lr": 1e-3, "warmup_updates": 100}
"""A twentieth and less of the usual updates of 256: what is not learned in them may be learned later."""


@dataclass(frozen=True)
class Row:
    """A mechanism in a table, with what its recipe has of its own.

    Attributes:
        name: in the table.
        attention: as recipes name it.
        changes: what its recipe has otherwise.
        whole: the row of the mechanism that this one has changed or without a part; none where it is a whole one.
    """

    name: str
    attention: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    whole: str | None = None


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
        metric: a column of the task, its first one if left out.
        at_equal_cost: whether rows of a mechanism are sizes of images, between which it is compared at equal cost.
        looked_into: whether the attention of its networks is measured.
    """

    name: str
    title: str
    task: str
    recipe: str
    archive: str | None
    changes: Mapping[str, Any]
    rows: tuple[Row, ...]
    seeds: tuple[int, ...] = SEEDS
    metric: str | None = None
    at_equal_cost: bool = False
    looked_into: bool = False


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


def plain(*mechanisms: str, whole: str | None = None) -> tuple[Row, ...]:
    """A row for each mechanism, named as it is; beside the row `whole`, of which they are changed."""
    return tuple(Row(name.replace(":", "_").replace("=", ""), name, whole=whole) for name in mechanisms)


def parted(whole: str, *changed: str) -> tuple[Row, ...]:
    """A mechanism, and rows of it that are without a part, or have another one."""
    return (*plain(whole), *plain(*changed, whole=whole))


def all_mechanisms() -> tuple[Row, ...]:
    """A row for each, softmax first; where class tokens are refused the network has none."""
    without = {"settings": {"class_token": False}}
    names = ["softmax", *(name for name in ATTENTION if name != "softmax")]
    return tuple(Row(name, name, without if "prefix" in traits_of(ATTENTION[name]).refuses else {}) for name in names)


def ablations() -> tuple[Row, ...]:
    """Each mechanism of the papers, whole and without what it is said to rest on; softmax and linear beside them."""
    return (
        *plain("softmax"),
        *parted("linear", "linear:local=true"),
        *parted("inline", "inline_uncentred", "inline:local=false"),
        *parted("agent", "agent_unbiased", "agent:local=false", *(f"agent:num_agents={n}" for n in (9, 16, 25))),
        *parted("pola", "pola_one_sided", "pola_fixed:alpha=0", "pola_fixed", "pola_ungated", "pola:local=false"),
        *parted("soft", "soft:inverse=plain", "soft:inverse=cholesky", "soft:local=false"),
    )


def brief() -> tuple[Row, ...]:
    """What the papers rest on, then every other mechanism."""
    parts = ablations()
    named = {row.name for row in parts}
    return (*parts, *(row for row in all_mechanisms() if row.name not in named))


def with_and_without_branch() -> tuple[Row, ...]:
    """Every mechanism, then those of the papers without their local branch, and linear attention with one."""
    without = [row for name in ("inline", "agent", "pola") for row in plain(f"{name}:local=false", whole=name)]
    return (*all_mechanisms(), *plain("linear:local=true", whole="linear"), *without)


def sequences(*mechanisms: str) -> tuple[Row, ...]:
    """Mechanisms that take sequences of several lengths."""
    refusing = [name for name in ATTENTION if "padding" in traits_of(ATTENTION[name]).refuses]
    chosen = mechanisms or ("softmax", *(name for name in ATTENTION if name != "softmax"))
    return plain(*(name for name in chosen if name not in refusing))


DENSE = ("softmax", "linear", "inline", "agent", "pola")

SIDES = (1.0, 1.5, 2.0)
"""Sizes of `resolutions`; twice the least is CamVid's own, 360 px."""


def resolutions() -> tuple[Row, ...]:
    """Each mechanism trained and judged on scenes of several sizes, the softmax of the least size first."""

    def row(name: str, side: float) -> Row:
        crop = [round(160 * side), round(224 * side)]
        return Row(f"{name} {side:g}x", name, {"short_side": round(180 * side), "img_size": crop})

    return tuple(row(name, side) for side in SIDES for name in DENSE)


TABLES = (
    Evidence(
        "cifar10",
        "CIFAR-10, 10 epochs",
        "classify",
        "cifar10_small",
        "cifar10.tar.xz",
        CIFAR10,
        all_mechanisms(),
        looked_into=True,
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
    Evidence(
        "brief",
        "CIFAR-10 in brief: whole, 4 epochs, a DeiT of width 64 and 4 blocks",
        "classify",
        "cifar10_small",
        "cifar10.tar.xz",
        BRIEF,
        brief(),
        looked_into=True,
    ),
    Evidence(
        "brief_deep",
        "Twelve blocks in brief (CIFAR-10: whole, 4 epochs, width 64)",
        "classify",
        "cifar10_small",
        "cifar10.tar.xz",
        {**BRIEF, "depth": 12},
        plain("softmax", "linear", "inline", "pola"),
        looked_into=True,
    ),
    Evidence("listops", "ListOps, 64 to 256 tokens, 1,000 updates", "lra", "listops_small", None, {}, sequences()),
    Evidence(
        "reach",
        "Are two patterns equal, 12 px apart? 10 epochs of 16,000 drawn images",
        "classify",
        "reach",
        None,
        {"data": "same_different:distance=12"},
        with_and_without_branch(),
    ),
    Evidence(
        "paths2d",
        "Pathfinder as an image of 32 px, contours of 6 dashes, 10 epochs of 40,000 drawn images",
        "classify",
        "reach",
        None,
        {"data": "pathfinder:contour_length=6,count=50000"},
        all_mechanisms(),
    ),
    Evidence("camvid", "CamVid, 20 epochs", "segment", "camvid_small", "camvid.tar", {}, plain(*DENSE)),
    Evidence("pennfudan", "Penn-Fudan, 25 epochs", "detect", "pennfudan_small", "pennfudan.tar", {}, plain(*DENSE)),
    Evidence(
        "masks",
        "Penn-Fudan with masks, 25 epochs",
        "detect",
        "pennfudan_small",
        "pennfudan.tar",
        {"head": "mask_rcnn"},
        plain(*DENSE),
        metric="mask_ap",
    ),
    Evidence(
        "resolution",
        "CamVid at 180, 270 and 360 px, 20 epochs: accuracy against cost",
        "segment",
        "camvid_small",
        "camvid.tar",
        {},
        resolutions(),
        at_equal_cost=True,
    ),
    Evidence(
        "deep",
        "Twelve blocks (CIFAR-10, 10 epochs)",
        "classify",
        "cifar10_small",
        "cifar10.tar.xz",
        {**CIFAR10, "depth": 12},
        plain("softmax", "linear", "inline", "pola"),
        looked_into=True,
    ),
    Evidence(
        "pixels",
        "CIFAR-10 in grey, pixel by pixel (LRA), 2,000 updates",
        "lra",
        "image",
        "cifar10.tar.xz",
        PIXELS,
        sequences(),
    ),
    Evidence(
        "paths",
        "Pathfinder of 32 px, pixel by pixel (LRA), contours of 6 dashes, 2,000 updates",
        "lra",
        "pathfinder",
        None,
        {**PIXELS, "data_settings": {"count": 50_000, "contour_length": 6}},
        sequences(),
    ),
    Evidence(
        "long_listops", "ListOps, 500 to 2,000 tokens, the usual 5,000 updates", "lra", "listops", None, {}, sequences()
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


def cells(names: list[str] | None = None, rows: list[str] | None = None) -> Iterator[Cell]:
    """All runs of these tables and rows, or of all, in their order; ends the script where there are none of a name."""
    tables = [table for table in TABLES if names is None or table.name in names]
    there = {table.name for table in tables} | {row.name for table in tables for row in table.rows}
    if missing := [name for name in (*(names or ()), *(rows or ())) if name not in there]:
        raise SystemExit(f"evidence: there is no {', '.join(missing)}, of {', '.join(sorted(there))}")
    for round in range(max((len(table.seeds) for table in tables), default=0)):
        for table in tables:
            if round < len(table.seeds):
                chosen = (row for row in table.rows if rows is None or row.name in rows)
                yield from (Cell(table, row, table.seeds[round]) for row in chosen)
