"""Where the time of a pass goes, by kinds of operations, as PyTorch's profiler tells them apart on a CPU."""

import os
from collections import Counter

import torch

from subquad.timing import Run

KINDS = {
    "products of matrices": {"mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_convolution", "linear", "mlp"},
    "activations": {"gelu", "relu", "silu", "hardswish", "sigmoid", "elu", "clamp_min", "mul"},
    "norms": {"layer_norm", "batch_norm", "group_norm", "rms_norm", "vector_norm", "var_mean", "norm"},
    "copies": {"copy", "cat", "clone", "index", "roll", "stack", "constant_pad_nd", "gather", "index_select"},
    "sums": {"add", "sum", "mean", "sub"},
}
"""Words that names of operators hold, which begin or end with `_` or `native_`; what is in none is `OTHER`."""

OTHER = "all else"


def shares_of_time(run: Run, repeats: int = 3) -> dict[str, float]:
    """Which part of the time of a pass each kind of operations takes, of KINDS and OTHER, largest first; the sum is 1.

    Args:
        run: a pass on the CPU, warm.
        repeats: how many are profiled.
    """
    # its library says on the terminal that it starts, and that there is no GPU, unless it is told not to
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # there is one cycle, but torch 2.11 warns of those that would be cleared
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(repeats):
            run()
    spent: Counter[str] = Counter()
    for row in profiler.key_averages():
        spent[kind_of(row.key)] += row.self_cpu_time_total
    total = sum(spent.values()) or 1.0
    return {kind: time / total for kind, time in spent.most_common()}


def kind_of(operator: str) -> str:
    """The kind of an operator, as aten::native_layer_norm or subquad::mlp."""
    name = operator.rpartition("::")[2].strip("_")
    name = name.removeprefix("native_").removeprefix("linalg_").removeprefix("fused_")
    return next((kind for kind, names in KINDS.items() if name in names), OTHER)
