"""On which grid tokens stand in a block that is computed again for its gradient: that of the call it was part of.

Gradient checkpointing keeps what a block was called with and calls the block again with it in the backward pass, when
the network may have seen other images. What is kept lies where it lay, so the memory of the tokens tells the call.
"""

from collections.abc import Iterable, Iterator, Mapping
from threading import get_ident
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from subquad.grid import TokenGrid
from subquad.tracing import is_traced

NOT_NAMED: Mapping[str, Any] = {}
"""What a hook is told of a call where PyTorch's quantization took it over to a layer of its own, without names."""


class Standing(NamedTuple):
    """Where the tokens of a call stand: the grid of their map, and how many tokens are in front of it."""

    grid: TokenGrid
    prefix: int


class _Again(NamedTuple):
    """What a thread computes again: from where in a backward pass, at which path, known by a part, on which grid."""

    place: tuple[int, int]
    path: str
    by_part: bool
    standing: Standing | None

    def holds(self, path: str) -> bool:
        """Whether what stands at a path is within it; all is within the network as a whole."""
        return not self.path or path.startswith(f"{self.path}.")


class CallMemory:
    """Knows of the calls of blocks whose tokens are still there on which grid they stood.

    A block is computed again within a thread from where tokens of such a call come in again: by a call of the block
    itself, or, where only its `forward` is called again, by that of one of its parts, until its attention has run.
    Where the image is embedded again, all of the network is, unless a part of it is known to be. Each time this goes
    on within one node of the gradient's graph, and what is known of it holds there.
    """

    def __init__(self) -> None:
        self._calls: dict[int, tuple[StorageWeakRef, Standing | None]] = {}
        self._by_thread: dict[int, _Again] = {}

    @property
    def standing(self) -> Standing | None:
        """Where tokens stand of what this thread computes again, if that is known."""
        if is_traced() or not self._by_thread:
            return None
        again = self._again
        return None if again is None else again.standing

    def heard(self, path: str, block: str, tokens: Tensor, last: Standing | None) -> None:
        """A block, or its part at `path`, is called with tokens: of the last image, or of an earlier one, again."""
        standing = last
        if in_backward():
            standing, again = self._of(tokens), self._again
            within = again is not None and again.holds(path)
            if standing is not None:
                # what is around it, as a stage, goes on behind this block
                if again is None or not within or again.standing != standing:
                    self._go_on(block, path != block, standing)
            elif again is not None and within:
                standing = again.standing
            else:
                self._end()
        if standing is not None:
            self._note(tokens, standing)

    def embeds(self, path: str) -> None:
        """What embeds the image itself is called: where that is again, the embedding will say on which grid."""
        if in_backward():
            self._go_on(path, False, None)

    def passed(self, tokens: Tensor, answered: Tensor) -> None:
        """A block gave this for tokens: where it is computed again, with those behind it, they are called with it."""
        if in_backward() and (standing := self._of(tokens)) is not None:
            self._note(answered, standing)

    def attended(self) -> None:
        """An attention layer has run: what its block's `forward` does besides needs no grid."""
        found = self._by_thread.get(get_ident())
        if found is not None and found.by_part:
            self._end()

    def embedded(self, standing: Standing) -> None:
        """An image was embedded, or a stage's map, maybe within what is computed again: so tokens stand behind it."""
        if not in_backward():
            self._end()
            self._forget_freed()
        elif (again := self._again) is None:
            self._go_on("", False, standing)
        else:
            self._go_on(again.path, again.by_part, standing)

    @property
    def _again(self) -> "_Again | None":
        """What this thread computes again, if it still does."""
        found = self._by_thread.get(get_ident())
        return found if found is not None and found.place == _place_in_backward() else None

    def _go_on(self, path: str, by_part: bool, standing: Standing | None) -> None:
        self._by_thread[get_ident()] = _Again(_place_in_backward(), path, by_part, standing)

    def _end(self) -> None:
        self._by_thread.pop(get_ident(), None)

    def _note(self, tokens: Tensor, standing: Standing) -> None:
        reference = _reference(tokens)
        if reference is not None:
            # a reference keeps its number from being used again; what several calls share, as tables, tells none
            _, known = self._calls.get(reference.cdata, (None, standing))
            self._calls[reference.cdata] = reference, standing if known == standing else None

    def _of(self, tokens: Tensor) -> Standing | None:
        reference = _reference(tokens)
        return None if reference is None else self._calls.get(reference.cdata, (None, None))[1]

    def _forget_freed(self) -> None:
        # of a copy, as other threads may note meanwhile
        for number, (reference, _) in list(self._calls.items()):
            if reference.expired():
                self._calls.pop(number, None)


class _Listener:
    """What these have in common: where nothing is trained they hear nothing, and what they hook need not be called."""

    hears_training_alone: ClassVar[bool] = True


class CallListener(_Listener):
    """Tells a memory what a module is called with: a hook in front of it.

    Args:
        recorder: a `GridRecorder`, which has the memory.
        path: of the module in the network.
        block: of what it is a part of; the same where it is the block, or holds it; None where it embeds images, too.
    """

    is_near: bool = False
    """Whether it has seen to it that the parts of all blocks within the module are listened to."""

    def __init__(self, recorder: Any, path: str, block: str | None) -> None:
        self.recorder, self.path, self.block = recorder, path, block

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any] = NOT_NAMED) -> None:
        """What such a hook is called with; nothing is computed again where nothing is trained."""
        if is_traced() or not (module.training or torch.is_grad_enabled()):
            return
        if not self.is_near:
            self.is_near = True
            _listen_to_parts(module)
        if self.block is None:
            self.recorder.calls.embeds(self.path)
            return
        tokens = first_tensor(arguments, named)
        if tokens is not None:
            self.recorder.calls.heard(self.path, self.block, tokens, self.recorder.last_standing)


class BlockListener(CallListener):
    """The same of a block: it also has the block's parts and its answers listened to, once anything is trained.

    Modules with hooks take PyTorch's slower way, which networks that are not trained need not go: a block has some
    eight parts.

    Args:
        recorder, path, block: as others have.
        embedding: the path of what embeds images.
    """

    def __init__(self, recorder: Any, path: str, block: str | None, embedding: str) -> None:
        super().__init__(recorder, path, block)
        self.embedding, self.has_listeners = embedding, False

    def listen_to_parts(self, block: nn.Module) -> None:
        """Hook listeners onto this block and its parts, unless they are there."""
        if self.has_listeners:
            return
        self.has_listeners = True
        block.register_forward_hook(AnswerListener(self.recorder), with_kwargs=True)
        for name, part in block.named_children():
            path = f"{self.path}.{name}"
            if not any(isinstance(one, CallListener) and one.path == path for one in part._forward_pre_hooks.values()):
                listener = CallListener(self.recorder, path, None if _holds(path, self.embedding) else self.path)
                part.register_forward_pre_hook(listener, with_kwargs=True)


def _listen_to_parts(module: nn.Module) -> None:
    """Hook listeners onto the parts of all blocks within a module, as nothing else may be called of a block again."""
    for part in list(module.modules()):
        for listener in list(part._forward_pre_hooks.values()):
            if isinstance(listener, BlockListener):
                listener.listen_to_parts(part)


class EndListener(_Listener):
    """Tells a memory that a converted layer has run: a hook behind it."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder

    def __call__(self, *called: Any) -> None:
        """What such a hook is called with."""
        if not is_traced():
            self.recorder.calls.attended()


class AnswerListener(_Listener):
    """Tells a memory what a block answers: a hook behind it."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], answer: Any) -> None:
        """What such a hook is called with."""
        if not is_traced():
            tokens, answered = (
                first_tensor(arguments, named),
                first_tensor(answer if isinstance(answer, tuple) else (answer,), {}),
            )
            if tokens is not None and answered is not None:
                self.recorder.calls.passed(tokens, answered)


def listen_to_calls(model: nn.Module, layers: Iterable[str], embedding: str, recorder: Any) -> None:
    """Hook a recorder onto converted layers and what they stand in below the network."""
    heard: set[str] = set()
    blocks: set[str] = set()
    for layer in layers:
        model.get_submodule(layer).register_forward_hook(EndListener(recorder), always_call=True)
        around = [layer.rsplit(".", steps)[0] for steps in range(layer.count(".") + 1)]
        heard |= set(around)
        # the innermost thing that stands in a list
        block = next((path for path in around if path.rpartition(".")[2].isdigit()), layer)
        if block != layer:
            blocks.add(block)
    # where only the `forward` of a whole stage is called again, blocks that stay hand on whose tokens these are
    beside = {path for block in blocks for path in _beside(model, block)} - heard
    heard, blocks = heard | beside, blocks | beside
    for path in sorted(heard):
        # what is handed its map itself has told where tokens stand before this hears of it
        block_here = None if _holds(path, embedding) and path != embedding else path
        listener: CallListener = (
            BlockListener(recorder, path, block_here, embedding)
            if path in blocks
            else CallListener(recorder, path, block_here)
        )
        model.get_submodule(path).register_forward_pre_hook(listener, with_kwargs=True)


def _beside(model: nn.Module, block: str) -> Iterator[str]:
    """Paths of the blocks in the list that a block stands in."""
    holder = block.rpartition(".")[0]
    return (f"{holder}.{name}" for name, _ in model.get_submodule(holder).named_children() if name.isdigit())


def _holds(path: str, embedding: str) -> bool:
    """Whether the embedding stands at a path, or within what does."""
    return f"{embedding}.".startswith(f"{path}.")


CALL_LISTENERS = (CallListener, AnswerListener, EndListener)


def in_backward() -> bool:
    """Whether this thread is within a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _place_in_backward() -> tuple[int, int]:
    """The backward pass that this thread is in, and the node of its graph whose gradient is computed."""
    node: Any = torch._C._current_autograd_node()
    return torch._C._current_graph_task_id(), -1 if node is None else node._sequence_nr()


def first_tensor(arguments: Iterable[Any], named: Mapping[str, Any]) -> Tensor | None:
    """The first tensor that a call hands over, by place or by name."""
    return next((one for one in (*arguments, *named.values()) if isinstance(one, Tensor)), None)


def _reference(tokens: Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tokens.untyped_storage())
    except (NotImplementedError, RuntimeError):
        # tensors of other kinds, as those of torch.func, lie nowhere
        return None
