"""ImageNet's classes by their WordNet ids or in words, for folders that have only some of them."""

import re
from collections.abc import Sequence

from timm.data import ImageNetInfo

from subquad.errors import SubquadError


def is_imagenet(classes: Sequence[str]) -> bool:
    """Whether these are the thousand classes of ImageNet-1k, in their order."""
    return list(classes) == ImageNetInfo().label_names()


def places_of(data: str, names: Sequence[str]) -> list[int]:
    """Where classes stand among the thousand.

    Args:
        data: what the user calls the data.
        names: of its classes: "n01440764", or one of a class's names in words, "tench", "English_springer".

    Raises:
        SubquadError: a name is none of ImageNet's, or is two classes', or two names are one class's.
    """
    ids = {name: place for place, name in enumerate(ImageNetInfo().label_names())}
    words = _words()
    places: dict[int, str] = {}
    for name in names:
        found = [ids[name]] if name in ids else words.get(_plain(name), [])
        if len(found) != 1:
            reason = f"which is {len(found)} classes of ImageNet" if found else "which is no class of ImageNet"
            raise SubquadError(
                f"{data} has a class {name}, {reason}: name its folders by WordNet ids (n01440764) or words"
            )
        if found[0] in places:
            raise SubquadError(f"{data} has classes {places[found[0]]} and {name}, which are one of ImageNet's")
        places[found[0]] = name
    return list(places)


def _words() -> dict[str, list[int]]:
    """The places of classes by each of their names in words."""
    information = ImageNetInfo()
    found: dict[str, list[int]] = {}
    for place in range(information.num_classes()):
        for name in dict.fromkeys(map(_plain, information.index_to_description(place).split(","))):
            found.setdefault(name, []).append(place)
    return found


def _plain(name: str) -> str:
    """A name without capitals and signs: "English_springer" is "English springer"."""
    return re.sub(r"[^a-z0-9]+", " ", name.lower()).strip()
