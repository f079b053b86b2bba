"""Claims of the papers, each judged by a rule from what was measured; what was not measured is not judged.

`scripts/evidence.py --page` prints them at the head of docs/findings.md.
"""

import json
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from subquad.analysis.paired_differences import Difference, mean_interval, paired_difference

SEEN, NOT_SEEN, OPPOSITE = "seen", "not seen", "not seen: the opposite is"
ABSENT, UNDECIDED, NOT_TESTABLE = "not trained yet", "not decided yet", "not testable here"

Done = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Judged:
    """A verdict, and what stands beside it: the interval, over how many seeds."""

    verdict: str
    beside: str = ""
    seeds: int = 0


@dataclass(frozen=True)
class Measured:
    """What claims are judged from.

    Attributes:
        done: runs by the names of their cells, docs/evidence.json.
        agentsd: docs/agentsd.json, by network.
        scale: docs/scale.json.
    """

    done: Done
    agentsd: Mapping[str, Any]
    scale: Mapping[str, Any]

    @classmethod
    def read(cls, docs: Path, done: Done) -> "Measured":
        """What stands in a folder of documents."""
        files = (docs / "agentsd.json", docs / "scale.json")
        agentsd, scale = (json.loads(file.read_text()) if file.is_file() else {} for file in files)
        return cls(done, agentsd, scale)

    def values(self, table: str, row: str) -> dict[int, float]:
        """A row's results by seed."""
        start = f"{table}/{row}-s"
        named = {name.removeprefix(start): run for name, run in self.done.items() if name.startswith(start)}
        return {int(seed): float(run["value"]) for seed, run in named.items() if seed.isdigit()}

    def difference(self, table: str, row: str, other: str) -> Difference | None:
        """How much higher a row is than another one, over the seeds that both have; None where there are none."""
        first, second = self.values(table, row), self.values(table, other)
        both = sorted(first.keys() & second.keys())
        return (
            paired_difference(*(torch.tensor([of[seed] for seed in both]) for of in (first, second))) if both else None
        )

    def looks(self, table: str, row: str, of: Callable[[Mapping[str, Any]], float]) -> dict[int, float]:
        """A number of what was found in a row's networks, by seed; those that were not looked into are left out."""
        start = f"{table}/{row}-s"
        runs = {
            name: run["findings"] for name, run in self.done.items() if name.startswith(start) and "findings" in run
        }
        return {int(name.removeprefix(start)): of(found) for name, found in runs.items()}


Rule = Callable[[Measured], Judged]


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper.

    Attributes:
        sentence: that can be true or not.
        paper: with its number and, where it is known, where in it.
        source: the table and cells that it is judged from.
        rule: in words.
        judge: the rule.
    """

    sentence: str
    paper: str
    source: str
    rule: str
    judge: Rule


def verdict_above(difference: Difference, bound: float = 0.0) -> str:
    """Whether all of an interval lies above a bound, or all below."""
    if difference.low > bound:
        return SEEN
    return OPPOSITE if difference.high < bound else NOT_SEEN


def verdict_below(difference: Difference, bound: float = 0.0) -> str:
    """Whether all of an interval lies below a bound, or all above."""
    turned = Difference(-difference.mean, -difference.high, -difference.low, difference.count)
    return verdict_above(turned, -bound)


def by_seeds(difference: Difference | None, bound: float = 0.0, unit: str = "points") -> Judged:
    """A verdict on a difference over seeds: none without a run, and none of a single seed."""
    if difference is None:
        return Judged(ABSENT)
    if difference.count == 1:
        return Judged(UNDECIDED, f"{difference.text} {unit}, one seed, which has no interval", 1)
    beside = f"{difference.text} {unit}, {difference.count} seeds"
    return Judged(verdict_above(difference, bound), beside, difference.count)


def better(table: str, row: str, other: str, *, margin: float = 0.0) -> Rule:
    """A row is above another one by more than a margin, over their seeds."""
    return lambda measured: by_seeds(measured.difference(table, row, other), margin)


def larger_gain(table: str, first: tuple[str, str], second: tuple[str, str]) -> Rule:
    """From one row to another more is gained than from a third one to a fourth, over the seeds that all have."""

    def rule(measured: Measured) -> Judged:
        rows = [measured.values(table, name) for name in (*first, *second)]
        seeds = sorted(set.intersection(*(set(row) for row in rows)))
        gains = [rows[1][s] - rows[0][s] - (rows[3][s] - rows[2][s]) for s in seeds]
        return by_seeds(mean_interval(gains) if gains else None)

    return rule


def of_denoiser(network: str, claim: str) -> Rule:
    """What scripts/agentsd_evidence.py found of a claim."""

    def rule(measured: Measured) -> Judged:
        found = measured.agentsd.get(network, {}).get("claims", {}).get(claim)
        return Judged(ABSENT) if found is None else Judged(found["verdict"], found["beside"])

    return rule


def slopes(most: float, least_of_softmax: float) -> Rule:
    """Costs of all mechanisms but softmax grow with at most such a power of the tokens, and softmax's with more."""

    def rule(measured: Measured) -> Judged:
        found = {name: row["macs"] for name, row in measured.scale.get("exponents", {}).items()}
        if "softmax" not in found:
            return Judged(ABSENT)
        softmax, others = found["softmax"], {name: value for name, value in found.items() if name != "softmax"}
        worst = max(others, key=lambda name: others[name])
        seen = others[worst] <= most and softmax >= least_of_softmax
        beside = f"n^{others[worst]:.2f} at most ({worst}), softmax n^{softmax:.2f}; counted, so without an interval"
        return Judged(SEEN if seen else NOT_SEEN, beside)

    return rule


def fewer_confused(table: str) -> Rule:
    """InLine confuses fewer pairs of queries of an image than linear attention, over seeds."""

    def rule(measured: Measured) -> Judged:
        linear, inline = (measured.looks(table, row, lambda found: found["confused"]) for row in ("linear", "inline"))
        seeds = sorted(linear.keys() & inline.keys())
        fewer = mean_interval([linear[seed] - inline[seed] for seed in seeds]) if seeds else None
        return by_seeds(fewer, unit="pairs an image fewer")

    return rule


def lower_entropy(table: str) -> Rule:
    """With its powers PolaFormer's entropy is lower than with powers of 1, in the layer where it is least so."""

    def least(found: Mapping[str, Any]) -> float:
        plain, learned = found["entropy_with_power"]["1"], found["measures"]["entropy"]
        return min(one - other for one, other in zip(plain, learned, strict=True))

    def rule(measured: Measured) -> Judged:
        lower = list(measured.looks(table, "pola", least).values())
        return by_seeds(mean_interval(lower) if lower else None, unit="of ln N lower, in the layer where it is least")

    return rule


def rising_with_depth(table: str) -> Rule:
    """Maps of the last third of twelve layers of softmax are more like the layer before than those of the first."""

    def rise(found: Mapping[str, Any]) -> float:
        values = [value for value in found["measures"]["similarity"] if value is not None]
        third = max(1, len(values) // 3)
        return statistics.fmean(values[-third:]) - statistics.fmean(values[:third])

    def rule(measured: Measured) -> Judged:
        rises = list(measured.looks(table, "softmax", rise).values())
        return by_seeds(mean_interval(rises) if rises else None, unit="of correlation, last third less first")

    return rule


def or_in_brief(rule_on: Callable[[str], Rule], table: str, small: str = "brief") -> Rule:
    """A rule on a table and, while that has fewer seeds, on the small networks of a brief one, which is said.

    An interval of two seeds is ten times as wide as one of three that differ as much.
    """

    def rule(measured: Measured) -> Judged:
        judged, brief = (rule_on(name)(measured) for name in (table, small))
        if brief.verdict == ABSENT or judged.seeds >= brief.seeds > 0:
            return judged
        if brief.seeds == 0 and (judged.verdict not in (ABSENT, UNDECIDED) or judged.verdict == brief.verdict):
            return judged
        return Judged(brief.verdict, f"{brief.beside}, small networks (CIFAR-10 in brief)", brief.seeds)

    return rule


def until(judge: Rule, before: str) -> Rule:
    """A rule, and until it can be judged what one seed before the campaign showed, which decides nothing."""

    def rule(measured: Measured) -> Judged:
        judged = judge(measured)
        return Judged(UNDECIDED, f"{before}; one seed, which has no interval") if judged.verdict == ABSENT else judged

    return rule


def always(verdict: str, beside: str) -> Rule:
    """Of which nothing that is measured here can say more."""
    return lambda measured: Judged(verdict, beside)


CLAIMS = (
    Claim(
        "InLine attention confuses fewer queries than linear attention does.",
        "InLine, arXiv 2412.06590 (injectivity)",
        "evidence.md, CIFAR-10: confused pairs of inline and linear (or in brief); until then the table below",
        "fewer pairs of an image",
        until(or_in_brief(fewer_confused, "cifar10"), "2.2 against 57.5, softmax 7.3, 2,000 images"),
    ),
    Claim(
        "InLine attention rests on centring its keys, by which rows sum to 1.",
        "InLine, arXiv 2412.06590, eq. 5",
        "evidence.md, ablations (or in brief): inline, inline_uncentred",
        "top-1 is higher with it",
        or_in_brief(lambda table: better(table, "inline", "inline_uncentred"), "ablations"),
    ),
    Claim(
        "What linear attention lacks is locality: a depthwise branch gains more than a better formula beside it.",
        "InLine, arXiv 2412.06590, eq. 6; FLatten, arXiv 2308.00442",
        "evidence.md, ablations (or in brief): linear, linear_localtrue, inline",
        "linear to linear with the branch gains more top-1 than from there to InLine",
        or_in_brief(
            lambda table: larger_gain(table, ("linear", "linear_localtrue"), ("linear_localtrue", "inline")),
            "ablations",
        ),
    ),
    Claim(
        "Agent attention is more accurate than softmax.",
        "Agent Attention, arXiv 2312.08874 (classification)",
        "evidence.md, CIFAR-10 (or in brief): agent, softmax",
        "top-1 is higher",
        or_in_brief(lambda table: better(table, "agent", "softmax"), "cifar10"),
    ),
    Claim(
        "Linear attention needs similarities of opposite signs, not of equal ones alone.",
        "PolaFormer, arXiv 2501.15061, eq. 5-8",
        "evidence.md, ablations (or in brief): pola, pola_one_sided",
        "top-1 is higher with both",
        or_in_brief(lambda table: better(table, "pola", "pola_one_sided"), "ablations"),
    ),
    Claim(
        "Powers above 1 lower the entropy of linear attention.",
        "PolaFormer, arXiv 2501.15061 (entropy)",
        "evidence.md, CIFAR-10 (or in brief): pola, with its powers and with others; until then the table below",
        "lower in every layer than with powers of 1, nothing else changed",
        until(or_in_brief(lower_entropy, "cifar10"), "0.78 to 0.83 of ln N against 0.97 to 0.98"),
    ),
    Claim(
        "Deep layers are saturated: their attention is that of the layer before.",
        "LaViT, arXiv 2406.00427",
        "evidence.md, twelve blocks (or in brief): softmax, likeness to the layer before; until then the table below",
        "higher in the last third of the layers than in the first",
        until(or_in_brief(rising_with_depth, "deep", "brief_deep"), "0.1 or less in every layer, 6 layers"),
    ),
    Claim(
        "Sub-quadratic attention costs as many operations as the tokens are; softmax their square.",
        "all of them",
        "scale.json: multiply-adds of a layer, forward and backward, 4,096 to 65,536 tokens",
        "exponents of at most 1.1 for all others, at least 1.8 for softmax; Fourier transforms are not counted",
        slopes(1.1, 1.8),
    ),
    Claim(
        "Agents can stand in a trained diffusion network without training, in its early steps.",
        "Agent Attention, arXiv 2312.08874, section 4.4 (AgentSD)",
        "agentsd.md: Fréchet distance of the published schedule, U-Net",
        "the distance to real images is at most 5 % higher than with softmax",
        of_denoiser("unet", "training-free"),
    ),
    Claim(
        "The published accuracies on ImageNet at 224 px are reached when they are trained again.",
        "all of them",
        "none: 300 epochs of 1.3 M images are beyond these machines; released weights reach them (weights.md)",
        "within 0.3 points",
        always(NOT_TESTABLE, "no interval"),
    ),
)
"""The ten that docs/findings.md opens with."""


def claims_page(claims: Sequence[Claim], measured: Measured) -> str:
    """A numbered list in Markdown: a sentence, the verdict, what is beside it, and what it is judged by."""
    lines = []
    for number, claim in enumerate(claims, start=1):
        judged = claim.judge(measured)
        beside = f": {judged.beside}" if judged.beside else ""
        said = f"{claim.sentence} **{judged.verdict[0].upper()}{judged.verdict[1:]}**{beside}."
        why = f"*{claim.paper}. Judged from {claim.source}. Rule: {claim.rule}.*"
        start, inside = f"{number}. ", " " * len(f"{number}. ")
        lines += [wrapped(said, start, inside), "", wrapped(why, inside, inside), ""]
    return "\n".join(lines).rstrip()


def wrapped(text: str, start: str, inside: str) -> str:
    """Lines that are no longer than those of this project."""
    return textwrap.fill(text, 120, initial_indent=start, subsequent_indent=inside, break_on_hyphens=False)
