"""What hands a patched block's processor the noise level, the size of the map and the block's tokens.

All are objects of classes of their own, not closures, so that a copy of a patched network has copies of them. Each says
by `shared` which patch it is of.
"""

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subquad.diffusion.processor import MergedAttention, Shared, Told
from subquad.diffusion.settings import Settings
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.tracing import is_traced


class SeesNoise:
    """Hook of the network: chooses the phase by the noise level, and what is forgotten between steps.

    Inside compiled code it does nothing: reading the level would break the graph. On a network that was compiled first
    it stands outside; one that is compiled later needs the handle's `callback`.
    """

    def __init__(self, shared: Shared, early: Settings, late: Settings, threshold: float, position: int | None) -> None:
        self.shared, self.early, self.late, self.threshold = shared, early, late, threshold
        self.position = position

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_traced():
            return
        timestep = kwargs["timestep"] if self.position is None or "timestep" in kwargs else args[self.position]
        levels = timestep.flatten().tolist() if isinstance(timestep, Tensor) else [float(timestep)]
        self.check_one_phase(levels)
        self.choose(float(levels[0]))

    def check_one_phase(self, levels: Sequence[float]) -> None:
        """Raise SubquadError where images of one call, each at a level of its own as in training, need both phases."""
        lowest, highest = min(levels), max(levels)
        if self.early != self.late and lowest < self.threshold <= highest:
            raise SubquadError(
                f"noise levels of one call go from {lowest:.4g} to {highest:.4g}, on both sides of "
                f"{self.threshold:.4g}, where the phase changes: call the network for each side by itself, or give sx, "
                "sy, ratio and agent_ratio to apply_agent_attention, for one"
            )

    def choose(self, level: float) -> None:
        """Enter the phase of a step at this noise level; raise SubquadError where it can't be one of training's."""
        if level < 0 and self.early != self.late:
            # of a scheduler that came after the patch, which was checked with the one before
            raise SubquadError(
                f"a noise level of {level:.4g} counts no training steps, by which the two phases go: give sx, sy, "
                "ratio and agent_ratio to apply_agent_attention, for one"
            )
        # levels of inversion rise, and those of training are drawn one by one
        falls_below_one = self.shared.begins and level < self.shared.level <= 1 and not torch.is_grad_enabled()
        self.shared.enter(level)
        if falls_below_one and self.early != self.late and not self.shared.said_late:
            self.shared.said_late = True
            warnings.warn(
                f"an image has noise levels of 1 at most, as {level:.4g}, all in the late phase: its scheduler counts "
                "no training steps, and came after the agents; give sx, sy, ratio and agent_ratio to "
                "apply_agent_attention, for one phase",
                stacklevel=2,
            )
        self.shared.settings = self.early if level >= self.threshold else self.late


OPTIONS = "cross_attention_kwargs"
"""What is handed through a network of diffusers, and through its gradient checkpointing, to its blocks."""

TOLD = "subquad"
"""Where in these options what blocks are told lies."""


class SeesMap:
    """Hook of the module around the blocks: its map's height and width, in tokens.

    Gradient checkpointing calls blocks again in the backward pass, when other calls of the network may have been made:
    what they are told is handed to them with their tokens then.

    Args:
        place: where OPTIONS stands among the module's arguments, None where it takes none.
    """

    def __init__(self, shared: Shared, processors: list[MergedAttention], patch: int, place: int | None) -> None:
        self.shared, self.processors, self.patch, self.place = shared, processors, patch, place

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        image = args[0] if args else kwargs["hidden_states"]
        grid = TokenGrid(image.shape[-2] // self.patch, image.shape[-1] // self.patch)
        for processor in self.processors:
            processor.grid = grid
        checkpointed = getattr(module, "gradient_checkpointing", False) and torch.is_grad_enabled()
        if self.place is None or not checkpointed or is_traced():
            return None
        # here, as random numbers that are drawn in a block are others when it is called again
        self.shared.draw(grid, image.device)
        told = {TOLD: Told(grid, copy.copy(self.shared))}
        if self.place < len(args):
            return (*args[: self.place], {**(args[self.place] or {}), **told}, *args[self.place + 1 :]), kwargs
        return args, {**kwargs, OPTIONS: {**(kwargs.get(OPTIONS) or {}), **told}}


def _is_told(option: Any) -> bool:
    return isinstance(option, dict) and TOLD in option


def _untold(option: Any) -> Any:
    return {key: option[key] for key in option if key != TOLD} if _is_told(option) else option


class OfProcessor:
    """A hook that serves one processor."""

    def __init__(self, processor: MergedAttention) -> None:
        self.processor = processor

    @property
    def shared(self) -> Shared:
        """Give what the layers of a patch share."""
        return self.processor.shared


class SeesTokens(OfProcessor):
    """Hook of a block: its tokens before their norm, which are matched; says it once where something else is in place.

    What loads adapters or fuses projections puts other processors in place: the patch is off then, at least in part.
    """

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.processor.features = None
        told = [option[TOLD] for option in (*args, *kwargs.values()) if _is_told(option)]
        self.processor.again = told[0] if told else None
        in_place = getattr(module.attn1, "processor", module.attn1)
        if in_place is self.processor:
            self.processor.tokens = args[0] if args else kwargs["hidden_states"]
        elif not self.shared.said_off and not is_traced():
            self.shared.said_off = True
            # tokens are not kept for a processor that is never asked
            warnings.warn(
                f"agents and merging are off: {type(in_place).__name__} stands where their processors were; "
                "apply them again",
                stacklevel=2,
            )
        if not told:
            return None
        return tuple(_untold(option) for option in args), {name: _untold(kwargs[name]) for name in kwargs}


class MergesMLP(OfProcessor):
    """Hook before a block's MLP: the tokens are merged as they were for its attention."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        features = self.processor.features
        if features is None:
            return args
        if args[0].shape[:2] != features.groups.shape:
            # chunks may have come after the patch, which refuses them where they are there before
            raise SubquadError(
                f"merge_mlp does not work in chunks: this MLP is given {args[0].shape[1]} of its block's "
                f"{features.groups.shape[1]} tokens and {len(args[0])} of {len(features.groups)} images; call "
                "disable_forward_chunking()"
            )
        return (features.merge(args[0]), *args[1:])


class UnmergesMLP(OfProcessor):
    """Hook after a block's MLP: every token gets its group's."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        features, self.processor.features = self.processor.features, None
        return output if features is None else features.unmerge(output)


HOOKS = SeesNoise, SeesMap, SeesTokens, MergesMLP, UnmergesMLP


def remove_hooks(module: nn.Module, shared: Shared | None = None) -> None:
    """Take the hooks of one patch off a module, or of any patch of this package."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in list(hooks.items()):
            if isinstance(hook, HOOKS) and shared in (None, hook.shared):
                del hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
