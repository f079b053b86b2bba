"""Files from the network: resumed where they broke off, checked, and in their place whole or not at all.

A file that is under way is `NAME.part`, and beside it lies a note of where it comes from, `NAME.part.json`. Of a file
that was whole, `NAME.json` keeps size and SHA-256: what the link gives later has to be the same.
"""

import hashlib
import http.client
import json
import re
import shutil
import socket
import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock
from tqdm import tqdm

from subquad.errors import SubquadError, reason_of, reason_without_path
from subquad.holding import lock_refusal
from subquad.text import one_line
from subquad.weights.web_pages import confirmation, title_of
from subquad.weights.web_requests import DownloadError, check_address, host_of, is_page, no_answer, opened
from subquad.writing import WriteError, write_json

ATTEMPTS = 4
"""How often a transfer is begun or gone on with before it is given up; the part that came is kept."""

PAUSE = 1.0
"""Seconds before the second attempt, twice as long before each further one."""

CHUNK = 2**18
MOST_PAGE = 2**20
"""Bytes of a page that are read for what it says."""

MOST_PAGES = 2
"""Pages that ask for confirmation, one after another."""


class _AnotherFileError(DownloadError):
    """A whole file that is not the one that is known."""


class _BrokenOffError(Exception):
    """A transfer that ended early, in words; another attempt may go on with it."""


@dataclass(frozen=True)
class Wanted:
    """A file to have.

    Attributes:
        url: http or https.
        target: where it is kept.
        what: what is expected in it, in words.
        sha256: its digest, where that is known beforehand.
    """

    url: str
    target: Path
    what: str
    sha256: str | None = None

    def error(self, reason: str, kind: type[DownloadError] = DownloadError) -> DownloadError:
        """What went wrong, where to put the file by hand, and what was expected."""
        return kind(
            f"can't get {self.target.name}: {reason}; fetch {self.url} by hand and put it at {self.target}, "
            f"expected is {self.what}"
        )


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Keep other processes out of what is made at `target`; its folder is made."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(f"{target.name}.lock"))
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        raise lock_refusal(target.parent, error) from None
    try:
        yield
    finally:
        lock.release()


def download(wanted: Wanted) -> dict[str, Any]:
    """Bring a file to its place, or go on where an earlier attempt broke off.

    Returns:
        What is to be remembered of it once it has proved good, see `remember`.

    Raises:
        DownloadError: it could not be had, or is not what it was before; nothing is at its place then.
    """
    check_address(wanted.url)
    part = wanted.target.with_name(f"{wanted.target.name}.part")
    try:
        wanted.target.parent.mkdir(parents=True, exist_ok=True)
        _attempt(wanted, part)
        seen = check_same(wanted, part)
        part.replace(wanted.target)
    except WriteError as error:
        _forget(part)
        raise wanted.error(str(error)) from None
    except OSError as error:
        # a disk that is full is not kept full
        _forget(part)
        raise wanted.error(f"{part} can't be written: {reason_without_path(error)}") from None
    except _AnotherFileError:
        _forget(part)
        raise
    _forget(part)
    return seen


def check_same(wanted: Wanted, file: Path) -> dict[str, Any]:
    """Compare a whole file with what is known of it; its link, size and SHA-256.

    Raises:
        DownloadError: it differs from what was remembered.
    """
    size, digest = file.stat().st_size, sha256_of(file)
    note = _note_of(wanted)
    known: dict[str, Any] = {} if wanted.sha256 is None else {"sha256": wanted.sha256}
    where = "as its page says"
    if note.exists():
        known, where = _read_note(note), f"as at first ({note}; remove that note to take what there is now)"
    if known.get("sha256", digest) != digest:
        before = f"{known['size']} bytes, " if "size" in known else ""
        raise wanted.error(
            f"it is another file than expected: {size} bytes, SHA-256 {digest[:16]}…, "
            f"not {before}{str(known['sha256'])[:16]}… {where}",
            _AnotherFileError,
        )
    return {"url": wanted.url, "size": size, "sha256": digest}


def remember(wanted: Wanted, seen: dict[str, Any]) -> None:
    """Keep what `check_same` saw beside the file, where it is the first."""
    if not _note_of(wanted).exists():
        write_json(_note_of(wanted), seen, indent=1)


def _note_of(wanted: Wanted) -> Path:
    return wanted.target.with_name(f"{wanted.target.name}.json")


def sha256_of(file: Path) -> str:
    """The digest of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _attempt(wanted: Wanted, part: Path) -> None:
    """Bring the whole file to `part`."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            return _transfer(wanted, part)
        except _BrokenOffError as error:
            reason = str(error)
    there = part.stat().st_size if part.exists() else 0
    kept = f"; the {there} bytes that came are kept, the same command goes on with them" if there else ""
    raise wanted.error(f"{reason}{kept}")


def _transfer(wanted: Wanted, part: Path) -> None:
    """Ask for the file, or for what is missing of it, and write what comes."""
    start, headers = _begun(wanted.url, part)
    url = wanted.url
    for _ in range(MOST_PAGES + 1):
        with _answer(wanted, url, headers) as response:
            if not is_page(response):
                return _receive(wanted, response, part, start)
            text = _read(response, MOST_PAGE).decode(errors="replace")
        confirmed = confirmation(text, response.url)
        if confirmed is None:
            raise wanted.error(f"{host_of(response.url)} gives a page instead of a file{title_of(text)}")
        url = confirmed
    raise wanted.error(f"{host_of(url)} asks for confirmation again and again")


@contextmanager
def _answer(wanted: Wanted, url: str, headers: dict[str, str]) -> Iterator[Any]:
    """The answer to a request, of a file or of a page."""
    try:
        response = opened(url, headers)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and "Range" in headers:
            # what came is not a beginning of what there is now
            _forget(wanted.target.with_name(f"{wanted.target.name}.part"))
            raise _BrokenOffError(no_answer(error, url)) from None
        if error.code >= 500 or error.code == http.client.TOO_MANY_REQUESTS:
            raise _BrokenOffError(no_answer(error, url)) from None
        raise wanted.error(no_answer(error, url)) from None
    except (OSError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", None), socket.gaierror | ConnectionRefusedError):
            # asking again would not help: there is no network, or nobody there
            raise wanted.error(no_answer(error, url)) from None
        raise _BrokenOffError(no_answer(error, url)) from None
    with response:
        yield response


def _receive(wanted: Wanted, response: Any, part: Path, start: int) -> None:
    """Write the answer behind what is there, or in its place."""
    total, start = _sizes(response, part, start)
    if not start:
        _forget(part)
        known = {"url": wanted.url, "total": total, "validator": _validator(response)}
        write_json(part.with_name(f"{part.name}.json"), known)
    chunk = _read(response, CHUNK)
    if not start and not _looks_like_weights(chunk):
        _forget(part)
        raise wanted.error(f"{host_of(response.url)} gives something else: it begins with {one_line(repr(chunk[:24]))}")
    if total is not None and shutil.disk_usage(part.parent).free < total - start:
        _forget(part)
        free = shutil.disk_usage(part.parent).free
        raise wanted.error(
            f"{(total - start) / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB are free in {part.parent}"
        )
    place = start
    with part.open("ab") as file, _bar(wanted, total, start) as bar:
        while chunk:
            file.write(chunk)
            place += len(chunk)
            bar.update(len(chunk))
            if total is not None and place > total:
                break
            chunk = _read(response, CHUNK)
    if total is not None and place > total:
        _forget(part)
        raise wanted.error(f"{host_of(response.url)} gives more than the {total} bytes that it speaks of")
    if total is not None and place < total:
        raise _BrokenOffError(f"the connection to {host_of(response.url)} broke off after {place} of {total} bytes")


def _sizes(response: Any, part: Path, start: int) -> tuple[int | None, int]:
    """The bytes of the whole file, None where the server does not say, and from which one on they come."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise _BrokenOffError(f"{host_of(response.url)} compresses the file, which was not asked for")
    if response.status != http.client.PARTIAL_CONTENT:
        length = response.headers.get("Content-Length", "")
        return int(length) if length.isdecimal() else None, 0
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
    if match is None or int(match[1]) != start:
        _forget(part)
        raise _BrokenOffError(f"{host_of(response.url)} goes on at another place than was asked for")
    return None if match[2] == "*" else int(match[2]), start


def _begun(url: str, part: Path) -> tuple[int, dict[str, str]]:
    """How much of a file is there, and the headers that ask for the rest if the file is still the same."""
    note = part.with_name(f"{part.name}.json")
    try:
        known, size = _read_note(note), part.stat().st_size
    except (OSError, SubquadError):
        known, size = {}, 0
    validator = known.get("validator")
    if not size or known.get("url") != url or not isinstance(validator, str):
        return 0, {}
    return size, {"Range": f"bytes={size}-", "If-Range": validator}


def _validator(response: Any) -> str | None:
    """By what a server tells whether a file is still the same."""
    etag = response.headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")


def _forget(part: Path) -> None:
    for file in (part, part.with_name(f"{part.name}.json")):
        with suppress(OSError):
            file.unlink()


def _read_note(note: Path) -> dict[str, Any]:
    try:
        content = json.loads(note.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise SubquadError(f"{note} is damaged: remove it")
    return content


def _bar(wanted: Wanted, total: int | None, start: int) -> Any:
    """A progress bar, silent where no terminal is."""
    return tqdm(
        total=total, initial=start, desc=wanted.target.name, unit="B", unit_scale=True, leave=False, disable=None
    )


def _read(response: BinaryIO, size: int) -> bytes:
    try:
        return response.read(size)
    except (OSError, http.client.HTTPException) as error:
        host = host_of(getattr(response, "url", ""))
        raise _BrokenOffError(f"the connection to {host} broke off: {reason_of(error)}") from None


def _looks_like_weights(beginning: bytes) -> bool:
    """Whether a file begins as those of torch.save (a zip archive or a pickle) and safetensors do."""
    return beginning[:4] == b"PK\x03\x04" or beginning[:1] == b"\x80" or beginning[8:9] == b"{"
