"""What conversion keeps of a teacher: swapped, aligned, distilled, and trained from nothing for as long.

python scripts/convert_evidence.py TEACHER --data-dir cifar10.tar.xz --output FOLDER [--seeds 0 1 2] [--status]
python scripts/convert_evidence.py TEACHER --data-dir camvid.tar --output FOLDER [--speed]

TEACHER is the run folder of a classifier or of a segmenter, as `subquad segment train --config camvid_plain` makes it,
or what scripts/timm_teacher.py made (with --no-scratch); what is kept is top-1 or mIoU. Every cell (mechanism, seed) is
one JSON in FOLDER; what is there is not made again, what was broken off goes on, and `from scratch` is added to cells
that were made without it. Students get the teacher's training images without labels, and at most a tenth of its
updates, half of them alignment and half distillation. `from scratch` has as many updates, with labels, and the
teacher's recipe. With --speed nothing is trained: each mechanism is timed at twice the teacher's size, against it.
"""

import argparse
import json
import math
import shutil
import statistics
from pathlib import Path
from typing import Any

import torch

import subquad
from subquad.attention import ATTENTION, traits_of
from subquad.conversion import Plan, compare_networks, convert_run, convert_without_training
from subquad.conversion.conversion_record import REPORT, read_record
from subquad.conversion.conversion_run import open_plan
from subquad.conversion.judged_steps import held_out_of
from subquad.conversion.judging import Comparison
from subquad.conversion.measured_costs import time_in_turns
from subquad.errors import SubquadError
from subquad.reading import read_yaml
from subquad.text import columns
from subquad.writing import write_json

SCRATCH = "from scratch"
STEPS = ("swapped", "aligned", "distilled", SCRATCH)
LENGTHS = ("epochs", "updates_per_epoch", "warmup_epochs", "warmup_updates")
LANDMARKS = (4, 7)
"""Of the rows without training, on a side."""


def main() -> None:
    """Make the cells that are missing, and print the table of all that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path, help="run folder")
    parser.add_argument("--data-dir", required=True, help="where the teacher's data are")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--attention", nargs="+", default=None)
    parser.add_argument("--keep", type=int, nargs="+", default=[0], help="blocks that stay softmax; a table for each")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=None, help="of both fits together; a tenth of the teacher's")
    parser.add_argument("--opt", default=Plan.opt, help="optimizer of both fits")
    parser.add_argument("--align-lr", type=float, default=Plan.align_lr)
    parser.add_argument("--distil-lr", type=float, default=Plan.distil_lr)
    parser.add_argument(
        "--judged", type=int, default=10_000, help="held-out images that a finished student is judged on"
    )
    parser.add_argument("--judged-on-the-way", type=int, default=2000, help="of it before it is finished")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-scratch", action="store_true")
    parser.add_argument("--speed", action="store_true", help="only time at twice the size; wants a machine at rest")
    parser.add_argument("--status", action="store_true", help="only print what is there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = arguments.attention or [name for name in ATTENTION if not traits_of(ATTENTION[name]).quadratic]
    cells = [(name, keep, seed) for seed in arguments.seeds for keep in arguments.keep for name in names]
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.speed and not arguments.status:
        for name in names:
            time_at_twice(name, arguments)
    elif not arguments.status:
        recipe = read_yaml(arguments.teacher / "recipe.yaml")
        # PyTorch's fused attention is slow in bf16 backward at few tokens
        torch.backends.cuda.enable_flash_sdp(False)
        untrained(recipe, arguments)
        for cell in cells:
            try:
                make(*cell, recipe, arguments)
            except SubquadError as error:
                # circulant attention, for one, knows no class token
                print(f"{cell[0]}: {error}", flush=True)
            print(table(arguments, names), flush=True)
    print(table(arguments, names))


def file_of(name: str, keep: int, seed: int, output: Path) -> Path:
    """Where a cell is kept."""
    return output / f"{safe(name)}-keep{keep}-seed{seed}.json"


def safe(name: str) -> str:
    """A mechanism with its settings, as a part of a file's name."""
    return name.replace(":", "_").replace("=", "-").replace(",", "_")


def plan_of(name: str, keep: int, seed: int, recipe: dict, arguments: argparse.Namespace, updates: int = 2) -> Plan:
    """How a student of a cell is made."""
    return Plan(
        source=str(arguments.teacher),
        images=str(recipe["data"]),
        data_dir=arguments.data_dir,
        attention=name,
        keep=keep or None,
        align_updates=updates // 2,
        distil_updates=updates - updates // 2,
        align_lr=arguments.align_lr,
        distil_lr=arguments.distil_lr,
        opt=arguments.opt,
        batch_size=recipe["batch_size"],
        crop_padding=recipe.get("crop_padding") or 0,
        amp=True,
        seed=seed,
    )


def updates_of_epoch(recipe: dict, arguments: argparse.Namespace) -> int:
    """That the teacher made, of all of its training images."""
    pictures = open_plan(plan_of("linear", 0, 0, recipe, arguments)).pictures
    return max(len(pictures) // recipe["batch_size"], 1)


def make(name: str, keep: int, seed: int, recipe: dict, arguments: argparse.Namespace) -> None:
    """One cell: a student and what it was like on the way, and a network of the same kind trained from nothing."""
    file = file_of(name, keep, seed, arguments.output)
    cell = json.loads(file.read_text()) if file.exists() else {}
    with_scratch = not arguments.no_scratch and not keep
    if cell and (SCRATCH in cell or not with_scratch):
        return
    folder = arguments.output / f"{file.stem}-work"
    in_epoch = updates_of_epoch(recipe, arguments)
    if not cell:
        updates = arguments.updates or max(in_epoch * recipe["epochs"] // 10, 2)
        cell = student_cell(name, keep, seed, updates, recipe, folder / "student", arguments)
        write_json(file, cell, indent=1)
    if with_scratch:
        folder.mkdir(exist_ok=True)
        budget = cell["updates"], in_epoch, cell["measure"]
        cell[SCRATCH] = from_scratch(name, seed, *budget, recipe, folder / "scratch", arguments)
        write_json(file, cell, indent=1)
    shutil.rmtree(folder, ignore_errors=True)


def student_cell(
    name: str, keep: int, seed: int, updates: int, recipe: dict, folder: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """What a student keeps of its teacher after each step; what was broken off in its folder is gone on with."""
    plan = plan_of(name, keep, seed, recipe, arguments, updates)
    torch.manual_seed(seed)
    if not (folder / REPORT).exists():
        convert_run(
            plan,
            folder,
            max_judged=min(arguments.judged_on_the_way, arguments.judged),
            log=lambda line: print(f"{folder.parent.stem}: {line}", flush=True),
        )
    made = read_record(folder)
    last = judge_student(folder, plan, arguments)
    print(f"{folder.parent.stem}: {last.text}", flush=True)
    cell: dict[str, Any] = {step: one.student_score for step, one in made.steps.items()}
    cell |= {"distilled": last.student_score, "teacher": last.teacher_score, "agreement": last.agreement}
    cell |= {"measure": last.measure, "images": last.images, "images on the way": made.steps["swapped"].images}
    cell |= {"updates": updates, "seconds": made.seconds}
    return cell | {"opt": plan.opt, "align_lr": plan.align_lr, "distil_lr": plan.distil_lr}


def judge_student(folder: Path, plan: Plan, arguments: argparse.Namespace) -> Comparison:
    """A finished student beside its teacher, on all the held-out images."""
    trained = open_plan(plan).trained
    held_out = held_out_of(trained, plan, arguments.judged)
    figure = {"measure": held_out.measure, "tally": held_out.tally}
    return compare_networks(subquad.open_trained(folder).model, trained.model, held_out.batches(200), **figure)


def from_scratch(
    name: str,
    seed: int,
    updates: int,
    in_epoch: int,
    measure: str,
    recipe: dict,
    folder: Path,
    arguments: argparse.Namespace,
) -> float:
    """What a network with this mechanism comes to, trained with labels for so many updates by the teacher's recipe."""
    mechanism, _, settings = name.partition(":")
    task = subquad.open_trained(arguments.teacher).task
    fields = {key: value for key, value in recipe.items() if key not in LENGTHS and value is not None}
    fields |= {"attention": mechanism, "seed": seed, "compile": False}
    fields["data_dir" if task == "classify" else "data"] = arguments.data_dir
    fields.pop("settings", None)
    if settings:
        fields["settings"] = settings
    epochs = max(2, math.ceil(updates / in_epoch))
    summary = subquad.train(
        None,
        folder,
        task=task,
        **fields,
        epochs=epochs,
        updates_per_epoch=max(updates // epochs, 1),
        warmup_epochs=0,
        warmup_updates=updates // 16,
        resume=folder.exists(),
    )
    return summary[f"last_{measure.lower().replace('-', '')}"] / 100


def untrained(recipe: dict, arguments: argparse.Namespace) -> None:
    """The rows without any training: landmarks, at two numbers of them."""
    file = arguments.output / "without-training.json"
    if file.exists():
        return
    plan = plan_of("linear", 0, 0, recipe, arguments)
    trained = open_plan(plan).trained
    # one in five: a pseudo-inverse for each head and image takes its time
    held_out = held_out_of(trained, plan, max(arguments.judged // 5, 1))
    rows = {}
    for side in LANDMARKS:
        student = convert_without_training(trained.model, (side, side))
        figure = {"measure": held_out.measure, "tally": held_out.tally}
        told = compare_networks(student, trained.model, held_out.batches(200), **figure)
        rows[f"Nyström, {side * side} landmarks"] = told.student_score
    write_json(file, rows, indent=1)


def time_at_twice(name: str, arguments: argparse.Namespace) -> None:
    """Milliseconds of a pass of the teacher and of a student with no trained weights, which cost as much."""
    file = arguments.output / f"speed-{safe(name)}.json"
    if file.exists():
        return
    trained = subquad.open_trained(arguments.teacher)
    height, width = trained.image_network().input.img_size
    size = 2 * height, 2 * width
    student = subquad.convert(trained.model, name)
    ms = time_in_turns({"teacher": trained.model, "student": student.eval()}, size)
    write_json(file, {"px": size, **ms, "gain": ms["teacher"] / ms["student"], "threads": arguments.threads}, indent=1)
    print(f"{name} at {size[0]}×{size[1]}: {ms['teacher'] / ms['student']:.2f} times as fast", flush=True)


def table(arguments: argparse.Namespace, names: list[str]) -> str:
    """Percent, mean ± standard deviation of the seeds that are there, what is kept of the teacher, and the gain."""
    rows = []
    measure = ""
    for keep in arguments.keep:
        for name in names:
            files = [file_of(name, keep, seed, arguments.output) for seed in arguments.seeds]
            cells = [json.loads(file.read_text()) for file in files if file.exists()]
            speed = arguments.output / f"speed-{safe(name)}.json"
            gain = f"{json.loads(speed.read_text())['gain']:.2f}" if speed.exists() and not keep else ""
            if cells:
                measure = cells[0].get("measure", "top-1")
                kept = spread([cell["distilled"] / cell["teacher"] for cell in cells if cell["teacher"]])
                figures = [spread([cell[step] for cell in cells if step in cell]) for step in STEPS]
                rows.append([name, str(keep), *figures, kept, str(len(cells)), gain])
            elif gain:
                rows.append([name, str(keep), *[""] * len(STEPS), "", "0", gain])
    without = arguments.output / "without-training.json"
    for name, score in json.loads(without.read_text()).items() if without.exists() else ():
        rows.append([name, "0", spread([score]), "", "", "", "", "", ""])
    return columns([[f"{measure} of", "softmax blocks", *STEPS, "kept", "seeds", "× as fast"], *rows])


def spread(shares: list[float]) -> str:
    """Percent."""
    if not shares:
        return ""
    percent = [100 * share for share in shares]
    return f"{statistics.mean(percent):.2f}" + (f" ± {statistics.stdev(percent):.2f}" if len(percent) > 1 else "")


if __name__ == "__main__":
    main()
