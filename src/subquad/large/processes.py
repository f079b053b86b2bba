"""What processes say to each other, as it is sent: by torch.distributed, whose failures become one line."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from subquad.errors import SubquadError, reason_of


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
            dist.all_gather_into_tensor(gathered, own, group=self.group)
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

    @contextmanager
    def _in_one_line(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not lost_process(error):
                raise
            raise SubquadError(
                f"process {self.index + 1} of {self.count} that hold one image does not reach the others any more: one "
                f"of them has ended, so all end. Start them again from what was saved last ({reason_of(error)})"
            ) from None


def lost_process(error: BaseException) -> bool:
    """Whether an error says that another process of this run can't be reached any more."""
    words = ("nccl", "closed by peer", "connection reset", "process group")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )
