"""AgentSD and token merging on a pipeline of diffusers: one line on, one line off.

Nothing is re-classed and no forward replaced. A patched block has a processor on its self-attention and a hook that
hands this the block's raw tokens; the module around it has a hook that sees the map's height and width, the network one
that sees the noise level. All are objects of this package, found again by looking for them, so that a copy of a patched
network is patched, and can be restored, by itself.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from subquad.diffusion.hooks import OPTIONS, MergesMLP, SeesMap, SeesNoise, SeesTokens, UnmergesMLP, remove_hooks
from subquad.diffusion.patchable_layers import (
    SERVED,
    Map,
    check_level_is_seen,
    check_one_thread,
    check_replaceable,
    check_steps_are_told_apart,
    maps_of,
    network_of,
    outermost_of,
    position_of,
    training_steps,
)
from subquad.diffusion.processor import MergedAttention, Shared
from subquad.diffusion.settings import FACTORS, FACTORS_IN_WORDS, SWITCH, Settings, agent_phases, merging_phase
from subquad.errors import SubquadError
from subquad.ranges import Count, Positive, Share, checks_arguments


class Handle:
    """A patch: `remove()` takes it away, `active` says whether it is whole; a context that removes it at its end.

    A network has one patch: a later one takes the place of this one, whose handle then does nothing.
    """

    def __init__(
        self, model: Any, outermost: nn.Module, processors: dict[str, MergedAttention], noise: SeesNoise
    ) -> None:
        self.model, self.outermost, self.processors, self.noise = model, outermost, processors, noise

    @property
    def active(self) -> bool:
        """Whether every processor is still in place: what loads adapters may replace them, or the network."""
        network = network_of(self.outermost)
        modules = dict(network.named_modules())
        theirs = (getattr(modules.get(name), "processor", None) for name in self.processors)
        in_place = all(found is ours for found, ours in zip(theirs, self.processors.values(), strict=True))
        # what sees the noise stands on what was called then, which may be called no more
        is_called = any(module is self.outermost for module in outermost_of(self.model).modules())
        is_told = self.noise in self.outermost._forward_pre_hooks.values()
        return in_place and is_called and is_told and network_of(self.model) is network

    def remove(self) -> None:
        """Restore what was there; nothing to do where another patch has taken its place."""
        _take_away(self.outermost, self.noise.shared)

    def callback(self, pipe: Any, step: int, t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """For `callback_on_step_end` of a pipeline whose U-Net is compiled: enters the phase of the step to come.

        Behind the last step it enters that of the first one, as the next call begins. The very first call begins early.
        """
        levels = [float(level) for level in pipe.scheduler.timesteps]
        self.noise.choose(levels[_behind(levels, step, float(t), getattr(pipe, "num_timesteps", len(levels)))])
        return kwargs

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _behind(levels: Sequence[float], step: int, level: float, count: int) -> int:
    """The place of the noise level behind `step`, which was at `level`, of a call of `count` steps.

    A call may begin within the schedule, as from an image, or end there, and a level may stand in it more than once.
    """
    begins = [len(levels) - count, 0, *range(len(levels) - step)]
    begin = next((k for k in begins if k >= 0 and k + step < len(levels) and levels[k + step] == level), 0)
    last = step + 1 >= count or begin + step + 1 >= len(levels)
    return begin if last else begin + step + 1


@checks_arguments
def apply_agent_attention(
    model: Any,
    *,
    sx: Positive | None = None,
    sy: Positive | None = None,
    ratio: Share | None = None,
    agent_ratio: Share | None = None,
    agents: Positive | None = None,
    k_scale: float = 0.3,
    k_shortcut: float = 0.075,
    max_downsample: Positive | None = None,
    random: bool = False,
    reuse: Count = 0,
    merge_mlp: bool = False,
) -> Handle:
    """Let the denoising network of a pipeline attend through agents on merged tokens.

    Args:
        model: a pipeline of diffusers with a U-Net, a DiT or a PixArt transformer; or that network; or a ControlNet.
        sx: columns of a cell; given any of sx, sy, agent_ratio and agents, one phase holds for all noise levels, else
            the authors' two, the early one from 0.6 of the training steps up.
        sy: rows of a cell.
        ratio: the share of tokens that is merged away, in all phases.
        agent_ratio: the share that is merged away for the agents.
        agents: about how many agents there are, whatever the size of the map, in place of sx, sy and agent_ratio: the
            time grows as the tokens do then. The released method has a share of them, and its time their square.
        k_scale: the second softmax is scaled by d^(-k_scale / 2).
        k_shortcut: the weight of the values that are added.
        max_downsample: levels up to this factor below the latent are patched: 1, 2, 4 or 8. The first that has
            self-attention if left out: 1, and 2 for SDXL.
        random: whether a cell's destination is drawn at each step, which is told by its noise level: images of a
            single step all have the first one's; else it is the top left token.
        reuse: for how many steps the matching of a map holds for all blocks on maps of that size; 0, as published, to
            match in each block anew. Calls at one noise level, as of guidance in two calls, each have their own.
            Another image is told by a noise level that does not fall: where one begins below the level at which the
            last one ended, as after a call that was broken off, apply it anew.
        merge_mlp: whether the blocks' MLPs run on the merged tokens too.

    Raises:
        SubquadError: a setting is none, the model has no such blocks, no level fits, or a layer has a processor that
            can't be replaced; or the phases could not follow the noise. What was there is left as it was.
    """
    common: dict[str, Any] = {"k_scale": k_scale, "k_shortcut": k_shortcut, "merge_mlp": merge_mlp}
    common |= {} if ratio is None else {"ratio": ratio}
    early, late = agent_phases(sx=sx, sy=sy, agent_ratio=agent_ratio, agents=agents, **common)
    return _patch(model, early, late, max_downsample, random, reuse)


@checks_arguments
def apply_token_merging(
    model: Any,
    *,
    sx: Positive = 2,
    sy: Positive = 2,
    ratio: Share = 0.5,
    max_downsample: Positive | None = None,
    random: bool = False,
    reuse: Count = 0,
    merge_mlp: bool = False,
) -> Handle:
    """Token merging without agents (ToMe): see `apply_agent_attention`."""
    phase = merging_phase(sx=sx, sy=sy, ratio=ratio, merge_mlp=merge_mlp)
    return _patch(model, phase, phase, max_downsample, random, reuse)


def remove_agent_attention(model: Any) -> None:
    """Take away what `apply_agent_attention` or `apply_token_merging` did to a pipeline or network, if anything."""
    _take_away(outermost_of(model))


def _take_away(outermost: nn.Module, shared: Shared | None = None) -> None:
    """Restore what was there before one patch, or any."""
    # a compiled network's wrapper has the original as its child
    for module in outermost.modules():
        processor = getattr(module, "processor", None)
        # loading an IP-Adapter makes further ones of the class of those in place, which are of no patch
        if isinstance(processor, MergedAttention) and (processor.is_plain or shared in (None, processor.shared)):
            module.processor = processor.original
        remove_hooks(module, shared)


def _patch(model: Any, early: Settings, late: Settings, max_downsample: int | None, random: bool, reuse: int) -> Handle:
    outermost, network = outermost_of(model), network_of(model)
    check_one_thread(outermost)
    chosen = _chosen(network, max_downsample)
    for place in chosen:
        for name, block in place.blocks():
            check_replaceable(name, block)
            if early.merge_mlp and getattr(block, "_chunk_size", None) is not None:
                raise SubquadError(f"merge_mlp does not work in chunks: call disable_forward_chunking(), for {name}")
    scheduler = getattr(model, "scheduler", None)
    if early != late or random or reuse:
        check_steps_are_told_apart(outermost)
    if early != late:
        check_level_is_seen(scheduler)
    shared = Shared(early, random, reuse)
    steps = training_steps(scheduler) or 1000
    noise = SeesNoise(shared, early, late, SWITCH * steps, position_of(network, "timestep"))
    # whatever may be refused is behind
    remove_agent_attention(outermost)
    processors = {}
    # before the map, which may be the same module's
    outermost.register_forward_pre_hook(noise, with_kwargs=True)
    for place in chosen:
        own = {name: _patch_block(block, shared) for name, block in place.blocks()}
        sees = SeesMap(shared, list(own.values()), place.patch, position_of(place.module, OPTIONS))
        place.module.register_forward_pre_hook(sees, with_kwargs=True)
        processors.update(own)
    return Handle(model, outermost, processors, noise)


def _chosen(network: nn.Module, max_downsample: int | None) -> list[Map]:
    """The maps to patch."""
    if max_downsample not in (None, *FACTORS):
        raise SubquadError(f"max_downsample must be {FACTORS_IN_WORDS}, got {max_downsample}")
    maps = maps_of(network)
    if not maps:
        kind = type(network).__name__
        if nets := getattr(network, "nets", None):
            raise SubquadError(f"{kind} holds {len(nets)} networks: apply it to each of its nets")
        raise SubquadError(f"{kind} has no blocks of self-attention over a map of image tokens alone: {SERVED}")
    levels = sorted({place.downsample for place in maps})
    most = levels[0] if max_downsample is None else max_downsample
    if most < levels[0]:
        there = " and ".join(f"1/{level}" for level in levels)
        raise SubquadError(f"max_downsample={most} patches nothing: self-attention stands at {there} here")
    return [place for place in maps if place.downsample <= most]


def _patch_block(block: Any, shared: Shared) -> MergedAttention:
    processor = MergedAttention(block.attn1.processor, shared)
    block.attn1.processor = processor
    block.register_forward_pre_hook(SeesTokens(processor), with_kwargs=True)
    if shared.settings.merge_mlp:
        block.ff.register_forward_pre_hook(MergesMLP(processor))
        block.ff.register_forward_hook(UnmergesMLP(processor))
    return processor
