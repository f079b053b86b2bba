"""Networks that can be streamed, as what a walk asks of them: the plain host and pyramids here, timm's beside.

Letters: n tokens, c channels, p prefix tokens, y x rows and columns.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.grid import GridRows, TokenGrid
from subquad.large.block_walks import check_is_not_heard, reach_of
from subquad.large.place_by_place import PlacesHost
from subquad.large.streaming import StreamedBlocks
from subquad.large.timm_hosts import TimmHost, is_plain_of_timm
from subquad.large.transformers_hosts import TransformersHost, is_plain_of_transformers
from subquad.models.backbone import Backbone
from subquad.models.stages import ImageRows, Stage, feature_width_of
from subquad.rope import Rotation

CAN = (
    "plain hosts and pyramids of a mechanism with a state can (deit_tiny, pvt_tiny and their like), and plain networks "
    "of timm and of transformers (ViT, DINOv2, DINOv3) that subquad.convert has converted"
)
"""What is said where something else is to be streamed."""


class StreamedHost(Protocol):
    """A network that can be streamed.

    Attributes:
        model: the network.
        in_chans: channels of its images.
        num_features: channels of its last tokens.
        num_classes: of its head; 0 for none.
        global_pool: what its head reads of the last tokens: "avg" or "max" of the map, "token", or "" for all of them;
            None where it tells each place by itself and nothing of the image.
        fc_norm: what tokens go through in front of a head.
        heads: what says classes of a token; of several the mean. None without classes.
    """

    model: Any
    in_chans: int
    num_features: int
    num_classes: int
    global_pool: str | None
    fc_norm: Any
    heads: Sequence[Any]

    def image(self, image: ImageRows) -> ImageRows:
        """An image as the network fills it up before it looks at it."""

    def stages(self, size: tuple[int, int]) -> list[StreamedBlocks]:
        """Its blocks for an image of (height, width), those of one grid after the other."""

    def normed(self, tokens: Tensor) -> Tensor:
        """Tokens (1, n, c) of some rows behind its last norm."""

    def logits(self, tokens: Tensor) -> Tensor:
        """What the head says of an image of prefix tokens and one place, (1, p + 1, c): (1, classes)."""


class OwnHost:
    """A network of `create_model`: the plain host, or a pyramid."""

    def __init__(self, model: Backbone) -> None:
        if not model.spreads:
            raise SubquadError(f"{type(model).__name__} can't be streamed: {CAN}")
        self.in_chans = model.in_chans
        self.model: Any = model
        self.num_features, self.num_classes = model.num_features, model.num_classes
        self.global_pool: str | None = model.global_pool
        self.fc_norm: Any = model.fc_norm
        self.heads: Sequence[Any] = [model.head] if model.num_classes else []

    def image(self, image: ImageRows) -> ImageRows:
        return image

    def stages(self, size: tuple[int, int]) -> list[StreamedBlocks]:
        levels = [self.model.feature_info[0]] if self.model.is_plain else self.model.feature_info
        strides = [self.model.patch_size, *[2] * (len(levels) - 1)]
        return [
            _blocks_of(stage, TokenGrid(*grid.shape, stage.grid.prefix), stride, level["num_chs"])
            for stage, grid, stride, level in zip(self.model.stages, self._grids(size), strides, levels, strict=True)
        ]

    def normed(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.model.norm(tokens)
        return y

    def logits(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.model.forward_head(tokens)
        return y

    def _grids(self, size: tuple[int, int]) -> list[TokenGrid]:
        """The grid of each stage, where an embedding may drop what fills no patch."""
        grids = self.model.grids(size)
        height, width = size
        for number, stage in enumerate(self.model.stages):
            if getattr(stage.embed, "drop_remainder", False):
                height, width = height // stage.embed.stride, width // stage.embed.stride
                if not height or not width:
                    raise SubquadError(f"an image of {size[0]}×{size[1]} px is too small for this network's stages")
                grids[number] = TokenGrid(height, width)
        return grids


def host_of(model: nn.Module) -> StreamedHost:
    """What a walk asks of a network.

    Raises:
        SubquadError: it can't be streamed, in one line that says what can.
    """
    host: StreamedHost
    check_is_not_heard(model)
    # what calls a network with images alone is no part of it
    model = getattr(model, "as_it_is_walked", model)
    if reason := getattr(model, "no_streaming", ""):
        raise SubquadError(f"{type(model).__name__} can't be streamed: {reason}")
    if (parts := getattr(model, "place_by_place", None)) is not None:
        about = parts()
        host = PlacesHost(about, host_of(about.backbone))
    elif isinstance(model, Backbone):
        host = OwnHost(model)
    elif is_plain_of_timm(model):
        host = TimmHost(model)
    elif is_plain_of_transformers(model):
        host = TransformersHost(model)
    else:
        raise SubquadError(f"{type(model).__name__} can't be streamed: {CAN}")
    return host


def _blocks_of(stage: Stage, grid: TokenGrid, stride: int, dim: int) -> StreamedBlocks:
    """A stage for an image whose tokens stand on `grid`."""
    of_rows: Any = getattr(stage.embed, "of_rows", None)
    reach = reach_of(stage.embed) if of_rows is None else 0
    if of_rows is not None:
        check_is_not_heard(stage.embed)

    def embed(image: ImageRows, rows: GridRows) -> Tensor:
        if of_rows is None:
            embedded = embedded_rows(stage.embed, image, rows, stride, reach)
        else:
            embedded = of_rows(image, rows.first, rows.behind)
        return stage.placed(embedded, rows)

    def rotation(block: Any, rows: GridRows) -> Rotation | None:
        if stage.rope is None:
            return None
        like = next(block.parameters())
        turned: Rotation = stage.rope(rows, like.device, like.dtype, feature_width=feature_width_of(block))
        return turned

    def call(block: Any, x: Tensor, rows: GridRows) -> Tensor:
        turned = {} if stage.rope is None else {"rotation": rotation(block, rows)}
        y: Tensor = block(x, grid=rows, **turned)
        return y

    return StreamedBlocks(grid, dim, list(stage.blocks), embed, call, rotation, stage.norm, reach)


def embedded_rows(embed: nn.Module, image: ImageRows, rows: GridRows, stride: int, reach: int) -> Tensor:
    """Some rows of what an embedding makes of an image, (1, c, y, x), by `reach` rows more on each side, cut off."""
    seen = rows.widened(reach)
    # with the last row comes what fills no stride, which the embedding reads or drops
    behind = image.shape[0] if seen.behind == rows.whole_height else seen.behind * stride
    y: Tensor = embed(image.rows(seen.first * stride, behind))
    return y[:, :, rows.first - seen.first : rows.behind - seen.first]
