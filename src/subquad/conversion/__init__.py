"""One's own trained network with other attention: replaced, aligned, distilled, judged, kept."""

from subquad.conversion.aligning import Alignment, align, relative_errors
from subquad.conversion.converted_attention import ConvertedAttention
from subquad.conversion.distilling import distil
from subquad.conversion.families import FAMILIES, register_family
from subquad.conversion.replacing import Conversion, conversion_of, convert, converted_layers, restore
from subquad.conversion.towers import find_tower

__all__ = [
    "FAMILIES",
    "Alignment",
    "Conversion",
    "ConvertedAttention",
    "align",
    "conversion_of",
    "convert",
    "converted_layers",
    "distil",
    "find_tower",
    "register_family",
    "relative_errors",
    "restore",
]
