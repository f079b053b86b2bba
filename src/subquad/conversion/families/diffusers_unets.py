"""diffusers' U-Nets and autoencoders: attention of maps, and what these networks are called with.

Blocks of Stable Diffusion's U-Nets are handed tokens of the map that the transformer around them is handed: where these
stand a call shows (`tokens_origin.py`). Those of unconditional U-Nets and of autoencoders are handed the map itself.

Letters: b batch, n tokens, c channels, y x rows and columns.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from subquad.conversion.example_calls import Example
from subquad.conversion.families.diffusers_attention import OF_IMAGE, DiffusersAttention, refuse_given
from subquad.conversion.families.map_attention import MapRecorder
from subquad.conversion.grid_recorder import GridRecorder, is_called
from subquad.diffusion.patchable_layers import REPLACEABLE
from subquad.errors import SubquadError
from subquad.grid import TokenGrid

MODELS = "diffusers.models"

BESIDE = "encoder_hidden_states", "attention_mask"
"""What calls of diffusers' layers may hand over by place beside tokens."""


class DiffusersMapAttention(DiffusersAttention):
    """A map (b, c, y, x) behind a norm of groups, to another one, to which that one is added."""

    replaces: ClassVar[tuple[str, ...]] = ()
    listener: ClassVar[type[GridRecorder]] = MapRecorder
    is_handed_maps: ClassVar[bool] = True
    processors: ClassVar[tuple[str, ...]] = tuple(sorted(REPLACEABLE))
    extras: ClassVar[tuple[str, ...]] = ("spatial_norm",)

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.over = float(original.rescale_output_factor)

    @classmethod
    def fits(cls, original: Any) -> bool:
        return bool(getattr(original, "residual_connection", False)) and original.group_norm is not None

    @classmethod
    def map_under(cls, x: Tensor) -> TokenGrid:
        return TokenGrid(*x.shape[2:])

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """A map (b, c, y, x) to another one; of the time, `temb`, such layers make nothing."""
        refuse_given(dict(zip(BESIDE, args, strict=False)) | {**kwargs, "temb": None})
        if hidden_states.dim() != 4:
            raise SubquadError(
                f"a converted layer of maps takes maps (b, c, height, width), got {tuple(hidden_states.shape)}"
            )
        grid = self.map_under(hidden_states)
        tokens = self.through("group_norm", hidden_states.flatten(2)).mT
        q, k, v = self.heads_of(tokens, *OF_IMAGE)
        y = self.project_out(self.mix(q, k, v, tokens, grid=grid))
        return (grid.to_image(y) + hidden_states) / self.over


def example_of(network: nn.Module, size: tuple[int, ...] | None) -> Example | None:
    """What a U-Net or an autoencoder of diffusers is called with, of this (height, width); None of other networks.

    Raises:
        SubquadError: it does not say its size, or takes what only its user knows.
    """
    make = next((make for name, make in CALLED_WITH.items() if is_called(network, name)), None)
    if make is None:
        return None
    config: Any = network.config
    said = getattr(config, "sample_size", None)
    if size is not None and len(size) != 2:
        raise SubquadError(f"img_size has {len(size)} sides, {size}, and this network takes images: give two")
    height, width = size or (said if isinstance(said, tuple | list) else (said, said))
    if height is None:
        raise SubquadError(f"this {type(network).__name__} does not say which images it is made for: give img_size")
    given = {"sample": torch.empty(1, config.in_channels, height, width), **make(network, config)}
    dtype = next(network.parameters()).dtype
    return Example(given=tree_map_only(Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, given))


def _nothing(network: Any, config: Any) -> dict[str, Any]:
    return {}


def _time(network: Any, config: Any) -> dict[str, Any]:
    """A time, and a class where there are such."""
    given: dict[str, Any] = {"timestep": torch.zeros((), dtype=torch.long)}
    kind, classes = getattr(config, "class_embed_type", None), getattr(config, "num_class_embeds", None)
    if kind in ("projection", "simple_projection"):
        given["class_labels"] = torch.empty(1, config.projection_class_embeddings_input_dim)
    elif kind is not None or classes is not None:
        given["class_labels"] = torch.zeros(1, dtype=torch.long)
    return given


SIZES_OF_IMAGES = 6
"""That Stable Diffusion XL is told of an image: its own, where it was cut, and what is wanted."""


def _time_and_text(network: Any, config: Any) -> dict[str, Any]:
    """Besides them a text of 77 tokens, and what XL is told of the image."""
    width, added = config.cross_attention_dim, config.addition_embed_type
    if config.encoder_hid_dim_type == "text_proj":
        width = config.encoder_hid_dim
    elif config.encoder_hid_dim_type is not None:
        _refuse_unknown(network)
    if not isinstance(width, int):
        if len(set(width)) > 1:
            _refuse_unknown(network)
        width = width[0]
    given = _time(network, config) | {"encoder_hidden_states": torch.empty(1, 77, width)}
    if added == "text_time":
        pooled = config.projection_class_embeddings_input_dim - SIZES_OF_IMAGES * config.addition_time_embed_dim
        told = {"text_embeds": torch.empty(1, pooled), "time_ids": torch.ones(1, SIZES_OF_IMAGES)}
        given["added_cond_kwargs"] = told
    elif added not in (None, "text"):
        _refuse_unknown(network)
    return given


def _refuse_unknown(network: nn.Module) -> None:
    raise SubquadError(
        f"what a {type(network).__name__} like this one is called with only its user knows: say the arguments of a "
        "call by `given`"
    )


CALLED_WITH: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    f"{MODELS}.unets.unet_2d.UNet2DModel": _time,
    f"{MODELS}.unets.unet_2d_condition.UNet2DConditionModel": _time_and_text,
    f"{MODELS}.autoencoders.autoencoder_kl.AutoencoderKL": _nothing,
    f"{MODELS}.autoencoders.vq_model.VQModel": _nothing,
}
"""What networks are called with besides a sample."""
