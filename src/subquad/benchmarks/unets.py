"""What a step of Stable Diffusion's U-Net costs with its self-attention whole, on merged tokens, and through agents."""

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from subquad.benchmarks.blocks import dtype_of
from subquad.benchmarks.memory import peak_memory_mb
from subquad.diffusion import (
    EARLY,
    Settings,
    apply_agent_attention,
    apply_token_merging,
    processor,
    remove_agent_attention,
)
from subquad.diffusion.called_with import arguments_of
from subquad.diffusion.patchable_layers import maps_of
from subquad.errors import SubquadError, unknown_name
from subquad.ranges import check_positive
from subquad.substituting import substituted
from subquad.text import columns, counted
from subquad.timing import interleaved_ms, now

# configurations of the U-Nets as their authors published them; attention_head_dim is the number of heads there
UNETS: dict[str, dict[str, Any]] = {
    "sd15": {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
    "sd21": {
        "sample_size": 96,
        "cross_attention_dim": 1024,
        "attention_head_dim": (5, 10, 20, 20),
        "use_linear_projection": True,
    },
    "sdxl": {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "cross_attention_dim": 2048,
        "attention_head_dim": (5, 10, 20),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 1280 + 6 * 256,
    },
}
PIXELS = 8
"""Of an image, to one of its latent."""


@dataclass(frozen=True)
class UnetRow:
    """One method at one image size: medians in milliseconds over interleaved repeats.

    Attributes:
        attention_ms: self-attention at the patched level, projections, matching and merging included.
        matching: the share of that which is matching.
        gain, attention_gain: how many times faster than with PyTorch's fused softmax attention.
        ceiling: the gain of a step if that attention took no time at all.
        distance: of the step's result from that with softmax, relative to its size; of random weights.
    """

    method: str
    px: int
    batch_size: int
    dtype: str
    step_ms: float
    attention_ms: float
    matching: float
    gain: float
    attention_gain: float
    ceiling: float
    peak_mb: float
    distance: float


def measure_unet(
    name: str,
    sizes: Sequence[int],
    ratios: Sequence[float],
    *,
    agents: int | None = None,
    reuse: int = 0,
    batch_size: int = 1,
    dtype: str = "fp32",
    device: torch.device | str = "cpu",
    repeats: int = 3,
    log: Callable[[str], None] = lambda line: None,
) -> list[UnetRow]:
    """Time one step of a U-Net with random weights on square images: softmax, and for each ratio ToMe and AgentSD.

    AgentSD is measured in its early phase; its late one is ToMe. With `agents` also AgentSD with that many of them;
    `reuse` is what `apply_agent_attention` has it for.
    """
    if name not in UNETS:
        raise unknown_name("U-Net", name, UNETS)
    check_positive(repeats=repeats, batch_size=batch_size)
    for px in sizes:
        if px < PIXELS or px % PIXELS:
            raise SubquadError(
                f"a U-Net's pixels are {PIXELS} px of the image, and {px} px are no whole number of them"
            )
    methods = _methods(ratios, agents, reuse)
    kind, device = dtype_of(dtype), torch.device(device)
    unet = unet_of(name).to(device=device, dtype=kind).eval()
    clock = _Clock(unet, device)
    rows: list[UnetRow] = []
    for px in sorted(sizes):
        side = px // PIXELS
        known = arguments_of(unet, (side, side), batch_size)
        inputs = tree_map_only(Tensor, lambda one: one.to(device), known) | {"timestep": 900}
        passes = {method: _pass(unet, clock, method, change, inputs) for method, change in methods.items()}
        log(f"{px} px: {counted(len(passes), 'method')}, {counted(repeats, 'time')} each")
        results = {method: run() for method, run in passes.items()}
        clock.parts.clear()
        steps = {method: statistics.median(of) for method, of in interleaved_ms(passes, repeats, device).items()}
        attention, matching = (
            {method: statistics.median(clock.parts[method, part]) for method in passes}
            for part in ("attention", "matching")
        )
        for method, run in passes.items():
            rows.append(
                UnetRow(
                    method=method,
                    px=px,
                    batch_size=batch_size,
                    dtype=dtype,
                    step_ms=steps[method],
                    attention_ms=attention[method],
                    matching=matching[method] / attention[method],
                    gain=steps["softmax"] / steps[method],
                    attention_gain=attention["softmax"] / attention[method],
                    ceiling=steps["softmax"] / (steps["softmax"] - attention["softmax"]),
                    peak_mb=peak_memory_mb(run, device),
                    distance=float((results[method] - results["softmax"]).norm() / results["softmax"].norm()),
                )
            )
    return rows


def unet_of(name: str) -> Any:
    """One of UNETS with random weights. Raises a SubquadError where diffusers is not installed."""
    try:
        from diffusers import UNet2DConditionModel
    except ImportError:
        raise SubquadError("diffusers is not installed: pip install 'subquad[diffusion]'") from None
    torch.manual_seed(0)
    return UNet2DConditionModel(**UNETS[name])


def _methods(ratios: Sequence[float], agents: int | None, reuse: int) -> dict[str, Callable[[nn.Module], Any]]:
    """By name what each does to the U-Net."""
    for ratio in ratios:
        # said before a network is built
        Settings(ratio=ratio, agents=agents)
    found: dict[str, Callable[[nn.Module], Any]] = {"softmax": remove_agent_attention}
    for ratio in ratios:
        early: dict[str, Any] = {"sx": EARLY.sx, "sy": EARLY.sy, "ratio": ratio, "agent_ratio": EARLY.agent_ratio}
        found[f"tome {ratio:.0%}"] = functools.partial(apply_token_merging, ratio=ratio, reuse=reuse)
        found[f"agent {ratio:.0%}"] = functools.partial(apply_agent_attention, **early, reuse=reuse)
        if agents is not None:
            fixed = functools.partial(apply_agent_attention, ratio=ratio, agents=agents, reuse=reuse)
            found[f"{agents} agents {ratio:.0%}"] = fixed
    return found


def _pass(
    unet: nn.Module,
    clock: "_Clock",
    method: str,
    change: Callable[[nn.Module], Any],
    inputs: dict[str, Any],
) -> Callable[[], Tensor]:
    def run() -> Tensor:
        change(unet)
        with torch.inference_mode(), clock.of(method):
            result: Tensor = unet(**inputs).sample
        remove_agent_attention(unet)
        return result

    return run


class _Clock:
    """How long the patched level's self-attention takes in a step, and the matching in it."""

    def __init__(self, unet: nn.Module, device: torch.device) -> None:
        self.device = device
        self.parts: dict[tuple[str, str], list[float]] = {}
        self.spent = {"attention": 0.0, "matching": 0.0}
        self.started = 0.0
        first = min(place.downsample for place in maps_of(unet))
        for place in maps_of(unet):
            for _, block in place.blocks() if place.downsample == first else ():
                block.attn1.register_forward_pre_hook(self._start)
                block.attn1.register_forward_hook(self._stop)

    @contextmanager
    def of(self, method: str) -> Iterator[None]:
        """Time one step of `method`: its attention, and of that the matching of tokens."""
        match = processor.match

        def timed_match(*tensors: Any) -> Any:
            start = now(self.device)
            matched = match(*tensors)
            self.spent["matching"] += now(self.device) - start
            return matched

        self.spent.update(attention=0.0, matching=0.0)
        with substituted(processor, "match", timed_match):
            yield
        for part, seconds in self.spent.items():
            self.parts.setdefault((method, part), []).append(1000 * seconds)

    def _start(self, *_: Any) -> None:
        self.started = now(self.device)

    def _stop(self, *_: Any) -> None:
        self.spent["attention"] += now(self.device) - self.started


def unets_table(rows: Sequence[UnetRow]) -> str:
    """The rows for a terminal."""
    several = len({row.batch_size for row in rows}) > 1
    head = ["method", *(["batch"] if several else []), "px", "step ms", "gain", "ceiling"]
    lines = [[*head, "attn ms", "gain", "match", "MB", "off"]]
    for row in rows:
        cells = [row.method, *([str(row.batch_size)] if several else []), str(row.px), f"{row.step_ms:.0f}"]
        cells += [f"{row.gain:.2f}", f"{row.ceiling:.2f}", f"{row.attention_ms:.0f}", f"{row.attention_gain:.2f}"]
        lines.append([*cells, f"{row.matching:.0%}", f"{row.peak_mb:.0f}", f"{row.distance:.3f}"])
    return (
        f"{columns(lines)}\ngain: how many times faster than SDPA. attn: the patched level's attention.\n"
        "ceiling: of a step without that attention. match: matching's share of attn.\n"
        "off: how far the result is from softmax's, relative to it; weights are random.\n"
        "agent: its early phase; the late one is tome."
    )
