"""Data that are drawn instead of photographed, the same on every machine from the same seed."""
