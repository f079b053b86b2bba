"""What is timed, and against what."""

from subquad.bench.blocks import (
    DTYPES,
    MEASUREMENTS,
    BlockRow,
    blocks_table,
    faster_than_softmax,
    measure_blocks,
    save_rows,
)
from subquad.bench.memory import peak_memory_mb
from subquad.bench.networks import NetworkRow, faster_from, measure_networks, networks_table
from subquad.bench.scaling import ScalingRow, crossover, describe_device, describe_scaling, measure_scaling

__all__ = [
    "DTYPES",
    "MEASUREMENTS",
    "BlockRow",
    "NetworkRow",
    "ScalingRow",
    "blocks_table",
    "crossover",
    "describe_device",
    "describe_scaling",
    "faster_from",
    "faster_than_softmax",
    "measure_blocks",
    "measure_networks",
    "measure_scaling",
    "networks_table",
    "peak_memory_mb",
    "save_rows",
]
