"""Calls of copies of foreign networks, with random images, which show what their layers are handed.

Letters: b batch, c channels, n tokens.
"""

import copy
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from subquad.conversion.example_calls import Call, Example
from subquad.conversion.families.twins import as_twins_have_it
from subquad.conversion.sketched_calls import IMAGES


class EnoughSeenError(Exception):
    """A hook has seen what a network is run for, and the rest of it need not be run."""


def run_copied(
    network: nn.Module, example: Example, batch: int, listen: Callable[[nn.Module], None]
) -> Exception | None:
    """Run a copy of a network that shares its numbers, evaluated, for one example several times.

    Nothing is left behind in the network, nor in what draws random numbers.

    Args:
        network: which takes what the example is of.
        example: of a call.
        batch: b.
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
            call = example.call(batch, weights)
            twin(*call.args, **call.kwargs)
        except EnoughSeenError:
            return None
        except Exception as error:
            # that is somebody's code, which may say in any way that it can't be copied or run
            return error
    return None


def calls_of(network: nn.Module, layers: Iterable[str], example: Example) -> tuple[dict[str, Call], Exception | None]:
    """What each of the layers at some paths is handed first where a network is run, and what went wrong.

    Tensors are as twins of the layers have them.
    """
    calls: dict[str, Call] = {}
    wanted = set(layers)

    def seen_at(path: str) -> Any:
        def hook(module: nn.Module, arguments: Any, named: Any) -> None:
            calls.setdefault(path, Call(arguments, named).with_tensors(as_twins_have_it))
            if calls.keys() == wanted:
                raise EnoughSeenError

        return hook

    def listen(twin: nn.Module) -> None:
        for path in wanted:
            twin.get_submodule(path).register_forward_pre_hook(seen_at(path), with_kwargs=True)

    wrong = run_copied(network, example, IMAGES, listen)
    return calls, wrong
