"""AgentSD and token merging on a pipeline of diffusers: one line on, one line off.

Nothing is re-classed and no forward replaced. A patched block has a processor on its self-attention and a hook that
hands this the block's raw tokens; the Transformer2DModel around it has a hook that sees the map's height and width, the
U-Net one that sees the noise level. All are objects of this package, found again by looking for them, so that a copy of
a patched model is patched, and can be restored, by itself.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from subquad.diffusion.processor import MergedAttention, Shared
from subquad.diffusion.settings import EARLY, LATE, SWITCH, Settings
from subquad.errors import SubquadError
from subquad.grid import TokenGrid

REPLACEABLE = {"AttnProcessor", "AttnProcessor2_0"}
"""Processors of diffusers that compute plain softmax attention, which can be done on merged tokens."""


class SeesNoise:
    """Hook of a U-Net: chooses the phase by the noise level, and forgets the last step's random offsets.

    Inside compiled code it does nothing: reading the level would break the graph. On a U-Net that was compiled first it
    stands outside; one that is compiled later needs the handle's `callback`.
    """

    def __init__(self, shared: Shared, early: Settings, late: Settings, threshold: float) -> None:
        self.shared, self.early, self.late, self.threshold = shared, early, late, threshold

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        timestep = kwargs["timestep"] if "timestep" in kwargs else args[1]
        self.choose(float(timestep.flatten()[0]) if isinstance(timestep, Tensor) else float(timestep))

    def choose(self, level: float) -> None:
        """Enter the phase of a step at this noise level."""
        self.shared.offsets.clear()
        self.shared.settings = self.early if level >= self.threshold else self.late


class SeesMap:
    """Hook of a Transformer2DModel: its map's height and width."""

    def __init__(self, processors: list[MergedAttention]) -> None:
        self.processors = processors

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        image = args[0] if args else kwargs["hidden_states"]
        grid = TokenGrid(*image.shape[-2:])
        for processor in self.processors:
            processor.grid = grid


class SeesTokens:
    """Hook of a block: its tokens before their norm, which are matched."""

    def __init__(self, processor: MergedAttention) -> None:
        self.processor = processor

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # what loads adapters puts other processors in place, and tokens must not be kept for one that is never asked
        if module.attn1.processor is self.processor:  # type: ignore[union-attr]
            self.processor.tokens = args[0] if args else kwargs["hidden_states"]


HOOKS = SeesNoise, SeesMap, SeesTokens


class Handle:
    """A patch: `remove()` takes it away, `active` says whether it is whole; a context that removes it at its end."""

    def __init__(self, model: Any, processors: dict[str, MergedAttention], noise: SeesNoise) -> None:
        self.model, self.processors, self.noise = model, processors, noise

    @property
    def active(self) -> bool:
        """Whether every processor is still in place: what loads adapters may replace them."""
        modules = dict(_unet_of(self.model).named_modules())
        return all(modules[name].processor is processor for name, processor in self.processors.items())

    def remove(self) -> None:
        """Restore what was there."""
        remove_agent_attention(self.model)

    def callback(self, pipe: Any, step: int, t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """For `callback_on_step_end` of a pipeline whose U-Net is compiled: enters the phase of the step to come."""
        levels = [float(level) for level in pipe.scheduler.timesteps]
        later = [level for level in levels if level < float(t)]
        self.noise.choose(max(later, default=levels[0]))
        return kwargs

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def apply_agent_attention(
    model: Any,
    *,
    sx: int | None = None,
    sy: int | None = None,
    ratio: float | None = None,
    agent_ratio: float | None = None,
    agents: int | None = None,
    k_scale: float = 0.3,
    k_shortcut: float = 0.075,
    max_downsample: int | None = None,
    random: bool = False,
) -> Handle:
    """Let the U-Net of a pipeline, or a U-Net, attend through agents on merged tokens.

    Args:
        model: a pipeline of diffusers with a U-Net, or the U-Net.
        sx: columns of a cell; given any of these five, one phase holds for all noise levels, else the authors' two,
            the early one from 0.6 of the training steps up.
        sy: rows of a cell.
        ratio: the share of tokens that is merged away.
        agent_ratio: the share that is merged away for the agents.
        agents: about how many agents there are, whatever the size of the map, in place of sx, sy and agent_ratio: the
            time grows as the tokens do then. The released method has a share of them, and its time their square.
        k_scale: the second softmax is scaled by d^(-k_scale / 2).
        k_shortcut: the weight of the values that are added.
        max_downsample: levels up to this factor below the latent are patched: 1, 2, 4 or 8. The first that has
            self-attention if left out: 1, and 2 for SDXL.
        random: whether a cell's destination is drawn at each step; else it is the top left token.

    Raises:
        SubquadError: the model has no such blocks, no level fits, or a layer has a processor that can't be replaced.
    """
    given = {"sx": sx, "sy": sy, "ratio": ratio, "agent_ratio": agent_ratio, "agents": agents}
    own = {name: value for name, value in given.items() if value is not None}
    if own:
        phase = Settings(**own, k_scale=k_scale, k_shortcut=k_shortcut)  # type: ignore[arg-type]
        return _patch(model, phase, phase, max_downsample, random)
    early, late = (replace(phase, k_scale=k_scale, k_shortcut=k_shortcut) for phase in (EARLY, LATE))
    return _patch(model, early, late, max_downsample, random)


def apply_token_merging(
    model: Any,
    *,
    sx: int = 2,
    sy: int = 2,
    ratio: float = 0.5,
    max_downsample: int | None = None,
    random: bool = False,
) -> Handle:
    """Token merging without agents (ToMe): see `apply_agent_attention`."""
    phase = Settings(sx=sx, sy=sy, ratio=ratio, agent_ratio=None)
    return _patch(model, phase, phase, max_downsample, random)


def remove_agent_attention(model: Any) -> None:
    """Take away what `apply_agent_attention` or `apply_token_merging` did to a pipeline or U-Net, if anything."""
    # a compiled U-Net's wrapper has the original as its child
    outermost = getattr(model, "unet", model)
    _unet_of(model)
    for module in outermost.modules():
        if isinstance(getattr(module, "processor", None), MergedAttention):
            module.processor = module.processor.original
        for number, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, HOOKS):
                del module._forward_pre_hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)


def _unet_of(model: Any) -> nn.Module:
    unet = getattr(model, "unet", model)
    unet = getattr(unet, "_orig_mod", unet)
    if not isinstance(unet, nn.Module):
        found = type(model).__name__
        raise SubquadError(f"{found} has no U-Net: agent attention is for pipelines like Stable Diffusion 1, 2 and XL")
    return unet


def _patch(model: Any, early: Settings, late: Settings, max_downsample: int | None, random: bool) -> Handle:
    unet = _unet_of(model)
    remove_agent_attention(unet)
    levels = list(spatial_transformers(unet))
    if not levels:
        raise SubquadError(
            f"{type(unet).__name__} has no blocks of self-attention over a map of image tokens: "
            "agent attention is for U-Nets like those of Stable Diffusion 1, 2 and XL"
        )
    there = sorted({level for level, _, _ in levels})
    most = there[0] if max_downsample is None else max_downsample
    if most < there[0]:
        raise SubquadError(f"max_downsample={most} patches nothing: self-attention stands at {_plain(there)} here")
    chosen = [(name, transformer) for level, name, transformer in levels if level <= most]
    for name, transformer in chosen:
        for k, block in enumerate(transformer.transformer_blocks):
            _check(f"{name}.transformer_blocks.{k}.attn1", block.attn1)
    shared = Shared(early, random)
    processors = {}
    for name, transformer in chosen:
        own = []
        for k, block in enumerate(transformer.transformer_blocks):
            processor = MergedAttention(block.attn1.processor, shared)
            block.attn1.processor = processor
            block.register_forward_pre_hook(SeesTokens(processor), with_kwargs=True)
            own.append(processor)
            processors[f"{name}.transformer_blocks.{k}.attn1"] = processor
        transformer.register_forward_pre_hook(SeesMap(own), with_kwargs=True)
    scheduler = getattr(model, "scheduler", None)
    steps = scheduler.config.num_train_timesteps if scheduler is not None else 1000
    noise = SeesNoise(shared, early, late, SWITCH * steps)
    getattr(model, "unet", model).register_forward_pre_hook(noise, with_kwargs=True)
    return Handle(model, processors, noise)


def spatial_transformers(unet: nn.Module) -> Iterator[tuple[int, str, Any]]:
    """The spatial transformers of a U-Net: how far below the latent each stands, its name and itself."""
    widths = getattr(getattr(unet, "config", None), "block_out_channels", None)
    if widths is None:
        return
    for name, module in unet.named_modules():
        if type(module).__name__ != "Transformer2DModel":
            continue
        side, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        depth = {"down_blocks": lambda n: int(n), "up_blocks": lambda n: len(widths) - 1 - int(n)}
        yield 2 ** depth.get(side, lambda n: len(widths) - 1)(number), name, module


def _check(name: str, attention: Any) -> None:
    """Raise where a layer's processor or the layer does what merged attention would not."""
    kind = type(attention.processor).__name__
    if kind not in REPLACEABLE:
        raise SubquadError(f"{name} has a {kind}, which can't be replaced: reset it with set_default_attn_processor()")
    for extra in ("group_norm", "spatial_norm", "residual_connection"):
        if getattr(attention, extra, None):
            raise SubquadError(f"{name} has a {extra}, which merged attention does not know")


def _plain(levels: list[int]) -> str:
    return " and ".join(f"1/{level}" for level in levels)
