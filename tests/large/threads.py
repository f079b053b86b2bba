"""Processes that are threads: what crosses between them is read from a shared list, so that many take milliseconds."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from subquad import spread
from subquad.large.exchanging import BandExchange, Traffic

TIMEOUT = 240
"""Seconds, of which a machine that measures something elsewhere may stop all for two minutes."""


class ThreadChannel:
    """A `Channel` whose processes are threads; each says which it is by `place.index`."""

    def __init__(self, count):
        self.count, self.place = count, threading.local()
        self._barrier, self._said = threading.Barrier(count), [None] * count

    @property
    def index(self):
        return self.place.index

    def _all_say(self, what):
        self._said[self.index] = what
        self._barrier.wait(TIMEOUT)
        said = list(self._said)
        self._barrier.wait(TIMEOUT)
        return said

    def add(self, x):
        x.copy_(torch.stack(self._all_say(x.clone())).sum(dim=0))

    def largest(self, x):
        x.copy_(torch.stack(self._all_say(x.clone())).amax(dim=0))

    def gather(self, numbers, like):
        return self._all_say(list(numbers))

    def swap(self, up, down):
        said = self._all_say((up.clone(), down.clone()))
        above = said[self.index - 1][1] if self.index > 0 else torch.zeros_like(down)
        below = said[self.index + 1][0] if self.index < self.count - 1 else torch.zeros_like(up)
        return above, below


class CountedExchange(BandExchange):
    """Shared by all threads, it counts what the one in the middle hands over."""

    @property
    def traffic(self):
        return self.counted if self.index == self.channel.count // 2 else Traffic()

    @traffic.setter
    def traffic(self, traffic):
        self.counted = traffic


def together(count, function):
    """`function(index, exchange)` of as many threads, which share an exchange; their results from the first on."""
    channel = ThreadChannel(count)
    exchange = CountedExchange(channel)

    def run(index):
        channel.place.index = index
        try:
            result = function(index, exchange)
            # who asks more often than the others gets no answer
            channel.gather([], None)
            return result
        except BaseException:
            channel._barrier.abort()
            raise

    with spread.over(exchange), ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, index) for index in range(count)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
