"""What `agentsd_evidence.py` measured, in numbers and as docs/agentsd.md."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from claims import verdict_above, verdict_below
from torch import Tensor

from subquad.analysis.frechet import frechet_difference, frechet_distance
from subquad.analysis.paired_differences import Difference, paired_difference, relative_rise

WORSE = 0.05
"""How much larger a Fréchet distance may be than softmax's to count as no worse, of softmax's."""

HEAD = """# Agents and token merging in denoising networks, measured

Written by `python scripts/agentsd_evidence.py page` from `docs/agentsd.json`. A small U-Net like Stable Diffusion's
(self-attention at 32×32 and 16×16 tokens) and a small DiT (16×16), trained with softmax on CIFAR-10; then agents or
merging are put in without training, or another mechanism with a short fine-tuning. All methods get the same test images
and the same noise, so that differences are paired; intervals are of 95 %, by Student's t over images, of Fréchet
distances by 200 resamples of the noises. *Early* are noise levels from 600 of 1,000 up, where the authors' schedule has
agents. What is *tuned* was trained longer: its yardstick is *softmax, tuned*. Fréchet distances are of a classifier of
ours and compare with nothing published. *tune* is for `inline`, `agent` and, to compare with, `softmax`;
RUN is `runs/evidence/cifar10/softmax-s0` of `scripts/evidence.py`, or another classifier of CIFAR-10.

    python scripts/agentsd_evidence.py train --data cifar10.tar.xz --network unet     # and dit
    python scripts/agentsd_evidence.py tune --data cifar10.tar.xz --network unet --attention inline
    python scripts/agentsd_evidence.py measure --data cifar10.tar.xz --network unet --classifier RUN
    python scripts/agentsd_evidence.py page
"""
NAMES = {"unet": "U-Net", "dit": "DiT"}
Errors = Mapping[str, Mapping[int, Tensor]]


def read_results(path: Path) -> dict[str, Any]:
    """What was found of each network; nothing where there is no file yet."""
    return json.loads(path.read_text()) if path.is_file() else {}


def summary(errors: Errors, made: Mapping[str, Tensor], features: Mapping[str, Tensor], switch: int) -> dict[str, Any]:
    """What is kept of measurements.

    Args:
        errors: of each image by method and noise level, softmax's among them.
        made: images by method, of the same noises.
        features: of these and, by the name "", of real images; empty without a classifier.
        switch: the noise level from which on a step is early.
    """
    phases = {name: [level for level in errors["softmax"] if (level >= switch) == is_early] for name, is_early in SIDES}
    rises = {
        name: {
            phase: relative_rise(_mean(own, levels), _mean(errors[yardstick_of(name, errors)], levels))
            for phase, levels in phases.items()
        }
        for name, own in errors.items()
        if name != "softmax"
    }
    found: dict[str, Any] = {
        "errors": {
            name: {
                "levels": {level: float(values.double().mean()) for level, values in own.items()},
                **{phase: _as_list(rise) for phase, rise in rises.get(name, {}).items()},
            }
            for name, own in errors.items()
        },
        "samples": {name: {} for name in made},
    }
    apart = {name: _distances(pictures, made["softmax"]) for name, pictures in made.items() if name != "softmax"}
    for name, distances in apart.items():
        found["samples"][name]["distance"] = float(distances.mean())
    if features:
        for name in made:
            found["samples"][name]["frechet"] = frechet_distance(features[name], features[""])
        for name in apart:
            difference = frechet_difference(features[name], features[yardstick_of(name, made)], features[""])
            found["samples"][name]["frechet_difference"] = _as_list(difference)
    return found | {"claims": _claims(errors, phases, apart, found["samples"])}


SIDES = ("early", True), ("late", False)


def yardstick_of(name: str, measured: Mapping[str, Any]) -> str:
    """What a method is compared with: softmax, tuned as long where it was tuned."""
    other = "softmax, tuned"
    return other if name.endswith(", tuned") and name != other and other in measured else "softmax"


def _claims(
    errors: Errors, phases: Mapping[str, list[int]], apart: Mapping[str, Tensor], samples: Mapping[str, Any]
) -> dict[str, dict[str, str]]:
    """The verdicts, each with what it is of."""
    claims = {}
    ours, merged, base = errors["agents 40 %"], errors["merging 40 %"], errors["softmax"]
    of_base = {phase: _mean(base, levels) for phase, levels in phases.items()}
    rise = {phase: (_mean(ours, levels) - of_base[phase]) / of_base[phase].mean() for phase, levels in phases.items()}
    more = paired_difference(rise["late"], rise["early"])
    claims["early steps bear agents better"] = _claim(
        verdict_above(more), "the error rises more late than early by", more
    )
    against = paired_difference(_mean(ours, phases["early"]), _mean(merged, phases["early"]))
    against = against.over(float(of_base["early"].mean()))
    claims["agents cost less than merging as much"] = _claim(
        verdict_below(against), "agents' error less merging's at 40 %, early, of softmax's error", against
    )
    further = paired_difference(apart["agents 40 %, early steps"], apart["agents 40 %, late steps"])
    claims["early steps matter most"] = _claim(
        verdict_above(further), "colours from those of softmax's image (of 255), early less late", further, share=False
    )
    if "frechet" in samples["softmax"]:
        own, distance = samples["softmax"]["frechet"], Difference(*samples["as published"]["frechet_difference"])
        claims["training-free"] = _claim(
            verdict_below(distance.over(own), WORSE), "Fréchet distance more than softmax's, of it,", distance.over(own)
        )
    return claims


def _claim(verdict: str, what: str, difference: Difference, *, share: bool = True) -> dict[str, str]:
    return {
        "verdict": verdict,
        "beside": f"{what} {in_percent(difference) if share else difference.text}, {difference.count} images",
    }


def page(results: Mapping[str, Any]) -> str:
    """docs/agentsd.md."""
    lines = [HEAD]
    for network, name in NAMES.items():
        lines += [f"## {name}", ""]
        lines += _of_network(network, results[network]) if network in results else ["Not trained yet.", ""]
    return "\n".join(lines)


def _of_network(network: str, found: Mapping[str, Any]) -> list[str]:
    said = f"{found['updates']:,} updates ({found['hours']} h), {found['test_images']:,} test images, "
    said += f"{found['made_images']:,} images made"
    lines = [*(["**A toy: it says nothing.**", ""] if found["toy"] else []), f"{said}, torch {found['torch']}.", ""]
    lines += ["| claim | | |", "|---|---|---|"]
    lines += [f"| {claim} | {one['verdict']} | {one['beside']} |" for claim, one in found["claims"].items()]
    levels = list(found["errors"]["softmax"]["levels"])
    lines += ["", "Error of the predicted noise; how much it rises over softmax's, and at each noise level.", ""]
    lines += [f"| method | early | late | {' | '.join(map(str, levels))} |", "|---|---:|---:|" + "---:|" * len(levels)]
    base = found["errors"]["softmax"]["levels"]
    for name, own in found["errors"].items():
        phases = [in_percent(Difference(*own[phase])) if phase in own else "" for phase, _ in SIDES]
        values = [
            f"{value:.4f}" if name == "softmax" else f"{100 * (value / base[level] - 1):+.2f} %"
            for level, value in own["levels"].items()
        ]
        lines.append(f"| {name} | {' | '.join([*phases, *values])} |")
    lines += ["", "Images of the same noises: how far each is from softmax's image (root mean square of 255), and the"]
    lines += [
        "Fréchet distance of all from real ones.",
        "",
        "| method | from softmax's | Fréchet | more than softmax's |",
    ]
    lines.append("|---|---:|---:|---:|")
    for name, own in found["samples"].items():
        distance, frechet = (f"{own[key]:.2f}" if key in own else "" for key in ("distance", "frechet"))
        more = Difference(*own["frechet_difference"]).text if "frechet_difference" in own else ""
        lines.append(f"| {name} | {distance} | {frechet} | {more} |")
    return [*lines, "", f"![images of the same noises](agentsd-{network}.png)", ""]


def in_percent(difference: Difference) -> str:
    """A share of something, with its interval."""
    mean, low, high = (100 * value for value in (difference.mean, difference.low, difference.high))
    return f"{mean:+.2f} % ({low:+.2f} to {high:+.2f})"


def _mean(errors: Mapping[int, Tensor], levels: list[int]) -> Tensor:
    """Of each image over noise levels."""
    return torch.stack([errors[level].double() for level in levels]).mean(dim=0)


def _distances(pictures: Tensor, others: Tensor) -> Tensor:
    """Of each pair of images in bytes, the root of the mean squared difference of a colour."""
    return (pictures.double() - others.double()).square().flatten(1).mean(dim=1).sqrt()


def _as_list(difference: Difference) -> list[float]:
    return [difference.mean, difference.low, difference.high, difference.count]
