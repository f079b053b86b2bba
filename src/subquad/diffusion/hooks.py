"""What hands a patched block's processor the noise level, the size of the map and the block's tokens.

All are objects of classes of their own, not closures, so that a copy of a patched network has copies of them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from subquad.diffusion.processor import MergedAttention, Shared
from subquad.diffusion.settings import Settings
from subquad.grid import TokenGrid


class SeesNoise:
    """Hook of the network: chooses the phase by the noise level, and what is forgotten between steps.

    Inside compiled code it does nothing: reading the level would break the graph. On a network that was compiled first
    it stands outside; one that is compiled later needs the handle's `callback`.
    """

    def __init__(self, shared: Shared, early: Settings, late: Settings, threshold: float, position: int) -> None:
        self.shared, self.early, self.late, self.threshold = shared, early, late, threshold
        self.position = position

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        timestep = kwargs["timestep"] if "timestep" in kwargs else args[self.position]
        self.choose(float(timestep.flatten()[0]) if isinstance(timestep, Tensor) else float(timestep))

    def choose(self, level: float) -> None:
        """Enter the phase of a step at this noise level."""
        self.shared.enter(level)
        self.shared.settings = self.early if level >= self.threshold else self.late


class SeesMap:
    """Hook of the module around the blocks: its map's height and width, in tokens."""

    def __init__(self, processors: list[MergedAttention], patch: int) -> None:
        self.processors, self.patch = processors, patch

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        image = args[0] if args else kwargs["hidden_states"]
        grid = TokenGrid(image.shape[-2] // self.patch, image.shape[-1] // self.patch)
        for processor in self.processors:
            processor.grid = grid


class SeesTokens:
    """Hook of a block: its tokens before their norm, which are matched."""

    def __init__(self, processor: MergedAttention) -> None:
        self.processor = processor

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.processor.features = None
        # what loads adapters puts other processors in place, and tokens must not be kept for one that is never asked
        if module.attn1.processor is self.processor:  # type: ignore[union-attr]
            self.processor.tokens = args[0] if args else kwargs["hidden_states"]


class MergesMLP:
    """Hook before a block's MLP: the tokens are merged as they were for its attention."""

    def __init__(self, processor: MergedAttention) -> None:
        self.processor = processor

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        features = self.processor.features
        return args if features is None else (features.merge(args[0]), *args[1:])


class UnmergesMLP:
    """Hook after a block's MLP: every token gets its group's."""

    def __init__(self, processor: MergedAttention) -> None:
        self.processor = processor

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        features, self.processor.features = self.processor.features, None
        return output if features is None else features.unmerge(output)


HOOKS = SeesNoise, SeesMap, SeesTokens, MergesMLP, UnmergesMLP


def remove_hooks(module: nn.Module) -> None:
    """Take the hooks of this package off a module."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in list(hooks.items()):
            if isinstance(hook, HOOKS):
                del hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
