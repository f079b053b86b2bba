"""transformers' plain encoders (ViT, DINOv2 with and without registers, DINOv3) as what a walk asks of them.

Their blocks are called as they are; positions of some rows are formed here, from the network's table. What fills no
patch at an image's right and lower border is left out, as they do it.

Letters: n tokens, c channels, d channels of a head, p prefix tokens, y x rows and columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.grid import GridRows, TokenGrid
from subquad.inference.transformers_blocks import full_name, is_block_of
from subquad.large.block_walks import check_is_not_heard
from subquad.large.streaming import StreamedBlocks
from subquad.models.stages import ImageRows
from subquad.positions import resample_places, stored_grid


@dataclass(frozen=True)
class Encoder:
    """What is known of a class of encoders.

    Attributes:
        blocks, norm: paths of its blocks, and of the norm behind them.
        block: the class of each, beside its own.
        positions: how the table of its positions is resampled, see `subquad.positions.MATRICES`; None for rotary ones.
    """

    blocks: str
    norm: str
    block: str
    positions: str | None


NETWORKS = {
    f"transformers.models.{name}.modeling_{name}.{cls}": encoder
    for name, cls, encoder in (
        ("vit", "ViTModel", Encoder("layers", "layernorm", "ViTLayer", "sharp bicubic")),
        ("dinov2", "Dinov2Model", Encoder("encoder.layer", "layernorm", "Dinov2Layer", "sharp bicubic")),
        (
            "dinov2_with_registers",
            "Dinov2WithRegistersModel",
            Encoder("encoder.layer", "layernorm", "Dinov2WithRegistersLayer", "bicubic"),
        ),
        ("dinov3_vit", "DINOv3ViTModel", Encoder("model.layer", "norm", "DINOv3ViTLayer", None)),
    )
}
"""The encoders that are known, by the full names of their classes."""

HEADS = {
    "ViTForImageClassification": "token",
    "Dinov2ForImageClassification": "avg",
    "Dinov2WithRegistersForImageClassification": "avg",
}
"""What the heads of networks around them read: the first token alone, or that and the mean of the map."""


def is_plain_of_transformers(model: Any) -> bool:
    """Whether it is one of transformers' plain encoders, or a classifier of one, converted or not."""
    encoder = _encoder_in(model)
    return full_name(type(encoder)) in NETWORKS and (encoder is model or type(model).__name__ in HEADS)


def _encoder_in(model: Any) -> Any:
    """What stands below a head, by the name that transformers gives it; the model itself where it is none."""
    if full_name(type(model)) in NETWORKS:
        return model
    name = getattr(model, "base_model_prefix", "")
    return getattr(model, name, model) if name else model


class TransformersHost:
    """A plain encoder of transformers whose attention layers were converted, and the head on it."""

    def __init__(self, model: Any) -> None:
        self.model, self.encoder = model, _encoder_in(model)
        self.about = NETWORKS[full_name(type(self.encoder))]
        config = self.encoder.config
        self.in_chans, self.num_features = config.num_channels, config.hidden_size
        size = config.patch_size
        self.patch_size: tuple[int, int] = (size, size) if isinstance(size, int) else tuple(size)
        self.global_pool: str | None = HEADS.get(type(model).__name__, "")
        self.num_classes = config.num_labels if self.global_pool else 0
        self.fc_norm: Any = nn.Identity()
        # what reads the mean beside the first token says nothing of a place alone
        self.heads: Sequence[Any] = [model.classifier] if self.global_pool == "token" and self.num_classes else []
        self.embeddings: Any = self.encoder.embeddings
        self.prefix = [self.embeddings.cls_token]
        if (registers := getattr(self.embeddings, "register_tokens", None)) is not None:
            self.prefix.append(registers)
        self.blocks = list(self.encoder.get_submodule(self.about.blocks))
        self._check()

    def _check(self) -> None:
        """Raise a SubquadError where the network has a part that is not known here."""
        name = type(self.model).__name__
        for part in (self.embeddings, self.embeddings.patch_embeddings):
            check_is_not_heard(part)
        wanted = f"{type(self.encoder).__module__}.{self.about.block}"
        if odd := [block for block in self.blocks if not is_block_of(block, wanted)]:
            raise SubquadError(f"{name} can't be streamed: it has {type(odd[0]).__name__}s, not {self.about.block}s")

    def image(self, image: ImageRows) -> ImageRows:
        return image

    def stages(self, size: tuple[int, int]) -> list[StreamedBlocks]:
        height, width = (side // patch for side, patch in zip(size, self.patch_size, strict=True))
        if not height or not width:
            raise SubquadError(f"an image of {size[0]}×{size[1]} px has no patch of {self.patch_size}")
        grid = TokenGrid(height, width, sum(token.shape[1] for token in self.prefix))
        call = partial(_call, self._turns(grid))
        return [StreamedBlocks(grid, self.num_features, self.blocks, self._embed, call, _none, nn.Identity())]

    def normed(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.encoder.get_submodule(self.about.norm)(tokens)
        return y

    def logits(self, tokens: Tensor) -> Tensor:
        read = tokens[:, 0] if self.global_pool == "token" else torch.cat([tokens[:, 0], tokens[:, -1]], dim=-1)
        y: Tensor = self.model.classifier(read)
        return y

    def _embed(self, image: ImageRows, rows: GridRows) -> Tensor:
        """The tokens (1, n, c) that go into the blocks, of some rows."""
        first, behind = (row * self.patch_size[0] for row in (rows.first, rows.behind))
        pixels = image.rows(first, behind)[..., : rows.width * self.patch_size[1]]
        tokens: Tensor = self.embeddings.patch_embeddings(pixels)
        if tokens.dim() == 4:
            tokens = tokens.flatten(2).transpose(1, 2)
        classes, registers = self.prefix[:1], self.prefix[1:]
        if not rows.prefix:
            classes = registers = []
        tokens = torch.cat([*classes, tokens], dim=1)
        if self.about.positions is not None:
            # registers are put between, and stand nowhere
            seen = TokenGrid(rows.whole_height, rows.width, 1).rows(rows.first, rows.behind)
            tokens = tokens + self._positions(seen)
        return torch.cat([tokens[:, : len(classes)], *registers, tokens[:, len(classes) :]], dim=1)

    def _positions(self, rows: TokenGrid) -> Tensor:
        """The rows of its table of positions (1, n, c), which stands on a square, resampled as transformers does it."""
        table: Tensor = self.embeddings.position_embeddings
        assert self.about.positions is not None
        return resample_places(table, stored_grid(table.shape[1], 1), rows, self.about.positions)

    def _turns(self, grid: TokenGrid) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines (y·x, d) of all places; None for a network without rotary positions."""
        if self.about.positions is not None:
            return None
        # of the image its size is read, its device and its dtype
        height, width = (side * patch for side, patch in zip(grid.shape, self.patch_size, strict=True))
        cos, sin = self.encoder.rope_embeddings(self.prefix[0].new_zeros(()).expand(1, 1, height, width))
        return cos, sin


def _call(turns: tuple[Tensor, Tensor] | None, block: Any, x: Tensor, rows: GridRows) -> Tensor:
    """A block with the tokens of some rows, as its network calls it."""
    places = rows.without_prefix
    turned = {} if turns is None else {"position_embeddings": tuple(places.own_tokens(part) for part in turns)}
    y: Tensor = block(x, **turned)
    return y


def _none(block: Any, rows: GridRows) -> None:
    """How tokens turn: what blocks are called with says it."""
