"""What is timed, and against what."""

from subquad.benchmarks.blocks import (
    DTYPES,
    MEASUREMENTS,
    BlockRow,
    blocks_table,
    dtype_of,
    faster_than_softmax,
    measure_blocks,
    save_rows,
)
from subquad.benchmarks.layers_on_squares import describe_device, is_mechanism
from subquad.benchmarks.memory import peak_memory_mb
from subquad.benchmarks.pipeline_costs import METHODS, MethodRow, check_images, images_table, make_images
from subquad.benchmarks.scaling import (
    LONG,
    CountedRow,
    count_scaling,
    describe_scaling,
    fitted_exponent,
    growth_text,
    measure_scaling,
)
from subquad.benchmarks.time_shares import shares_of_time
from subquad.benchmarks.tuned_tiles import tiles_table, tune_tiles
from subquad.benchmarks.unets import UNETS, UnetRow, measure_unet, unets_table
from subquad.benchmarks.whole_networks import NetworkRow, faster_from, measure_networks, networks_table

__all__ = [
    "DTYPES",
    "LONG",
    "MEASUREMENTS",
    "METHODS",
    "UNETS",
    "BlockRow",
    "CountedRow",
    "MethodRow",
    "NetworkRow",
    "UnetRow",
    "blocks_table",
    "check_images",
    "count_scaling",
    "describe_device",
    "describe_scaling",
    "dtype_of",
    "faster_from",
    "faster_than_softmax",
    "fitted_exponent",
    "growth_text",
    "images_table",
    "is_mechanism",
    "make_images",
    "measure_blocks",
    "measure_networks",
    "measure_scaling",
    "measure_unet",
    "networks_table",
    "peak_memory_mb",
    "save_rows",
    "shares_of_time",
    "tiles_table",
    "tune_tiles",
    "unets_table",
]
