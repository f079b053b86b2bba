"""`create_model`: a row of the table, the mechanisms by name, and their settings, put together."""

import inspect
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from subquad.attention import ATTENTION
from subquad.errors import SubquadError, unknown_name
from subquad.models.layers import Mechanism
from subquad.models.variants import HOSTS, VARIANTS

Names = str | Sequence[str | Sequence[Any]]
"""One mechanism for all blocks; one for each stage or block; a (name, count) pair stands for `count` blocks."""


def create_model(
    name: str,
    *,
    attention: Names = "softmax",
    img_size: int | tuple[int, int] | None = None,
    in_chans: int = 3,
    num_classes: int = 1000,
    depths: Sequence[int] | None = None,
    **settings: Any,
) -> nn.Module:
    """A network of the table `VARIANTS` with any mechanism.

        create_model("deit_tiny", attention="pola", img_size=32, patch_size=2, num_classes=10)
        create_model("deit_tiny", attention=(("agent", 4), ("softmax", 8)), num_agents=16)

    Args:
        name: a row of `VARIANTS`.
        attention: mechanisms by name, see `Names`; "linear:feature_map=elu" gives one its own settings.
        img_size: pixels, one number or (height, width), that position parameters are made for; other sizes work too.
        in_chans: channels of the images.
        num_classes: classes of the head; 0 for none.
        depths: blocks of each stage, instead of the row's.
        settings: arguments of the host (`patch_size`, `embed_dim`, `num_heads`, `drop_path_rate`, …) and of the
            mechanisms (`num_agents`, …); a mechanism's can be a list with an entry for each stage or block. None means
            the default.

    Returns:
        The model; `model.creation` holds the arguments of this call, as JSON can hold them.

    Raises:
        SubquadError: for a name, a setting or a number that does not fit, in one line.
    """
    if name not in VARIANTS:
        raise unknown_name("model", name, VARIANTS)
    variant = VARIANTS[name]
    host = HOSTS[variant.host]
    settings = {key: value for key, value in settings.items() if value is not None}
    depths = tuple(depths) if depths is not None else variant.depths
    if not depths or min(depths) < 1:
        raise SubquadError(f"every stage needs a block, got depths {depths}")

    own = inspect.signature(host).parameters
    blocks = [parse_attention(entry) for entry in per_block(attention, depths, "attention")]
    for mechanism, _ in blocks:
        if mechanism not in ATTENTION:
            raise unknown_name("attention", mechanism, ATTENTION)
    _check_names(settings, set(own), {mechanism for mechanism, _ in blocks})
    arguments = variant.arguments | {key: value for key, value in settings.items() if key in own}
    if img_size is not None:
        arguments["img_size"] = _pair(img_size)
    shared = {key: per_block(value, depths, key) for key, value in settings.items() if key not in own}
    mechanisms = [_mechanism(*block, {key: row[i] for key, row in shared.items()}) for i, block in enumerate(blocks)]
    model = host(mechanisms, in_chans=in_chans, num_classes=num_classes, **arguments)
    given: dict[str, Any] = {
        "name": name,
        "attention": attention,
        "img_size": img_size,
        "in_chans": in_chans,
        "num_classes": num_classes,
    }
    given |= {"depths": depths if depths != variant.depths else None, **settings}
    # through JSON, so that a model made here and one restored from its file say the same
    model.creation = json.loads(json.dumps({key: value for key, value in given.items() if value is not None}))
    return model


def per_block(entries: Any, depths: Sequence[int], what: str) -> list[Any]:
    """`entries`, one for all, for each stage or for each block, as a list with one for each block."""
    total = sum(depths)
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        return [entries] * total
    expanded = [single for entry in entries for single in _repeat(entry)]
    if len(expanded) == total:
        return expanded
    if len(entries) == len(depths):
        return [
            single for entry, depth in zip(entries, depths, strict=True) for single in per_block(entry, [depth], what)
        ]
    raise SubquadError(
        f"{what} has {len(expanded)} entries for {len(depths)} stages and {total} blocks: "
        "give one for all, one for each stage or one for each block"
    )


def _repeat(entry: Any) -> list[Any]:
    """A (value, count) pair written out."""
    if isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2 and isinstance(entry[1], int):
        return [entry[0]] * entry[1]
    return [entry]


def parse_attention(text: str) -> tuple[str, dict[str, Any]]:
    """Read "linear:feature_map=elu,local=true": ("linear", {"feature_map": "elu", "local": True})."""
    name, _, rest = text.partition(":")
    settings = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise SubquadError(f"'{part}' in '{text}' is no setting: write name:setting=value,setting=value")
        settings[key.strip()] = _literal(value.strip())
    return name.strip(), settings


def _literal(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def settings_of(mechanism: str) -> dict[str, Any]:
    """A mechanism's own settings and their defaults."""
    parameters = inspect.signature(ATTENTION[mechanism]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}


def _check_names(settings: dict[str, Any], own: set[str], mechanisms: set[str]) -> None:
    theirs = {key for mechanism in mechanisms for key in settings_of(mechanism)}
    for key in settings:
        if key not in own | theirs or key == "attention":
            used = ", ".join(sorted(mechanisms))
            raise unknown_name(f"setting (of this model with {used} attention)", key, (own | theirs) - {"attention"})


def _mechanism(name: str, settings: dict[str, Any], shared: dict[str, Any]) -> Mechanism:
    """The class `name` with its own settings, and with those of the shared ones that it knows."""
    known = settings_of(name)
    for key in settings:
        if key not in known:
            raise unknown_name(f"setting of {name} attention", key, known)
    fitting = {key: value for key, value in shared.items() if key in known and value is not None}
    return partial(ATTENTION[name], **(fitting | settings))


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    if len(size) != 2:
        raise SubquadError(f"img_size is one number or (height, width), got {tuple(size)}")
    return size[0], size[1]
