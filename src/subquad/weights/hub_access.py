"""Other libraries that fetch from the Hugging Face hub: where it can't be reached they try for a minute or more."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from subquad.errors import SubquadError
from subquad.substituting import substituted
from subquad.weights.web_requests import asks_proxy, no_answer


@contextmanager
def asking_hub() -> Iterator[None]:
    """Let libraries fetch from the hub in this context; where that has no address they look into their cache alone.

    Raises:
        SubquadError: what they looked for is not in it, and there is no way to the hub.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    reason = None if constants.HF_HUB_OFFLINE else _unreachable(constants.ENDPOINT)
    if reason is None:
        yield
        return
    try:
        with substituted(constants, "HF_HUB_OFFLINE", True):
            yield
    except Exception as error:
        if any(isinstance(one, LocalEntryNotFoundError | OfflineModeIsEnabled) for one in _chain(error)):
            raise SubquadError(reason) from None
        raise


def _unreachable(url: str) -> str | None:
    """Why a link's host has no address, in words; None where it has one, or a proxy is asked for it."""
    host = urlsplit(url).hostname
    if host is None or asks_proxy(url):
        return None
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return no_answer(error, url)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came from or behind."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
