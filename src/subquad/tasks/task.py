"""What a task is: its recipe, data, network, loss, judging, predictions, pictures and columns, behind one protocol.

The class says what is known of a task without a recipe, an object is a recipe made into data and a network. Training,
the commands, the report, analysis and bench ask a task for what they need, and none of them names one. A new task is a
class in a file of its own, and a row in `TASKS`: see docs/design.md.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from PIL import Image
from torch import Tensor, nn

from subquad.data.dataset import PictureDataset
from subquad.errors import SubquadError
from subquad.flags import Flag
from subquad.ranges import Pixels
from subquad.tasks.common_recipe import CommonRecipe
from subquad.tasks.recipe_files import load_recipe
from subquad.tasks.trained import Trained
from subquad.tasks.transformers_network import NetworkOfTransformers

Row = dict[str, float]

ACTIONS = ("train", "compare", "benchmark", "evaluate", "predict")
"""What a task can have a command for; a benchmark is a comparison that ends on a test set, beside what is published."""


@dataclass(frozen=True)
class Column:
    """A figure of a judgement, the higher the better: its entry in a row, and its title in a table."""

    entry: str
    title: str

    @property
    def short(self) -> str:
        """The title without its unit."""
        return self.title.removesuffix(" %")


class Judgement(Protocol):
    """What the evaluation of a trained network comes to."""

    @property
    def text(self) -> str:
        """All of it, for a terminal."""

    def save(self, path: Path) -> list[Path]:
        """Write what does not fit on a terminal beside `path`, and return the files."""


class Predicted(Protocol):
    """What a trained network makes of one file."""

    @property
    def text(self) -> str:
        """The most of it in a line."""


@dataclass(frozen=True)
class Gallery:
    """Some held-out images beside what networks make of them.

    Attributes:
        rows: of an image each, pictures with what they show.
        legend: names of classes with their colours, where colours stand for them.
    """

    rows: list[list[tuple[Image.Image, str]]]
    legend: list[tuple[str, tuple[int, int, int]]]


@dataclass(frozen=True)
class KnownResult:
    """A figure that runs are set beside: what guessing reaches, or what somebody published."""

    name: str
    value: float
    source: str


class Task(ABC):
    """A task, and a recipe for it made into objects, checked before a run begins.

    Attributes:
        name: what it is called in recipes, in weight files and in commands.
        title: what its commands do, in a line.
        noun: what is trained, as in "train a segmenter".
        recipe_class: the recipes that ask for it.
        commands: the words of the command for each of `ACTIONS`; what is left out has no command.
        leading_flags: of the commands that train, in front of those for the recipe's fields.
        evaluation_flags, prediction_flags: further arguments of `evaluate` and `predict`.
        evaluation_help, prediction_help: what these commands do, in a line.
        columns: figures of a judgement that tables show; by the first one the best weights are chosen.
        counted: the first column, in a sentence.
        examples: what there are several of, for people: images, sequences.
        judged_alone: whether what is found in an image depends on those beside it: they are judged one by one then.
        has_gallery: whether `gallery` shows something.
        has_released: whether there are authors' weights of its networks, which commands take by name.
        released_whole: whether these are of networks with a head, which one name stands for: `--pretrained NAME` then,
            where others have `--model NAME --pretrained`.
        heads: names that `bench_network` takes.
        facts: entries that a run's facts must have, with their types.
        of_transformers: what the names of transformers' classes for this task end with.
        foreign_steps: what their processors may do beside, which nothing is shown of here.
        of_smp: whether the networks of segmentation_models_pytorch are for this task.
        recipe: what was asked for.
        model: the network, with its initial weights and its `creation`.
        train_images, eval_images: data sets whose items are None where an image is broken.
        collate, eval_collate: make a batch of items, to train on and to judge by; pairs of images and labels are
            stacked where it is None.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    noun: ClassVar[str]
    recipe_class: ClassVar[type[CommonRecipe]]
    commands: ClassVar[Mapping[str, str]]
    leading_flags: ClassVar[tuple[Flag, ...]] = ()
    evaluation_flags: ClassVar[tuple[Flag, ...]] = ()
    prediction_flags: ClassVar[tuple[Flag, ...]] = ()
    evaluation_help: ClassVar[str] = "Judge trained weights."
    prediction_help: ClassVar[str] = "What trained weights make of files."
    columns: ClassVar[tuple[Column, ...]]
    counted: ClassVar[str]
    examples: ClassVar[str] = "images"
    judged_alone: ClassVar[bool] = False
    has_gallery: ClassVar[bool] = False
    has_released: ClassVar[bool] = False
    released_whole: ClassVar[bool] = False
    heads: ClassVar[tuple[str, ...]] = ()
    facts: ClassVar[Mapping[str, tuple[type, ...]]] = MappingProxyType({})
    of_transformers: ClassVar[tuple[str, ...]] = ()
    foreign_steps: ClassVar[frozenset[str]] = frozenset()
    of_smp: ClassVar[bool] = False

    collate: Callable[[list[Any]], Any] | None = None
    eval_collate: Callable[[list[Any]], Any] | None = None

    def __init__(self, recipe: Any, model: nn.Module, train_images: Any, eval_images: Any) -> None:
        self.recipe: Any = recipe
        self.model: Any = model
        self.train_images, self.eval_images = train_images, eval_images
        for images in (train_images, eval_images):
            if isinstance(images, PictureDataset):
                # before hours of training, and before anything is written
                images.check_any_whole()

    # a recipe

    @classmethod
    def recipe_of(cls, given: Mapping[str, Any], config: str | None = None) -> Any:
        """The recipe that some fields describe, on top of a recipe's name or file, or else of `default_recipe`."""
        cls.check_given_data(given)
        source = config or cls.default_recipe(given)
        base: Any = cls.recipe_class() if source is None else load_recipe(source, cls.recipe_class)
        recipe = base.replace(**given)
        if "model" in given and recipe.model != base.model:
            cls._check_carried_over(base, recipe, given, source)
        return recipe

    @classmethod
    def _check_carried_over(cls, base: Any, recipe: Any, given: Mapping[str, Any], source: str | None) -> None:
        """Raise where another model does not take what a recipe says of its own, which nobody asked for by a flag."""
        silent = cls.recipe_class().to_dict()
        said = {name: value for name, value in base.to_dict().items() if name in base.of_network and name not in given}
        carried = {name: value for name, value in said.items() if value != silent[name]}
        if not carried:
            return
        try:
            cls.check_network(recipe)
        except SubquadError as error:
            try:
                cls.check_network(recipe.replace(**{name: silent[name] for name in carried}))
            except SubquadError:
                # it is wrong by itself, and is refused where it is made
                return
            words = ", ".join(f"{name} {in_words(value)}" for name, value in carried.items())
            raise SubquadError(
                f"the recipe {source} is for {base.model} and says {words}, which {recipe.model} does not take "
                f"({error}): give flags of your own for these, where 'none' leaves one out, and '' settings"
            ) from None

    @classmethod
    def default_recipe(cls, given: Mapping[str, Any]) -> str | None:
        """The name of the recipe for fields without one; None for what the class of recipes has by default."""
        return None

    @classmethod  # noqa: B027 - what a task takes for data is its own affair
    def check_data(cls, data: str | None, data_dir: str | None) -> None:
        """Raise for words for data that can be seen to be wrong without opening these, before what takes long.

        Raises:
            SubquadError: there are no such data.
        """

    @classmethod
    def check_given_data(cls, given: Mapping[str, Any]) -> None:
        """Raise where some fields name two places of data; one of them may be in the place of a recipe's."""
        if given.get("data") and given.get("data_dir"):
            cls.check_data(given["data"], given["data_dir"])

    @classmethod
    def continued(cls, run: Path) -> str:
        """The command that goes on with a run."""
        if "train" not in cls.commands:
            return "the same command"
        return f"subquad {cls.commands['train']} --resume {shlex.quote(str(run))}"

    # a network

    @classmethod
    @abstractmethod
    def build(cls, **creation: Any) -> nn.Module:
        """A network of the arguments that its `creation` holds, but for its entry `task`."""

    @classmethod
    @abstractmethod
    def check_network(cls, recipe: Any) -> None:
        """Raise for a wrong name or setting of a recipe's network, without its data and weights."""

    @classmethod
    def network_name(cls, recipe: Mapping[str, Any]) -> str:
        """What the network of a recipe is called in tables and names of folders."""
        return str(recipe["model"])

    @classmethod
    def bench_network(cls, head: str, backbone: dict[str, Any], px: int) -> nn.Module:
        """A network with one of `heads` on the backbone that `create_model` makes of arguments, for images of a side.

        Raises:
            SubquadError: there are no heads.
        """
        raise SubquadError(f"{cls.name} has no heads to stand on backbones")

    # a run

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch; a batch without images still passes through the network, for the other processes."""

    def size(self, batch: Any) -> int:
        """How many images of a batch could be read."""
        return len(batch[0])

    @abstractmethod
    def judge(self, model: nn.Module, loader: Any, device: torch.device, amp_dtype: torch.dtype | None) -> Row:
        """What the loader's images say about a network, the first column among it; of all processes together."""

    def examine(self) -> list[str]:
        """What is doubtful about the data, in lines, before anything is trained.

        Raises:
            SubquadError: held-out images can't be judged by, which would be seen behind an epoch else.
        """
        return []

    @abstractmethod
    def macs(self) -> int:
        """Multiply-adds of one image."""

    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """What a weight file says beside the arguments of the model."""

    def describe(self) -> str:
        """What is trained on what, in a few words."""
        return f"{self.recipe.data}, {len(self.train_images)}+{len(self.eval_images)} {self.examples}"

    def words(self, row: Row) -> str:
        """A judgement, the entries of a row that begin with eval_ and ema_, in a few words."""
        first = self.columns[0]
        average = f" (EMA {row[f'ema_{first.entry}']:.2f})" if f"ema_{first.entry}" in row else ""
        return f"{first.short} {row[f'eval_{first.entry}']:.2f}{average}"

    # what was trained

    @classmethod
    @abstractmethod
    def opened(cls, model: nn.Module, note: Mapping[str, Any], recipe: Mapping[str, Any]) -> Trained:
        """What is known of a trained network, which is in evaluation mode and on its device.

        Args:
            model: of `build`, with its weights.
            note: of its weight file, with what `metadata` says.
            recipe: what lies beside the file as recipe.yaml; nothing where it lies alone.
        """

    @classmethod
    def foreign_note(cls, classes: Sequence[str], pictures: Mapping[str, Any]) -> dict[str, Any]:
        """What `opened` reads in the note of a weight file, of a network of another library, whose data are not known.

        Args:
            classes: their names; none where it has none, or they are not known.
            pictures: how images are brought to it, the fields of `subquad.data.InputConfig`; of a detector whose images
                differ in size `short_side` and `long_side` too, and what else `ObjectInput` has; of scenes that stay as
                they are the `crop_mode` "none".

        Raises:
            SubquadError: they are brought in a way that the task has not.
        """
        return {"classes": list(classes), "input": dict(pictures)}

    @classmethod
    def called_with_images(cls, network: Any) -> nn.Module:
        """A network of another library, of a class that `of_transformers` names or of `of_smp`, called as ours are."""
        return NetworkOfTransformers(network)

    @classmethod
    def unlike_foreign(cls, name: str) -> str:
        """What is taken instead of a class of transformers that `of_transformers` names; empty where that is taken."""
        return ""

    @classmethod
    def foreign_sizes(cls, said: Mapping[str, Any], img_size: Pixels | None) -> dict[str, Any] | None:
        """To which sizes a processor of transformers brings images, and how, as `foreign_note` takes it.

        None where it is by one size and a crop, as classifiers' do.

        Raises:
            KeyError, and others of its kind: its settings are of another form.
        """
        return None

    @classmethod
    def evaluate(cls, trained: Any, **settings: Any) -> Judgement:
        """Judge a trained network; the arguments are those of `evaluation_flags`, but for --output.

        Raises:
            SubquadError: it can't be judged.
        """
        raise SubquadError(f"networks of `subquad {cls.name}` are judged where they are trained")

    @classmethod
    def predict(
        cls, trained: Any, files: Sequence[Path], log: Callable[[str], None], **settings: Any
    ) -> Iterator[Predicted]:
        """What a trained network makes of files; further arguments are those of `prediction_flags`.

        `log` hears what is skipped, and in the end where files were written.

        Raises:
            SubquadError: it makes nothing of files.
        """
        raise SubquadError(f"networks of `subquad {cls.name}` make nothing of files")

    @classmethod
    def test(cls, trained: Any, *, data_dir: str | None, batch_size: int) -> Row:
        """What the test set says about a trained network, the first column among it, for `commands["benchmark"]`.

        Raises:
            SubquadError: there is no test set.
        """
        raise SubquadError(f"{cls.name} has no test set of its own")

    @classmethod
    def guesses(cls, facts: Mapping[str, Any]) -> dict[str, float]:
        """What the first column of the test set is without looking; `facts` are those of `metadata`."""
        return {}

    @classmethod
    def published(cls, facts: Mapping[str, Any]) -> list[KnownResult]:
        """What is published of the test set; `facts` are those of `metadata`."""
        return []

    @classmethod
    def unlike_published(cls, facts: Mapping[str, Any]) -> str:
        """In a sentence, by what runs are not like those of `published`; empty where nothing is known of that."""
        return ""

    @classmethod
    def gallery(cls, networks: Sequence[tuple[str, Any]], count: int) -> Gallery:
        """Some held-out images beside what networks, each with its label, make of them; where `has_gallery`.

        Raises:
            SubquadError: there is nothing to show.
        """
        raise SubquadError(f"{cls.name} has no pictures of what its networks make of images")


def in_words(value: Any) -> str:
    """A field's value as a flag has it."""
    if value is None or value == {}:
        return "none"
    return ",".join(f"{key}={entry}" for key, entry in value.items()) if isinstance(value, Mapping) else str(value)
