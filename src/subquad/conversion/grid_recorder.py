"""How the grid of an image reaches attention layers that are handed tokens alone: a hook on the patch embedding."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from subquad.conversion.checkpointed_calls import CALL_LISTENERS, CallMemory, Standing, in_backward
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.tracing import is_traced, surely

REPLACED = "was replaced after the conversion: replace it before subquad.convert"

COMPUTED_AGAIN = (
    "are computed again for their gradient, what they came from was kept elsewhere, and images of two shapes had as "
    "many: keep it where it is, without hooks that move saved tensors, switch gradient checkpointing off, "
    "or take shapes of different numbers of tokens"
)


COMPILED_ALONE = (
    "tokens in turns, through blocks that are compiled without the patch embedding: where gradient checkpointing "
    "computes such a block again behind images of the other shape, its gradients are wrong. Compile the network as a "
    "whole, go backward before the other shape comes, or do not compile or not checkpoint the blocks"
)


class GridRecorder:
    """Listens to a patch embedding, a convolution, and says on which grid the tokens of a call stand.

    One is shared by the converted layers of a network. It is an object, not a closure, so that a copied or pickled
    network has its own. Threads that call one network at a time, as those of a server or of `nn.DataParallel`, each
    have the grid of their own image.

    Args:
        prefix: tokens in front of the map, which stand nowhere.

    Attributes:
        in_front: whether it hears what the module is called with, before that runs; what it gives, else.
        usual_size: (height, width) of the images of networks that do not say what they are made for; None where such a
            network is to be told.
    """

    usual_size: ClassVar[tuple[int, int] | None] = None
    in_front: ClassVar[bool] = False

    def __init__(self, prefix: int) -> None:
        self.prefix = prefix
        self._map: TokenGrid | None = None
        self._by_thread: dict[int, TokenGrid] = {}
        self._rows: dict[int, TokenGrid] = {}
        self._earlier: dict[Any, TokenGrid | None] = {}
        # whether the last image was embedded by compiled code, and whether such code read of one that was not
        self._embedded_compiled = self._read_alone = False
        self.calls = CallMemory()

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        """Whether this module knows where tokens stand: a convolution that cuts an image into patches."""
        return isinstance(module, nn.Conv2d) and module.stride == module.kernel_size and module.stride[0] > 1

    @classmethod
    def map_from(cls, embedding: Any, size: Any) -> tuple[int, int]:
        """Rows and columns of tokens of an image, or in diffusers' networks a latent, of this (height, width).

        Raises:
            SubquadError: it is smaller than a patch.
        """
        height, width = (
            (length + 2 * padding - embedding.kernel_size[axis]) // embedding.stride[axis] + 1
            for axis, (length, padding) in enumerate(zip(size, _paddings(embedding), strict=True))
        )
        if min(height, width) < 1:
            raise SubquadError(f"images of {size[0]}×{size[1]} px hold no patch of {embedding.kernel_size}")
        return height, width

    @classmethod
    def most_sides(cls, embedding: nn.Module) -> int:
        """How many sides an image may have by which `map_from` is asked; of volumes and films three."""
        return 2

    @classmethod
    def size_of(cls, network: nn.Module, embedding: nn.Module) -> tuple[int, ...] | None:
        """What `map_from` is to know of the images of a network that does not say which it is made for."""
        return cls.usual_size

    @classmethod
    def whole_size(cls, config: Any, size: tuple[int, ...]) -> tuple[int, ...]:
        """All that `map_from` is to know of images of this (height, width), from how the network is configured."""
        return size

    def __call__(self, module: Any, arguments: Any, image: Tensor) -> None:
        """What a forward hook of the embedding is called with; its output is a map (b, c, y, x).

        Raises:
            SubquadError: it is none, as of one image without a batch, or as the embedding was replaced since the
                conversion.
        """
        if isinstance(module, nn.Conv2d) and isinstance(image, Tensor) and image.dim() == 3:
            raise _no_batch(module, arguments[0])
        if not isinstance(image, Tensor) or image.dim() != 4:
            kind = type(module).__name__
            raise SubquadError(f"the patch embedding, now a {kind} that gives no map (b, c, y, x), {REPLACED}")
        self.record(TokenGrid(image.shape[-2], image.shape[-1]))

    def hook_onto(self, module: nn.Module) -> RemovableHandle:
        """Listen to a module, whose calls are told from the next one on."""
        if self.in_front:
            return module.register_forward_pre_hook(self, with_kwargs=True)  # type: ignore[arg-type]
        return module.register_forward_hook(self)

    def record(self, grid: TokenGrid) -> None:
        """The next tokens stand on `grid`, a map without prefix tokens."""
        if is_traced() and not torch.compiler.is_dynamo_compiling():
            # symbols, and of nobody else
            self._by_thread[get_ident()] = grid
            return
        self._embedded_compiled = is_traced()
        before = None if self._embedded_compiled else self._map
        self._map = grid
        if is_traced():
            # layers that are not compiled with the embedding read the same
            self._by_thread = {}
        else:
            self._by_thread[get_ident()] = grid
            places = int(grid.num_places)
            # where its block's call is not known, the number of tokens is to tell what a layer is computed again for
            self._earlier[places] = grid if self._earlier.get(places, grid) == grid else None
            if self._read_alone and before is not None and torch.is_grad_enabled() and not in_backward():
                self._warn_of_turns(before, grid)
            self.calls.embedded(Standing(grid, self.prefix))

    def _warn_of_turns(self, before: TokenGrid, grid: TokenGrid) -> None:
        """Warn where compiled code, which can't ask whose tokens it computes again, could take these for the others."""
        if before.num_places == grid.num_places and before != grid:
            warnings.warn(f"images of {before} and {grid} {COMPILED_ALONE}", stacklevel=2)

    @property
    def last_standing(self) -> Standing | None:
        """Where the tokens of this thread's last image stand."""
        return None if self._last is None else Standing(self._last, self.prefix)

    @property
    def present(self) -> Tensor | None:
        """(b, n), True for the tokens of the last images that stand on their maps; None where all do."""
        return None

    @contextmanager
    def standing_on(self, rows: TokenGrid) -> Iterator[None]:
        """Inside this context all tokens of this thread stand on these rows of a grid, whatever was embedded."""
        here = get_ident()
        before, self._rows[here] = self._rows.get(here), rows
        try:
            yield
        finally:
            del self._rows[here]
            if before is not None:
                self._rows[here] = before

    def grid_of(self, tokens: Tensor, prefix: int | None = None) -> TokenGrid:
        """The grid of tokens (b, n, c), prefix tokens in front: those of the embedding, unless `prefix` says otherwise.

        Raises:
            SubquadError: nothing was embedded yet, or these tokens are not those of the image.
        """
        if (rows := self._rows_here()) is not None:
            return rows
        if prefix is None:
            again = self.calls.standing
            prefix = self.prefix if again is None else again.prefix
        return TokenGrid(*self._find(tokens.shape[-2], prefix).shape, prefix)

    def map_of(self, tokens: Tensor) -> TokenGrid:
        """The grid of tokens (b, n, c) of the map alone; raises as `grid_of`."""
        if (rows := self._rows_here()) is not None:
            return rows.without_prefix
        return self._find(tokens.shape[-2], 0)

    def grid_within(self, tokens: Tensor, layer: nn.Module) -> TokenGrid:
        """The grid of tokens (b, n, c) of a layer, those of the last map and any number of others, as prefix tokens.

        Raises:
            SubquadError: nothing was embedded yet, or these are fewer than the map has.
        """
        count = tokens.shape[-2]
        # layers of one network may have other numbers beside the same map
        key = (id(layer), count)
        if is_traced():
            last = self._last
        elif (again := self.calls.standing) is not None:
            last = again.grid
        elif in_backward():
            last = self._earlier.get(key)
            if last is None:
                raise SubquadError(f"{count} tokens {COMPUTED_AGAIN}")
        else:
            last = self._last
            known = self._earlier.setdefault(key, last)
            self._earlier[key] = last if known == last else None
        if last is None or surely(count < last.num_places):
            last = self._find(count, 0)
        return TokenGrid(*last.shape, count - last.num_places)

    def _rows_here(self) -> TokenGrid | None:
        # a compiler can't ask for the thread, and has nothing to ask where no tokens stand on rows
        return self._rows.get(get_ident()) if self._rows else None

    def _find(self, count: int, prefix: int) -> TokenGrid:
        again = self.calls.standing
        if again is not None and again.grid.num_places == count - prefix:
            return again.grid
        last, places = self._last, count - prefix
        if last is not None and last.num_places == places:
            if is_traced() or not in_backward() or self._earlier.get(int(places)) is not None:
                return last
            raise SubquadError(f"{count} tokens {COMPUTED_AGAIN}")
        if not is_traced() and in_backward() and (earlier := self._earlier.get(int(places))):
            return earlier
        if last is None:
            raise SubquadError(
                "a converted attention layer was called before the network's patch embedding, and can't know the grid; "
                "where that was replaced since the conversion, the network itself is to be called, not a part of it"
            )
        expected = TokenGrid(*last.shape, prefix)
        raise SubquadError(
            f"{count} tokens are not those of the last image, {expected} ({expected.num_tokens} tokens): networks that "
            "drop, merge or reorder tokens between their blocks can't be converted, and where the patch embedding was "
            "replaced since the conversion, the network itself is to be called, not a part of it"
        )

    @property
    def _last(self) -> TokenGrid | None:
        """The grid of this thread's last image; of any thread's in one that embedded none, as those of backward."""
        if torch.compiler.is_dynamo_compiling():
            # compiled code has embedding and layers in one graph, which knows its own grid, or knows the last one
            self._read_alone = not self._embedded_compiled
            return self._map
        return self._by_thread.get(get_ident(), self._map)

    def __getstate__(self) -> dict[str, Any]:
        """The arguments that made it: grids of a trace are symbols, which can't be copied."""
        return {"prefix": self.prefix}

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GridRecorder":
        copied = type(self)(**self.__getstate__())
        memo[id(self)] = copied
        return copied


class OverlappingRecorder(GridRecorder):
    """Listens to a convolution whose patches overlap."""

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.Conv2d) and module.stride[0] > 1


class Follower:
    """Lets a recorder listen to whatever stands in the embedding's place: timm replaces it for another patch size.

    It is a hook in front of a module that holds the embedding, an object as the recorder is.

    Args:
        recorder: what listens.
        path: of the embedding, below that module.
    """

    def __init__(self, recorder: GridRecorder, path: str) -> None:
        self.recorder, self.path = recorder, path

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        """What a hook in front of the module is called with."""
        embedding = self._embedding(module)
        if self._is_near and arguments and _is_one_image(arguments[0], embedding):
            # networks ask for four axes before their embedding is asked, each in its own way
            raise _no_batch(embedding, arguments[0])
        if embedding is None or not self._is_heard(embedding):
            self._listen_again(module, embedding)

    @property
    def _is_near(self) -> bool:
        """Whether what this module is called with first are the images: what is further out may take others."""
        return self.path.count(".") < 2

    def _embedding(self, module: nn.Module) -> nn.Module | None:
        """What stands in the embedding's place, if anything."""
        try:
            return module.get_submodule(self.path)
        except AttributeError:
            return None

    def _is_heard(self, module: nn.Module) -> bool:
        return self.recorder in module._forward_hooks.values()

    @torch.compiler.disable(reason="call the network once before it is compiled: its patch embedding was replaced")
    def _listen_again(self, module: nn.Module, embedding: nn.Module | None) -> None:
        if any(map(self._is_heard, module.modules())):
            # it is wrapped, and called all the same
            return
        if embedding is None:
            raise SubquadError(f"the patch embedding {self.path} of a {type(module).__name__} {REPLACED}")
        embedding.register_forward_hook(self.recorder)


def _is_one_image(x: Any, embedding: Any) -> bool:
    """Whether these are the colours of one image, which have no batch axis, for an embedding that takes batches."""
    if not isinstance(embedding, nn.Conv2d) or not isinstance(x, Tensor):
        return False
    # of a single channel may be what becomes a batch of images further in, as the spectra of sounds
    return x.dim() == 3 and x.is_floating_point() and 1 < embedding.in_channels == x.shape[0]


def _no_batch(embedding: Any, x: Tensor) -> SubquadError:
    wanted = f"a converted network takes images (b, {embedding.in_channels}, height, width)"
    return SubquadError(f"{wanted}, got {tuple(x.shape)}: x[None] makes a batch of one image")


def listen(model: nn.Module, path: str, recorder: GridRecorder) -> None:
    """Let a recorder listen to the embedding of a network, at `path`, and to what takes its place there."""
    parts = path.split(".")
    for length in range(0 if recorder.in_front else len(parts)):
        holder = model.get_submodule(".".join(parts[:length]))
        holder.register_forward_pre_hook(Follower(recorder, ".".join(parts[length:])))
    recorder.hook_onto(model.get_submodule(path))


LISTENERS = (GridRecorder, Follower, *CALL_LISTENERS)


def stop_listening(model: nn.Module) -> None:
    """Take all recorders of a network from it."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, LISTENERS)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
                module._forward_hooks_with_kwargs.pop(key, None)


def is_called(module: nn.Module, name: str) -> bool:
    """Whether a module is of the class of this full name, whose library need not be there."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}" == name


def _paddings(convolution: Any) -> tuple[int, int]:
    """Of rows and of columns, on each side; "valid" is none."""
    return convolution.padding if isinstance(convolution.padding, tuple) else (0, 0)
