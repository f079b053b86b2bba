"""Requests to the network, http and https alone, and why there was no answer, in words."""

import http.client
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, urlsplit

from subquad.errors import SubquadError, reason_of
from subquad.text import one_line

TIMEOUT = 30.0
"""Seconds without a byte after which a connection is taken for broken."""


class DownloadError(SubquadError):
    """What could not be had from the network, in one line."""


def is_link(text: str) -> bool:
    """Whether a text is a link, not a path."""
    return text[: len("https://")].lower().startswith(("https://", "http://"))


def check_address(url: str) -> None:
    """Raise where a link is not of the network, or none that could be asked for."""
    try:
        named = is_link(url) and url.isprintable() and bool(urlsplit(as_sent(url)).netloc)
    except ValueError as error:
        raise SubquadError(f"{one_line(url)} is no link: {one_line(error)}") from None
    if not named:
        raise SubquadError(f"{one_line(url)} is no link: it begins with https:// or http://")


def as_sent(url: str) -> str:
    """A link in the letters that requests are made of, as browsers send it: "fü r.pth" is "f%C3%BC%20r.pth".

    Raises:
        ValueError: its server has no name that there could be.
    """
    parts = urlsplit(url)
    server = parts.netloc if parts.netloc.isascii() else parts.netloc.encode("idna").decode("ascii")
    path, query = (quote(part, safe="%/:=&?~+!$,;'@()*[]|") for part in (parts.path, parts.query))
    return parts._replace(netloc=server, path=path, query=query, fragment="").geturl()


def read_small(url: str, most: int = 2**22) -> bytes:
    """A small answer, as of a listing.

    Raises:
        DownloadError: there is none, in one line.
    """
    check_address(url)
    try:
        with opened(url, {}) as response:
            answer = response.read(most + 1)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise DownloadError(f"{url} can't be read: {no_answer(error, url)}") from None
    if len(answer) > most:
        raise DownloadError(f"{url} can't be read: it gives more than {most} bytes")
    return answer


def opened(url: str, headers: dict[str, str]) -> Any:
    """The answer to a request, open; errors are those of urllib."""
    named = {"User-Agent": "subquad", "Accept-Encoding": "identity", **headers}
    # http and https only, checked by `check_address` and at every redirection
    return urllib.request.build_opener(Redirections).open(
        urllib.request.Request(as_sent(url), headers=named), timeout=TIMEOUT
    )


class Redirections(urllib.request.HTTPRedirectHandler):
    """Follows where a server points to, but from https to nothing else."""

    def redirect_request(self, request: Any, file: Any, code: int, message: str, headers: Any, url: str) -> Any:
        """As the base class.

        Raises:
            HTTPError: the new place is less safe.
        """
        if urlsplit(request.full_url).scheme == "https" != urlsplit(url).scheme:
            raise urllib.error.HTTPError(request.full_url, code, f"it points to {url}", headers, file)
        return super().redirect_request(request, file, code, message, headers, url)


def no_answer(error: Exception, url: str) -> str:
    """Why there was no answer, in words."""
    if isinstance(error, urllib.error.HTTPError):
        moved = ", it was moved or removed" if error.code in (401, 403, 404, 410) else ""
        return f"{host_of(url)} answers {error.code} {one_line(error.reason)}{moved}"
    reason: BaseException | str = error
    if isinstance(error, urllib.error.URLError):
        reason = error.reason
    said = reason_of(reason) if isinstance(reason, BaseException) else one_line(reason)
    return f"{host_of(url)} can't be reached{_by_proxy(url)}, {said}"


def _by_proxy(url: str) -> str:
    """By which proxy a link is asked for, which may be what can't be reached; nothing where by none."""
    proxy = asks_proxy(url)
    # not who asks, and by which password
    return f" by the proxy {one_line(proxy.rpartition('@')[2], 80)} (${urlsplit(url).scheme}_proxy)" if proxy else ""


def asks_proxy(url: str) -> str | None:
    """The proxy that is asked for a link, if one is."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    return proxy if proxy and not urllib.request.proxy_bypass(parts.netloc) else None


def host_of(url: str) -> str:
    """The server of a link, for what is said to users."""
    return urlsplit(url).netloc or "the server"


def is_page(response: Any) -> bool:
    """Whether an answer is HTML and no file of weights."""
    return response.headers.get_content_type() in ("text/html", "application/xhtml+xml")
