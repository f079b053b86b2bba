"""Training: the loop, going on with a run, and the comparison of mechanisms. What is trained is a task of `tasks`."""

from subquad.training.compare import compare, comparison_table, fitting_mechanisms, released_mechanisms, slug
from subquad.training.running import train
from subquad.training.tested_comparison import BenchmarkRow, BenchmarkTable, benchmark_text, compare_tested

__all__ = [
    "BenchmarkRow",
    "BenchmarkTable",
    "benchmark_text",
    "compare",
    "compare_tested",
    "comparison_table",
    "fitting_mechanisms",
    "released_mechanisms",
    "slug",
    "train",
]
