"""Attention layers of other libraries, and of our own hosts, as converted ones: a file for what is built alike."""

from subquad.conversion.families.known_families import FAMILIES, PLUGGED_IN, converted_class, register_family

__all__ = ["FAMILIES", "PLUGGED_IN", "converted_class", "register_family"]
