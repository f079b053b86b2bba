"""One's own trained network with other attention: replaced, aligned, distilled, judged, kept."""

from subquad.conversion.advising import Advice, advise
from subquad.conversion.aligning import Alignment, align, relative_errors
from subquad.conversion.conversion_plan import Judging, Plan
from subquad.conversion.conversion_run import Converted, convert_run
from subquad.conversion.converted_attention import ConvertedAttention
from subquad.conversion.delta_files import load_converted, save_converted, save_delta
from subquad.conversion.distilling import distil
from subquad.conversion.families import register_family
from subquad.conversion.hybrids import blocks_but, blocks_for, blocks_within, hybrid, sensitivity, trade_off
from subquad.conversion.judging import Comparison, compare_networks
from subquad.conversion.replacing import Conversion, conversion_of, convert, converted_layers, restore
from subquad.conversion.towers import find_tower
from subquad.conversion.training_free import convert_without_training

__all__ = [
    "Advice",
    "Alignment",
    "Comparison",
    "Conversion",
    "Converted",
    "ConvertedAttention",
    "Judging",
    "Plan",
    "advise",
    "align",
    "blocks_but",
    "blocks_for",
    "blocks_within",
    "compare_networks",
    "conversion_of",
    "convert",
    "convert_run",
    "convert_without_training",
    "converted_layers",
    "distil",
    "find_tower",
    "hybrid",
    "load_converted",
    "register_family",
    "relative_errors",
    "restore",
    "save_converted",
    "save_delta",
    "sensitivity",
    "trade_off",
]
