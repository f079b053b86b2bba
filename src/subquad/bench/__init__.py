"""What is timed, and against what."""

from subquad.bench.memory import peak_memory_mb
from subquad.bench.scaling import ScalingRow, crossover, describe_scaling, measure_scaling

__all__ = ["ScalingRow", "crossover", "describe_scaling", "measure_scaling", "peak_memory_mb"]
