"""What each Triton kernel needs of a GPU, which need not be here: registers, what they do not hold, shared memory.

python scripts/kernel_needs.py [--capability 9.0] [--dtype bf16 …] [--channels 32 …]
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from subquad.kernels.triton import (
    MOST_OF_TWO_STATES,
    MOST_TURNED,
    inline_kernels,
    linear_calls,
    local_kernels,
    maps_calls,
    newton_kernels,
    polapp_calls,
    pool_kernels,
    state_calls,
)
from subquad.kernels.triton.offline import needs_of
from subquad.text import columns

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def calls(
    channels: int, dtype: torch.dtype, *, images: int = 2, heads: int = 2, tokens: int = 64, few: int = 49
) -> dict[str, Callable[[], Any]]:
    """One call for every mechanism, forward (backward repeats it), by name."""
    b, h, n, d = images, heads, tokens, channels
    q, k, v, grad = torch.randn(b, n, 4, h, d, dtype=dtype).permute(2, 0, 3, 1, 4).unbind(0)
    agents, landmarks, power = torch.randn(b, h, few, d, dtype=dtype), torch.randn(b, h, few, d), torch.ones(h, 1, d)
    bias, places = torch.randn(h, few, n), torch.randn(h, n, d)
    # all tokens stand on a map, in one column
    grid, taps, bias_of_taps = [n, 1], torch.randn(h * d, 3, 3, dtype=dtype), torch.randn(h * d, dtype=dtype)
    gram, alpha = torch.randn(b, h, few, few), torch.randn(b, h, 1, 1)
    tables = torch.ones(n, d), torch.ones(h, n, d), True, 1e-6
    turned = {
        name: getattr(state_calls, f"{form}_attention{gradient}")
        for form in ("mlla", "mala", "rala", "nala")
        for name, gradient in ((form, ""), (f"{form} backward", "_gradient"))
    }
    still = None, None, True, 1e-6
    turned = {
        f"{name}{where}": partial(call, *((grad,) if "backward" in name else ()), q, k, v, *given)
        for name, call in turned.items()
        for where, given in (("", tables), (", not turned", still))
    }
    spikes = torch.rand(h, 1, 2 * d)
    wide = torch.ones(n, 2 * d), torch.ones(h, n, 2 * d), True, 1e-6
    turned |= {
        "polapp": lambda: polapp_calls.polapp_attention(q, k, v, spikes, spikes, *wide),
        "polapp backward": lambda: polapp_calls.polapp_attention_gradient(grad, q, k, v, spikes, spikes, *wide),
        "polapp, not turned": lambda: polapp_calls.polapp_attention(q, k, v, spikes, spikes, *still),
        "polapp backward, not turned": lambda: polapp_calls.polapp_attention_gradient(
            grad, q, k, v, spikes, spikes, *still
        ),
    }
    two_states = {
        "pola": lambda: linear_calls.pola_attention(q, k, v, power, power, places, 1e-6),
        "pola backward": lambda: linear_calls.pola_attention_gradient(grad, q, k, v, power, power, places, 1e-6),
    }
    return {
        **(turned if d <= MOST_TURNED else {}),
        **(two_states if d <= MOST_OF_TWO_STATES or dtype != torch.float16 else {}),
        "linear": lambda: linear_calls.linear_attention(q, k, v, "relu", 1e-6),
        "linear backward": lambda: linear_calls.linear_attention_gradient(grad, q, k, v, "relu", 1e-6),
        "inline": lambda: inline_kernels.inline_attention(q, k, v),
        "inline backward": lambda: inline_kernels.inline_attention_gradient(grad, q, k, v),
        "agent": lambda: maps_calls.agent_attention(q, agents, k, v, bias, bias),
        "agent backward": lambda: maps_calls.agent_attention_gradient(grad, q, agents, k, v, bias, bias),
        "soft gather": lambda: maps_calls.soft_gather(k, landmarks, v, 0.5),
        "soft gather backward": lambda: maps_calls.soft_gather_gradient(landmarks, k, landmarks, v, 0.5),
        "soft spread": lambda: maps_calls.soft_spread(k, landmarks, landmarks, 0.5),
        "soft spread backward": lambda: maps_calls.soft_spread_gradient(grad, k, landmarks, landmarks, 0.5),
        "local": lambda: local_kernels.local_branch(q, v, k, taps, bias_of_taps, grid),
        "local backward": lambda: local_kernels.depthwise_gradient(grad, v, taps, grid),
        "pool": lambda: pool_kernels.pool(q, grid, [few, 1]),
        "pool backward": lambda: pool_kernels.pool_gradient(agents, q, grid, [few, 1]),
        "newton": lambda: newton_kernels.newton_inverse(gram, alpha, 20),
        "newton backward": lambda: newton_kernels.newton_inverse_gradient(gram, gram, alpha, 20),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--capability", default="9.0", help="of the GPU")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--channels", nargs="+", type=int, default=[32, 64, 128], help="of a head")
    given = parser.parse_args()
    major, minor = map(int, given.capability.split("."))
    lines = [["dtype", "channels", "call", "kernel", "warps", "registers", "spilled bytes", "shared KB"]]
    for dtype in given.dtype:
        for channels in given.channels:
            for name, call in calls(channels, DTYPES[dtype]).items():
                for needs in needs_of(call, (major, minor)):
                    cells = needs.kernel, needs.warps, needs.registers, needs.spilled, f"{needs.shared / 1024:.0f}"
                    lines.append([dtype, str(channels), name, *map(str, cells)])
    print(columns(lines))


if __name__ == "__main__":
    main()
