"""What attention layers cost from 256 to 65,536 tokens, forward and as a training step: docs/scale.json.

    python scripts/scale.py            # multiply-adds and memory, counted: a minute or two, on any machine
    python scripts/scale.py --time     # milliseconds as well; on a quiet machine, goes on where it was

All mechanisms, an attention layer with its projections, width 192, 3 heads, one image, fp32. Exponents are fitted to
the logarithms over 4,096 to 65,536 tokens. `scripts/evidence.py --page` makes the table of docs/evidence.md of it.
"""

import argparse
import json
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from subquad import ATTENTION
from subquad.benchmarks import LONG, count_scaling, describe_device, fitted_exponent, measure_scaling
from subquad.writing import write_json

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    """Count, and time what is not timed yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true", help="time as well")
    parser.add_argument("--device", default="cpu", help="to time on")
    parser.add_argument("--repeats", type=int, default=5, help="of each pass, in turn")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LONG), help="square numbers")
    parser.add_argument("--attention", nargs="+", default=list(ATTENTION))
    parser.add_argument("--output", type=Path, default=DOCS / "scale.json")
    arguments = parser.parse_args()
    found: dict[str, Any] = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
    rows = count_scaling(arguments.attention, arguments.tokens)
    found |= {"counted": [asdict(row) for row in rows], "torch": torch.__version__}
    save(arguments.output, found)
    if not arguments.time:
        return
    where = describe_device(arguments.device)
    if found.get("device", where) != where:
        parser.error(f"{arguments.output} was timed on {found['device']}, not on {where}: name another --output")
    timed = found.setdefault("timed", [])
    for length in sorted(arguments.tokens):
        for backward in (False, True):
            missing = [
                name for name in arguments.attention if (name, length, backward) not in {key_of(row) for row in timed}
            ]
            settings: dict[str, Any] = {"backward": backward, "device": arguments.device, "log": print}
            # it would be timed beside the others, for minutes at these lengths, where it is not asked for
            longest = max(arguments.tokens) if "softmax" in missing else 0
            settings |= {"max_softmax_tokens": longest, "time_budget_s": float("inf")}
            for row in measure_scaling(missing, [length], repeats=arguments.repeats, **settings) if missing else []:
                own = {"mechanism": row.mechanism, "tokens": row.tokens, "backward": backward}
                own["date"] = date.today().isoformat()
                timed.append({**own, "ms": row.block_ms, "spread": row.spread, "measured_mb": row.peak_mb})
            save(arguments.output, {**found, "device": where})


def key_of(row: dict[str, Any]) -> tuple[str, int, bool]:
    """What a row is of."""
    return row["mechanism"], row["tokens"], row["backward"]


def save(path: Path, found: dict[str, Any]) -> None:
    """Write rows and the exponents of training steps."""
    exponents: dict[str, dict[str, float | None]] = {}
    for part, values in (("counted", ("macs", "peak_mb")), ("timed", ("ms",))):
        rows = [row for row in found.get(part, []) if row["backward"]]
        for name in dict.fromkeys(row["mechanism"] for row in rows):
            own = [row for row in rows if row["mechanism"] == name]
            fitted = {value: fitted_exponent((row["tokens"], row[value]) for row in own) for value in values}
            exponents.setdefault(name, {}).update(fitted)
    write_json(path, {**found, "exponents": exponents}, indent=1)
    for name, own in exponents.items():
        print(f"{name:12}" + "".join(f"  {value} n^{power:.2f}" for value, power in own.items() if power is not None))


if __name__ == "__main__":
    main()
