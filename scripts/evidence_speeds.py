"""What networks that were trained cost: milliseconds of an image, images a second of a training step, its memory."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from evidence_tables import Cell, Evidence

from subquad.benchmarks.memory import peak_memory_mb
from subquad.runs import open_trained
from subquad.runs.run_folder import recipe_beside
from subquad.timing import interleaved_ms, timed_pass, warmed_up

REPEATS, STEPS = 15, 5


def measured_speeds(
    table: Evidence, done: Mapping[str, Mapping[str, Any]], runs: Path
) -> dict[str, dict[str, float | int]]:
    """Of the first seed of each row whose folder is in `runs`, by cell; rows take turns.

    *ms* is of a pass of one image; *step_images_per_second* and *step_mb* (what lives at once beside the weights) of a
    training step, forward and backward, on a batch of the recipe's size, where the network classifies images.
    """
    cells = [Cell(table, row, table.seeds[0]) for row in table.rows]
    folders = {cell.name: runs / cell.name for cell in cells if cell.name in done and (runs / cell.name).is_dir()}
    networks = {name: open_trained(folder).image_network() for name, folder in folders.items()}
    if not networks:
        return {}
    device = next(iter(networks.values())).device
    passes = {}
    for name, network in networks.items():
        image = torch.zeros(1, 3, *network.input.img_size, device=device)
        passes[name] = torch.inference_mode()(lambda model=network.model, image=image: model(image))
    costs: dict[str, dict[str, float | int]] = {
        name: {"ms": statistics.median(times)}
        for name, times in interleaved_ms(warmed_up(passes, device)[0], REPEATS, device).items()
    }
    if table.task != "classify":
        return costs
    steps = {}
    for name, network in networks.items():
        size = recipe_beside(folders[name])["batch_size"]
        images = torch.randn(size, 3, *network.input.img_size, device=device)
        model = network.model.train()
        # parameters keep their gradients from here on, so that memory is of the step alone
        step = timed_pass(lambda model=model, images=images: model(images), backward=True)
        steps[name], costs[name]["step_batch"] = step, size
    steps, _ = warmed_up(steps, device)
    for name, times in interleaved_ms(steps, STEPS, device).items():
        costs[name]["step_images_per_second"] = 1000 * costs[name]["step_batch"] / statistics.median(times)
        costs[name]["step_mb"] = peak_memory_mb(steps[name], device)
    return costs
