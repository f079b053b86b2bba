"""Blocks of transformers' plain vision encoders, whose steps are one step where they can be.

Such a block is of transformers' class before and of a class derived from it afterwards, with the same modules and
parameters. All of them are of the same parts under other names, so that a family is a row of `PARTS`.
"""

import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from subquad.inference.foreign_halves import (
    Between,
    Turning,
    converted,
    first_half_of,
    has_usual_scale,
    is_asked_for,
    replayed_where_it_stands,
)
from subquad.inference.halves import activation_of, are_mlp, does_more, drops_nothing, is_norm, second_half
from subquad.inference.rotations import of_two_tables, remembered
from subquad.ops import softmax_attention
from subquad.ops.turning import turned_tokens
from subquad.rope import Rotation
from subquad.tracing import refuse_torchscript


@dataclass(frozen=True)
class Parts:
    """What a block's modules are called.

    Attributes:
        norms: before attention, and before the MLP.
        attention: the layer.
        proj: its projection back.
        mlp: the MLP's first layer, its activation and its second layer.
        scales: modules whose `lambda1` are the factors of a branch's channels, or none.
        by_name: whether the layer gets tokens as `hidden_states`, which hooks on it see.
    """

    norms: tuple[str, str]
    attention: str = "attention"
    proj: str = "o_proj"
    mlp: tuple[str, str, str] = ("fc1", "activation_fn", "fc2")
    scales: tuple[str, str] | None = None
    by_name: bool = False

    def are_in(self, block: nn.Module) -> bool:
        """Whether a block has them: those of other versions may have others."""
        attn = getattr(block, self.attention, None)
        wanted = (block, (*self.norms, *(self.scales or ()))), (attn, (*PROJECTED_BY, self.proj))
        has_all = all(hasattr(module, name) for module, names in wanted for name in names)
        return has_all and hasattr(block, "mlp")


VIT = Parts(norms=("layernorm_before", "layernorm_after"))
CLIP = Parts(norms=("layer_norm1", "layer_norm2"), attention="self_attn", proj="out_proj", by_name=True)
DINOV2 = Parts(norms=("norm1", "norm2"), scales=("layer_scale1", "layer_scale2"))
EOMT = replace(DINOV2, proj="out_proj")
DINOV3 = Parts(("norm1", "norm2"), mlp=("up_proj", "act_fn", "down_proj"), scales=("layer_scale1", "layer_scale2"))

PARTS = {
    f"transformers.models.{name}.modeling_{name}.{cls}": parts
    for name, cls, parts in (
        ("vit", "ViTLayer", VIT),
        ("deit", "DeiTLayer", VIT),
        ("ijepa", "IJepaLayer", VIT),
        ("vit_msn", "ViTMSNLayer", VIT),
        ("dinov2", "Dinov2Layer", DINOV2),
        ("dinov2_with_registers", "Dinov2WithRegistersLayer", DINOV2),
        ("dinov3_vit", "DINOv3ViTLayer", DINOV3),
        ("radio", "RadioLayer", DINOV2),
        ("tipsv2", "Tipsv2VisionLayer", DINOV2),
        ("pixio", "PixioLayer", VIT),
        ("siglip", "SiglipEncoderLayer", CLIP),
        ("clip", "CLIPEncoderLayer", CLIP),
        ("metaclip_2", "MetaClip2EncoderLayer", CLIP),
        ("altclip", "AltCLIPEncoderLayer", CLIP),
        ("chinese_clip", "ChineseCLIPVisionLayer", CLIP),
        ("clipseg", "CLIPSegEncoderLayer", CLIP),
        ("owlvit", "OwlViTEncoderLayer", CLIP),
        ("owlv2", "Owlv2EncoderLayer", CLIP),
        ("git", "GitVisionEncoderLayer", CLIP),
        ("idefics2", "Idefics2EncoderLayer", CLIP),
        ("idefics3", "Idefics3EncoderLayer", CLIP),
        ("smolvlm", "SmolVLMEncoderLayer", CLIP),
        ("kosmos2", "Kosmos2VisionEncoderLayer", CLIP),
        ("eomt", "EomtLayer", EOMT),
        ("eomt_dinov3", "EomtDinov3Layer", DINOV3),
    )
}
"""By the full names of their classes."""

PROJECTED_BY = "q_proj", "k_proj", "v_proj"
DROPPED_BY = "dropout", "drop_path"
PREFIX = "Fused"

ACTIVATIONS = {
    f"transformers.activations.{cls}": name
    for cls, name in (
        ("GELUActivation", "gelu"),
        ("GELUTanh", "gelu_tanh"),
        ("PytorchGELUTanh", "gelu_tanh"),  # in earlier versions
        ("QuickGELUActivation", "quick_gelu"),
    )
}
"""By the full names of their classes."""


def fuse_all(model: nn.Module) -> None:
    """Let all blocks of these classes be of few steps; those of classes derived from them stay as they are."""
    for module in model.modules():
        name = full_name(type(module))
        if name in PARTS and PARTS[name].are_in(module):
            module.__class__ = fused(name)


def full_name(cls: type) -> str:
    """Where a class is defined, and what it is called there."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_block_of(block: nn.Module, full: str) -> bool:
    """Whether a block is of transformers' class of this full name, as it is or of few steps."""
    of_few_steps = isinstance(block, FusedLayer) and full in map(full_name, type(block).__mro__)
    return full_name(type(block)) == full or of_few_steps


class OfTransformers(nn.Module):
    """What fused blocks of both forms share.

    Attributes:
        home: the module of transformers that defines what it was.
    """

    home: str

    __prepare_scriptable__ = refuse_torchscript

    def are_of_home(self, *modules: nn.Module) -> bool:
        """Whether modules are of the classes that stand beside the block's own."""
        return all(type(module).__module__ == self.home for module in modules)

    def is_softmax(self, attn: Any) -> bool:
        """Whether an attention layer is transformers' own, and computes what it is known for."""
        # other implementations are chosen, or written, by whoever wants what they do
        chosen = attn.config._attn_implementation if self.are_of_home(attn) else None
        scale = getattr(attn, "scaling", getattr(attn, "scale", None))
        width = getattr(attn, "head_dim", None) or attn.attention_head_size
        return chosen in ("eager", "sdpa") and not attn.is_causal and has_usual_scale(scale, width)


class FusedLayer(OfTransformers):
    """A block in evaluation; training, masks and causal attention are as they were.

    Attributes:
        parts: what its modules are called.
    """

    parts: Parts

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        settings = of_blocks(kwargs)
        positions = settings.pop("position_embeddings", None)
        drops = (getattr(self, name, None) for name in DROPPED_BY)
        if self.training or is_asked_for(*args, *settings.values()) or not drops_nothing(*drops):
            return super().forward(hidden_states, *args, **kwargs)
        mixing = self._mixing()
        rotation = None
        if mixing is not None and positions is not None:
            rotation = cast(Turning, mixing).rotation_of(hidden_states, positions)
        steps = functools.partial(self._steps, positions=positions)
        # what implements attention is chosen by a setting that is none of the block's own
        return replayed_where_it_stands(self, mixing, hidden_states, rotation, steps, settings=mixing is None)

    def _steps(self, x: Tensor, rotation: Rotation | None, positions: Any) -> Tensor:
        attn, mlp = getattr(self, self.parts.attention), self.get_submodule("mlp")
        norms = [getattr(self, name) for name in self.parts.norms]
        scales = [getattr(self, name) for name in self.parts.scales or ()] or [None, None]
        y = None
        if self._are_factors(scales[0]):
            y = first_half_of(self, x, norms[0], attn, self._mixing(), factors(scales[0]), rotation)
        if y is None:
            given = {} if positions is None else {"position_embeddings": positions}
            tokens = norms[0](x)
            args = () if self.parts.by_name else (tokens,)
            given |= {"hidden_states": tokens} if self.parts.by_name else {}
            y = x + through(scales[0], attn(*args, attention_mask=None, **given)[0])
        behind = None
        if self._are_factors(scales[1]):
            behind = half_of_plain_mlp(self, y, norms[1], mlp, self.parts.mlp, self.home, factors(scales[1]))
        return y + through(scales[1], mlp(norms[1](y))) if behind is None else behind

    def _mixing(self) -> Between | None:
        attn = getattr(self, self.parts.attention)
        return converted(attn) or (TransformersSoftmax(attn, self.parts.proj) if self.is_softmax(attn) else None)

    def _are_factors(self, scale: nn.Module | None) -> bool:
        return scale is None or (self.are_of_home(scale) and not does_more(scale))


def of_blocks(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those by which a block is asked for something: networks hand down what is asked of them as well."""
    return {name: value for name, value in settings.items() if name != "output_hidden_states"}


def half_of_plain_mlp(
    block: nn.Module, x: Tensor, norm: nn.Module, mlp: nn.Module, names: Sequence[str], home: str, scale: Tensor | None
) -> Tensor | None:
    """Tokens x (b, n, c) behind the second half of a block, in one step.

    None where its MLP is not the plain one of the module `home`, whose layers have these names, or somebody listens.
    """
    modules = dict(mlp.named_children())
    if type(mlp).__module__ != home or modules.keys() != set(names):  # one with a gate has more, or others
        return None
    first, act, second = (modules[name] for name in names)
    activation = of_transformers(act)
    if activation is None or not (is_norm(norm) and are_mlp(first, second)):
        return None
    if any(map(does_more, (norm, mlp, first, act, second))):
        return None
    return second_half(block, x, norm, first, second, scale, activation=activation)


def factors(scale: Any) -> Tensor | None:
    """Those of a branch's channels, if it has some."""
    return None if scale is None else scale.lambda1


def through(scale: nn.Module | None, x: Tensor) -> Tensor:
    """Tokens behind a module, if there is one."""
    return x if scale is None else scale(x)


def of_transformers(act: nn.Module) -> str | None:
    """What `subquad.ops.mlp_branch` calls an activation, PyTorch's or transformers'; None where it knows none."""
    return activation_of(act) or ACTIVATIONS.get(full_name(type(act)))


class TransformersSoftmax:
    """Between the projections of transformers' attention; positions are a rotation."""

    projected_by = PROJECTED_BY
    reads_tokens = False

    def __init__(self, attn: Any, answered_by: str) -> None:
        self.attn, self.answered_by = attn, answered_by

    def grid_under(self, x: Tensor) -> None:
        """Nothing asks for it."""

    def rotation_of(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Rotation:
        """Cosines and sines as a rotation of tokens (b, n, c)."""
        return remembered(of_two_tables, *positions, num_tokens=x.shape[1])

    def between(self, projected: Sequence[Tensor], x: Tensor, positions: Any = None) -> Tensor:
        """(b, n, h·d)."""
        q, k, v = (part.unflatten(-1, (-1, self.attn.head_dim)).transpose(1, 2) for part in projected)
        if positions is not None:
            q, k = (turned_tokens(positions, tokens) for tokens in (q, k))
        return softmax_attention(q, k, v).transpose(1, 2).flatten(2)


@functools.cache
def fused(full: str) -> type[nn.Module]:
    """The class of blocks of few steps that is derived from the one of this full name."""
    return derived(full, FusedLayer, __name__, parts=PARTS[full])


def derived(full: str, fused_form: type[OfTransformers], module: str, **attributes: Any) -> type[nn.Module]:
    """A class of blocks of few steps, defined in `module`, that is derived from the one of this full name."""
    home, _, name = full.rpartition(".")
    cls = getattr(importlib.import_module(home), name)
    contents = {"home": home, "__module__": module, "__doc__": cls.__doc__, **attributes}
    return type(f"{PREFIX}{name}", (fused_form, cls), contents)


def named(short: str, fulls: Iterable[str]) -> str:
    """Which of some full names the class has that `derived` called so.

    Raises:
        AttributeError: none of them, as pickles that ask for it expect.
    """
    for full in fulls:
        if short == PREFIX + full.rpartition(".")[2]:
            return full
    raise AttributeError(f"there is no class {short!r} of blocks of few steps")


def __getattr__(name: str) -> type[nn.Module]:
    """The class of this name, which pickles ask for."""
    return fused(named(name, PARTS))
