"""One network over several processes, each with a band of rows of every image: docs/tokens-over-processes.md.

Mechanisms sum over all tokens, convolutions see the rows beside their band, tables and rotations are those of the
band's place, prefix tokens stand in the first band, and heads read what all bands have together. Every process gets
the same logits, so that a loss is written as for one process.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from subquad import spread
from subquad.attention.bricks import LocalConv
from subquad.attention.traits import traits_of
from subquad.besides import Network
from subquad.errors import SubquadError, shown
from subquad.grid import TokenGrid
from subquad.large.band_layers import BandConv2d, beside, see_beside
from subquad.large.chunked_blocks import InChunks
from subquad.large.exchanging import BandExchange
from subquad.large.processes import ProcessGroup
from subquad.models.backbone import Backbone
from subquad.ranges import Positive, checks_arguments


def split_tokens(model: Network, mesh: DeviceMesh | dist.ProcessGroup) -> Network:
    """Spread a network's tokens over the processes of `mesh`: each calls it with its band of rows of the same images.

    The network is changed in place: `model(band)` gives the logits of the whole images, the same in every process.
    The loss that is minimised is the mean of all processes' losses: let DistributedDataParallel or FSDP, over all
    processes, average gradients as they do for images. `band_rows` says which rows are whose.

    Args:
        model: a network of `create_model` whose host and mechanisms allow it.
        mesh: one axis of a DeviceMesh, `mesh["tokens"]` say, or a process group. Bands lie in its order from the top.

    Returns:
        The network.

    Raises:
        SubquadError: for a network that can't be spread, in one line with the reason.
    """
    return split_over(model, BandExchange(ProcessGroup(_group_of(mesh))))


def _group_of(mesh: Any) -> dist.ProcessGroup:
    """The processes that an image is spread over.

    Raises:
        SubquadError: none, or not one axis, are named.
    """
    if not dist.is_initialized():
        raise SubquadError(
            "no processes have met: start them by torchrun, and call torch.distributed.init_process_group() first"
        )
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        axis = f"mesh[{names[-1]!r}], say" if names else "name them, mesh_dim_names=(…), and give mesh[NAME]"
        raise SubquadError(f"tokens are spread along one axis of a mesh, and this one has {mesh.ndim}: {axis}")
    group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise SubquadError(
            "tokens are spread over an axis of a DeviceMesh, or a process group that this process is in, got "
            f"{shown(mesh)}"
        )
    return group


def split_over(model: nn.Module, exchange: BandExchange) -> Any:
    """`split_tokens` over whatever answers."""
    check_spreads(model)
    assert isinstance(model, Backbone)
    see_beside(model.modules())
    for stage in model.stages:
        for block in stage.blocks:
            # a block is also called by itself, to be computed again in a backward pass
            entered: list[AbstractContextManager[None]] = []
            block.register_forward_pre_hook(_Enter(exchange, entered))
            block.register_forward_hook(_Leave(entered), always_call=True)
    model.__class__ = type(f"Split{type(model).__name__}", (_Split, type(model)), {"exchange": exchange})
    return model


def check_spreads(model: nn.Module) -> None:
    """Raise a SubquadError where a network can't be spread over processes."""
    if is_split(model):
        raise SubquadError("this network's tokens are spread over processes already")
    if not isinstance(model, Backbone) or not model.spreads or getattr(model, "takes_frames", False):
        raise SubquadError(
            f"{type(model).__name__} can't be spread over processes: it takes networks of subquad whose blocks see "
            "all tokens, as the plain host's and the pyramids' do (docs/tokens-over-processes.md)"
        )
    if any(isinstance(vars(module).get("forward"), InChunks) for module in model.modules()):
        raise SubquadError("blocks in chunks can't be spread over processes as well: take subquad.chunk_mlps")
    # known by what a mechanism has to say: `traits` it may leave out, and does not spread then
    inner = {type(module): module for module in model.modules() if hasattr(type(module), "inputs")}
    names = [traits_of(module).label or cls.__name__ for cls, module in inner.items() if not traits_of(module).spreads]
    if names:
        raise SubquadError(
            f"{' and '.join(names)} attention can't be spread over processes, as it has no sums over tokens that these "
            "could exchange: take a mechanism that has (docs/tokens-over-processes.md)"
        )
    if getattr(model.stages[0].embed, "margin", 0):
        raise SubquadError("images with a margin can't be spread over processes: take image_margin=0")


def is_split(model: nn.Module) -> bool:
    """Whether a network's tokens are spread over processes."""
    return isinstance(model, _Split)


@checks_arguments
def band_rows(model: nn.Module, height: Positive) -> slice:
    """Which rows of images of `height` pixels this process holds, of bands as equal as the network's strides allow.

    Raises:
        SubquadError: for images with fewer strides than there are processes.
    """
    if not isinstance(model, _Split):
        raise SubquadError("bands are those of a network that subquad.split_tokens was called with")
    unit, channel = unit_of(model), model.exchange.channel
    steps = -(-height // unit)
    if steps < channel.count:
        raise SubquadError(
            f"images of {height} rows have {steps} times {unit} rows, too few for {channel.count} processes: take at "
            f"most {steps}, or images of {unit * (channel.count - 1) + 1} rows"
        )
    first, behind = (index * steps // channel.count * unit for index in (channel.index, channel.index + 1))
    return slice(first, min(behind, height))


def unit_of(model: Backbone) -> int:
    """What all bands' heights in pixels are multiples of, but for the last: the stride of the coarsest map."""
    return model.patch_size * 2 ** (len(model.stages) - 1)


def least_rows(model: Backbone) -> int:
    """Pixels that a band between others has at least, so that what is seen beside a band lies in the next one."""
    rows = [1]
    for s, stage in enumerate(model.stages):
        for module in stage.blocks.modules():
            if isinstance(module, BandConv2d):
                rows.append(max(beside(module)) * model.patch_size * 2**s)
            elif isinstance(module, LocalConv):
                rows.append(module.reach * model.patch_size * 2**s)
    return max(rows)


class _Split(Backbone):
    """What a network is besides its own class while its tokens are spread."""

    exchange: BandExchange
    no_streaming = "its tokens are spread over processes: stream the network that it was, with its state_dict"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SubquadError(
            "a network whose tokens are spread over processes can't be pickled, as these are of this run: keep its "
            "state_dict(), or write it by subquad.save_weights"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # within this run, as averages of weights are made
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    def check_pixels(self, x: Tensor) -> None:
        """A band without rows is refused by all processes alike."""

    def check_images(self, x: Tensor) -> None:
        super().check_images(x)
        check_bands(self.exchange.channel.gather(x.shape, x), unit_of(self), least_rows(self))

    def forward(self, x: Tensor) -> Tensor:
        with spread.over(self.exchange):
            return super().forward(x)

    def forward_features(self, x: Tensor) -> Tensor:
        with spread.over(self.exchange):
            return super().forward_features(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        with spread.over(self.exchange):
            return super().forward_head(x, pre_logits)

    def forward_intermediates(self, x: Tensor, *arguments: Any, **named: Any) -> Any:
        with spread.over(self.exchange):
            return super().forward_intermediates(x, *arguments, **named)

    def walk(self, x: Tensor) -> Iterator[tuple[Tensor, TokenGrid]]:
        with spread.over(self.exchange):
            levels = list(super().walk(x))
        yield from levels


def check_bands(shapes: Sequence[Sequence[int]], unit: int, least: int) -> None:
    """Raise, in every process alike, where bands (b, c, y, x) are not those of the same images."""
    if len({(images, channels, width) for images, channels, _, width in shapes}) > 1:
        bands = ", ".join("×".join(map(str, shape)) for shape in shapes)
        raise SubquadError(f"processes hold bands of different images: {bands}; only their heights may differ")
    heights = [height for _, _, height, _ in shapes]
    if not all(heights):
        raise SubquadError(f"bands of {' '.join(map(str, heights))} rows: every process has to hold some")
    if any(height % unit for height in heights[:-1]):
        raise SubquadError(
            f"bands of {' '.join(map(str, heights))} rows: all but the last have to be multiples of {unit}, the stride "
            "of the coarsest map; subquad.band_rows gives such"
        )
    if any(height < least for height in heights[1:-1]):
        raise SubquadError(
            f"bands of {' '.join(map(str, heights))} rows: this network's convolutions look beyond those between "
            f"others unless they have {least} rows; take fewer processes or larger images"
        )


class _Enter:
    """A hook that lets tokens be spread until `_Leave` is called."""

    def __init__(self, exchange: BandExchange, entered: list[AbstractContextManager[None]]) -> None:
        self.exchange, self.entered = exchange, entered

    def __call__(self, *_: object) -> None:
        context = spread.over(self.exchange)
        context.__enter__()
        self.entered.append(context)


class _Leave:
    def __init__(self, entered: list[AbstractContextManager[None]]) -> None:
        self.entered = entered

    def __call__(self, *_: object) -> None:
        self.entered.pop().__exit__(None, None, None)
