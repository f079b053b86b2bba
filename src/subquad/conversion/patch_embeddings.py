"""The patch embedding of a foreign network: the module behind which tokens stand, and what is in front of it."""

from functools import reduce
from itertools import pairwise
from typing import Any

from torch import nn

from subquad.attention.bricks import is_conv
from subquad.conversion.attention_layers import IN_A_LIST, paths_of_layers
from subquad.conversion.families import converted_class
from subquad.conversion.grid_recorder import GridRecorder
from subquad.conversion.pyramids import follows
from subquad.errors import SubquadError

PREFIX_TOKENS = (
    "cls_token",
    "class_token",
    "cls_register_token",
    "class_embedding",
    "dist_token",
    "distillation_token",
    "reg_token",
    "register_tokens",
    "storage_tokens",
    "prefix_tokens",
)
"""Parameters (1, p, c) or (c,) of an embedding that put tokens in front of the map's."""


def find_embedding(modules: dict[str, nn.Module]) -> tuple[str, type[GridRecorder]]:
    """The first module that knows where tokens stand, and what the families that are there listen to it with."""
    families = [family for module in modules.values() if (family := converted_class(module)) is not None]
    recorders = dict.fromkeys(family.listener for family in families) or {GridRecorder: None}
    for path, module in modules.items():
        for recorder in recorders:
            if reckons(module):
                return f"{path}.proj".lstrip("."), recorder
            if recorder.hears(module):
                return path, recorder
    instead = ": of a U-Net say the arguments of a call, by `given`" if hasattr(modules[""], "down_blocks") else ""
    none = "" if next(paths_of_layers("", modules), None) else "attention layers in numbered blocks, and no "
    raise SubquadError(
        f"the network has no {none}patch embedding, a convolution whose stride is its kernel's size{instead}"
    )


def reckons(module: Any) -> bool:
    """Whether this is an embedding of timm's: it says how many tokens an image has, and `proj` gives the map of them.

    In front of that there may be a stem of any kind, as of hybrids, and `proj` may be an identity then.
    """
    says = callable(getattr(module, "dynamic_feat_size", None))
    return says and isinstance(module._modules.get("proj"), nn.Conv2d | nn.Identity)


def stem_of(path: str, root: str, modules: dict[str, nn.Module], recorder: type[GridRecorder]) -> list[str]:
    """Paths of the convolutions that make tokens of an image, the one at `path` and those it is chained with.

    Raises:
        SubquadError: what changes the size of a map in front of the blocks is no such chain.
    """
    # what is no convolution is told where tokens stand, whatever is in front of it
    if reckons(modules[path.rpartition(".")[0]]) or not isinstance(modules[path], nn.Conv2d):
        return [path]
    before, behind = _resizing(path, root, modules)
    stem = [*before, path]
    for one in behind:
        # what does not take the channels of the last convolution stands beside, as of another input
        if follows(modules[one], modules[stem[-1]]):
            stem.append(one)
    chained = all(follows(modules[one], modules[earlier]) for earlier, one in pairwise(stem))
    if chained and all(is_conv(modules[one]) for one in stem[:-1]) and recorder.hears(modules[stem[-1]]):
        return stem
    others = ", ".join(one for one in stem if one != path)
    raise SubquadError(
        f"{others} beside the patch embedding {path} changes the size of the map in front of the blocks: where tokens "
        "stand is known behind convolutions alone, the last with a stride of its kernel's size"
    )


def _resizing(path: str, root: str, modules: dict[str, nn.Module]) -> tuple[list[str], list[str]]:
    """What changes the size of maps in front of the blocks below `root`, before the module at `path` and behind it."""
    blocks = next(paths_of_layers(root, modules))
    inside = [one for one in modules if not root or one.startswith(f"{root}.")]
    front = inside[: inside.index(blocks)]
    if path not in front:
        return [], []
    place = front.index(path)
    before, behind = (
        [one for one in part if _changes_size(modules[one])] for part in (front[:place], front[place + 1 :])
    )
    return before, behind


def _changes_size(module: Any) -> bool:
    """Whether maps leave a convolution or a pooling with another number of rows than they entered it with."""
    stride = getattr(module, "stride", 1)
    pools = isinstance(module, nn.MaxPool2d | nn.AvgPool2d)
    return (pools or isinstance(module, nn.Conv2d)) and stride not in (1, (1, 1))


def map_behind(
    stem: list[str], modules: dict[str, nn.Module], recorder: type[GridRecorder], size: Any
) -> tuple[int, int]:
    """Rows and columns of the tokens of an image of this (height, width), or what else the recorder is to know."""
    embedding: Any = modules[stem[-1].rpartition(".")[0]]
    if not reckons(embedding):
        return reduce(lambda before, path: recorder.map_from(modules[path], before), stem, size)
    height, width = embedding.dynamic_feat_size(size)
    if min(height, width) < 1:
        raise SubquadError(f"images of {size[0]}×{size[1]} px hold no patch of {embedding.patch_size}")
    return height, width


def root_of(embedding: str, modules: dict[str, nn.Module]) -> str:
    """The smallest part of the network that is or holds the embedding, and holds blocks with attention."""
    parts = embedding.split(".")
    for length in range(len(parts), -1, -1):
        root = ".".join(parts[:length])
        if next(paths_of_layers(root, modules), None) is not None:
            return root
    kinds = [type(module) for path, module in modules.items() if IN_A_LIST.search(path) and list(module.children())]
    blocks = next(
        (
            f", and {cls.__module__}.{cls.__qualname__} holds none, or one that computes something else than softmax "
            "attention of tokens alone, for which a family can be registered (docs/convert.md)"
            for cls in kinds
            if "Block" in cls.__name__
        ),
        "",
    )
    raise SubquadError(f"no blocks with attention layers stand behind the patch embedding {embedding}{blocks}")


def count_prefix(root: Any, embedding: Any) -> int:
    """How many tokens a network puts in front of the map's: what it says, or by the parameters that it has for them."""
    if isinstance(number := getattr(root, "num_prefix_tokens", None), int):
        return number
    count, seen = 0, set()
    for holder in (root, getattr(root, "embeddings", None), embedding):
        for name in PREFIX_TOKENS:
            token = getattr(holder, name, None)
            if isinstance(token, nn.Parameter) and id(token) not in seen:
                seen.add(id(token))
                count += token.shape[-2] if token.dim() > 1 else 1
    return count
