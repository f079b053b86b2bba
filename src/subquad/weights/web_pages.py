"""What web pages say that come in the place of a file: their title, and where one leads that asks for confirmation."""

import re
from html import unescape
from html.parser import HTMLParser
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit, urlunsplit

from subquad.text import one_line


def title_of(page: str) -> str:
    """A page's title in quotes behind a comma, nothing where it has none."""
    match = re.search(r"<title[^>]*>(.*?)</title>", page, re.IGNORECASE | re.DOTALL)
    return f", '{one_line(unescape(match[1]).strip(), 80)}'" if match and match[1].strip() else ""


def confirmation(page: str, address: str) -> str | None:
    """Where a page leads that asks whether a file is wanted although it is too large to be scanned.

    Google Drive's has a form whose hidden inputs are to be sent along, one of them called `confirm`.

    Args:
        page: its HTML.
        address: its link.

    Returns:
        The link of the file, None where it is another page.
    """
    reader = _Forms()
    reader.feed(page)
    for action, inputs in reader.forms:
        if "confirm" in inputs and "id" in inputs:
            parts = urlsplit(urljoin(address, action))
            safe = parts.scheme == "https" or (parts.scheme == "http" and urlsplit(address).scheme == "http")
            query = urlencode({**dict(parse_qsl(parts.query)), **inputs})
            return urlunsplit(parts._replace(query=query)) if safe else None
    return None


class _Forms(HTMLParser):
    """Collects forms that are sent with GET: where to, and their hidden inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.forms: list[tuple[str, dict[str, str]]] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "form":
            self._inside = given.get("method", "get").lower() == "get"
            if self._inside:
                self.forms.append((given.get("action", ""), {}))
        elif tag == "input" and self._inside and given.get("type") == "hidden" and given.get("name"):
            self.forms[-1][1][given["name"]] = given.get("value", "")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "form"
