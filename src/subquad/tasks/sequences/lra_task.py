"""The Long Range Arena: a sequence, a class."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.attention import ATTENTION, traits_of
from subquad.errors import SubquadError
from subquad.flags import Flag
from subquad.models import load_checkpoint, names_in
from subquad.tasks.accuracy import evaluate
from subquad.tasks.network_costs import count_macs_of
from subquad.tasks.recipe_files import load_recipe
from subquad.tasks.sequences.lra_data import SEQUENCES, load_sequences
from subquad.tasks.sequences.lra_judging import (
    SequenceJudgement,
    TrainedSequences,
    guesses,
    judge_sequences,
    opened_sequences,
)
from subquad.tasks.sequences.lra_published import PUBLISHED
from subquad.tasks.sequences.lra_recipe import LraRecipe
from subquad.tasks.sequences.sequence_network import SequenceClassifier, create_sequence_model
from subquad.tasks.task import Column, KnownResult, Row, Task, in_words

_SET_UP = ("data_settings", "max_length", "max_train_images", "epochs", "updates_per_epoch", "batch_size")
"""The fields of a recipe that say what is learnt, and for how long: published figures are of those of its task."""


class LongRange(Task):
    """Trained by cross-entropy, judged by accuracy."""

    name: ClassVar[str] = "lra"
    title: ClassVar[str] = "A task of the Long Range Arena with several mechanisms and seeds, beside what is published."
    noun: ClassVar[str] = "classifier of sequences"
    recipe_class: ClassVar[type[LraRecipe]] = LraRecipe
    commands: ClassVar[Mapping[str, str]] = {"benchmark": "lra"}
    leading_flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "--task",
            dest="data",
            required=True,
            choices=SEQUENCES,
            help="; ".join(f"{name}, {task.what}" for name, task in SEQUENCES.items()),
        ),
    )
    columns: ClassVar[tuple[Column, ...]] = (Column("top1", "accuracy %"),)
    counted: ClassVar[str] = "accuracy on the held-out sequences"
    examples: ClassVar[str] = "sequences"
    facts: ClassVar[Mapping[str, tuple[type, ...]]] = {"data": (str,), "data_settings": (dict,)}

    def __init__(self, recipe: LraRecipe) -> None:
        given: dict[str, Any] = {"data_dir": recipe.data_dir, "settings": recipe.data_settings}
        given["max_length"] = recipe.max_length
        train = load_sequences(recipe.data, split="train", max_sequences=recipe.max_train_images, **given)
        held_out = load_sequences(recipe.data, split="validation", **given)
        model = self.network(recipe)
        if recipe.initial_checkpoint:
            load_checkpoint(model, recipe.initial_checkpoint)
        super().__init__(recipe, model, train, held_out)

    @classmethod
    def recipe_of(cls, given: Mapping[str, Any], config: str | None = None) -> LraRecipe:
        """A recipe for the task of the arena that is asked for, by its name if there is none else."""
        source = config or cls.default_recipe(given)
        recipe = load_recipe(source, LraRecipe)
        if recipe.data != given["data"]:
            raise SubquadError(
                f"the recipe {source} is for {recipe.data}: leave out --config, or ask for --task {recipe.data}"
            )
        return recipe.replace(**given)

    @classmethod
    def default_recipe(cls, given: Mapping[str, Any]) -> str:
        return str(given["data"])

    @classmethod
    def build(cls, **creation: Any) -> nn.Module:
        return create_sequence_model(**creation)

    @classmethod
    def check_network(cls, recipe: LraRecipe) -> None:
        cls.network(recipe)

    @classmethod
    def network_name(cls, recipe: Mapping[str, Any]) -> str:
        """There is one network for all recipes."""
        return "sequence"

    @classmethod
    def network(cls, recipe: LraRecipe) -> SequenceClassifier:
        """The network of a recipe, with its initial weights.

        Raises:
            SubquadError: for a setting that does not fit, and a mechanism that refuses padding, where data have some.
        """
        what = SEQUENCES[recipe.data]
        for name in names_in(recipe.attention or "softmax") if what.padded else ():
            if reason := traits_of(ATTENTION.get(name)).refuses.get("padding"):
                raise SubquadError(f"the sequences of {recipe.data} have padding, which {name} refuses: {reason}")
        arguments: dict[str, Any] = {
            "attention": recipe.attention or "softmax",
            "vocab_size": recipe.vocab_size or what.symbols,
            "max_length": recipe.max_length,
            "num_classes": what.num_classes,
            "depth": recipe.depth,
            "embed_dim": recipe.embed_dim,
            "num_heads": recipe.num_heads,
            "mlp_ratio": recipe.mlp_ratio,
            "drop_rate": recipe.drop,
            "pairs": what.pairs,
        }
        if twice := arguments.keys() & recipe.settings.keys():
            raise SubquadError(
                f"settings are those of the mechanism, {', '.join(sorted(twice))} is a field of the recipe"
            )
        return create_sequence_model(**arguments, **recipe.settings)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the cross-entropy of tokens (b, n), or of pairs (b, 2, n), and labels (b,)."""
        tokens, labels = batch
        return nn.functional.cross_entropy(model(tokens).float(), labels)

    def judge(self, model: nn.Module, loader: Any, device: torch.device, amp_dtype: torch.dtype | None) -> Row:
        """Mean cross-entropy, and accuracy in percent."""
        count = SEQUENCES[self.recipe.data].num_classes
        found = evaluate(model, loader, device=device, amp_dtype=amp_dtype, num_classes=count)
        return {"loss": found.loss, "top1": found.top1}

    def macs(self) -> int:
        """Count those of a sequence of `max_length` tokens."""
        length = (2, self.recipe.max_length) if self.model.pairs else (self.recipe.max_length,)
        return count_macs_of(self.model, torch.ones(1, *length, dtype=torch.long))

    def metadata(self) -> dict[str, Any]:
        recipe: LraRecipe = self.recipe
        return {
            "task": self.name,
            "classes": list(self.train_images.classes),
            "data": recipe.data,
            "data_settings": dict(recipe.data_settings),
        }

    def describe(self) -> str:
        sizes = f"{len(self.train_images)}+{len(self.eval_images)}"
        return f"{self.recipe.data}, {sizes} of {self.recipe.max_length}"

    @classmethod
    def opened(cls, model: nn.Module, note: Mapping[str, Any], recipe: Mapping[str, Any]) -> TrainedSequences:
        return opened_sequences(model, note, recipe)

    @classmethod
    def evaluate(cls, trained: TrainedSequences, **settings: Any) -> SequenceJudgement:
        """Accuracy on a part of the data."""
        return judge_sequences(trained, **settings)

    @classmethod
    def test(cls, trained: TrainedSequences, *, data_dir: str | None, batch_size: int) -> Row:
        """Accuracy in percent and loss on the test set, and how many sequences it has."""
        found = judge_sequences(trained, data_dir=data_dir, split="test", batch_size=batch_size).result
        return {"top1": found.top1, "loss": found.loss, "count": found.count}

    @classmethod
    def guesses(cls, facts: Mapping[str, Any]) -> dict[str, float]:
        return guesses(facts["data"], facts["data_settings"])

    @classmethod
    def published(cls, facts: Mapping[str, Any]) -> list[KnownResult]:
        return [KnownResult(row.name, row.on(facts["data"]), row.source) for row in PUBLISHED]

    @classmethod
    def unlike_published(cls, facts: Mapping[str, Any]) -> str:
        usual = load_recipe(str(facts["data"]), LraRecipe).to_dict()
        known = [name for name in _SET_UP if name in facts and facts[name] != usual[name]]
        if not known:
            return ""
        others = ", ".join(f"{name} {in_words(facts[name])} in place of {in_words(usual[name])}" for name in known)
        return f"These runs do not compare with what is published, which is of the set-up {facts['data']}: {others}."
