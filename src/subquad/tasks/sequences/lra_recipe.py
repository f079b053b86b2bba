"""How a classifier of sequences is trained on the Long Range Arena."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from subquad.errors import SubquadError
from subquad.tasks.common_recipe import CommonRecipe
from subquad.tasks.recipe_fields import option
from subquad.tasks.sequences.lra_data import SEQUENCES, check_settings


@dataclass(frozen=True)
class LraRecipe(CommonRecipe):
    """How a classifier of sequences is trained; the defaults are the usual small network."""

    task: ClassVar[str] = "lra"
    folder: ClassVar[Path | None] = Path(__file__).parent / "recipes"
    retired: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "model": "sequence",
            "img_size": None,
            "patch_size": None,
            "num_classes": None,
            "strict": False,
            "layer_decay": None,
            "drop_path": None,
            "mean": [0.485, 0.456, 0.406],
            "std": [0.229, 0.224, 0.225],
            "grad_checkpointing": False,
        }
    )

    data: str = option("listops", f"task: {', '.join(SEQUENCES)}", choices=SEQUENCES)
    data_dir: str | None = option(None, "folder or archive of CIFAR-10, of IMDb, or of the pairs of AAN", free="a path")
    data_settings: Mapping[str, Any] = option(
        {}, "of generated data, in place of all the recipe's: count=20000,longest=512,…"
    )
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
        # in front of the first of several runs
        check_settings(self.data, self.data_settings)
        if self.vocab_size is not None and self.vocab_size < SEQUENCES[self.data].symbols:
            raise SubquadError(
                f"{self.data} has {SEQUENCES[self.data].symbols} symbols, a vocab_size of {self.vocab_size} is too few"
            )
