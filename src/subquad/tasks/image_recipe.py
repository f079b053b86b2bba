"""What recipes of networks of images have: a network of the table, its sizes, how images come to it."""

from dataclasses import dataclass
from typing import Any, ClassVar

from subquad.tasks.common_recipe import CommonRecipe
from subquad.tasks.recipe_fields import option


@dataclass(frozen=True)
class ImageRecipe(CommonRecipe):
    """Settings of a training run of a network of `create_model`, or of one that stands on such a backbone."""

    of_network: ClassVar[tuple[str, ...]] = (
        *CommonRecipe.of_network,
        *("patch_size", "embed_dim", "depth", "num_heads"),
    )

    model: str = option("deit_tiny", "model, see `subquad list`", free="`create_model` knows the networks")
    img_size: tuple[int, int] | None = option(
        None, "height,width of the input, one number for a square", at_least=1, at_most=2**16
    )
    patch_size: int | None = option(None, "side of a patch", at_least=1, at_most=2**16)
    num_classes: int | None = option(None, "number of classes; that of the data if left out", at_least=1, at_most=2**24)
    embed_dim: int | None = option(None, "width", at_least=1, at_most=2**16)
    depth: int | None = option(None, "number of blocks", at_least=1, at_most=10_000)
    num_heads: int | None = option(None, "number of heads", at_least=1, at_most=2**16)
    strict: bool = option(False, "stop at a broken image instead of skipping it")

    layer_decay: float | None = option(
        None, "factor of the learning rate from a layer to the one below", above=0, at_most=1
    )
    drop_path: float | None = option(None, "stochastic depth; the model's own rate if left out", at_least=0, below=1)
    mean: tuple[float, float, float] = option(
        (0.485, 0.456, 0.406), "mean of the input channels", at_least=0, at_most=1
    )
    std: tuple[float, float, float] = option((0.229, 0.224, 0.225), "standard deviation of the input channels", above=0)
    grad_checkpointing: bool = option(False, "recompute activations in the backward pass")
    chunk_tokens: int | None = option(
        None, "take blocks some rows of at most so many tokens at a time, and recompute them so", at_least=1
    )

    def optimizer_settings(self) -> dict[str, Any]:
        """Those of all recipes, and the decay from layer to layer."""
        return {**super().optimizer_settings(), "layer_decay": self.layer_decay}
