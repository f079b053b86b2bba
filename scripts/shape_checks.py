"""What checking the shapes of an operation costs at a call: python scripts/shape_checks.py."""

import timeit

import torch

from subquad.ops import OPERATIONS, linear_attention
from subquad.ops.linear_formula import SHAPES

CALLS = 20_000


def microseconds(function) -> float:
    """The least of several means."""
    return min(timeit.repeat(function, number=CALLS, repeat=9)) / CALLS * 1e6


def main() -> None:
    """Print the cost of a check beside that of the smallest call it stands in front of."""
    torch.set_num_threads(1)
    q, k, v = torch.randn(3, 1, 3, 196, 64)
    padding = torch.zeros(1, 196, dtype=torch.bool)
    print(f"torch {torch.__version__}, one thread, {len(OPERATIONS)} operations; microseconds a call")
    print(f"three tensors and no padding  {microseconds(lambda: SHAPES.check(q, k, v, None)):6.2f}")
    print(f"three tensors and padding     {microseconds(lambda: SHAPES.check(q, k, v, padding)):6.2f}")
    with torch.no_grad():
        whole = min(timeit.repeat(lambda: linear_attention(q, k, v), number=200, repeat=9)) / 200 * 1e6
    print(f"linear attention, 196 tokens  {whole:6.1f}")


if __name__ == "__main__":
    main()
