"""Products of tokens and a layer's weights: PyTorch's and our kernel's, billions of operations a second of one thread.

    taskset -c 1 python scripts/product_rates.py    # on a core that does nothing else

Both take turns; a rate is of the median. Where PyTorch's in fp32 lag, `subquad.optimize` has linear layers multiplied
by the kernel (`subquad.kernels.multipliers`).
"""

import statistics
import time

import torch
import torch.nn.functional as F

from subquad.kernels.multipliers import products_lag
from subquad.ops.branch_at_once import projection
from subquad.text import columns

SIZES = [
    (197, 192, 576),
    (785, 192, 192),
    (785, 192, 768),
    (785, 768, 192),
    (197, 768, 3072),
    (3136, 96, 288),
    (49, 768, 768),
]
"""Tokens, channels, channels of the result."""


@torch.inference_mode()
def rates(tokens: int, width: int, rows: int, dtype: torch.dtype, repeats: int = 60) -> list[str]:
    """A row of the table."""
    x, weight, bias = torch.randn(1, tokens, width), torch.randn(rows, width) / width**0.5, torch.randn(rows)
    given = [one.to(dtype) for one in (x, weight, bias)]
    seconds: dict[str, list[float]] = {"PyTorch": [], "kernel": []}
    for _ in range(repeats):
        for name, product in (("PyTorch", F.linear), ("kernel", projection)):
            start = time.perf_counter()
            product(*given)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[3:]) for name, times in seconds.items()}
    billions = 2e-9 * tokens * width * rows
    figures = [f"{billions / median:.0f}" for median in medians.values()]
    return [f"{tokens} × {width} × {rows}", str(dtype)[6:], *figures, f"{medians['PyTorch'] / medians['kernel']:.2f}"]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    head = ["tokens × channels × rows", "dtype", "PyTorch", "kernel", "times"]
    print(columns([head, *(rates(*size, dtype) for dtype in (torch.float32, torch.bfloat16) for size in SIZES)]))
    print(f"PyTorch's products in fp32 {'lag' if products_lag() else 'do not lag'} here; torch {torch.__version__}")


if __name__ == "__main__":
    main()
