"""By what the runs of a task are compared."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from subquad.errors import SubquadError
from subquad.report.run_records import Group


@dataclass(frozen=True)
class Measure:
    """The entries of a run's rows that say how good it is, each with its title; the first counts.

    Attributes:
        entries: (entry, title) pairs; the higher the better.
        words: the first one, in a sentence.
    """

    entries: tuple[tuple[str, str], ...]
    words: str

    @property
    def main(self) -> str:
        """The entry that counts."""
        return self.entries[0][0]

    @property
    def title(self) -> str:
        """What it is called on an axis."""
        return self.entries[0][1]

    @property
    def short(self) -> str:
        """Without its unit."""
        return self.title.removesuffix(" %")


MEASURES = {
    "classify": Measure((("eval_top1", "top-1 %"), ("eval_top5", "top-5 %")), "top-1 on the held-out images"),
    "detect": Measure(
        (("eval_box_ap", "box AP %"), ("eval_box_ap50", "box AP50 %"), ("eval_mask_ap", "mask AP %")),
        "the average precision of boxes on the held-out images",
    ),
    "lra": Measure((("eval_top1", "accuracy %"),), "accuracy on the held-out sequences"),
    "segment": Measure(
        (("eval_miou", "mIoU %"), ("eval_accuracy", "pixels %"), ("eval_class_accuracy", "classes %")),
        "the mean intersection over union on the held-out images",
    ),
}
"""By task."""


def measure_of(groups: Sequence[Group]) -> Measure:
    """The measure of these runs."""
    tasks = list(dict.fromkeys(group.first.task for group in groups))
    if len(tasks) > 1:
        raise SubquadError(f"runs of different tasks ({', '.join(tasks)}) can't be compared: a page for each")
    if tasks[0] not in MEASURES:
        raise SubquadError(f"{groups[0].first.path} is a run of the task '{tasks[0]}', which has no page")
    measure = MEASURES[tasks[0]]
    runs = [run for group in groups for run in group.runs]
    # detectors without masks have no figures on them
    there = tuple(pair for pair in measure.entries if all(pair[0] in run.rows[0] for run in runs))
    if measure.entries[0] not in there:
        without = next(run.path for run in runs if measure.main not in run.rows[0])
        raise SubquadError(f"{without / 'metrics.jsonl'} is damaged: it has no {measure.main}")
    return replace(measure, entries=there)
