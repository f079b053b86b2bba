"""What diffusers' U-Nets and autoencoders are called with: a sample, and a time, a text and sizes beside it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from subquad.errors import SubquadError

MODELS = "diffusers.models"

TIME = "timestep"
"""What U-Nets are told of how much noise there is."""

MOST_ALIKE = 63
"""Images at a time that these networks compute in one way: from 64 on they copy what they double."""


def arguments_of(network: nn.Module, size: tuple[int, ...] | None = None, batch: int = 1) -> dict[str, Any] | None:
    """The arguments of a call by name, on the CPU; None for networks of other kinds.

    Fractions are random, the same in each call, in the dtype of the network, and whole numbers are 0. All images have
    one time, of one row, in fp32: schedulers ask for fractions of steps, too.

    Args:
        network: maybe of diffusers.
        size: (height, width) of the sample, which is a latent in Stable Diffusion; as the network says if left out.
        batch: images at a time.

    Raises:
        SubquadError: it does not say its size, or takes what only its user knows.
    """
    kind = type(network)
    make = CALLED_WITH.get(f"{kind.__module__}.{kind.__qualname__}")
    if make is None:
        return None
    config: Any = network.config
    said = getattr(config, "sample_size", None)
    if size is not None and len(size) != 2:
        raise SubquadError(f"img_size has {len(size)} sides, {size}, and this network takes images: give two")
    height, width = size or (said if isinstance(said, tuple | list) else (said, said))
    if height is None:
        raise SubquadError(f"this {type(network).__name__} does not say which images it is made for: give img_size")
    given = {"sample": torch.zeros(batch, config.in_channels, height, width), **make(network, config, batch)}
    drawn: dict[str, Any] = tree_map_only(Tensor, _drawn_in(next(network.parameters()).dtype), given)
    return drawn | {TIME: torch.tensor([500.0])} if TIME in given else drawn


def _drawn_in(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(dtype) if like.is_floating_point() else like

    return drawn


def _nothing(network: Any, config: Any, batch: int) -> dict[str, Any]:
    return {}


def _time(network: Any, config: Any, batch: int) -> dict[str, Any]:
    """A time, and a class where there are such."""
    given: dict[str, Any] = {TIME: torch.zeros(1)}
    kind, classes = getattr(config, "class_embed_type", None), getattr(config, "num_class_embeds", None)
    if kind in ("projection", "simple_projection"):
        given["class_labels"] = torch.zeros(batch, config.projection_class_embeddings_input_dim)
    elif kind is not None or classes is not None:
        given["class_labels"] = torch.zeros(batch, dtype=torch.long)
    return given


TOKENS_OF_TEXT = 77
"""Of CLIP's texts."""

SIZES_OF_IMAGES = 6
"""That Stable Diffusion XL is told of an image: its own, where it was cut, and what is wanted."""


def _time_and_text(network: Any, config: Any, batch: int) -> dict[str, Any]:
    """Besides them a text, and what XL is told of the image."""
    width, added = config.cross_attention_dim, config.addition_embed_type
    if config.encoder_hid_dim_type == "text_proj":
        width = config.encoder_hid_dim
    elif config.encoder_hid_dim_type is not None:
        _refuse_unknown(network)
    if not isinstance(width, int):
        if len(set(width)) > 1:
            _refuse_unknown(network)
        width = width[0]
    text = torch.zeros(batch, TOKENS_OF_TEXT, width)
    given = _time(network, config, batch) | {"encoder_hidden_states": text}
    if added == "text_time":
        pooled = config.projection_class_embeddings_input_dim - SIZES_OF_IMAGES * config.addition_time_embed_dim
        told = {"text_embeds": torch.zeros(batch, pooled), "time_ids": torch.zeros(batch, SIZES_OF_IMAGES)}
        given["added_cond_kwargs"] = told
    elif added not in (None, "text"):
        _refuse_unknown(network)
    return given


def _refuse_unknown(network: nn.Module) -> None:
    raise SubquadError(
        f"what a {type(network).__name__} like this one is called with only its user knows: say the arguments of a "
        "call by `given`"
    )


CALLED_WITH: dict[str, Callable[[Any, Any, int], dict[str, Any]]] = {
    f"{MODELS}.unets.unet_2d.UNet2DModel": _time,
    f"{MODELS}.unets.unet_2d_condition.UNet2DConditionModel": _time_and_text,
    f"{MODELS}.autoencoders.autoencoder_kl.AutoencoderKL": _nothing,
    f"{MODELS}.autoencoders.vq_model.VQModel": _nothing,
}
"""What networks are called with besides a sample."""
