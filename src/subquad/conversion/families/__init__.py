"""Attention layers of other libraries, and of our own hosts, as converted ones: a file for what is built alike."""

from subquad.conversion.families.known_families import PLUGGED_IN, converted_class, own_families, register_family

__all__ = ["PLUGGED_IN", "converted_class", "own_families", "register_family"]
