"""Pages of the trained evidence: docs/evidence.md, and the claims that docs/findings.md opens with."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from claims import CLAIMS, Measured, claims_page
from evidence_tables import TABLES, Cell, Evidence, Row, cells

from subquad.analysis.paired_differences import mean_interval
from subquad.analysis.removal import Removal, removed_pairs
from subquad.grid import TokenGrid
from subquad.writing import write_text

Done = Mapping[str, Mapping[str, Any]]
COSTS = {"ms": "ms", "step_images_per_second": "img/s", "step_mb": "MB"}
"""What `--speed` found, by title."""
START, END = "<!-- claims: written by scripts/evidence.py --page -->", "<!-- end of claims -->"
HEAD = """# Evidence

What was trained to judge the papers' claims, written by `python scripts/evidence.py --page` from `docs/evidence.json`.
Means ± standard deviations of the last epoch over so many seeds; *against* is the paired difference to the first row
over the seeds that both have, with its 95 % interval (Student's t) from two seeds on. An empty cell was not trained.
*hours* are no measurement of speed: runs share a machine with other work; *ms* is one, of a pass of one image
(`--speed`, on a quiet machine), as are *img/s* and *MB* of a training step, forward and backward on a batch: what it
holds at once beside the weights, without what a kernel takes and gives back inside itself.

    python scripts/evidence.py --data DATA --code FROZEN
    python scripts/evidence.py --status"""


def status(done: Done) -> str:
    """How much of each table is done."""
    lines = []
    for table in TABLES:
        names = [cell.name for cell in cells([table.name])]
        hours = sum(done[name]["train_seconds"] for name in names if name in done) / 3600
        lines.append(f"{table.name:12}  {sum(name in done for name in names):3} of {len(names):3} runs  {hours:6.1f} h")
    return "\n".join(lines)


def write_pages(done: Done, docs: Path) -> None:
    """Write evidence.md in the folder `docs`, and where there is a findings.md its claims."""
    measured = Measured.read(docs, done)
    write_text(docs / "evidence.md", page(done, measured.scale))
    findings = docs / "findings.md"
    if findings.is_file():
        write_text(findings, with_claims(findings.read_text(), claims_page(CLAIMS, measured)))


def with_claims(text: str, claims: str) -> str:
    """A page whose part between the marks is what is claimed now."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{claims}\n\n{END}{after}"


def page(done: Done, scale: Mapping[str, Any] = MappingProxyType({})) -> str:
    """docs/evidence.md."""
    lines = [HEAD]
    for table in TABLES:
        lines += ["", f"## {table.title}", "", *table_lines(table, done)]
    lines += ["", "## Scale: 256 to 65,536 tokens", "", *scale_lines(scale)]
    return "\n".join(lines) + "\n"


def runs_of(table: Evidence, row: Row, done: Done) -> dict[int, Mapping[str, Any]]:
    """What is done of a row, by seed."""
    names = {seed: Cell(table, row, seed).name for seed in table.seeds}
    return {seed: done[name] for seed, name in names.items() if name in done}


def table_lines(table: Evidence, done: Done) -> list[str]:
    """A table in Markdown, and what it was made with."""
    found = {row.name: runs_of(table, row, done) for row in table.rows}
    runs = [run for row in found.values() for run in row.values()]
    if not runs:
        return ["Not trained yet."]
    first, title = found[table.rows[0].name], runs[0].get("title", runs[0]["metric"])
    # of two classes every image is among the first five
    others = [
        name
        for name in runs[0].get("columns", {})
        if name != title and any(run["columns"].get(name) != 100 for run in runs)
    ]
    against = f"against {table.rows[0].name}"
    names = ["", title, "seeds", against, *others, "parameters", "MACs", *COSTS.values(), "hours"]
    lines = [as_row(names), "|---" + "|---:" * (len(names) - 1) + "|"]
    for row in table.rows:
        own = found[row.name]
        if not own:
            lines.append(as_row([row.name, "", "0", *[""] * (len(names) - 3)]))
            continue
        apart = [own[seed]["value"] - first[seed]["value"] for seed in own if seed in first and own is not first]
        one, hours = next(iter(own.values())), sum(run["train_seconds"] for run in own.values()) / 3600
        beside = [spread([run["columns"][name] for run in own.values() if name in run["columns"]]) for name in others]
        cells_of_row = [row.name, spread([run["value"] for run in own.values()]), str(len(own))]
        cells_of_row += [mean_interval(apart).text if apart else "", *beside]
        cells_of_row += [f"{one['params'] / 1e6:.2f} M", f"{one['macs'] / 1e6:.1f} M"]
        cells_of_row += [three_digits(one[key]) if key in one else "" for key in COSTS] + [f"{hours:.1f}"]
        lines.append(as_row(cells_of_row))
    days = span_of(run["date"] for run in runs)
    devices, versions = ("; ".join(sorted({run[key] for run in runs})) for key in ("device", "torch"))
    equal = equal_cost_lines(table, found) + size_lines(table, found) if table.at_equal_cost else []
    equal += parts_lines(table, found)
    equal += findings_lines(table, found) if table.looked_into else []
    return [*lines, *equal, "", f"{days}, torch {versions}, {devices}."]


def parts_lines(table: Evidence, found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    """What rows that are changed have more or less than the whole mechanism, seed by seed."""
    changed = []
    for row in table.rows:
        own, whole = found[row.name], found[row.whole] if row.whole else {}
        if apart := [own[seed]["value"] - whole[seed]["value"] for seed in own if seed in whole]:
            changed.append(as_row([row.name, row.whole or "", mean_interval(apart).text, str(len(apart))]))
    if not changed:
        return []
    title = "What a mechanism has more or less with a part changed, than whole, over the seeds that both have."
    return ["", title, "", "| | whole | difference | seeds |", "|---|---|---:|---:|", *changed]


def equal_cost_lines(table: Evidence, found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    """What each mechanism reaches at the cost of the first one at each size, from its own sizes around that."""
    timed = all("ms" in run for row in found.values() for run in list(row.values())[:1])
    unit, scale = ("ms", 1.0) if timed else ("macs", 1e-6)
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in table.rows:
        if own := found[row.name]:
            cost = scale * next(iter(own.values()))[unit]
            curves.setdefault(row.attention, []).append((cost, statistics.fmean(run["value"] for run in own.values())))
    first = table.rows[0].attention
    if first not in curves:
        return []
    costs = [cost for cost, _ in curves[first]]
    shown = "ms" if timed else "M MACs"
    lines = ["", f"At equal cost (between sizes, in its logarithm): at {first}'s, in {shown}.", ""]
    lines += [f"| | {' | '.join(f'{cost:.4g}' for cost in costs)} |", "|---" + "|---:" * len(costs) + "|"]
    for name, points in curves.items():
        values = [at_cost(points, cost) for cost in costs]
        lines.append(f"| {name} | {' | '.join('' if value is None else f'{value:.2f}' for value in values)} |")
    return lines


def size_lines(table: Evidence, found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    """What each size of a mechanism has more than others, over the seeds that both have."""
    sizes = {row.name: row.name.rpartition(" ")[2] for row in table.rows}
    order, first = list(dict.fromkeys(sizes.values())), table.rows[0].attention
    titles = [f"{first} at this size", f"{first} {order[-1]}", "its next smaller size", f"its {order[0]}"]
    lines = ["", "What is gained, over the seeds that both have (95 %), against", ""]
    lines += [as_row(["", *titles]), "|---" + "|---:" * len(titles) + "|"]
    for row in table.rows:
        place = order.index(sizes[row.name])
        others = [f"{first} {order[place]}", f"{first} {order[-1]}"]
        others += [f"{row.attention} {order[place - 1]}", f"{row.attention} {order[0]}"] if place else []
        own, told = found[row.name], []
        for other in others:
            apart = [own[seed]["value"] - found[other][seed]["value"] for seed in own if seed in found.get(other, {})]
            told.append(mean_interval(apart).text if apart and other != row.name else "")
        lines.append(as_row([row.name, *told, *[""] * (len(titles) - len(told))]))
    return lines


KINDS, PLACES = ("local", "random"), TokenGrid(8, 8)
"""What keys are removed, and the map of the networks that are looked into."""
MEASURES = ("entropy", "local", "rank", "features", "global", "similarity", "gates", "kernel")


def findings_lines(table: Evidence, found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    """What `--analyze` found: means over layers, their spread over seeds, by the names that `subquad analyze` has."""
    looked = {name: [run["findings"] for run in row.values() if "findings" in run] for name, row in found.items()}
    if not any(looked.values()):
        return []
    titles = [*MEASURES, "confused pairs", "top-1 without 7×7: near, random"]
    near, random = (float(removed_pairs(PLACES, Removal(kind, 7)).sum(1).double().mean()) for kind in KINDS)
    lines = [
        "",
        "Means over layers of what `subquad analyze` calls so. Windows of 7×7 are cut at borders: of 8×8 places",
        f"{near:.0f} go in the mean, and {random:.0f} at random, as a window in the middle leaves 15 others.",
        "",
        f"| | {' | '.join(titles)} |",
    ]
    lines.append("|---" + "|---:" * len(titles) + "|")
    for name, runs in looked.items():
        if not runs:
            continue
        cells_of_row = []
        for measure in MEASURES:
            layers = [run.get("measures", {}).get(measure, []) for run in runs]
            means = [statistics.fmean(some) for values in layers if (some := [v for v in values if v is not None])]
            cells_of_row.append(spread(means, 3))
        cells_of_row.append(spread([run["confused"] for run in runs if "confused" in run], 1))
        removed = [run["removed"] for run in runs if "removed" in run]
        shares = [spread([one[f"{kind} 49"] for one in removed], 1) for kind in KINDS]
        cells_of_row.append(", ".join(share for share in shares if share))
        lines.append(as_row([name, *cells_of_row]))
    return lines


def at_cost(points: Sequence[tuple[float, float]], cost: float) -> float | None:
    """What is reached at a cost, from points (cost, value), straight in the logarithm of the cost; None beyond them."""
    ordered = sorted(points)
    for (low, below), (high, above) in zip(ordered, ordered[1:] or ordered, strict=False):
        if low <= cost <= high:
            share = math.log(cost / low) / math.log(high / low) if high > low else 0.0
            return below + share * (above - below)
    return None


def as_row(cells_of_row: Sequence[str]) -> str:
    """A row of a table in Markdown."""
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells_of_row) + "|"


def span_of(dates: Iterable[str]) -> str:
    """The day, or the first and the last one."""
    days = set(dates)
    return min(days) if len(days) == 1 else f"{min(days)} to {max(days)}"


def three_digits(value: float) -> str:
    """A cost, in whole numbers where these have three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± standard deviation."""
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def scale_lines(scale: Mapping[str, Any]) -> list[str]:
    """What docs/scale.json has, as a table of training steps."""
    if "counted" not in scale:
        return ["Not counted yet."]
    exponents = scale["exponents"]
    lengths = sorted({row["tokens"] for row in scale["counted"]})
    timed = {(row["mechanism"], row["tokens"]): row["ms"] for row in scale.get("timed", []) if row["backward"]}
    counted = {(row["mechanism"], row["tokens"]): row for row in scale["counted"] if row["backward"]}
    titles = [f"{length:,}" for length in lengths]
    dated = f"; timed on {scale['device']}, {span_of(row['date'] for row in scale['timed'])}." if timed else ""
    untimed = [f"{name} at {length:,}" for name in exponents for length in lengths if (name, length) not in timed]
    lines = [
        "A training step (forward and backward) of an attention layer with its projections, one image, fp32: G",
        "multiply-adds / MB that live at once" + (" / ms" if timed else "") + ". Counted of the eager forms, softmax's",
        "being fused; Fourier transforms are in no count. *n^* is fitted over the longest lengths, from a sixteenth of",
        f"the longest on. torch {scale['torch']}" + (dated or "; not timed yet."),
        *([f"Not timed: {', '.join(untimed)} tokens."] if timed and untimed else []),
        "",
        "    python scripts/scale.py            # --time on a quiet machine",
        "",
        f"| | operations | memory | time | {' | '.join(titles)} |",
        "|---|---:|---:|---:|" + "---:|" * len(lengths),
    ]
    for name, own in exponents.items():
        powers = [f"n^{own[key]:.2f}" if own.get(key) is not None else "" for key in ("macs", "peak_mb", "ms")]
        cells_of_row = []
        for length in lengths:
            row, ms = counted[name, length], timed.get((name, length))
            costs = [f"{row['macs'] / 1e9:.3g}", f"{row['peak_mb']:.3g}", *([f"{ms:.3g}"] if ms is not None else [])]
            cells_of_row.append(" / ".join(costs))
        lines.append(as_row([name, *powers, *cells_of_row]))
    return lines
