"""What processes say to each other, as it is sent: by torch.distributed, whose failures become one line."""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from subquad.errors import SubquadError


class Channel(Protocol):
    """Some processes in a row, which all make the same calls in the same order."""

    index: int
    """Which of them this process is."""

    count: int
    """How many they are."""

    def add(self, x: Tensor) -> None:
        """Make `x` the sum of all processes' in place."""

    def largest(self, x: Tensor) -> None:
        """Make each entry of `x` the largest of all processes' in place."""

    def gather(self, numbers: Sequence[int], like: Tensor) -> list[list[int]]:
        """The numbers of all processes, which have as many each; `like` is on the device that they talk by."""

    def swap(self, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """Send `up` to the process before and `down` to the next; what those sent to this one, in shapes alike.

        From before the first and from behind the last come zeros.
        """


class ProcessGroup:
    """A `Channel` over a process group of torch.distributed, whose ranks are the places in the row."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)

    def add(self, x: Tensor) -> None:
        with self._in_one_line():
            dist.all_reduce(x, group=self.group)

    def largest(self, x: Tensor) -> None:
        with self._in_one_line():
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)

    def gather(self, numbers: Sequence[int], like: Tensor) -> list[list[int]]:
        own = torch.tensor(numbers, device=like.device)
        gathered = own.new_empty(self.count * len(own))
        with self._in_one_line():
            # its name up to PyTorch 2.13, which warns of it from then on
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(gathered, own, group=self.group)
            return gathered.view(self.count, -1).tolist()

    def swap(self, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        up, down = up.contiguous(), down.contiguous()
        above, below = torch.zeros_like(down), torch.zeros_like(up)
        calls = []
        for neighbour, sent, received in ((self.index - 1, up, above), (self.index + 1, down, below)):
            if 0 <= neighbour < self.count and sent.numel():
                calls.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=neighbour))
            if 0 <= neighbour < self.count and received.numel():
                calls.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=neighbour))
        with self._in_one_line():
            for work in dist.batch_isend_irecv(calls) if calls else ():
                work.wait()
        return above, below

    def _in_one_line(self) -> AbstractContextManager[None]:
        return lost_in_one_line(self.index, self.count)


@contextmanager
def lost_in_one_line(index: int, count: int) -> Iterator[None]:
    """Raise a SubquadError where the block, of process `index` of `count`, does not reach another one any more."""
    try:
        yield
    except RuntimeError as error:
        if not lost_process(error):
            raise
        raise SubquadError(
            f"process {index + 1} of {count} does not reach another one any more: one of them has ended, so all end. "
            f"Start them again, from what was saved last ({shortened(error)})"
        ) from None


def shortened(error: BaseException) -> str:
    """PyTorch's error without the line of its source that it begins with, and without advice to its authors."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).strip()).partition("\n")[0].partition(". ")[0]


def lost_process(error: BaseException) -> bool:
    """Whether an error says that another process of this run can't be reached any more."""
    words = ("gloo", "nccl", "closed by peer", "connection reset", "process group")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )
