"""Swin's blocks in anybody's copy: of classifiers, of restoration (SwinIR), of detectors and segmenters.

Liu et al. 2021, arXiv 2103.14030; Liang et al. 2021, arXiv 2108.10257. Their parts have the names of the authors' code
wherever they stand. How a block is told its map differs: by an attribute (`input_resolution`), in the call
(`forward(x, x_size)`), or by its stage, which sets `H` and `W` and hands over a mask. What a block answers is held
against ours with softmax in its place, by a twin (`twins.py`).

Letters: b batch, n tokens of a map, c channels, y x rows and columns.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

from subquad.attention import ATTENTION
from subquad.conversion.converted_attention import ConvertedAttention, channels_into
from subquad.conversion.families.map_attention import MapRecorder
from subquad.conversion.families.twins import OF_LIBRARIES, Remembered, are_equal, random_tokens, twin_of
from subquad.conversion.families.windowed_blocks import BIAS, WithTable
from subquad.conversion.grid_recorder import GridRecorder
from subquad.grid import TokenGrid
from subquad.models.windows import Windows

PARTS = frozenset({"norm1", "attn", "drop_path", "norm2", "mlp"})
OF_ATTENTION = frozenset({"qkv", "proj", "attn_drop", "proj_drop", "softmax"})


class StagesRecorder(MapRecorder):
    """Listens to networks that take images of any size, and say none."""

    usual_size = (224, 224)


class ProvenSwinBlock(WithTable):
    """A block of tokens (b, n, c) of a map of one size, which it says itself."""

    is_anybodys: ClassVar[bool] = True
    pads_first: ClassVar[bool] = True

    @classmethod
    def of_map(cls, block: Any, x: Tensor, grid: TokenGrid, window: TokenGrid) -> Tensor:
        """What such a block, of anybody's class or ours, answers to tokens (b, n, c) of a map, and windows."""
        answers: Tensor = block(x)
        return answers

    def window_of(self, original: Any) -> tuple[int, int]:
        return _pair(original.window_size)

    def shift_of(self, original: Any) -> tuple[int, int]:
        return _pair(original.shift_size)

    @classmethod
    def grid_of(cls, original: Any, grid: TokenGrid) -> TokenGrid:
        return TokenGrid(*_pair(original.input_resolution))

    def kept(self, original: Any) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        for name, part in super().kept(original):
            yield name, part if name != "attn" else self.projections(part)

    def forward(self, x: Tensor) -> Tensor:
        return self.answered(x, self.grid)

    def answered(self, x: Tensor, grid: TokenGrid) -> Tensor:
        """Tokens (b, n, c) of a map behind the block.

        Raises:
            SubquadError: these are not the tokens of that map.
        """
        grid.check(x)
        image = self.through("norm1", x).unflatten(1, grid.shape)
        x = x + self.through("drop_path", self.attended(image).flatten(1, 2))
        return x + self.through("drop_path", self.through("mlp", self.through("norm2", x)))


class ProvenSizedBlock(ProvenSwinBlock):
    """A block that is handed the (height, width) of its map, as SwinIR's."""

    @classmethod
    def of_map(cls, block: Any, x: Tensor, grid: TokenGrid, window: TokenGrid) -> Tensor:
        answers: Tensor = block(x, grid.shape)
        return answers

    def forward(self, x: Tensor, *size: Any, **named: Any) -> Tensor:
        # by whatever name it is handed over
        (shape,) = (*size, *named.values())
        return self.answered(x, TokenGrid(*shape))


class ProvenStagedBlock(ProvenSwinBlock):
    """A block whose stage sets `H` and `W`, as in detectors and segmenters; of the mask it makes its own."""

    # what a stage sets
    H: int
    W: int
    listener: ClassVar[type[GridRecorder]] = StagesRecorder
    is_handed_maps: ClassVar[bool] = True

    @classmethod
    def of_map(cls, block: Any, x: Tensor, grid: TokenGrid, window: TokenGrid) -> Tensor:
        block.H, block.W = grid.shape
        # as stages make it, whether this block shifts its windows or not
        mask = Windows(grid, window, (window.height // 2, window.width // 2)).mask(1, x.device)
        assert mask is not None
        answers: Tensor = block(x, -100.0 * mask[:, 0])
        return answers

    @classmethod
    def grid_of(cls, original: Any, grid: TokenGrid) -> TokenGrid:
        return grid

    @classmethod
    def way_to_map(cls, original: Any) -> Callable[[Tensor], TokenGrid]:
        return lambda x: TokenGrid(original.H, original.W)

    def forward(self, x: Tensor, *mask: Any, **named: Any) -> Tensor:
        return self.answered(x, TokenGrid(self.H, self.W))


def stands_for_windows(block: nn.Module) -> type[ConvertedAttention] | None:
    """The class that stands for a block whose parts are called so, and that computes so; None where it does not."""
    attention: Any = block._modules.get("attn")
    if attention is None or block._modules.keys() != PARTS or type(block).__module__.partition(".")[0] in OF_LIBRARIES:
        return None
    tables = attention._parameters.keys() == {BIAS} and attention._modules.keys() <= OF_ATTENTION
    said = all(hasattr(block, name) for name in ("window_size", "shift_size"))
    if not tables or not said or any("forward" in vars(one) for one in (block, attention)):
        return None
    return _found(block)


def _prove(block: nn.Module) -> type[ConvertedAttention] | None:
    try:
        twin = twin_of(block)
        called_with = len(inspect.signature(twin.forward).parameters)
        kinds = (ProvenSwinBlock,) if called_with == 1 else (ProvenSizedBlock, ProvenStagedBlock)
    except Exception:
        # that is somebody's code, which may say in any way that it can't be copied
        return None
    return next((kind for kind in kinds if _computes(kind, twin)), None)


def _computes(kind: type[ProvenSwinBlock], twin: Any) -> bool:
    """Whether ours answers as a block's twin does, on maps of the sizes that it takes."""
    try:
        height, width = _pair(twin.window_size)
        several = [(2 * height, 3 * width), (3 * height, 2 * width)]
        if kind is ProvenSwinBlock:
            several = [_pair(twin.input_resolution)]
        elif kind is ProvenStagedBlock:
            # filled up to whole windows
            several.append((2 * height - 1, width + 1))
        return all(_agree(kind, twin, TokenGrid(*map_)) for map_ in several)
    except Exception:
        # somebody's code may say in any way that it is called otherwise
        return False


def _agree(kind: type[ProvenSwinBlock], twin: Any, grid: TokenGrid) -> bool:
    ours = kind(twin, ATTENTION["softmax"], grid=grid, recorder=GridRecorder(0)).eval()
    x = random_tokens(2, int(grid.num_tokens), channels_into(twin.attn.qkv))
    window = TokenGrid(*_pair(twin.window_size))
    return are_equal(kind.of_map(ours, x, grid, window), kind.of_map(twin, x, grid, window))


def _pair(value: Any) -> tuple[int, int]:
    """Height and width, of which a number is both."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


_found = Remembered(_prove)
