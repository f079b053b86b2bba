"""By what the runs of a task are compared."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from subquad.errors import SubquadError
from subquad.runs.run_records import Group
from subquad.tasks import TASKS


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


def measure_of(groups: Sequence[Group]) -> Measure:
    """The measure of these runs."""
    tasks = list(dict.fromkeys(group.first.task for group in groups))
    if len(tasks) > 1:
        raise SubquadError(f"runs of different tasks ({', '.join(tasks)}) can't be compared: a page for each")
    if tasks[0] not in TASKS:
        raise SubquadError(f"{groups[0].first.path} is a run of the task '{tasks[0]}', which is not here")
    task = TASKS[tasks[0]]
    measure = Measure(tuple((f"eval_{column.entry}", column.title) for column in task.columns), task.counted)
    runs = [run for group in groups for run in group.runs]
    # detectors without masks have no figures on them
    there = tuple(pair for pair in measure.entries if all(pair[0] in run.rows[0] for run in runs))
    if measure.entries[0] not in there:
        without = next(run.path for run in runs if measure.main not in run.rows[0])
        raise SubquadError(f"{without / 'metrics.jsonl'} is damaged: it has no {measure.main}")
    return replace(measure, entries=there)
