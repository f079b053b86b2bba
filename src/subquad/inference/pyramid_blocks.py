"""Blocks of pyramids whose MLPs look at the map, in few steps: timm's PVTv2, SegFormer of transformers and of smp.

Such a block is of its library's class before and of a class derived from it afterwards, with the same modules and
parameters. A call tells it where its tokens stand. The MLP's half is three steps, and so is that around a converted
layer whose keys are not reduced.
"""

import importlib
from functools import cache, partial
from typing import Any, ClassVar

from timm.models import register_notrace_module
from timm.models.pvt_v2 import Block, MlpWithDepthwiseConv
from torch import Tensor, nn

from subquad.grid import TokenGrid
from subquad.inference.foreign_halves import Between, converted, first_half_of, is_asked_for
from subquad.inference.halves import (
    activation_of,
    are_mlp,
    does_more,
    drops_no_branch,
    drops_nothing,
    is_depthwise,
    is_norm,
    second_half_on_map,
)
from subquad.inference.transformers_blocks import full_name, of_blocks, of_transformers
from subquad.kernels import replayed
from subquad.tracing import refuse_torchscript

SEGFORMER = "transformers.models.segformer.modeling_segformer"
MIT = "segmentation_models_pytorch.encoders.mix_transformer"
PREFIX = "Fused"


class OnMap(nn.Module):
    """What blocks of both libraries share, in evaluation.

    Attributes:
        attends: the name of the attention layer.
        norms: those of the norms before attention, and before the MLP.
    """

    attends: ClassVar[str]
    norms: ClassVar[tuple[str, str]]

    __prepare_scriptable__ = refuse_torchscript

    def few_steps(self, x: Tensor, grid: TokenGrid) -> Tensor:
        """Tokens x (b, n, c) behind the block, in as few steps as there are."""
        grid.check(x)
        mixing = converted(getattr(self, self.attends))
        y = replayed(self, "block", partial(self._steps, mixing, grid), x.contiguous(), settings=(grid, mixing is None))
        assert y is not None
        return y

    def _steps(self, mixing: Between | None, grid: TokenGrid, x: Tensor) -> Tensor:
        first, second = (getattr(self, name) for name in self.norms)
        y = first_half_of(self, x, first, getattr(self, self.attends), mixing, None, grid)
        if y is None:
            y = x + self.attended(first(x), grid)
        behind = self.second_half(y, second, grid)
        return y + self.fed(second(y), grid) if behind is None else behind

    def attended(self, tokens: Tensor, grid: TokenGrid) -> Tensor:
        """Normed tokens (b, n, c) behind the attention layer itself."""
        answers: Tensor = self.get_submodule(self.attends)(tokens, *grid.shape)
        return answers

    def fed(self, tokens: Tensor, grid: TokenGrid) -> Tensor:
        """Normed tokens (b, n, c) behind the MLP itself."""
        answers: Tensor = self.get_submodule("mlp")(tokens, *grid.shape)
        return answers

    def second_half(self, y: Tensor, norm: nn.Module, grid: TokenGrid) -> Tensor | None:
        """Tokens y (b, n, c) behind the MLP's half, in three steps; None where it is more than that."""
        raise NotImplementedError


@register_notrace_module
class FusedPvtV2Block(OnMap, Block):
    """timm's, in evaluation; training is as it was."""

    attends: ClassVar[str] = "attn"
    norms: ClassVar[tuple[str, str]] = ("norm1", "norm2")
    attn: Any
    mlp: Any

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        if self.training or not drops_no_branch(self):
            return super().forward(x, feat_size)
        return self.few_steps(x, TokenGrid(*feat_size))

    def attended(self, tokens: Tensor, grid: TokenGrid) -> Tensor:
        answers: Tensor = self.attn(tokens, grid.shape)
        return answers

    def fed(self, tokens: Tensor, grid: TokenGrid) -> Tensor:
        answers: Tensor = self.mlp(tokens, grid.shape)
        return answers

    def second_half(self, y: Tensor, norm: nn.Module, grid: TokenGrid) -> Tensor | None:
        mlp = self.mlp
        if type(mlp) is not MlpWithDepthwiseConv or type(mlp.relu) is not nn.Identity:
            return None
        if activation_of(mlp.act) != "gelu" or not drops_nothing(mlp.drop):
            return None
        return half_on_map(self, y, norm, mlp, mlp.dwconv, grid)


class FusedSegformerLayer(OnMap):
    """transformers', in evaluation; training, and what is asked for beside, are as they were."""

    attends: ClassVar[str] = "attention"
    norms: ClassVar[tuple[str, str]] = ("layernorm_before", "layernorm_after")

    def forward(self, hidden_states: Tensor, height: int, width: int, *args: Any, **kwargs: Any) -> Tensor:
        asked = is_asked_for(*args, *of_blocks(kwargs).values())
        drops = (self.get_submodule(name) for name in ("drop_path", "hidden_dropout"))
        if self.training or asked or not drops_nothing(*drops):
            answers: Tensor = super().forward(hidden_states, height, width, *args, **kwargs)
            return answers
        return self.few_steps(hidden_states, TokenGrid(height, width))

    def attended(self, tokens: Tensor, grid: TokenGrid) -> Tensor:
        # with weights that are not formed
        return super().attended(tokens, grid)[0]

    def second_half(self, y: Tensor, norm: nn.Module, grid: TokenGrid) -> Tensor | None:
        mlp: Any = self.mlp
        if full_name(type(mlp)) != f"{SEGFORMER}.SegformerMixMLP" or of_transformers(mlp.activation_fn) != "gelu":
            return None
        return half_of_mix(self, y, norm, mlp, mlp.dropout, grid)


class FusedMitBlock(OnMap):
    """That of segmentation_models_pytorch, in evaluation, which is handed maps (b, c, y, x); training is as it was."""

    attends: ClassVar[str] = "attn"
    norms: ClassVar[tuple[str, str]] = ("norm1", "norm2")

    def forward(self, x: Tensor) -> Tensor:
        if self.training or not drops_no_branch(self):
            answers: Tensor = super().forward(x)
            return answers
        grid = TokenGrid(x.shape[-2], x.shape[-1])
        return grid.to_image(self.few_steps(x.flatten(2).mT, grid))

    def second_half(self, y: Tensor, norm: nn.Module, grid: TokenGrid) -> Tensor | None:
        mlp: Any = self.mlp
        if full_name(type(mlp)) != f"{MIT}.Mlp" or activation_of(mlp.act) != "gelu":
            return None
        return half_of_mix(self, y, norm, mlp, mlp.drop, grid)


def half_of_mix(
    block: nn.Module, y: Tensor, norm: nn.Module, mlp: Any, drop: nn.Module, grid: TokenGrid
) -> Tensor | None:
    """Tokens y (b, n, c) behind SegFormer's MLP, whose convolution is within a module of its own; None for others."""
    if does_more(mlp.dwconv) or not drops_nothing(drop):
        return None
    return half_on_map(block, y, norm, mlp, mlp.dwconv.dwconv, grid)


def half_on_map(
    block: nn.Module, y: Tensor, norm: nn.Module, mlp: Any, conv: nn.Module, grid: TokenGrid
) -> Tensor | None:
    """Tokens y (b, n, c) behind an MLP with GELU behind its convolution; None where somebody listens."""
    if not (is_norm(norm) and are_mlp(mlp.fc1, mlp.fc2) and is_depthwise(conv)):
        return None
    if any(map(does_more, (norm, mlp, *mlp.children()))):
        return None
    return second_half_on_map(block, y, norm, mlp.fc1, conv, mlp.fc2, None, grid, in_front=False, behind=True)


def fuse_all(model: nn.Module) -> None:
    """Let all blocks of these classes be of few steps; those of classes derived from them stay as they are."""
    for module in model.modules():
        if type(module) is Block:
            module.__class__ = FusedPvtV2Block
        elif full_name(type(module)) == f"{SEGFORMER}.SegformerLayer" and hasattr(module.attention, "q_proj"):
            module.__class__ = derived(f"{PREFIX}SegformerLayerOfTransformers")
        elif full_name(type(module)) == f"{MIT}.Block":
            module.__class__ = derived(f"{PREFIX}MitBlockOfSmp")


DERIVED = {
    f"{PREFIX}SegformerLayerOfTransformers": (SEGFORMER, "SegformerLayer", FusedSegformerLayer),
    f"{PREFIX}MitBlockOfSmp": (MIT, "Block", FusedMitBlock),
}
"""Blocks of few steps of libraries that may not be there, by the names of their classes: the library's file and class,
and what it is derived from as well."""


@cache
def derived(name: str) -> type[nn.Module]:
    """The class of this name, made of the library's own."""
    file, kind, of_few_steps = DERIVED[name]
    cls = getattr(importlib.import_module(file), kind)
    return type(name, (of_few_steps, cls), {"__module__": __name__, "__doc__": cls.__doc__})


def __getattr__(name: str) -> type[nn.Module]:
    """The class of this name, which pickles ask for."""
    if name in DERIVED:
        return derived(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
