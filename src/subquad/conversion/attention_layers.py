"""Which modules of a foreign network are attention layers, and which classes of ours may stand for them."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from subquad.conversion.converted_attention import ConvertedAttention
from subquad.conversion.families import converted_class
from subquad.conversion.pyramids import holder_of
from subquad.errors import SubquadError
from subquad.grid import TokenGrid

IN_A_LIST = re.compile(r"\d+$")
"""Ends the path of one of several blocks."""

_CALLED_ATTENTION = re.compile(r"Attention|Attn|(MSA|MHSA|MHA)(?![a-z])")


@dataclass(frozen=True)
class Layer:
    """An attention layer in a block: its path, and the class of ours that may stand for it, if any.

    Attributes:
        grid: of its tokens, for images of the size that position parameters are made for.
        number: of its block, from 0; in one of our networks, within its stage.
    """

    path: str
    module: nn.Module
    block: nn.Module
    known: type[ConvertedAttention] | None
    grid: TokenGrid
    number: int

    @property
    def is_target(self) -> bool:
        """Whether it is meant where all are to be replaced."""
        return self.known is None or self.known.is_target(self.module, self.block, self.number)

    @property
    def family(self) -> type[ConvertedAttention]:
        """The class of ours that may stand for it.

        Raises:
            SubquadError: its kind is not known.
        """
        if self.known is None:
            raise SubquadError(f"{self.named}: leave its block out of `blocks`, or register a family (docs/convert.md)")
        return self.known

    @property
    def named(self) -> str:
        """What is said of a layer of no known kind."""
        return _named(self.path, self.module)


def layers_below(
    root: str, modules: dict[str, nn.Module], grid: TokenGrid, standing: Mapping[str, TokenGrid] | None = None
) -> Iterator[Layer]:
    """The layers below `root`; on `standing` where that is given, or where their families say from `grid`."""
    return layers_at(paths_of_layers(root, modules), modules, grid, standing)


def layers_at(
    paths: Iterable[str],
    modules: dict[str, nn.Module],
    grid: TokenGrid,
    standing: Mapping[str, TokenGrid] | None = None,
) -> Iterator[Layer]:
    """The layers at some paths, likewise."""
    for number, path in enumerate(paths):
        module = modules[path]
        family = converted_class(module)
        own = grid if standing is None else standing.get(path, grid)
        if family is not None:
            grid = family.grid_behind(module, own)
            own = family.grid_of(module, own)
            own = TokenGrid(*own.shape, own.prefix + family.tokens_beside(module, number))
        # a block itself stands in a list of them, which knows nothing
        block = modules[holder_of([path.rpartition(".")[0]], modules)]
        yield Layer(path, module, block, family, own, number)


def is_one_of_several(path: str) -> bool:
    """Whether a layer belongs to one of several blocks, by the path of it below a network."""
    return any(IN_A_LIST.search(part) for part in path.split(".")[:-1])


def paths_of_layers(root: str, modules: dict[str, nn.Module], *, anywhere: bool = False) -> Iterator[str]:
    """Paths of attention layers below `root` that are or belong to one of several blocks, and hold no other.

    Anywhere are those of known kinds that stand alone as well, as between the halves of a U-Net.
    """
    known: list[str] = []
    for path, module in modules.items():
        inside = path.startswith(f"{root}.") if root else bool(path)
        if not inside or any(path.startswith(f"{outer}.") for outer in known):
            continue
        own = path[len(root) :].strip(".").split(".")
        family = converted_class(module)
        # a class of a family may stand for a block itself
        is_block = family is not None and own[-1].isdigit()
        is_known = is_block or (family is not None and (anywhere or family.stands_anywhere))
        if not is_known and not is_one_of_several(".".join(own)):
            continue
        if family is not None and not family.is_self_attention(module, modules[path.rpartition(".")[0]], path):
            continue
        if family is not None or (_is_called_attention(module) and not _holds_attention(module)):
            known.append(path)
            yield path


def _is_called_attention(module: nn.Module) -> bool:
    return _CALLED_ATTENTION.search(type(module).__name__) is not None


def _holds_attention(module: nn.Module) -> bool:
    """Whether a module is a wrapper of attention layers, or has nothing to learn."""
    inner = [part for part in module.modules() if part is not module]
    return not any(True for _ in module.parameters()) or any(
        converted_class(part) is not None or _is_called_attention(part) for part in inner
    )


def refuse_unknown(root: str, modules: dict[str, nn.Module]) -> None:
    """Raise where there are attention layers below `root`, and all are of kinds that are not known."""
    paths = list(paths_of_layers(root, modules))
    if paths and all(converted_class(modules[path]) is None for path in paths):
        raise SubquadError(f"{_named(paths[0], modules[paths[0]])}: register a family for it (docs/convert.md)")


def _named(path: str, module: nn.Module) -> str:
    cls = type(module)
    return f"{path} is a {cls.__module__}.{cls.__qualname__}, an attention layer that is not known here"


def paths_in_pyramid(root: str, modules: dict[str, nn.Module]) -> list[str]:
    """Paths of the layers below `root` that stand in stages which convolutions lead to."""
    families = {path: converted_class(modules[path]) for path in paths_of_layers(root, modules)}
    return [
        path for path, family in families.items() if family is not None and (family.in_pyramid or family.is_handed_maps)
    ]


def ways_to_maps(root: str, modules: dict[str, nn.Module]) -> dict[str, Callable[[Tensor], TokenGrid]]:
    """What says on which map tokens stand, for each layer below `root` that is handed maps."""
    families = {path: converted_class(modules[path]) for path in paths_of_layers(root, modules)}
    return {
        path: one.way_to_map(modules[path]) for path, one in families.items() if one is not None and one.is_handed_maps
    }


def host_of(layers: Iterable[Layer]) -> str:
    """The host whose usual settings mechanisms have in a network with such layers."""
    return min((layer.known.host for layer in layers if layer.known is not None), default="vit")
