"""What conversion keeps of a teacher: swapped, aligned, distilled, and trained from nothing for as long.

python scripts/convert_evidence.py TEACHER --data-dir cifar10.tar.xz --output FOLDER [--seeds 0 1 2] [--status]

Every cell (mechanism, seed) is one JSON in FOLDER; what is there is not made again, and what was broken off goes on.
Students get the teacher's training images without labels, and at most a tenth of its updates, half of them alignment
and half distillation. `from scratch` has as many updates, with labels, and the teacher's recipe.
"""

import argparse
import json
import shutil
import statistics
from pathlib import Path

import torch

import subquad
from subquad.attention import ATTENTION, traits_of
from subquad.conversion import Plan, compare_networks, convert_run, convert_without_training
from subquad.data import create_loader
from subquad.reading import read_yaml
from subquad.tasks.classification import images_of
from subquad.text import columns
from subquad.writing import write_json

STEPS = ("swapped", "aligned", "distilled", "from scratch")
SCRATCH = ("epochs", "updates_per_epoch", "warmup_epochs")


def main() -> None:
    """Make the cells that are missing, and print the table of all that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path, help="run folder")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--attention", nargs="+", default=None)
    parser.add_argument("--keep", type=int, nargs="+", default=[0], help="blocks that stay softmax; a table for each")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=None, help="of both fits together; a tenth of the teacher's")
    parser.add_argument("--judged", type=int, default=10_000, help="held-out images")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-scratch", action="store_true")
    parser.add_argument("--status", action="store_true", help="only print what is there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = arguments.attention or [name for name in ATTENTION if not traits_of(ATTENTION[name]).quadratic]
    cells = [(name, keep, seed) for seed in arguments.seeds for keep in arguments.keep for name in names]
    arguments.output.mkdir(parents=True, exist_ok=True)
    if not arguments.status:
        recipe = read_yaml(arguments.teacher / "recipe.yaml")
        # PyTorch's fused attention is slow in bf16 backward at few tokens
        torch.backends.cuda.enable_flash_sdp(False)
        untrained(arguments)
        for cell in cells:
            make(*cell, recipe, arguments)
            print(table(arguments, names), flush=True)
    print(table(arguments, names))


def file_of(name: str, keep: int, seed: int, output: Path) -> Path:
    """Where a cell is kept."""
    safe = name.replace(":", "_").replace("=", "-").replace(",", "_")
    return output / f"{safe}-keep{keep}-seed{seed}.json"


def make(name: str, keep: int, seed: int, recipe: dict, arguments: argparse.Namespace) -> None:
    """One cell: a student and what it was like on the way, and a network of the same kind trained from nothing."""
    file = file_of(name, keep, seed, arguments.output)
    if file.exists():
        return
    total = 50_000 // recipe["batch_size"] * recipe["epochs"]
    updates = arguments.updates or total // 10
    plan = Plan(
        source=str(arguments.teacher),
        images="cifar10",
        data_dir=arguments.data_dir,
        attention=name,
        keep=keep or None,
        align_updates=updates // 2,
        distil_updates=updates - updates // 2,
        batch_size=recipe["batch_size"],
        crop_padding=recipe["crop_padding"],
        amp=True,
        seed=seed,
    )
    folder = arguments.output / f"{file.stem}-work"
    torch.manual_seed(seed)
    made = convert_run(
        plan, folder / "student", max_judged=arguments.judged, log=lambda line: print(f"{file.stem}: {line}")
    )
    cell = {step: one.student_score for step, one in made.steps.items()}
    cell |= {"teacher": next(iter(made.steps.values())).teacher_score, "updates": updates, "seconds": made.seconds}
    cell["agreement"] = made.steps["distilled"].agreement
    if not arguments.no_scratch and not keep:
        cell["from scratch"] = from_scratch(name, seed, updates, recipe, folder / "scratch", arguments)
    write_json(file, cell, indent=1)
    shutil.rmtree(folder)


def from_scratch(
    name: str, seed: int, updates: int, recipe: dict, folder: Path, arguments: argparse.Namespace
) -> float:
    """Top-1 of a network with this mechanism, trained with labels for so many updates by the teacher's recipe."""
    mechanism, _, settings = name.partition(":")
    fields = {key: value for key, value in recipe.items() if key not in SCRATCH and value is not None}
    fields |= {"attention": mechanism, "seed": seed, "compile": False, "data_dir": arguments.data_dir}
    fields.pop("settings", None)
    if settings:
        fields["settings"] = settings
    epochs = 2
    summary = subquad.train(
        None,
        folder,
        **fields,
        epochs=epochs,
        updates_per_epoch=updates // epochs,
        warmup_epochs=0,
        warmup_updates=updates // 16,
        resume=folder.exists(),
    )
    return summary["last_top1"] / 100


def untrained(arguments: argparse.Namespace) -> None:
    """The rows without any training: landmarks, at two numbers of them."""
    file = arguments.output / "without-training.json"
    if file.exists():
        return
    trained = subquad.open_trained(arguments.teacher)
    images = images_of(trained, data_dir=arguments.data_dir)
    # one in five: a pseudo-inverse for each head and image takes its time
    batches = list(create_loader(torch.utils.data.Subset(images, range(0, len(images), 5)), batch_size=200))
    rows = {}
    for side in (4, 7):
        student = convert_without_training(trained.model, (side, side))
        rows[f"Nyström, {side * side} landmarks"] = compare_networks(student, trained.model, batches).student_score
    write_json(file, rows, indent=1)


def table(arguments: argparse.Namespace, names: list[str]) -> str:
    """Top-1 in percent, mean ± standard deviation of the seeds that are there, and what is kept of the teacher."""
    rows = [["attention", "softmax blocks", *STEPS, "kept", "seeds"]]
    for keep in arguments.keep:
        for name in names:
            files = [file_of(name, keep, seed, arguments.output) for seed in arguments.seeds]
            cells = [json.loads(file.read_text()) for file in files if file.exists()]
            if cells:
                kept = statistics.mean(cell["distilled"] / cell["teacher"] for cell in cells)
                figures = [spread([cell[step] for cell in cells if step in cell]) for step in STEPS]
                rows.append([name, str(keep), *figures, f"{kept:.2%}", str(len(cells))])
    without = arguments.output / "without-training.json"
    for name, top1 in json.loads(without.read_text()).items() if without.exists() else ():
        rows.append([name, "0", spread([top1]), "", "", "", "", ""])
    return columns(rows)


def spread(shares: list[float]) -> str:
    """Percent."""
    if not shares:
        return ""
    percent = [100 * share for share in shares]
    return f"{statistics.mean(percent):.2f}" + (f" ± {statistics.stdev(percent):.2f}" if len(percent) > 1 else "")


if __name__ == "__main__":
    main()
