"""Where the networks of diffusers have self-attention over a map of image tokens, and what may stand there."""

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from subquad.diffusion.processor import MergedAttention
from subquad.errors import SubquadError
from subquad.weights.files import within_wrappers

TRANSFORMERS = {"DiTTransformer2DModel", "PixArtTransformer2DModel"}
"""Networks whose blocks attend over image tokens alone, without positions in the attention."""

REPLACEABLE = {"AttnProcessor", "AttnProcessor2_0", "XFormersAttnProcessor", "FusedAttnProcessor2_0"}
"""Processors of diffusers that compute plain softmax attention, which can be done on merged tokens. Others may have
these names and do more: people take diffusers' for a beginning."""

EXTRAS = ("group_norm", "spatial_norm", "residual_connection")
"""What an attention layer of diffusers may do beside attention."""

SERVED = "agent attention is for U-Nets like those of Stable Diffusion 1, 2 and XL, for DiT and for PixArt"


@dataclass(frozen=True)
class Map:
    """A module that is given a map (b, c, height, width) whose tokens its blocks attend over.

    Attributes:
        downsample: how far below the network's input the tokens of self-attention stand.
        name: of the module in the network, empty for the network itself.
        patch: places of the map along a side of one token.
    """

    downsample: int
    name: str
    module: nn.Module
    patch: int = 1

    def blocks(self) -> Iterator[tuple[str, Any]]:
        """The blocks, by the name of their self-attention; not those whose `attn1` looks at the text alone."""
        for k, block in enumerate(self.module.transformer_blocks):  # type: ignore[arg-type]
            if not getattr(block, "only_cross_attention", False):
                yield f"{self.name}.transformer_blocks.{k}.attn1".lstrip("."), block


def outermost_of(model: Any) -> nn.Module:
    """The denoising network of a pipeline, or the network that is given; as it is called, compiled or not."""
    for name in ("unet", "transformer"):
        if isinstance(getattr(model, name, None), nn.Module):
            return getattr(model, name)
    if not isinstance(model, nn.Module):
        raise SubquadError(f"{type(model).__name__} has no U-Net or transformer: {SERVED}")
    return model


def network_of(model: Any) -> nn.Module:
    """The denoising network itself, whatever wraps it: torch.compile, DataParallel, or peft's `get_peft_model`."""
    network = within_wrappers(outermost_of(model))
    # neither names nor arguments of peft's are the network's
    return network.get_base_model() if hasattr(network, "get_base_model") else network


def maps_of(network: nn.Module) -> list[Map]:
    """All maps of a network over which blocks attend."""
    config = getattr(network, "config", None)
    if type(network).__name__ in TRANSFORMERS:
        return [Map(1, "", network, config.patch_size)]  # type: ignore[union-attr]
    widths = getattr(config, "block_out_channels", ())
    # those of videos attend over frames, in modules of another class
    transformers = [pair for pair in network.named_modules() if type(pair[1]).__name__ == "Transformer2DModel"]
    maps = [Map(_downsample(name, len(widths)), name, module) for name, module in transformers if widths]
    # upscalers have blocks that attend to the text alone, at their first levels
    return [place for place in maps if any(True for _ in place.blocks())]


def _downsample(name: str, levels: int) -> int:
    """Of a module of a U-Net with this many levels, by its name; what is in the middle is at the last."""
    side, _, rest = name.partition(".")
    if side not in ("down_blocks", "up_blocks"):
        return 2 ** (levels - 1)
    number = int(rest.partition(".")[0])
    return 2 ** (number if side == "down_blocks" else levels - 1 - number)


def position_of(module: nn.Module, name: str) -> int | None:
    """Where an argument of a module's forward stands among those given by position, None where it takes none."""
    names = list(inspect.signature(module.forward).parameters)
    return names.index(name) if name in names else None


def check_one_thread(outermost: nn.Module) -> None:
    """Raise where a network is called in several threads at once, which would take each other's tokens."""
    devices = outermost.device_ids if isinstance(outermost, nn.DataParallel) else []
    if len(devices) > 1:
        raise SubquadError(
            f"DataParallel calls a network in {len(devices)} threads at once, which agent attention can't tell apart: "
            "take one device, or a process for each (DistributedDataParallel)"
        )


def check_steps_are_told_apart(outermost: nn.Module) -> None:
    """Raise where hooks can't see from which step to which a network is called, as it is called compiled."""
    if getattr(outermost, "_compiled_call_impl", None) is not None:
        raise SubquadError(
            f"{type(outermost).__name__} was compiled in place by .compile(), where hooks can't see the noise level: "
            "give pipe.unet = torch.compile(pipe.unet), or one phase by sx, sy, ratio and agent_ratio, without random "
            "and reuse"
        )


def check_level_is_seen(scheduler: Any) -> None:
    """Raise where the phases can't go by the noise level of a pipeline's scheduler, if there is one."""
    if scheduler is None:
        return
    steps = training_steps(scheduler)
    if steps is None:
        seen = "it has no num_train_timesteps"
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # as it is made, whatever steps it was set to last
            levels = getattr(type(scheduler).from_config(scheduler.config), "timesteps", None)
        first = None if levels is None or not len(levels) else float(max(levels))
        if first is None or steps / 2 <= first <= steps:
            return
        seen = f"its first is {first:.4g} of {steps}"
    raise SubquadError(
        f"{type(scheduler).__name__} does not count noise levels in training steps ({seen}), by which the two phases "
        "go: give sx, sy, ratio and agent_ratio, for one"
    )


def training_steps(scheduler: Any) -> int | None:
    """How many noise levels a scheduler counts in, None where it counts in none."""
    return getattr(getattr(scheduler, "config", None), "num_train_timesteps", None)


def check_replaceable(name: str, block: Any) -> None:
    """Raise where a block, its self-attention or that one's processor does what merged attention would not."""
    if type(block).__name__ == "ToMeBlock":
        raise SubquadError(
            f"{name}: tomesd merges the tokens of this network already, call tomesd.remove_patch() first"
        )
    attention = block.attn1
    there = getattr(attention, "processor", None)
    if there is None:
        raise SubquadError(
            f"{name} is a {type(attention).__name__} without a processor, as layers that subquad.convert made are: "
            "apply agents to the network as it was before"
        )
    # one of ours gives its place to the next
    kind = type(there.original if isinstance(there, MergedAttention) else there)
    is_theirs = kind.__module__.partition(".")[0] == "diffusers"
    if not is_theirs or kind.__name__ not in REPLACEABLE:
        named = kind.__name__ if is_theirs else f"{kind.__name__} of {kind.__module__}"
        raise SubquadError(
            f"{name} has a {named}, which can't be replaced: give this layer an AttnProcessor2_0 of diffusers, or all "
            "layers one with set_attn_processor(AttnProcessor2_0())"
        )
    for extra in EXTRAS:
        if getattr(attention, extra, None):
            raise SubquadError(f"{name} has a {extra}, which merged attention does not know")
