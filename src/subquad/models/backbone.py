"""What all hosts share: the head, and the interface that timm's models have.

A host builds `stages` (or blocks), hands over its sizes, and says how it walks through them (`walk`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from timm.models import register_notrace_function
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.fx import Proxy

from subquad import spread
from subquad.errors import SubquadError, shown
from subquad.grid import TokenGrid
from subquad.models.layers import init_linear
from subquad.ranges import Count, Positive, checks_arguments, height_and_width
from subquad.tracing import refuse_torchscript
from subquad.weights.fitting import adapt

POOLS = ("avg", "max", "token", "")


class Backbone(nn.Module):
    """A network of stages, one a resolution, with a head on its last tokens.

    Args:
        stages: from the finest to the coarsest.
        dims: channels of each stage.
        img_size: (height, width) in pixels that position parameters are made for; other sizes work.
        in_chans: channels of the images.
        num_classes: classes of the head; 0 for none.
        norm: of the last tokens.
        num_features: channels of the tokens behind `norm`, if not those of the last stage.
        fc_norm: of what the head reads, for networks that norm behind the pooling; None for none.
        global_pool: what the head reads: "avg" or "max" of the map, "token", the class token, or "" for all tokens.
        drop_rate: dropout in front of the head.
        reg_tokens: prefix tokens of the last map that nothing reads; the others are a class token.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        dims: Sequence[int],
        *,
        img_size: tuple[int, int],
        in_chans: int,
        num_classes: int,
        norm: nn.Module,
        num_features: int | None = None,
        fc_norm: nn.Module | None = None,
        global_pool: str = "avg",
        drop_rate: float = 0,
        patch_size: int = 4,
        reg_tokens: int = 0,
    ) -> None:
        super().__init__()
        self.creation: dict[str, Any] = {}
        self.img_size, self.in_chans, self.num_classes = img_size, in_chans, num_classes
        # windows and what else follows from a size stay as they are when the network moves to another
        self.built_for = img_size
        self.patch_size, self.reg_tokens = patch_size, reg_tokens
        self.num_features = self.head_hidden_size = num_features or dims[-1]
        self.stages: Any = nn.ModuleList(stages)
        self.feature_info: list[dict[str, Any]] = [
            {"num_chs": dim, "reduction": patch_size * 2**s, "module": f"stages.{s}"} for s, dim in enumerate(dims)
        ]
        self.norm = norm
        self.fc_norm = fc_norm or nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.global_pool = self._checked_pool(global_pool)
        self.apply(init_linear)

    wants_own_dtype = False
    """Whether images of another dtype than the parameters' are refused, as `subquad.inference` lets it."""

    layout = ""
    """Whose released checkpoints can fit, a name of `released.FAMILIES`."""

    first_conv = "stages.0.embed.proj"
    """The entry that sees the image, for timm."""

    takes_mechanisms = True
    """Whether the host's blocks take any mechanism; some networks have attention of their own."""

    own_attention = ""
    """What blocks are called that have attention of the host's own; empty where all take a mechanism."""

    is_plain = False
    """Whether all blocks stand on one grid: levels are blocks then, and the network is no pyramid."""

    spreads = False
    """Whether several processes may hold an image, a band of rows each: all that looks beyond a token is a mechanism
    or a plain convolution, and blocks stand in `stages`."""

    everything: int | None = None
    """The reach of a block that sees the whole grid."""

    @staticmethod
    def default_reach(img_size: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """The argument that confines blocks of quadratic mechanisms, if any, and its default for each stage."""
        return {}

    @property
    def prefix(self) -> int:
        """Tokens in front of the last map, the class token among them."""
        return self.stages[-1].grid.prefix

    @property
    def output_fmt(self) -> str:
        """Shape of `forward_features`: a map "NHWC", or tokens "NLC" where there are some without a place on it."""
        return "NLC" if self.prefix else "NHWC"

    @property
    def least_size(self) -> int:
        """Pixels of the shortest side whose maps hold whole windows, or stripes, of every block; 1 without any."""
        return 1

    # forward

    def check_images(self, x: Tensor) -> None:
        """Raise SubquadError where `x` are no images (b, in_chans, height, width) of numbers with a point."""
        # here and not where it is called: FX knows what it is not to look into by a public name beside `forward`
        refuse_no_images(x, self.in_chans)
        self.check_pixels(x)
        if self.wants_own_dtype:
            refuse_other_dtype(x, next(self.parameters()).dtype)

    def check_pixels(self, x: Tensor) -> None:
        """Raise where images have no pixels."""
        refuse_no_pixels(x, self.in_chans)

    def walk(self, x: Tensor) -> Iterator[tuple[Tensor, TokenGrid]]:
        """Tokens and their grid wherever features can be taken: at the end of each stage."""
        self.check_images(x)
        for stage in self.stages:
            tokens, grid = stage(x)
            yield tokens, grid
            x = grid.to_image(tokens)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (b, in_chans, height, width) to normed features: (b, y, x, c), or (b, n, c) with prefix tokens."""
        self.check_images(x)
        for stage in self.stages:
            tokens, grid = stage(x)
            x = grid.to_image(tokens)
        return self._as_output(self.norm(tokens), grid)

    def _as_output(self, tokens: Tensor, grid: TokenGrid) -> Tensor:
        return tokens if self.output_fmt == "NLC" else grid.to_image(tokens).permute(0, 2, 3, 1)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features to logits (b, num_classes), or to what the classifier reads."""
        x = self.head_drop(self.fc_norm(self._pool(x)))
        return x if pre_logits else self.head(x)

    def _pool(self, x: Tensor) -> Tensor:
        if self.global_pool == "":
            return x
        if self.global_pool == "token":
            return spread.first_token(x)
        places = x.flatten(1, -2)[:, spread.prefix_here(self.prefix) :]
        return spread.mean_token(places) if self.global_pool == "avg" else spread.largest_token(places)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        *,
        return_prefix_tokens: bool = False,
        output_dict: bool = False,
    ) -> Any:
        """Maps of the levels `indices` (all; the last so many; these), as timm's models give them.

        Args:
            x: images.
            indices: which levels of `feature_info`.
            norm: apply the final norm to those it is made for.
            stop_early: end with the last level asked for.
            output_fmt: "NCHW", "NHWC", or "NLC" for tokens without prefix.
            intermediates_only: leave out the final features.
            return_prefix_tokens: with each map its prefix tokens (b, prefix, c), where the network has some.
            output_dict: give a dictionary.

        Returns:
            The list of maps, of (map, prefix tokens) with `return_prefix_tokens`; or (final features, that list). Of
            `output_dict` the same as "image_intermediates", "image_intermediates_prefix" and "image_features".
        """
        taken, last = levels_of(len(self.feature_info), indices)
        maps, prefixes, level = [], [], 0
        for level, (tokens, grid) in enumerate(self.walk(x)):
            if level in taken:
                normed = self.norm(tokens) if norm and self._norm_fits(level) else tokens
                maps.append(self._as_map(normed, grid, output_fmt))
                prefixes.append(normed[:, : grid.prefix])
            if stop_early and level == last:
                break
        has_prefixes = return_prefix_tokens and self.prefix > 0
        given: dict[str, Any] = {"image_intermediates": maps}
        if has_prefixes:
            given["image_intermediates_prefix"] = prefixes
        if not intermediates_only:
            ended = level == len(self.feature_info) - 1 or self._norm_fits(level)
            given["image_features"] = self._as_output(self.norm(tokens) if ended else tokens, grid)
        if output_dict:
            return given
        levels = list(zip(maps, prefixes, strict=True)) if has_prefixes else maps
        return levels if intermediates_only else (given["image_features"], levels)

    def _as_map(self, tokens: Tensor, grid: TokenGrid, output_fmt: str) -> Tensor:
        if output_fmt not in ("NCHW", "NHWC", "NLC"):
            raise SubquadError(f"unknown output_fmt '{output_fmt}': use NCHW, NHWC or NLC")
        if output_fmt == "NLC":
            return tokens[:, grid.prefix :]
        image = grid.to_image(tokens)
        return image.contiguous() if output_fmt == "NCHW" else rearrange(image, "b c y x -> b y x c")

    def _norm_fits(self, level: int) -> bool:
        return level == len(self.feature_info) - 1

    # what torch.jit.script calls first
    __prepare_scriptable__ = refuse_torchscript

    # changing a network

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the levels `indices` do not need; returns them as numbers from 0.

        The head goes unless `prune_head` is False, and even then where it can't read the last level that is left, as
        that of a pyramid.
        """
        taken, last = levels_of(len(self.feature_info), indices)
        shortened = last < len(self.feature_info) - 1
        misfits = shortened and not self._norm_fits(last)
        width, prune_norm = self.num_features, prune_norm or misfits
        if shortened or prune_norm:
            # no arguments of `create_model` make it so
            self.creation = {}
        if shortened:
            self._cut_after(last)
            # levels are counted, from the last as well, among those that are left
            self.feature_info = self.feature_info[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
            self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
        # a norm may widen its tokens, and no head reads others
        if prune_head or misfits or self.num_features != width:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0, "")
        return taken

    def _cut_after(self, level: int) -> None:
        self.stages = self.stages[: level + 1]

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    @checks_arguments
    def reset_classifier(self, num_classes: Count, global_pool: str | None = None) -> None:
        """A new head for `num_classes` classes, on the network's device; 0 for none. The pooling stays unless given."""
        if global_pool is not None:
            self.global_pool = self._checked_pool(global_pool)
            self._made_with(global_pool=global_pool)
        self.num_classes = num_classes
        self._made_with(num_classes=int(num_classes))
        like = next(self.parameters())
        head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.head = head.apply(init_linear).to(device=like.device, dtype=like.dtype).train(self.training)

    def _checked_pool(self, global_pool: str) -> str:
        if global_pool not in POOLS:
            raise SubquadError(f"unknown global_pool '{global_pool}': use one of {', '.join(map(repr, POOLS))}")
        if global_pool == "token" and self.prefix <= self.reg_tokens:
            raise SubquadError("global_pool 'token' reads the class token, and this network has none: use 'avg'")
        return global_pool

    def grids(self, img_size: tuple[int, int]) -> list[TokenGrid]:
        """The grid of every stage, without prefix tokens, for images of (height, width)."""
        return grids_of(img_size, self.patch_size, len(self.stages))

    @checks_arguments
    def set_input_size(self, img_size: Positive | tuple[Positive, Positive] | None = None) -> None:
        """Make position parameters for images of another size, (height, width), resampling those that are there."""
        if img_size is None:
            return
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1])
        for stage, grid in zip(self.stages, self.grids(self.img_size), strict=True):
            stage.regrid(grid)
        self._made_for_its_size()

    def say_how_it_is(self) -> None:
        """Let `creation` name the size, the head and the pooling that the network has by now."""
        size = self.creation.get("img_size")
        if size is None or height_and_width(size) != tuple(self.img_size):
            self._made_for_its_size()
        self._made_with(num_classes=int(self.num_classes), global_pool=self.global_pool)

    def _made_for_its_size(self) -> None:
        self._made_with(
            img_size=[int(side) for side in self.img_size], built_for=[int(side) for side in self.built_for]
        )

    def _made_with(self, **arguments: Any) -> None:
        """From now on the network is as if it had been made with these: its weights' file says so."""
        if self.creation:
            self.creation = self.creation | arguments

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As PyTorch's, and reads the authors' layouts and tables of other image sizes as well."""
        return super().load_state_dict(adapt(dict(state_dict), self).state, strict=strict, assign=assign)

    # training

    def no_weight_decay(self) -> set[str]:
        """Parameters that the papers' recipes do not decay."""
        names = ("prefix_tokens", "relative_bias.table")
        return {name for name, _ in self.named_parameters() if name.endswith(names)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups, for layer-wise learning rates."""
        fine = [
            (r"^stages\.(\d+)\.(?:embed|pos_embed|prefix_tokens|residual)", (0,)),
            (r"^stages\.(\d+)\.\w+\.(\d+)", None),
            (r"^stages\.(\d+)\.norm", (99999,)),
            (r"^norm", (99999,)),
        ]
        return {"stem": r"^stages\.0\.(?:embed|pos_embed)", "blocks": r"^stages\.(\d+)" if coarse else fine}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade time for memory in training: blocks are computed again in the backward pass."""
        for stage in self.stages:
            stage.grad_checkpointing = enable


@register_notrace_function
def refuse_no_pixels(x: Tensor, in_chans: int) -> None:
    """Raise SubquadError where images (b, c, y, x) have no rows or no columns."""
    if 0 in x.shape[2:]:
        raise SubquadError(
            f"this network takes images (b, {in_chans}, height, width), got {tuple(x.shape)}: they have no pixels"
        )


@register_notrace_function
def refuse_no_images(x: Tensor, in_chans: int) -> None:
    """Raise SubquadError where `x` are no images of `in_chans` channels."""
    if isinstance(x, Proxy):
        raise SubquadError(
            "torch.fx can't follow what is within stages: timm.models.create_feature_extractor and "
            "get_graph_node_names leave them whole, where torchvision's and symbolic_trace do not"
        )
    if not isinstance(x, Tensor):
        kind = type(x).__name__
        raise SubquadError(f"this network takes images as a tensor (b, {in_chans}, height, width), got {kind}")
    # it may be that it does not say its shape
    if why := not_dense(x):
        raise SubquadError(f"this network takes images as a tensor (b, {in_chans}, height, width), got {why}")
    if x.dim() == 4 and x.shape[1] == in_chans and x.is_floating_point():
        return
    wanted = f"this network takes images (b, {in_chans}, height, width), got {tuple(x.shape)}"
    if x.dim() != 4:
        raise SubquadError(f"{wanted}: x[None] makes a batch of one image" if x.dim() == 3 else wanted)
    if x.shape[1] == in_chans:
        dtype = str(x.dtype).removeprefix("torch.")
        raise SubquadError(f"{wanted} of {dtype}: make them float and normalise them first")
    last = "channels stand in front of height and width" if x.shape[3] == in_chans else ""
    raise SubquadError(f"{wanted}: {last or f'make it with in_chans={x.shape[1]} to take these'}")


@register_notrace_function
def refuse_no_frames(x: Tensor, in_chans: int, most: int) -> None:
    """Raise SubquadError where `x` are no scenes of 1 to `most` frames; what they are made of is not looked at."""
    if isinstance(x, Proxy):
        # says what can trace
        refuse_no_images(x, in_chans)
    wanted = f"this network takes 1 to {most} frames (b, frames, {in_chans}, height, width)"
    if why := not_dense(x) if isinstance(x, Tensor) else type(x).__name__:
        raise SubquadError(f"{wanted} as a tensor, got {why}")
    if x.dim() != 5 or not 1 <= x.shape[1] <= most:
        as_one = ": x[:, None] makes scenes of one frame of images" if x.dim() == 4 else ""
        raise SubquadError(f"{wanted}, got {tuple(x.shape)}{as_one}")


def not_dense(x: Tensor) -> str:
    """What a tensor is beside a block of numbers, and what to do with it; empty for one that is none."""
    if x.is_nested:
        return "a nested one: stack images of one size by torch.stack(x.unbind()), or hand them over one by one"
    if x.layout is not torch.strided:
        return f"one of {x.layout}: x.to_dense() makes it a dense one"
    return ""


@register_notrace_function
def levels_of(count: int, indices: int | Sequence[int] | None) -> tuple[list[int], int]:
    """The levels that `indices` asks for among `count`, as timm has them: numbers from 0, and the last of them.

    Raises:
        SubquadError: it is no number of the last levels, no list of levels, or there are fewer.
    """
    try:
        return feature_take_indices(count, indices)
    except (AssertionError, TypeError):
        raise SubquadError(
            f"indices is how many of the last levels, 1 to {count}, or a list of levels, {-count} to {count - 1}, "
            f"got {shown(indices)}"
        ) from None


@register_notrace_function
def refuse_other_dtype(x: Tensor, dtype: torch.dtype) -> None:
    """Raise SubquadError where images are not of the dtype that a network computes in, and autocast does not decide."""
    if x.dtype == dtype or torch.is_autocast_enabled(x.device.type):
        return
    names = [str(one).removeprefix("torch.") for one in (dtype, x.dtype)]
    wanted = f"this network computes in {names[0]} and was given {names[1]}"
    raise SubquadError(f"{wanted}: hand it images.to(torch.{names[0]})")


def least_for(reaches: Sequence[Iterable[int]], patch_size: int) -> int:
    """Pixels of a side from which on every stage has as many rows as its blocks reach over, of `reaches`."""
    return max(patch_size * 2**s * (max(stage) - 1) + 1 for s, stage in enumerate(reaches))


def grids_of(img_size: tuple[int, int], patch_size: int, stages: int) -> list[TokenGrid]:
    """The grid of every stage for images of `img_size`: patches, then halves, rounded up."""
    if min(img_size) < 1 or patch_size < 1:
        raise SubquadError(f"an image of {img_size[0]}×{img_size[1]} px in patches of {patch_size} px has no tokens")
    height, width = -(-img_size[0] // patch_size), -(-img_size[1] // patch_size)
    grids = []
    for _ in range(stages):
        grids.append(TokenGrid(height, width))
        height, width = -(-height // 2), -(-width // 2)
    return grids
