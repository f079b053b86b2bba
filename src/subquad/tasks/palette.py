"""Colours of classes and objects in pictures."""

import colorsys


def colour(k: int) -> tuple[int, int, int]:
    """Choose the red, green and blue of class k: hues a golden angle apart, so that neighbours differ."""
    hue = (k * 0.618034) % 1
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.55 + 0.4 * (k % 2), 0.95 - 0.25 * (k // 2 % 2))
    return round(255 * red), round(255 * green), round(255 * blue)
