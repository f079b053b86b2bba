"""An attention layer of a foreign network whose tokens are mixed by one of our mechanisms.

A family (`timm_attention.py`, …) derives a class from `ConvertedAttention` for each kind of attention layer that it
reads: what it is called with, how it projects, what becomes of its answer. All else is here.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels.
"""

import inspect
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from subquad.attention import traits_of
from subquad.attention.bricks import check_answer, is_heard
from subquad.conversion.filled_images import mixed_apart
from subquad.conversion.grid_recorder import GridRecorder
from subquad.conversion.recorded_maps import are_recorded
from subquad.errors import SubquadError, shown
from subquad.grid import TokenGrid
from subquad.inference.foreign_halves import has_usual_scale
from subquad.models.layers import init_linear, is_linear
from subquad.ops.turning import turned_tokens
from subquad.rope import Rotation
from subquad.tracing import is_traced, refuse_torchscript

ADDED = ("inner", "gate_of_tokens", "extra_qkv", "extra_proj")
"""Modules that a converted layer has beside those that it keeps."""

EXTRA_PARTS = ("q", "k", "v")
"""What is projected for heads that a mechanism has beside the layer's."""

COMPUTING = (BasePruningMethod, SpectralNorm, WeightNorm)
"""Hooks of PyTorch that compute a weight of others in front of each call."""

Mechanism = Callable[..., Any]
"""A class of `subquad.attention`, or a `functools.partial` of one that fixes its settings."""


@register_notrace_module
class ConvertedAttention(nn.Module):
    """Mixes as `inner`, a mechanism, does, and projects as the layer that it stands for.

    What it keeps of that layer has the same names, so that a network's state dict only grows by `inner.*`, by
    `gate_of_tokens.*` where the mechanism has a gate, and by `extra_qkv.*` and `extra_proj.*` where it has heads beside
    the layer's. What these give is added to the layer's own heads, and is nothing at first. The layer itself is held
    beside, not among the modules: `subquad.restore` puts it back as it was.

    Attributes:
        replaces: full names of the classes that a family's class stands for, where they are defined.
        host: the host whose usual settings mechanisms have in this family, see `Traits.in_hosts`.
        listener: what tells this family's layers where their tokens stand, and to which module it listens.
        in_pyramid: whether convolutions lead from one stage of this family's networks to the next, each to a smaller
            map, on which the layers behind it stand.
        is_handed_maps: whether calls bring maps, on which tokens stand; the network is run for where, see `map_under`.
        stands_anywhere: whether such layers are handed all that says where their tokens stand, so that they are found
            wherever they are, as between the halves of a U-Net, by a call of a network of anybody's code.
        is_anybodys: whether such layers stand in networks of anybody's own code, which may be run to see where their
            tokens come from, and in which order they stand.
        asks_for_calls: whether what such a layer is handed beside tokens is seen in a call of its network, and given to
            the class as `call` (`copied_calls.py`), or what went `wrong` there.
        others_see: what layers that are no targets see, where these can't be converted at all, as "windows".
        recorded_as: the full name of what holds such layers and gives transformers their attention maps, if something
            does.
        fills_images: whether padding fills images of a batch up to one size, so that each stands on a map of its own.
        maps_asked_at: the place among its arguments by which a call asks for attention maps.
    """

    replaces: ClassVar[tuple[str, ...]] = ()
    host: ClassVar[str] = "vit"
    listener: ClassVar[type[GridRecorder]] = GridRecorder
    in_pyramid: ClassVar[bool] = False
    is_handed_maps: ClassVar[bool] = False
    stands_anywhere: ClassVar[bool] = False
    is_anybodys: ClassVar[bool] = False
    asks_for_calls: ClassVar[bool] = False
    others_see: ClassVar[str | None] = None
    recorded_as: ClassVar[str | None] = None
    fills_images: ClassVar[bool] = False
    maps_asked_at: int | None = None

    # what torch.jit.script calls first
    __prepare_scriptable__ = refuse_torchscript

    def __init__(self, original: nn.Module, mechanism: Mechanism, *, grid: TokenGrid, recorder: GridRecorder) -> None:
        super().__init__()
        self.check(original)
        self.num_heads, self.width = self.sizes(original)
        self.sharpening = sharpening_of(self.scale_of(original), self.width)
        self.recorder = recorder
        self.tokens_in_front = grid.prefix
        self._held = (original,)  # in a tuple, where PyTorch does not look for modules
        dim = self.num_heads * self.width
        like = next(original.parameters())
        self.inner = self.make_inner(original, mechanism, grid)
        for name, part in self.kept(original):
            if isinstance(part, nn.Parameter):
                self.register_parameter(name, nn.Parameter(part.detach().clone(), part.requires_grad))
            else:
                # a copy, so that what is trained here leaves the original as it was
                self.add_module(name, deepcopy(part))
        if "g" in self.inner.inputs:
            self.gate_of_tokens = open_gate(self.tokens_width(original), dim, traits_of(self.inner).open_gate)
            self.gate_of_tokens.to(device=like.device, dtype=like.dtype)
        self.extra_heads = traits_of(self.inner).extra_heads
        if self.extra_heads:
            refuse_extra_heads(self.inner)
            more = self.extra_heads * self.width
            self.extra_qkv = nn.Linear(self.tokens_width(original), len(EXTRA_PARTS) * more)
            self.extra_proj = nn.Linear(more, dim, bias=False)
            init_linear(self.extra_qkv)
            nn.init.zeros_(self.extra_proj.weight)
            for part in (self.extra_qkv, self.extra_proj):
                part.to(device=like.device, dtype=like.dtype)
        self.inner.to(device=like.device, dtype=like.dtype)
        refuse_lost_weights(original, self)
        refuse_lost_forward(original)
        refuse_lost_hooks(original, self)
        arguments = list(inspect.signature(original.forward).parameters)
        self.maps_asked_at = arguments.index("output_attentions") if "output_attentions" in arguments else None
        start_quietly(self.inner)
        self.train(original.training)

    # what a family says of its layers

    def check(self, original: nn.Module) -> None:
        """Raise a SubquadError where this layer has something that the family's class does not carry over."""

    def sizes(self, original: Any) -> tuple[int, int]:
        """(heads, channels of a head)."""
        raise NotImplementedError

    def scale_of(self, original: Any) -> float | None:
        """What the scores of this layer's heads are multiplied by; None where that is 1/√d, as usually."""
        return None

    def make_inner(self, original: Any, mechanism: Mechanism, grid: TokenGrid) -> Any:
        """The mechanism, for queries and keys on `grid`."""
        return mechanism(self.num_heads * self.width, self.num_heads, grid=grid, kv_grid=grid)

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        """The modules and parameters that are carried over, by name: all of them, unless a family says otherwise."""
        yield from original.named_children()
        yield from original.named_parameters(recurse=False)

    def tokens_width(self, original: Any) -> int:
        """Channels of the tokens that the layer is called with."""
        return self.num_heads * self.width

    @classmethod
    def standing_for(cls, original: nn.Module) -> "type[ConvertedAttention]":
        """The class that stands for this very layer: another where layers of one class are called in several ways."""
        return cls

    @classmethod
    def is_target(cls, original: nn.Module, block: nn.Module, number: int) -> bool:
        """Whether this layer of block `number` is meant where all are to be replaced; windows are cheap as they are."""
        return True

    @classmethod
    def is_self_attention(cls, original: nn.Module, block: nn.Module, path: str) -> bool:
        """Whether the class stands for this layer, of a block, at a path, or for others of its kind alone."""
        return True

    @classmethod
    def grid_of(cls, original: nn.Module, grid: TokenGrid) -> TokenGrid:
        """Where the tokens of this layer stand in an image whose embedding gives `grid`: there, but in a pyramid."""
        return grid

    @classmethod
    def map_under(cls, x: Tensor) -> TokenGrid:
        """Where the tokens of a map stand that such a layer is called with, if it is handed maps."""
        raise NotImplementedError

    @classmethod
    def way_to_map(cls, original: Any) -> Callable[[Tensor], TokenGrid]:
        """What says where the tokens of a call of this layer stand, if it is handed maps."""
        return cls.map_under

    @classmethod
    def grid_behind(cls, original: nn.Module, grid: TokenGrid) -> TokenGrid:
        """Where tokens stand behind this layer: as in front of it, unless it pools them."""
        return grid

    @classmethod
    def tokens_beside(cls, original: nn.Module, number: int) -> int:
        """How many tokens the layer of block `number` has in front of its map besides those of the embedding.

        Such are queries that come in between blocks. They count as prefix tokens of that layer.
        """
        return 0

    # what all families share

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer.

        Raises:
            SubquadError: attention maps are asked for: others' would stand in their places.
        """
        place = self.maps_asked_at
        asked = args[place] if place is not None and len(args) > place else kwargs.get("output_attentions")
        refuse_maps(asked or are_recorded(self.original, self.recorded_as))
        return super().__call__(*args, **kwargs)

    def standing_on(self, rows: TokenGrid) -> AbstractContextManager[None]:
        """Let the tokens that the layer is called with stand on some rows of a grid: who streams an image says so."""
        return self.recorder.standing_on(rows)

    def added(self) -> list[nn.Module]:
        """What the layer has that the one it stands for had not."""
        return [one for name, one in self.named_children() if name in ADDED]

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that a fit may change: all of them where the old layer was frozen as a whole."""
        added = {id(one) for part in self.added() for one in part.parameters()}
        frozen = not any(one.requires_grad for one in self.parameters() if id(one) not in added)
        return [one for one in self.parameters() if frozen or one.requires_grad]

    def has(self, name: str) -> bool:
        """Whether there is a module of this name."""
        return self._modules.get(name) is not None

    def through(self, name: str, tokens: Tensor) -> Tensor:
        """Tokens behind the module of this name, if there is one."""
        module = self._modules.get(name)
        return tokens if module is None else module(tokens)

    def own_weight(self, name: str) -> Tensor | None:
        """The layer's weight of this name, if there is one: a parameter, or a tensor in its place.

        `torch.func.functional_call` hands over plain tensors, and parametrizations compute them.
        """
        return getattr(self, name, None)

    @property
    def original(self) -> nn.Module:
        """The layer that this one stands for, as it was."""
        return self._held[0]

    def split(self, tokens: Tensor) -> Tensor:
        """(b, n, h·d) to (b, h, n, d)."""
        return tokens.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        *,
        grid: TokenGrid | None = None,
        kv_grid: TokenGrid | None = None,
        unnormed: Tensor | None = None,
        rotation: Rotation | None = None,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """What the mechanism makes of projected heads (b, h, n, d): (b, n, h·d), before the output projection.

        Of k and v there may be fewer heads, each of which is that of several neighbours of q (grouped queries).
        `x` (b, n, c) are the layer's own tokens; a mechanism that asks for them gets `unnormed` where that is given,
        and the values in their place where its heads have another width than the tokens.
        `grid` is that of the image, unless it is given, and that of keys, `kv_grid`, the same. `rotation` turns q and
        k, here or in the mechanism. `padding` (b, n) and `mask` are True for what must not be seen.

        Raises:
            SubquadError: the tokens stand on no known grid, or the mechanism can't honour the mask.
        """
        grid = self.grid_under(x) if grid is None else grid
        inputs = self.inner.inputs
        if self.sharpening != 1:
            # of both, so that scores of what a mechanism makes of queries or of keys alone are multiplied alike
            q, k = q * self.sharpening, k * self.sharpening
        if rotation is not None and "rotation" not in inputs:
            q, k = turned_tokens(rotation, q), turned_tokens(rotation, k)
        if (groups := q.shape[1] // k.shape[1]) > 1:
            k, v = (heads.repeat_interleave(groups, dim=1) for heads in (k, v))
        if mask is not None and "mask" not in inputs:
            raise SubquadError(
                f"this layer is called with a mask of pairs, which {type(self.inner).__name__} can't honour: keep this "
                "block, or call the network without a mask"
            )
        if self.extra_heads:
            if kv_grid not in (None, grid):
                raise SubquadError(f"heads of {type(self.inner).__name__}'s own stand on {grid}, not on {kv_grid} too")
            fused = self.through("extra_qkv", x).unflatten(-1, (len(EXTRA_PARTS), self.extra_heads, self.width))
            more = fused.permute(2, 0, 3, 1, 4).unbind(0)
            q, k, v = (torch.cat(both, dim=1) for both in zip((q, k, v), more, strict=True))
        tokens = x if unnormed is None else unnormed
        if "x" in inputs and tokens.shape[-1] != v.shape[1] * self.width:
            tokens = v.transpose(1, 2).flatten(2)
        supply: dict[str, Any] = {"q": q, "k": k, "v": v, "x": tokens}
        supply |= {"padding": padding, "mask": mask, "rotation": rotation}
        if "g" in inputs:
            supply["g"] = self.split(self.through("gate_of_tokens", x))
        y = None
        if padding is not None and self.fills_images and kv_grid in (None, grid) and not is_traced():
            y = mixed_apart(self.inner, supply, grid)
        if y is None:
            y = self.inner(**{name: supply[name] for name in inputs}, grid=grid, kv_grid=kv_grid or grid)
        check_answer(self.inner, y, v, grid)
        if not self.extra_heads:
            return y.transpose(1, 2).flatten(2)
        own, others = (heads.transpose(1, 2).flatten(2) for heads in y.split([self.num_heads, self.extra_heads], dim=1))
        return own + self.through("extra_proj", others)

    # what subquad.inference asks for, where a family has a `between`

    reading: ClassVar[tuple[str, ...]] = ("gate_of_tokens", "extra_qkv")
    """Layers that read tokens between the projections, where there are such."""

    @property
    def reads_tokens(self) -> bool:
        """Whether what lies between the projections reads tokens, and not only how many there are."""
        return "x" in self.inner.inputs or any(map(self.has, self.reading))

    def grid_under(self, x: Tensor) -> TokenGrid:
        """The grid on which the layer's tokens (b, n, c) stand."""
        return self.recorder.grid_of(x, self.tokens_in_front)

    def extra_repr(self) -> str:
        return f"converted from {type(self._held[0]).__name__}"


def refuse_maps(asked: Any) -> None:
    """Raise where a layer is asked for attention maps."""
    if asked:
        raise SubquadError(
            "a converted layer forms no attention maps: leave output_attentions out, or ask the network that was "
            "converted"
        )


def is_quadratic(mechanism: Mechanism) -> bool:
    """Whether a mechanism's cost grows with n²: it stays in the windows of the layer that it stands in."""
    return traits_of(getattr(mechanism, "func", mechanism)).quadratic


def channels_into(layer: nn.Module) -> int:
    """Channels of what a linear layer reads, or what stands in its place."""
    return _says(layer, "in_features")


def channels_out_of(layer: nn.Module) -> int:
    """Channels of what a linear layer gives, or what stands in its place."""
    return _says(layer, "out_features")


def biased(layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
    """Tokens through a linear layer that has no bias, and one that stands beside it."""
    if is_linear(layer) and not is_heard(layer):
        return F.linear(x, cast(nn.Linear, layer).weight, bias)
    y: Tensor = layer(x)
    return y + bias


def _says(layer: Any, name: str) -> int:
    count: int | None = getattr(layer, name, None)
    if count is None:
        raise SubquadError(
            f"a {type(layer).__name__} stands where a linear layer was, and has no {name}: give it this attribute, as "
            "nn.Linear has it, or convert the network before such layers come into it"
        )
    return count


def refuse_extra_heads(mechanism: Any) -> None:
    """Raise where a mechanism has heads of its own that a converted layer can't supply."""
    name, traits = type(mechanism).__name__, traits_of(mechanism)
    if traits.quadratic or "g" in mechanism.inputs:
        has = "grows with n²" if traits.quadratic else "has a gate"
        raise SubquadError(f"{name} has heads of its own and {has}: it can't stand in the place of a trained layer")


def refuse_lost_weights(original: nn.Module, converted: nn.Module) -> None:
    """Raise where weights of a layer are computed of others, as by weight norms, and those of ours would not be."""
    kept = dict(converted.named_modules())
    for path, part in original.named_modules():
        hooks = part._forward_pre_hooks.values()
        computes = is_parametrized(part) or any(isinstance(hook, COMPUTING) for hook in hooks)
        # PyTorch makes a class for a parametrized module, which a copy of it has, too
        if computes and type(kept.get(path)) is not type(part):
            raise SubquadError(
                f"weights of a {type_before_parametrizations(part).__name__} are computed of others, as by pruning or "
                "weight norms, which is not carried over: make them permanent first, by torch.nn.utils.prune.remove or "
                "torch.nn.utils.parametrize.remove_parametrizations"
            )


def refuse_lost_hooks(original: nn.Module, converted: nn.Module) -> None:
    """Raise where somebody listens to a part of a layer that ours does not have."""
    kept = dict(converted.named_modules())
    for path, part in original.named_modules():
        if path not in kept and is_heard(part):
            raise SubquadError(
                f"somebody listens to the {path} of a {type(original).__name__}, which a converted layer has not: take "
                "the hook away"
            )


def sharpening_of(scale: Any, width: int) -> float:
    """What queries and keys of so many channels are multiplied by each, so that 1/√d makes their scores a layer's own.

    Raises:
        SubquadError: its scores are multiplied by nothing that a root can be taken of.
    """
    if has_usual_scale(scale, width):
        return 1.0
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise SubquadError(
            f"its scores are multiplied by {shown(scale)}, and those of a converted layer by a number above 0: "
            "multiply what makes its queries, weights and biases, instead"
        )
    return math.sqrt(scale * math.sqrt(width))


def refuse_lost_forward(original: nn.Module) -> None:
    """Raise where a layer computes by a `forward` of its own, put onto it alone: ours would compute something else."""
    if "forward" in vars(original):
        raise SubquadError(
            f"the forward of this {type(original).__name__} was replaced on the layer itself, as patches and the hooks "
            "of accelerate do, which is not carried over: take it away (del layer.forward, or "
            "accelerate.hooks.remove_hook_from_submodules), or give the layer a class of its own and register a family"
        )


def open_gate(width: int, dim: int, value: float) -> nn.Linear:
    """A projection to a gate that lets everything through at first, being `value` for every token."""
    gate = nn.Linear(width, dim)
    nn.init.zeros_(gate.weight)
    nn.init.constant_(gate.bias, value)
    return gate


@torch.no_grad()
def start_quietly(mechanism: nn.Module) -> None:
    """Let a fresh mechanism add nothing to what it mixes, as its file says: branches and positions of zeros."""
    start = traits_of(mechanism).start_quietly
    if start is not None:
        start(mechanism)
