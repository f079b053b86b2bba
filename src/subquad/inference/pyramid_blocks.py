"""Blocks of pyramids whose MLPs look at the map, timm's PVTv2 and transformers' SegFormer, in few steps.

Such a block is of its library's class before and of a class derived from it afterwards, with the same modules and
parameters. A call tells it where its tokens stand. The MLP's half is three steps, and so is that around a converted
layer whose keys are not reduced.
"""

import functools
import importlib
from typing import Any

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
PREFIX = "Fused"


class OnMap(nn.Module):
    """What blocks of both libraries share, in evaluation."""

    __prepare_scriptable__ = refuse_torchscript

    def few_steps(self, x: Tensor, attn: nn.Module, grid: TokenGrid) -> Tensor:
        """Tokens x (b, n, c) behind the block, in as few steps as there are."""
        grid.check(x)
        mixing = converted(attn)
        steps = functools.partial(self._steps, attn=attn, mixing=mixing, grid=grid)
        y = replayed(self, "block", steps, x.contiguous(), settings=(grid, mixing is None))
        assert y is not None
        return y

    def _steps(self, x: Tensor, attn: nn.Module, mixing: Between | None, grid: TokenGrid) -> Tensor:
        y = first_half_of(self, x, self.norm_of("attention"), attn, mixing, None, grid)
        if y is None:
            y = x + self.attended(self.norm_of("attention")(x), grid)
        behind = self.second_half(y, self.norm_of("MLP"), grid)
        return y + self.fed(self.norm_of("MLP")(y), grid) if behind is None else behind

    def norm_of(self, half: str) -> nn.Module:
        """The norm in front of the attention or the MLP."""
        raise NotImplementedError

    def attended(self, tokens: Tensor, grid: TokenGrid) -> Tensor:
        """Normed tokens (b, n, c) behind the attention layer itself."""
        raise NotImplementedError

    def fed(self, tokens: Tensor, grid: TokenGrid) -> Tensor:
        """Normed tokens (b, n, c) behind the MLP itself."""
        raise NotImplementedError

    def second_half(self, y: Tensor, norm: nn.Module, grid: TokenGrid) -> Tensor | None:
        """Tokens y (b, n, c) behind the MLP's half, in three steps; None where it is more than that."""
        raise NotImplementedError


@register_notrace_module
class FusedPvtV2Block(OnMap, Block):
    """timm's, in evaluation; training is as it was."""

    attn: Any
    mlp: Any
    norm1: Any
    norm2: Any

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        if self.training or not drops_no_branch(self):
            return super().forward(x, feat_size)
        return self.few_steps(x, self.attn, TokenGrid(*feat_size))

    def norm_of(self, half: str) -> nn.Module:
        norm: nn.Module = self.norm1 if half == "attention" else self.norm2
        return norm

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

    def forward(self, hidden_states: Tensor, height: int, width: int, *args: Any, **kwargs: Any) -> Tensor:
        asked = is_asked_for(*args, *of_blocks(kwargs).values())
        if self.training or asked or not drops_nothing(self.drop_path, self.hidden_dropout):  # type: ignore[arg-type]
            answers: Tensor = super().forward(hidden_states, height, width, *args, **kwargs)
            return answers
        return self.few_steps(hidden_states, self.get_submodule("attention"), TokenGrid(height, width))

    def norm_of(self, half: str) -> nn.Module:
        return self.get_submodule("layernorm_before" if half == "attention" else "layernorm_after")

    def attended(self, tokens: Tensor, grid: TokenGrid) -> Tensor:
        answers: Tensor = self.get_submodule("attention")(tokens, *grid.shape)[0]
        return answers

    def fed(self, tokens: Tensor, grid: TokenGrid) -> Tensor:
        answers: Tensor = self.get_submodule("mlp")(tokens, *grid.shape)
        return answers

    def second_half(self, y: Tensor, norm: nn.Module, grid: TokenGrid) -> Tensor | None:
        mlp: Any = self.mlp
        if full_name(type(mlp)) != f"{SEGFORMER}.SegformerMixMLP" or does_more(mlp.dwconv):
            return None
        if of_transformers(mlp.activation_fn) != "gelu" or not drops_nothing(mlp.dropout):
            return None
        return half_on_map(self, y, norm, mlp, mlp.dwconv.dwconv, grid)


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
            module.__class__ = fused_segformer()


@functools.cache
def fused_segformer() -> type[nn.Module]:
    """The class of blocks of few steps that is derived from transformers'."""
    cls = importlib.import_module(SEGFORMER).SegformerLayer
    contents = {"__module__": __name__, "__doc__": cls.__doc__}
    return type(f"{PREFIX}{cls.__name__}OfTransformers", (FusedSegformerLayer, cls), contents)


def __getattr__(name: str) -> type[nn.Module]:
    """The class of this name, which pickles ask for."""
    if name == f"{PREFIX}SegformerLayerOfTransformers":
        return fused_segformer()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
