"""The colour of each mechanism, the same on every page and picture: the one that its traits say, or one of its name.

A series has a class that is called after its colour, `colour-0072b2`; `style_of` makes the style of all on a page.
"""

import colorsys
import hashlib
import re
from collections.abc import Iterator, Mapping
from itertools import count

from subquad.attention import ATTENTION, Traits, traits_of
from subquad.errors import SubquadError
from subquad.models import names_in

NEUTRAL = "colour-667080"
"""The class of what is no mechanism: baselines, chance."""

_DARK_PAPER = 0.66
"""The least lightness of colours on dark paper."""


def colour_of(attention: str, shade: int = 0) -> str:
    """The colour of a mechanism, as "#0072b2"; of several, "agent+softmax", that of the first that is not quadratic.

    Args:
        attention: mechanisms by name, settings and all; names that nothing is known of have a colour too.
        shade: 0 for the colour itself, others tell apart what has the same mechanism.
    """
    names = names_in(attention) or [attention]
    name = next((name for name in names if not _traits(name).quadratic), names[0])
    return _shaded(_traits(name).colour or _colour_of_name(name), shade)


def classes_of(attentions: Mapping[str, str]) -> dict[str, str]:
    """A class for each label, by what mechanism it stands for; labels of the same mechanism get different shades."""
    taken: dict[str, str] = {}
    for label, attention in attentions.items():
        shades = (f"colour-{colour_of(attention, shade)[1:]}" for shade in count())
        taken[label] = next(name for name in shades if name not in taken.values())
    return taken


def style_of(markup: str) -> str:
    """The style of the classes in a page's markup, on light and on dark paper."""
    colours = list(_colours_in(markup))
    light = "".join(f".colour-{colour} {{ --colour: #{colour}; }}\n" for colour in colours)
    dark = "".join(f".colour-{colour} {{ --colour: {_on_dark(colour)}; }}\n" for colour in colours)
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"


def colour_of_class(name: str) -> str:
    """The colour of a class, as "#0072b2", for pictures without style sheets."""
    return f"#{name.removeprefix('colour-')}"


def _colours_in(markup: str) -> Iterator[str]:
    yield from dict.fromkeys(re.findall(r"\bcolour-([0-9a-f]{6})\b", markup))


def _traits(name: str) -> Traits:
    try:
        return traits_of(ATTENTION.get(name))
    except SubquadError:
        # a page is drawn though a plug-in is broken by now
        return traits_of(None)


def _colour_of_name(name: str) -> str:
    """A colour that is made of a name, the same on every machine; duller than those of our mechanisms."""
    digest = hashlib.sha256(name.encode()).digest()
    return _hex(digest[0] / 256, 0.42 + 0.1 * digest[1] / 256, 0.45)


def _shaded(colour: str, shade: int) -> str:
    """Lighter and darker in turn, and turned a little, so that no two are alike."""
    if not shade:
        return colour
    hue, light, saturation = _parts(colour)
    step = 1 - 0.7 ** ((shade + 1) // 2)
    light = light + (0.85 - light) * step if shade % 2 else light * (1 - step)
    return _hex((hue + 0.02 * shade) % 1, light, saturation)


def _on_dark(colour: str) -> str:
    hue, light, saturation = _parts(f"#{colour}")
    return _hex(hue, max(light, _DARK_PAPER), saturation)


def _parts(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return colorsys.rgb_to_hls(red, green, blue)


def _hex(hue: float, light: float, saturation: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, light, saturation))
