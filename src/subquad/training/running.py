"""One run from the folder's side: it is held, begun or gone on with, and ends in a summary or in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from subquad.data.decoding import DataError
from subquad.errors import InterruptedRunError, SubquadError
from subquad.holding import holding, is_first_process, tidy
from subquad.large.processes import lost_process, shortened
from subquad.runs.run_folder import RunFolder, place_of_data
from subquad.tasks import load_recipe, make_task, task_named
from subquad.tasks.common_recipe import CommonRecipe
from subquad.training.engine import Interruptions, make_accelerator
from subquad.training.journal import Log, silent, summary_numbers
from subquad.training.loop import Trainer
from subquad.training.order import WEIGHTS, seed_all
from subquad.writing import WriteError, write_reason


def train(recipe: CommonRecipe, run: Path | str, *, resume: bool = False, log: Log = silent) -> dict[str, Any]:
    """Train a recipe in the folder `run` and return its summary.

    Args:
        recipe: what to train, one of any task.
        run: a folder that is not there yet; it gets recipe, metrics, weights and summary.
        resume: go on with the run in that folder instead; one that has finished is left as it is.
        log: gets a line an epoch.

    Raises:
        SubquadError: in one line, if the recipe can't be trained, another process writes to the folder, the loss is
            not finite, the disk is full, another process of this run has gone, or the run is interrupted: the folder
            then holds the last whole epoch, and a run that was begun here and has none leaves nothing.
    """
    folder = RunFolder(Path(run))
    if resume:
        folder.check_resumable(recipe)
        if moved := folder.moved_data(recipe):
            log(moved)
        if (summary := folder.summary(summary_numbers(task_named(recipe.task).columns[0].entry))) is not None:
            tidy(folder.path)
            log(f"it has finished: {folder.path} is kept as it is")
            return summary
    attempt = _Attempt(recipe, folder, resume)
    with Interruptions() as interruptions, attempt.in_one_line(), holding(folder.path):
        if is_first_process():
            folder.sweep()
        if not resume:
            folder.check_new()
        with attempt.tidied():
            return attempt.run(interruptions, log)


class _Attempt:
    """To begin a run or to go on with it."""

    def __init__(self, recipe: CommonRecipe, folder: RunFolder, resume: bool) -> None:
        self.recipe, self.folder, self.resume = recipe, folder, resume
        self.trainer: Trainer | None = None

    def run(self, interruptions: Interruptions, log: Log) -> dict[str, Any]:
        """Train from set-up to summary."""
        accelerator = make_accelerator(self.recipe)
        try:
            seed_all(self.recipe.seed, WEIGHTS)
            self.trainer = Trainer(make_task(self._where_data_lie()), self.folder, accelerator, interruptions, log)
            # every process has looked at the folder before the first one writes to it
            accelerator.wait_for_everyone()
            return self.trainer.run(self.resume)
        finally:
            accelerator.free_memory()

    def _where_data_lie(self) -> CommonRecipe:
        """The recipe, with the paths that its run was begun with as they are seen from here; new ones stay."""
        if not self.resume:
            return self.recipe
        begun = load_recipe(self.folder.recipe, type(self.recipe))
        said = {name: getattr(self.recipe, name) for name in ("data", "data_dir")}
        old = {name: place for name, place in said.items() if place == getattr(begun, name)}
        return self.recipe.replace(**{name: place_of_data(self.folder.path, place) for name, place in old.items()})

    @contextmanager
    def tidied(self) -> Iterator[None]:
        """Leave nothing of a run that was begun here and has no whole epoch."""
        try:
            yield
        except BaseException:
            if is_first_process() and not self.resume and not self.folder.state.is_file():
                self.folder.discard()
            raise

    @contextmanager
    def in_one_line(self) -> Iterator[None]:
        """Say what is kept where the block is interrupted, or meets what no recipe can help."""
        try:
            yield
        except KeyboardInterrupt as stop:
            raise InterruptedRunError(f"interrupted: {self._kept()}", stop) from None
        except DataError as error:
            if self.trainer is None or not self.trainer.epochs_done:
                raise
            raise DataError(f"{error}; {self._kept()}") from error
        except WriteError as error:
            raise WriteError(f"{error}; {self._kept()}") from error
        except OSError as error:
            if self.trainer is not None and self.trainer.epochs_done:
                self.folder.check_there()
            where = f"{error.filename}: " if error.filename else ""
            raise SubquadError(f"{where}{error.strerror or error}; {self._kept()}") from error
        except RuntimeError as error:
            if "unable to" in str(error) and (reason := write_reason(error)):
                raise SubquadError(f"no room for what processes share: {reason}; {self._kept()}") from error
            if not lost_process(error):
                raise
            raise SubquadError(f"another process of this run has gone ({shortened(error)}): {self._kept()}") from error

    def _kept(self) -> str:
        """What a run has to go on from."""
        goes_on = f"{task_named(self.recipe.task).continued(self.folder.path)} goes on"
        if not self.folder.state.is_file():
            return f"no epoch is whole yet, {goes_on}" if self.folder.recipe.is_file() else "no epoch is kept"
        if self.trainer is None or not self.trainer.epochs_done:
            return f"its epochs are kept, {goes_on}"
        return f"{self.trainer.epochs_done} of {self.trainer.num_epochs} epochs are kept, {goes_on}"
