"""Layers of our own hosts, with any mechanism: of the plain one, of Swin, PVT and CSwin.

A quadratic mechanism stays in its windows or with its fewer keys, all others see the whole grid, as in `create_model`.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from subquad.attention import traits_of
from subquad.attention.bricks import LocalConv
from subquad.conversion.converted_attention import ConvertedAttention, Mechanism, channels_into, is_quadratic
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.models.cswin import CrossShapedAttention
from subquad.models.layers import SelfAttention, move_tables
from subquad.models.pvt import reduced
from subquad.models.windows import Windows, attend_in_windows, window_of, windows_of
from subquad.rope import Rotation


class OwnAttention(ConvertedAttention):
    """Called with the grid, as all our layers; it needs no recorder."""

    replaces: ClassVar[tuple[str, ...]] = ("subquad.models.layers.SelfAttention",)

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.projected = tuple(original.projected)
        # what `SelfAttention.heads` cuts the fused projection into
        self.all_heads = self.num_heads
        carry_over(original.inner, self.inner)

    def check(self, original: Any) -> None:
        refuse_own_heads(original.inner)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, channels_into(original.proj) // original.num_heads

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        return ((name, part) for name, part in super().kept(original) if name != "inner")

    def forward(
        self,
        x: Tensor,
        *,
        grid: TokenGrid,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        grid.check(x)
        x = self.through("pre_norm", x)
        y = self.mixed_of(self.through("qkv", x), x, grid, rotation, padding=padding, mask=mask)
        return self.through("proj", y)

    def mixed_of(self, projected: Tensor, x: Tensor, grid: TokenGrid, rotation: Rotation | None, **seen: Any) -> Tensor:
        """What stands in front of the output projection, of what tokens x are projected to: (b, n, h·d).

        `seen` is what a call says of it: padding and mask.
        """
        fused = projected.chunk(len(self.projected), dim=-1)
        parts = {name: self.split(part) for name, part in zip(self.projected, fused, strict=True)}
        q, v = self.through("q_norm", parts["q"]), parts["v"]
        # SOFT's keys are its queries
        k = self.through("k_norm", parts["k"]) if "k" in parts else q
        return self.mix(q, k, v, x, grid=grid, rotation=rotation, **seen)

    def is_plain_on(self, grid: TokenGrid) -> bool:
        """Whether a call on `grid` does what this class does, see `SelfAttention.is_plain_on`."""
        return True

    def windows_on(self, grid: TokenGrid) -> Windows | None:
        """The windows of `grid` in which tokens attend, see `SelfAttention.windows_on`."""
        return None

    def regrid(self, old: TokenGrid, new: TokenGrid) -> None:
        """Make position parameters for `new` instead of `old`, the old layer's too."""
        self._move_tables(old, new)
        self.original.regrid(old, new)  # type: ignore[operator]

    def _move_tables(self, old: TokenGrid, new: TokenGrid) -> None:
        move_tables(self.inner, {old: new})


class OwnGatedAttention(OwnAttention):
    """MAViT's: its gate and its convolution of the values stay, also where the replaced mechanism had them."""

    replaces: ClassVar[tuple[str, ...]] = ("subquad.models.mavit.GatedAttention",)
    host: ClassVar[str] = "mavit"

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        local = getattr(original.inner, "local", None)
        # one of the same kind has its convolution again
        if not self.has("lepe") and isinstance(local, LocalConv) and type(original.inner) is not type(self.inner):
            self.lepe = with_every_filter(local)

    def mixed_of(self, projected: Tensor, x: Tensor, grid: TokenGrid, rotation: Rotation | None, **seen: Any) -> Tensor:
        """What stands in front of the output projection, gated, of what tokens x are projected to: (b, n, h·d)."""
        tokens = dict(zip(self.projected, projected.chunk(len(self.projected), dim=-1), strict=True))
        parts = {name: self.split(part) for name, part in tokens.items()}
        q, k = parts["q"], parts.get("k", parts["q"])
        y = self.mix(q, k, parts["v"], x, grid=grid, rotation=rotation, **seen)
        if self.has("lepe"):
            y = self.lepe(self.split(y), parts["v"], grid=grid, kv_grid=grid).transpose(1, 2).flatten(2)
        g = F.silu(tokens["g"]) if self.has("gate_norm") else tokens["g"]
        return self.through("gate_norm", y) * g

    def is_plain_on(self, grid: TokenGrid) -> bool:
        return True


def with_every_filter(local: LocalConv) -> LocalConv:
    """The local branch of a mechanism with a filter of its own for each channel."""
    weight, has_bias = local.weight, local.bias is not None
    made = LocalConv(local.num_heads, local.head_dim, weight.shape[-1], bias=has_bias)
    made.to(weight).load_state_dict({name: local.for_channels(part) for name, part in local.named_parameters()})
    return made


class OwnMambaLikeAttention(OwnAttention):
    """MLLA's: its convolution and its gate stay, and values are the convolved tokens."""

    replaces: ClassVar[tuple[str, ...]] = ("subquad.models.mlla_network.MambaLikeAttention",)
    host: ClassVar[str] = "mllanet"

    def forward(self, x: Tensor, *, grid: TokenGrid, rotation: Rotation | None = None) -> Tensor:  # type: ignore[override]
        grid.check(x)
        convolved = self.through("conv", grid.to_image(self.through("in_proj", x))).flatten(2).mT
        y = self.mixed_tokens(F.silu(convolved), grid, rotation)
        return self.through("proj", y * F.silu(self.through("gate", x)))

    def mixed_tokens(self, tokens: Tensor, grid: TokenGrid, rotation: Rotation | None) -> Tensor:
        """What the mechanism makes of convolved tokens (b, n, c), in front of the gate: (b, n, h·d)."""
        fused = self.through("qkv", tokens).chunk(len(self.projected), dim=-1)
        parts = {name: self.split(part) for name, part in zip(self.projected, fused, strict=True)}
        q, k = parts["q"], parts.get("k", parts["q"])
        return self.mix(q, k, self.split(tokens), tokens, grid=grid, rotation=rotation)


class OwnWindowAttention(OwnAttention):
    """Stand for the windows of our Swin."""

    replaces: ClassVar[tuple[str, ...]] = ("subquad.models.swin.WindowAttention",)

    def make_inner(self, original: Any, mechanism: Mechanism, grid: TokenGrid) -> Any:
        self.window_size = original.window_size if is_quadratic(mechanism) else None
        self.shifted = original.shifted and self.window_size is not None
        self.fixed = original.fixed
        return super().make_inner(original, mechanism, self.window_of(grid))

    def window_of(self, grid: TokenGrid) -> TokenGrid:
        """The window on a grid."""
        return window_of(grid, self.window_size, fixed=self.fixed)

    def is_plain_on(self, grid: TokenGrid) -> bool:
        return self.windows_on(grid) is None

    def windows_on(self, grid: TokenGrid) -> Windows | None:
        return windows_of(grid, self.window_size, shifted=self.shifted, fixed=self.fixed)

    def forward(self, x: Tensor, *, grid: TokenGrid, **keywords: Any) -> Tensor:
        windows = self.windows_on(grid)
        if windows is None:
            return super().forward(x, grid=grid, **keywords)
        refuse(f"windows of {windows.window}", keywords)
        return attend_in_windows(x, windows, super().forward)

    def _move_tables(self, old: TokenGrid, new: TokenGrid) -> None:
        move_tables(self.inner, {self.window_of(old): self.window_of(new)})


class OwnReducingAttention(OwnAttention):
    """Stand for the reduced keys of our PVT and PVTv2."""

    replaces: ClassVar[tuple[str, ...]] = ("subquad.models.pvt.SpatialReductionAttention",)

    def make_inner(self, original: Any, mechanism: Mechanism, grid: TokenGrid) -> Any:
        self.sr_ratio = original.sr_ratio if is_quadratic(mechanism) else 1
        dim = self.num_heads * self.width
        # keys of a grid without prefix tokens, unless all of them are kept
        kv_grid = grid if self.sr_ratio == 1 else reduced(grid, self.sr_ratio)
        return mechanism(dim, self.num_heads, grid=grid, kv_grid=kv_grid)

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        return ((name, part) for name, part in super().kept(original) if name != "reduce" or self.sr_ratio > 1)

    # queries of the tokens, keys and values of the reduced ones
    heads: Any = SelfAttention.heads
    some_heads: Any = SelfAttention.some_heads
    in_heads: Any = SelfAttention.in_heads

    def is_plain_on(self, grid: TokenGrid) -> bool:
        return self.sr_ratio == 1

    def forward(self, x: Tensor, *, grid: TokenGrid, **keywords: Any) -> Tensor:
        if self.sr_ratio == 1:
            return super().forward(x, grid=grid, **keywords)
        refuse(f"keys that are reduced {self.sr_ratio} times", keywords)
        keys = rearrange(self.through("reduce", grid.to_image(x)), "b c y x -> b (y x) c")
        parts = self.heads(x, keys)
        y = self.mix(parts["q"], parts["k"], parts["v"], x, grid=grid, kv_grid=reduced(grid, self.sr_ratio))
        return self.through("proj", y)

    def _move_tables(self, old: TokenGrid, new: TokenGrid) -> None:
        move_tables(self.inner, {reduced(old, self.sr_ratio): reduced(new, self.sr_ratio), old: new})


class OwnCrossShapedAttention(ConvertedAttention):
    """CSwin's, with the locally-enhanced positions of all channels."""

    replaces: ClassVar[tuple[str, ...]] = ("subquad.models.cswin.CrossShapedAttention",)

    # a branch for each direction of the stripes
    branch_of: Any = CrossShapedAttention.branch_of
    positions_of: Any = CrossShapedAttention.positions_of
    stripe_of: Any = CrossShapedAttention.stripe_of

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.names = original.names
        self.projected = tuple(name for name in original.names if name != "x")

    def check(self, original: Any) -> None:
        refuse_own_heads(original.branches[0])

    def sizes(self, original: Any) -> tuple[int, int]:
        heads = original.heads * len(original.branches)
        return heads, channels_into(original.proj) // heads

    def make_inner(self, original: Any, mechanism: Mechanism, grid: TokenGrid) -> Any:
        self.split_size = original.split_size if is_quadratic(mechanism) else None
        if self.split_size is None:
            return super().make_inner(original, mechanism, grid)
        self.heads = self.all_heads = original.heads
        stripe = self.stripe_of(0, grid)
        inner = mechanism(self.heads * self.width, self.heads, grid=stripe, kv_grid=stripe)
        if any(True for _ in inner.parameters()):
            raise SubquadError(f"{type(inner).__name__} learns something, and would be one for all stripes of CSwin")
        # without parameters one is as good as two
        self.branches = (inner, inner)
        return inner

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        return ((name, part) for name, part in super().kept(original) if name != "branches")

    def forward(self, x: Tensor, unnormed: Tensor, *, grid: TokenGrid) -> Tensor:
        if self.split_size is not None:
            return CrossShapedAttention.forward(self, x, unnormed, grid=grid)  # type: ignore[arg-type]
        grid.check(x)
        fused = self.through("qkv", x).chunk(len(self.projected), dim=-1)
        parts = dict(zip(self.projected, fused, strict=True))
        q, v = self.split(parts["q"]), self.split(parts["v"])
        k = self.split(parts["k"]) if "k" in parts else q
        positions = self.through("lepe", grid.to_image(parts["v"])).flatten(2).mT
        return self.through("proj", self.mix(q, k, v, x, unnormed=unnormed, grid=grid) + positions)

    def regrid(self, old: TokenGrid, new: TokenGrid) -> None:
        """Make position parameters for `new` instead of `old`, the old layer's too."""
        move_tables(self.inner, {old: new})
        self.original.regrid(old, new)  # type: ignore[operator]


def refuse_own_heads(mechanism: nn.Module) -> None:
    """Raise where the mechanism of a trained layer has heads of its own, which another one would not have."""
    if count := traits_of(mechanism).extra_heads:
        raise SubquadError(
            f"{type(mechanism).__name__} has {count} of this layer's heads for itself, and the output projection reads "
            "them: such layers can't be converted"
        )


def refuse(what: str, keywords: dict[str, Any]) -> None:
    """Raise where a layer that does not attend over the whole grid is called with padding, a mask or a rotation."""
    if given := [name for name, value in keywords.items() if value is not None]:
        raise SubquadError(f"{what} take no {' and no '.join(given)} of the whole grid")


def carry_over(old: nn.Module, new: nn.Module) -> None:
    """Give a mechanism of the same kind and sizes what the replaced one has learned."""
    learned = old.state_dict()
    shapes = {name: tensor.shape for name, tensor in learned.items()}
    if type(old) is type(new) and shapes == {name: tensor.shape for name, tensor in new.state_dict().items()}:
        new.load_state_dict(learned)
