"""Downloads: whatever a server, the network, the disk or another process does, one line and never half a file."""

import io
import json
import multiprocessing
import re
import resource
import shutil
import signal
import socket
import urllib.error
import urllib.request
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from serving import Answer, serving

from subquad import SubquadError
from subquad.weights import downloading
from subquad.weights.downloading import Wanted, check_same, download, locked, remember
from subquad.weights.files import linked_file, load_checkpoint
from subquad.weights.web_pages import confirmation
from subquad.weights.web_requests import Redirections, as_sent, check_address, is_link

BODY = b"PK\x03\x04" + bytes(range(256)) * 4096
PAGE = b"<!doctype html><html><head><title>Log in &amp; go</title></head><body>who are you?</body></html>"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(downloading, "PAUSE", 0.001)
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")


def wanted_of(server, tmp_path, path="file.pth"):
    return Wanted(f"{server.url}/{path}", tmp_path / "net.pth", "the authors' net, 11.57 M parameters")


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_one_line(raised, wanted, *words):
    line = str(raised.value)
    assert "\n" not in line and len(line) < 800
    for word in (wanted.url, str(wanted.target), wanted.what, *words):
        assert word in line, line
    assert not wanted.target.exists()


def test_a_file_comes_whole_and_nothing_else_is_left(tmp_path, capfd):
    with serving(**{"file.pth": Answer(BODY)}) as server:
        download(wanted_of(server, tmp_path))
    assert (tmp_path / "net.pth").read_bytes() == BODY and names_in(tmp_path) == ["net.pth"]
    # no bar where no terminal is
    assert capfd.readouterr() == ("", "")


def test_a_broken_transfer_goes_on_where_it_stopped(tmp_path):
    with serving(**{"file.pth": [Answer(BODY, sent=300_000), Answer(BODY)]}) as server:
        download(wanted_of(server, tmp_path))
        ranges = [headers.get("Range") for _, headers in server.requests]
    assert (tmp_path / "net.pth").read_bytes() == BODY
    assert ranges == [None, "bytes=300000-"]


def test_a_transfer_that_breaks_off_again_and_again_is_kept_for_the_next_call(tmp_path):
    with serving(**{"file.pth": Answer(BODY, sent=100_000)}) as server:
        wanted = wanted_of(server, tmp_path)
        with pytest.raises(SubquadError) as raised:
            download(wanted)
        assert_one_line(
            raised, wanted, "broke off after 400000 of 1048580 bytes", "the 400000 bytes that came are kept"
        )
        assert names_in(tmp_path) == ["net.pth.part", "net.pth.part.json"]
        server.answers["/file.pth"] = [Answer(BODY)]
        download(wanted)
        assert server.requests[-1][1]["Range"] == "bytes=400000-"
    assert wanted.target.read_bytes() == BODY and names_in(tmp_path) == ["net.pth"]


@pytest.mark.parametrize(
    "second", [Answer(BODY[::-1], etag='"two"'), Answer(BODY, etag=None), Answer(BODY, ranges=False)]
)
def test_what_is_no_longer_the_same_file_is_begun_anew(tmp_path, second):
    body = BODY[:4] + second.body[4:]
    second.body = body
    with serving(**{"file.pth": [Answer(BODY, sent=300_000), second]}) as server:
        download(wanted_of(server, tmp_path))
    assert (tmp_path / "net.pth").read_bytes() == body


def test_without_a_mark_of_the_server_nothing_is_gone_on_with(tmp_path):
    with serving(**{"file.pth": [Answer(BODY, sent=300_000, etag=None), Answer(BODY, etag=None)]}) as server:
        download(wanted_of(server, tmp_path))
        assert not any("Range" in headers for _, headers in server.requests)
    assert (tmp_path / "net.pth").read_bytes() == BODY


def test_a_modification_time_will_do_and_a_weak_etag_will_not(tmp_path):
    marked = {"headers": {"Last-Modified": "Sun, 22 Nov 2026 10:00:00 GMT"}, "etag": 'W/"one"'}
    with serving(**{"file.pth": [Answer(BODY, sent=300_000, **marked), Answer(BODY, **marked)]}) as server:
        download(wanted_of(server, tmp_path))
        assert server.requests[1][1]["If-Range"] == "Sun, 22 Nov 2026 10:00:00 GMT"


def test_a_part_that_is_longer_than_the_file_is_begun_anew(tmp_path):
    with serving(**{"file.pth": Answer(BODY)}) as server:
        wanted = wanted_of(server, tmp_path)
        (tmp_path / "net.pth.part").write_bytes(BODY + b"more")
        note = {"url": wanted.url, "total": None, "validator": '"one"'}
        (tmp_path / "net.pth.part.json").write_text(json.dumps(note))
        download(wanted)
    assert wanted.target.read_bytes() == BODY


@pytest.mark.parametrize(
    "note", ["", "[]", "{", '{"url": 3}', '{"url": "http://else.where/x", "validator": "\\"one\\""}']
)
def test_a_part_without_a_sound_note_is_begun_anew(tmp_path, note):
    (tmp_path / "net.pth.part").write_bytes(b"rubbish")
    (tmp_path / "net.pth.part.json").write_text(note)
    with serving(**{"file.pth": Answer(BODY)}) as server:
        download(wanted_of(server, tmp_path))
    assert (tmp_path / "net.pth").read_bytes() == BODY


def test_a_part_that_goes_on_elsewhere_is_begun_anew(tmp_path):
    strange = Answer(BODY, status=206, headers={"Content-Range": f"bytes 5-{len(BODY) - 1}/{len(BODY)}"}, ranges=False)
    with serving(**{"file.pth": [Answer(BODY, sent=300_000), strange, Answer(BODY)]}) as server:
        download(wanted_of(server, tmp_path))
    assert (tmp_path / "net.pth").read_bytes() == BODY


REFUSALS = {
    "moved": (Answer(PAGE, status=404, kind="text/html"), "answers 404 Not Found, it was moved or removed"),
    "forbidden": (Answer(PAGE, status=403, kind="text/html"), "answers 403 Forbidden, it was moved or removed"),
    "down": (Answer(b"", status=503), "answers 503 Service Unavailable"),
    "a page": (Answer(PAGE, kind="text/html; charset=utf-8"), "gives a page instead of a file, 'Log in & go'"),
    "a page under another name": (Answer(PAGE), "gives something else: it begins with b'<!doctype html"),
    "words": (Answer(b'{"error": "quota"}', kind="application/json"), "gives something else"),
    "nothing": (Answer(b""), "gives something else: it begins with b''"),
    "compressed": (Answer(BODY, headers={"Content-Encoding": "gzip"}), "compresses the file"),
}


@pytest.mark.parametrize("case", sorted(REFUSALS))
def test_what_is_no_file_is_one_line(tmp_path, case):
    answer, words = REFUSALS[case]
    with serving(**{"file.pth": answer}) as server:
        wanted = wanted_of(server, tmp_path)
        with pytest.raises(SubquadError) as raised:
            download(wanted)
        assert_one_line(raised, wanted, words)
    assert not any(name.endswith(".part") for name in names_in(tmp_path))


def test_redirections_are_followed_to_a_file_and_not_to_a_login_or_a_disk(tmp_path):
    with serving(real=Answer(BODY), login=Answer(PAGE, kind="text/html")) as server:
        for target in ("real", "login"):
            server.answers[f"/{target}.pth"] = [Answer(status=302, headers={"Location": f"{server.url}/{target}"})]
        server.answers["/disk.pth"] = [Answer(status=302, headers={"Location": "file:///etc/passwd"})]
        download(wanted_of(server, tmp_path, "real.pth"))
        assert (tmp_path / "net.pth").read_bytes() == BODY
        (tmp_path / "net.pth").unlink()
        for path, words in (
            ("login.pth", "gives a page instead of a file"),
            ("disk.pth", "'file:///etc/passwd' is not allowed"),
        ):
            wanted = wanted_of(server, tmp_path, path)
            with pytest.raises(SubquadError) as raised:
                download(wanted)
            assert_one_line(raised, wanted, words)


def test_https_is_not_left():
    request = urllib.request.Request("https://a/file.pth")
    with pytest.raises(urllib.error.HTTPError, match="it points to http://a/other"):
        Redirections().redirect_request(request, None, 302, "Found", {}, "http://a/other")


def test_more_than_was_spoken_of_is_not_kept(tmp_path):
    more = Answer(BODY[300_000:], status=206, headers={"Content-Range": "bytes 300000-300009/300010"}, ranges=False)
    with serving(**{"file.pth": [Answer(BODY, sent=300_000), more]}) as server:
        wanted = wanted_of(server, tmp_path)
        with pytest.raises(SubquadError) as raised:
            download(wanted)
        assert_one_line(raised, wanted, "gives more than the 300010 bytes")
    assert names_in(tmp_path) == []


DRIVE = """<html><head><title>Google Drive - Virus scan warning</title></head><body>
<form id="download-form" action="{url}/download" method="get"><input type="submit" value="Download anyway"/>
<input type="hidden" name="id" value="1S04"><input type="hidden" name="export" value="download">
<input type="hidden" name="confirm" value="t"><input type="hidden" name="uuid" value="a-b&amp;c"></form>"""


def test_googles_question_is_answered_and_a_broken_transfer_goes_on_behind_it(tmp_path):
    with serving(download=[Answer(BODY, sent=300_000), Answer(BODY)]) as server:
        page = Answer(DRIVE.format(url=server.url).encode(), kind="text/html; charset=utf-8", ranges=False)
        server.answers["/uc"] = [page]
        download(wanted_of(server, tmp_path, "uc?export=download&id=1S04"))
        asked = [path for path, _ in server.requests]
        assert server.requests[-1][1]["Range"] == "bytes=300000-"
    assert (tmp_path / "net.pth").read_bytes() == BODY
    assert asked == 2 * ["/uc?export=download&id=1S04", "/download?id=1S04&export=download&confirm=t&uuid=a-b%26c"]


def test_a_page_that_asks_for_ever_is_given_up(tmp_path):
    with serving() as server:
        page = Answer(DRIVE.format(url=server.url).encode(), kind="text/html")
        server.answers |= {"/uc": [page], "/download": [page]}
        wanted = wanted_of(server, tmp_path, "uc")
        with pytest.raises(SubquadError) as raised:
            download(wanted)
        assert_one_line(raised, wanted, "asks for confirmation again and again")


def test_other_forms_are_no_question():
    assert confirmation("<form action='/login'><input type=hidden name=token value=1></form>", "http://a/b") is None
    asking = (
        "<form method={} action='{}'><input type=hidden name=id value=1><input type=hidden name=confirm value=t></form>"
    )
    assert confirmation(asking.format("post", "/get"), "http://a/b") is None
    assert confirmation(asking.format("get", "/get?x=1"), "http://a/b") == "http://a/get?x=1&id=1&confirm=t"
    # nothing less safe than what was asked for
    assert confirmation(asking.format("get", "http://a/get"), "https://a/b") is None
    assert confirmation(asking.format("get", "file:///etc/passwd"), "https://a/b") is None


def test_offline_is_one_line_at_once(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    wanted = Wanted(f"http://127.0.0.1:{port}/file.pth", tmp_path / "net.pth", "the net")
    with pytest.raises(SubquadError) as raised:
        download(wanted)
    assert_one_line(raised, wanted, "can't be reached, Connection refused")

    def nobody(*arguments, **settings):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    wanted = Wanted("https://cloud.tsinghua.edu.cn/f/1/?dl=1", tmp_path / "net.pth", "the net")
    with pytest.raises(SubquadError) as raised:
        download(wanted)
    assert_one_line(raised, wanted, "cloud.tsinghua.edu.cn can't be reached, Name or service not known")
    assert names_in(tmp_path) == []


OTHER_LINKS = ["file:///etc/passwd", "ftp://a/b", "net.pth", "https://", "data:,x"]
# each was an error of Python's, or broke a message in two
OTHER_LINKS += [
    "https://[bad/net.pth",
    "https://a/b\nc.pth",
    "https://exämple..com/a.pth",
    "https://ä" + 70 * "a" + ".com/b",
]


@pytest.mark.parametrize("url", OTHER_LINKS)
def test_other_links_are_refused(url, tmp_path):
    with pytest.raises(SubquadError, match="is no link") as raised:
        check_address(url)
    assert "\n" not in str(raised.value)
    if is_link(url):
        with pytest.raises(SubquadError, match="is no link"):
            linked_file(url)


@pytest.fixture
def small_disk():
    """Files may not grow beyond 400,000 bytes, as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_one_line_and_is_not_kept_full(tmp_path, small_disk):
    with serving(**{"file.pth": Answer(BODY)}) as server:
        wanted = wanted_of(server, tmp_path)
        with pytest.raises(SubquadError) as raised:
            download(wanted)
        assert_one_line(raised, wanted, "can't be written: File too large")
    assert names_in(tmp_path) == []


def test_a_disk_that_is_too_small_is_not_begun_with(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 9 * 10**5, 10**5))
    with serving(**{"file.pth": Answer(BODY)}) as server:
        wanted = wanted_of(server, tmp_path)
        with pytest.raises(SubquadError) as raised:
            download(wanted)
        assert_one_line(raised, wanted, "1.0 MB are needed and 0.1 MB are free")
    assert names_in(tmp_path) == []


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(SubquadError, match="set SUBQUAD_HOME to a folder to write to"),
        locked(tmp_path / "file" / "net"),
    ):
        pass


def test_changed_content_is_noticed_and_not_put_in_place(tmp_path):
    with serving(**{"file.pth": Answer(BODY)}) as server:
        wanted = wanted_of(server, tmp_path)
        remember(wanted, download(wanted))
        note = json.loads((tmp_path / "net.pth.json").read_text())
        assert note["size"] == len(BODY) and len(note["sha256"]) == 64 and note["url"] == wanted.url
        assert check_same(wanted, wanted.target) == note
        wanted.target.unlink()
        server.answers["/file.pth"] = [Answer(BODY + b"x")]
        with pytest.raises(SubquadError) as raised:
            download(wanted)
        assert_one_line(
            raised, wanted, "another file than expected", note["sha256"][:16], "net.pth.json; remove that note"
        )
        assert names_in(tmp_path) == ["net.pth.json"]
        # whoever removes the note takes what there is now
        (tmp_path / "net.pth.json").unlink()
        remember(wanted, download(wanted))
    assert wanted.target.read_bytes() == BODY + b"x"


def test_a_digest_that_is_known_beforehand_is_compared(tmp_path):
    with serving(**{"file.pth": Answer(BODY)}) as server:
        wanted = Wanted(f"{server.url}/file.pth", tmp_path / "net.pth", "the net", "0" * 64)
        with pytest.raises(SubquadError) as raised:
            download(wanted)
        assert_one_line(raised, wanted, "another file than expected", "as its page says")


def _fetch(url, folder, results):
    downloading.PAUSE = 0.001
    wanted = Wanted(url, Path(folder) / "net.pth", "the net")
    with locked(wanted.target):
        if not wanted.target.exists():
            download(wanted)
    results.put(wanted.target.read_bytes() == BODY)


def test_two_processes_at_once_fetch_once(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with serving(**{"file.pth": Answer(BODY)}) as server:
        two = [
            context.Process(target=_fetch, args=(f"{server.url}/file.pth", str(tmp_path), results)) for _ in range(2)
        ]
        for process in two:
            process.start()
        assert [results.get(timeout=60) for _ in two] == [True, True]
        for process in two:
            process.join()
        assert len(server.requests) == 1


def test_links_are_asked_for_as_browsers_do(tmp_path):
    assert as_sent("https://exämple.com/fü r.pth?a=ß&b=%20#c") == (
        "https://xn--exmple-cua.com/f%C3%BC%20r.pth?a=%C3%9F&b=%20"
    )
    plain = "https://drive.google.com/uc?export=download&id=1S04D-_~.x"
    assert as_sent(plain) == plain and is_link("HTTPS://a/b.pth") and not is_link("httpsx")
    with serving(**{"f%C3%BC.pth": Answer(BODY)}) as server:
        download(wanted_of(server, tmp_path, "fü.pth"))
    assert (tmp_path / "net.pth").read_bytes() == BODY


def test_a_length_that_is_no_number_is_passed_over(tmp_path):
    """ "²" is a digit, but no number."""
    with serving(**{"file.pth": Answer(BODY, headers={"Content-Length": "\xb2"})}) as server:
        download(wanted_of(server, tmp_path))
    assert (tmp_path / "net.pth").read_bytes() == BODY


@pytest.mark.parametrize("proxy", ["http://me:secret@127.0.0.1:9", "127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_a_proxy_is_named_where_it_is_what_can_not_be_reached(tmp_path, monkeypatch, proxy):
    """The server was said to refuse the connection."""
    monkeypatch.setenv("http_proxy", proxy)
    wanted = Wanted("http://weights.example/file.pth", tmp_path / "net.pth", "the net")
    with pytest.raises(SubquadError) as raised:
        download(wanted)
    by = r"weights.example can't be reached by the proxy \S*127.0.0.1:9 \(\$http_proxy\), \w"
    assert re.search(by, str(raised.value)) and "secret" not in str(raised.value) and "<" not in str(raised.value)
    # nothing is said of one that is passed by
    with serving() as server, pytest.raises(SubquadError, match=r"127.0.0.1:\d+ answers 404"):
        download(wanted_of(server, tmp_path))


def test_a_link_that_is_here_needs_no_folder_to_write_to(tmp_path, monkeypatch):
    """As one that others share: the lock was taken first, which can't be made there."""
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path))
    kept = io.BytesIO()
    torch.save({"weight": torch.zeros(2)}, kept)
    with serving(**{"file.pth": Answer(kept.getvalue())}) as server:
        file = linked_file(f"{server.url}/file.pth")

        def refused(*arguments, **settings):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(downloading.FileLock, "acquire", refused)
        assert linked_file(f"{server.url}/file.pth") == file
        with pytest.raises(SubquadError, match="Permission denied"):
            linked_file(f"{server.url}/other.pth")


def test_a_fetched_file_that_was_damaged_since_is_to_be_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path))
    network, kept = torch.nn.Linear(2, 2), io.BytesIO()
    torch.save(network.state_dict(), kept)
    with serving(**{"file.pth": Answer(kept.getvalue())}) as server:
        load_checkpoint(network, f"{server.url}/file.pth")
        file = linked_file(f"{server.url}/file.pth")
        file.write_bytes(kept.getvalue()[:-100])
        with pytest.raises(SubquadError, match=r"; remove it, and the next call fetches it anew$"):
            load_checkpoint(network, f"{server.url}/file.pth")
        file.unlink()
        load_checkpoint(network, f"{server.url}/file.pth")
    (tmp_path / "own.pth").write_bytes(kept.getvalue()[:-100])
    with pytest.raises(SubquadError) as raised:
        load_checkpoint(network, tmp_path / "own.pth")
    assert "anew" not in str(raised.value)
