"""Calls of copies of foreign networks, with random images, which show what their layers are handed.

Letters: b batch, c channels, n tokens.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from subquad.conversion.families.twins import as_twins_have_it
from subquad.conversion.sketched_calls import IMAGES


class EnoughSeenError(Exception):
    """A hook has seen what a network is run for, and the rest of it need not be run."""


def run_copied(
    network: nn.Module, image: tuple[int, ...], images: int, listen: Callable[[nn.Module], None]
) -> Exception | None:
    """Run a copy of a network that shares its numbers, evaluated, for one random image several times.

    Nothing is left behind in the network, nor in what draws random numbers.

    Args:
        network: which takes images.
        image: (channels, height, width).
        images: b.
        listen: registers hooks at the copy.

    Returns:
        What went wrong, if something did: of networks that can't be copied or have no numbers yet, for instance.
    """
    shared = {id(one): one for one in chain(network.parameters(), network.buffers())}
    weights = next((one for one in network.parameters() if one.is_floating_point()), None)
    if weights is None or any(one.is_meta for one in shared.values()):
        return ValueError("it has no numbers")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        try:
            # evaluated, whatever the network is about; all that has numbers is the network's own
            twin = copy.deepcopy(network, shared).eval()
            listen(twin)
            one = torch.randn(1, *image).to(weights)
            twin(one.expand(images, *image))
        except EnoughSeenError:
            return None
        except Exception as error:
            # that is somebody's code, which may say in any way that it can't be copied or run
            return error
    return None


@dataclass(frozen=True)
class Call:
    """What a layer was handed once: its arguments, tensors as its twins have them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def calls_of(
    network: nn.Module, layers: Iterable[str], image: tuple[int, ...]
) -> tuple[dict[str, Call], Exception | None]:
    """What each of the layers at some paths is handed first where a network is run for images, and what went wrong."""
    calls: dict[str, Call] = {}
    wanted = set(layers)

    def seen_at(path: str) -> Any:
        def hook(module: nn.Module, arguments: Any, named: Any) -> None:
            calls.setdefault(path, Call(*tree_map_only(Tensor, as_twins_have_it, (arguments, named))))
            if calls.keys() == wanted:
                raise EnoughSeenError

        return hook

    def listen(twin: nn.Module) -> None:
        for path in wanted:
            twin.get_submodule(path).register_forward_pre_hook(seen_at(path), with_kwargs=True)

    wrong = run_copied(network, image, IMAGES, listen)
    return calls, wrong
