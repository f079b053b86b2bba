"""The Long Range Arena: a sequence, a class."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.data.sequences import SEQUENCES, load_sequences
from subquad.errors import SubquadError
from subquad.evaluation import evaluate
from subquad.models.sequence import SequenceClassifier, create_sequence_model
from subquad.training.common import CommonRecipe
from subquad.training.cost import count_macs_of
from subquad.training.fields import option
from subquad.training.task import Row, Task


@dataclass(frozen=True)
class LraRecipe(CommonRecipe):
    """How a classifier of sequences is trained; the defaults are the usual small network."""

    task: ClassVar[str] = "lra"
    command: ClassVar[str] = "lra"
    metric: ClassVar[str] = "top1"
    metric_title: ClassVar[str] = "accuracy %"
    unused: ClassVar[frozenset[str]] = frozenset(
        {"img_size", "patch_size", "drop_path", "mean", "std", "strict", "num_classes"}
        | {"initial_checkpoint", "grad_checkpointing", "layer_decay"}
    )
    hidden: ClassVar[frozenset[str]] = frozenset({"model", "data"})

    model: str = option("sequence", "the classifier of sequences", choices=("sequence",))
    data: str = option("listops", f"task: {', '.join(SEQUENCES)}", choices=SEQUENCES)
    data_dir: str | None = option(None, "folder or archive of CIFAR-10, of IMDb, or of the pairs of AAN", free="a path")
    data_settings: Mapping[str, Any] = option({}, "of generated data: count=20000,longest=512,…")
    max_train_images: int | None = option(None, "train on so many sequences only", at_least=1)
    max_length: int = option(
        2048, "tokens that the network is made for; longer sequences are cut", at_least=1, at_most=2**24
    )
    vocab_size: int | None = option(
        None, "rows of the table of tokens; as many as there are symbols if left out", at_least=1, at_most=2**24
    )
    embed_dim: int | None = option(64, "width", at_least=1, at_most=2**16)
    depth: int | None = option(2, "number of blocks", at_least=1, at_most=10_000)
    num_heads: int | None = option(2, "number of heads", at_least=1, at_most=2**16)
    mlp_ratio: float = option(2.0, "width of the MLPs over that of the network", above=0, at_most=1_000)
    drop: float = option(0.1, "dropout", at_least=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size is not None and self.vocab_size < SEQUENCES[self.data].symbols:
            raise SubquadError(
                f"{self.data} has {SEQUENCES[self.data].symbols} symbols, a vocab_size of {self.vocab_size} is too few"
            )

    def continued(self, run: Path) -> str:
        """There is one command for all runs."""
        return "the same command"


class LongRange(Task):
    """Trained by cross-entropy, judged by accuracy."""

    def __init__(self, recipe: LraRecipe) -> None:
        given: dict[str, Any] = {"data_dir": recipe.data_dir, "settings": recipe.data_settings}
        given["max_length"] = recipe.max_length
        train = load_sequences(recipe.data, split="train", max_sequences=recipe.max_train_images, **given)
        held_out = load_sequences(recipe.data, split="validation", **given)
        super().__init__(recipe, self.network(recipe), train, held_out)

    @classmethod
    def network(cls, recipe: Any) -> SequenceClassifier:
        what = SEQUENCES[recipe.data]
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
        """Cross-entropy."""
        tokens, labels = batch
        return nn.functional.cross_entropy(model(tokens).float(), labels)

    def judge(self, model: nn.Module, loader: Any, device: torch.device, amp_dtype: torch.dtype | None) -> Row:
        """Mean cross-entropy, and accuracy in percent."""
        count = SEQUENCES[self.recipe.data].num_classes
        found = evaluate(model, loader, device=device, amp_dtype=amp_dtype, num_classes=count)
        return {"loss": found.loss, "top1": found.top1}

    def macs(self) -> int:
        """Of a sequence of `max_length` tokens."""
        length = (2, self.recipe.max_length) if self.model.pairs else (self.recipe.max_length,)
        return count_macs_of(self.model, torch.ones(1, *length, dtype=torch.long))

    def metadata(self) -> dict[str, Any]:
        recipe: LraRecipe = self.recipe
        return {
            "task": LraRecipe.task,
            "classes": list(self.train_images.classes),
            "data": recipe.data,
            "data_settings": dict(recipe.data_settings),
        }

    def describe(self) -> str:
        sizes = f"{len(self.train_images)}+{len(self.eval_images)}"
        return f"{self.recipe.data}, {sizes} of {self.recipe.max_length}"

    def words(self, row: Row) -> str:
        average = f" (EMA {row['ema_top1']:.2f})" if "ema_top1" in row else ""
        return f"accuracy {row['eval_top1']:.2f}{average}"
