"""One's own trained network with other attention: replaced, aligned, distilled, judged, kept."""

from subquad.conversion.converted_attention import ConvertedAttention
from subquad.conversion.families import FAMILIES, register_family
from subquad.conversion.replacing import Conversion, conversion_of, convert, converted_layers, restore
from subquad.conversion.towers import find_tower

__all__ = [
    "FAMILIES",
    "Conversion",
    "ConvertedAttention",
    "conversion_of",
    "convert",
    "converted_layers",
    "find_tower",
    "register_family",
    "restore",
]
