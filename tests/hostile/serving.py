"""A server on the loopback that gives files as the authors' hosts do, and does what can go wrong there."""

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Answer:
    """What a path is answered with.

    Attributes:
        body: what is sent, of it `sent` bytes before the connection is closed, all if None.
        ranges: whether a part may be asked for.
        length: what Content-Length says; None for the truth, "" for no header.
    """

    body: bytes = b""
    status: int = 200
    headers: dict = field(default_factory=dict)
    etag: str | None = '"one"'
    ranges: bool = True
    sent: int | None = None
    length: str | None = None
    kind: str = "application/octet-stream"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append((self.path, dict(self.headers)))
        answers = self.server.answers.get(self.path.partition("?")[0])
        if answers is None:
            answers = [Answer(b"<html><title>Not here</title></html>", status=404, kind="text/html")]
        # one after another, the last again and again
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        body, status, headers = answer.body, answer.status, dict(answer.headers)
        wanted = self.headers.get("Range", "")
        if wanted and answer.ranges and self.headers.get("If-Range") == answer.etag:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(body):
                body, status = b"", 416
            else:
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                body, status = body[start:], 206
        self.send_response(status)
        if answer.etag:
            headers["ETag"] = answer.etag
        if answer.length != "":
            headers["Content-Length"] = answer.length or str(len(body))
        for name, value in {"Content-Type": answer.kind, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if answer.sent is None else body[: answer.sent])
        self.close_connection = True

    def log_message(self, *arguments):
        pass


@contextmanager
def serving(**answers):
    """A server whose paths are named without their slash; `.url`, `.answers` and `.requests` are for the test."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        server.answers = {
            f"/{path}": answer if isinstance(answer, list) else [answer] for path, answer in answers.items()
        }
        server.requests = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
