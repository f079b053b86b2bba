"""Networks whose answers come from a file: of images, and diffusers' that are told more."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from subquad.diffusion.called_with import TIME, arguments_of
from subquad.errors import SubquadError, reason_of
from subquad.exports.formats import Runner
from subquad.exports.known_arguments import places_of_tensors, tensor_at
from subquad.text import counted

FARTHEST = 0.3
"""How far answers may be off, by the network's largest number: what is exported in int8 is by 0.2 at most, and other
networks, unless they are much alike, by more."""

ANY_SIZE = (8, 8)
"""Of a sample: what a network is called with besides does not depend on it, and not all say theirs."""

PRECISIONS = torch.float32, torch.float16, torch.bfloat16
"""What images may have to be for a file, as it was written."""


class InEngine(nn.Module):
    """A network whose answers come from the engine that its file is for; all else is asked of the network itself.

    The first answer is held against the network's own, so that a file of another network is not judged in its place.

    Args:
        network: what the file was written from.
        run: the file, opened.
        name: of the file.
    """

    def __init__(self, network: nn.Module, run: Runner, name: str = "the exported file") -> None:
        super().__init__()
        self.network, self.name = network, name
        # a program may be a module of its own, which neither trains nor moves with this one
        self._held = (run,)
        self._dtype: torch.dtype | None = None
        self._batch = 0

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        if not isinstance(images, Tensor):
            raise SubquadError("networks that take lists of images, as detectors do, have no exported files")
        answer = self._run(images.cpu()).float().to(images.device)
        if not self._batch:
            self._check(self.network(images), answer)
        self._batch = max(self._batch, len(images))
        return answer

    def _run(self, images: Tensor) -> Tensor:
        """The file's answer to images."""
        # the last images may be fewer than a file takes that was written for a number of them
        more = dict.fromkeys((0, max(self._batch - len(images), 0)))
        filled = [torch.cat([images, images[-1:].expand(count, -1, -1, -1)]) for count in more]
        answer = self._first_taken(partial(_alone, one) for one in filled)
        if isinstance(answer, Tensor):
            return answer[: len(images)]
        height, width = images.shape[2:]
        raise SubquadError(
            f"{self.name} does not take {counted(len(images), 'image')} of {height}×{width} px: write it with "
            f"--dynamic batch,size, or judge it with the number and size of images it was written for (--batch-size "
            f"and --img-size, where the command has them): "
            f"{reason_of(answer)}"
        ) from answer

    def _first_taken(self, calls: Iterable[Callable[[torch.dtype], Sequence[Tensor]]]) -> Tensor | Exception:
        """The file's answer to the first of some calls that it takes, or why it took none.

        They are made in what it was written in, which is found out.
        """
        errors: list[Exception] = []
        for call in calls:
            for dtype in PRECISIONS if self._dtype is None else (self._dtype,):
                try:
                    answer = self._held[0](*call(dtype))
                except Exception as error:
                    # engines raise what they like
                    errors.append(error)
                    continue
                self._dtype = dtype
                return answer
        return errors[0]

    def _check(self, own: Any, answer: Tensor) -> None:
        """Raise a SubquadError where the network's own answer is another one."""
        if not isinstance(own, Tensor) or own.shape != answer.shape:
            what = tuple(own.shape) if isinstance(own, Tensor) else type(own).__name__
            raise SubquadError(f"{self.name} gives {tuple(answer.shape)} and the network {what}: it is of another one")
        off = float((own.float() - answer).abs().max() / own.abs().max().clamp(min=1e-12))
        if not off <= FARTHEST:
            raise SubquadError(
                f"{self.name} is off by {off:.1g} of the network's largest number: it was written of another network"
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("network"), name)


def _alone(images: Tensor, dtype: torch.dtype) -> list[Tensor]:
    return [images.to(dtype)]


class CalledInEngine(InEngine):
    """A U-Net of diffusers in the same way: it is called as that is, and stands in its place in a pipeline.

    Args:
        network: what the file was written from, with all that it takes.
        run: the file, opened.
        name: of the file.

    Raises:
        SubquadError: nobody calls the network itself.
    """

    def __init__(self, network: nn.Module, run: Runner, name: str = "the exported file") -> None:
        super().__init__(network, run, name)
        known = arguments_of(network, ANY_SIZE) or {}
        if TIME not in known:
            raise SubquadError(
                f"pipelines call encode and decode of a {type(network).__name__}, and never itself: write the module "
                "that calls one of them, and give that a file"
            )
        places = places_of_tensors(known).values()
        self._dtypes = {place: one.dtype for place in places if (one := tensor_at(known, place)) is not None}
        self._called = inspect.signature(network.forward)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = self._called.bind(*args, **kwargs).arguments
        tensors = self._tensors_of(given)
        answer = self._first_taken([partial(self._brought, tensors)])
        if not isinstance(answer, Tensor):
            raise SubquadError(f"{self.name} does not take this call: {reason_of(answer)}") from answer
        answer = answer.to(tensors["sample"])
        if not self._batch:
            self._check(self.network(**given | {"return_dict": False})[0], answer)
            self._batch = len(answer)
        return Sample(answer) if given.get("return_dict", True) else (answer,)

    def _tensors_of(self, given: Mapping[str, Any]) -> dict[str, Tensor]:
        """What the file takes of a call, in its order and by name; of the time, which all images share, one row."""
        found = {}
        for place, dtype in self._dtypes.items():
            if (one := tensor_at(given, place)) is None:
                raise SubquadError(f"{self.name} takes {place[-1]}, which is not given")
            found[place[-1]] = one.to(dtype)
        times = found[TIME].unique()
        if len(times) > 1:
            raise SubquadError(f"{self.name} takes one {TIME} for all images, got {len(times)}")
        found[TIME] = times
        taken = {place[0] for place in self._dtypes} | {"return_dict"}
        if more := [name for name, value in given.items() if value is not None and name not in taken]:
            raise SubquadError(f"{self.name} has no place for {', '.join(more)}: the network itself takes it")
        return found

    @staticmethod
    def _brought(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
        """In a dtype, as files take them, but for the time."""
        kept = [name for name, one in tensors.items() if name == TIME or not one.is_floating_point()]
        return [(one if name in kept else one.to(dtype)).cpu() for name, one in tensors.items()]


@dataclass
class Sample:
    """What diffusers' U-Nets answer with where they are not asked for a tuple."""

    sample: Tensor
