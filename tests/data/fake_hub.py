"""A hub on this machine: the few answers of the real one's API that a download needs, from made-to-measure files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class FakeHub:
    """Serves `root`/<owner>/<name>/** as data sets, each at the commit that `commits` gives it.

    Attributes:
        root: of the repositories' files.
        commits: of each repository.
        requests: the paths asked for, with the first byte wanted.
        cut: the next answer with a file stops after so many bytes, and further ones are refused until this is None.
        heals: further ones are not refused.
        damage: the next answer with a file has a wrong byte.
    """

    root: Path
    commits: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, int]] = field(default_factory=list)
    cut: int | None = None
    heals: bool = False
    damage: bool = False
    address: str = ""

    def commit(self, repo: str) -> str:
        return self.commits.setdefault(repo, hashlib.sha1(repo.encode()).hexdigest())

    def listing(self, repo: str) -> dict[str, object]:
        folder = self.root / repo
        siblings = []
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            content = file.read_bytes()
            blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            entry: dict[str, object] = {
                "rfilename": file.relative_to(folder).as_posix(),
                "size": len(content),
                "blobId": blob,
            }
            if file.suffix == ".parquet":
                sha = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha, "size": len(content), "pointerSize": 130}
            siblings.append(entry)
        return {"id": repo, "sha": self.commit(repo), "tags": [], "private": False, "siblings": siblings}


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """No line per request."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                repo, revision = found.groups()
                if not (hub.root / repo).is_dir() or revision not in (None, "main", hub.commit(repo)):
                    return self._answer(404, b"{}")
                hub.requests.append((path, 0))
                return self._answer(200, json.dumps(hub.listing(repo)).encode())
            if found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                return self._file(*found.groups())
            return self._answer(404, b"{}")

        def _file(self, repo: str, revision: str, name: str) -> None:
            file = hub.root / repo / name
            if revision not in ("main", hub.commit(repo)) or not file.is_file():
                return self._answer(404, b"{}")
            content = file.read_bytes()
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            begin = int(wanted[1]) if wanted else 0
            if self.command == "GET":
                hub.requests.append((name, begin))
            if hub.cut == 0:
                return self._answer(503, b"")
            headers = {
                "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Repo-Commit": hub.commit(repo),
                "X-Linked-Size": str(len(content)),
            }
            body = content[begin:]
            if hub.damage and self.command == "GET":
                body, hub.damage = bytes([body[0] ^ 1]) + body[1:], False
            if wanted:
                headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
            return self._answer(206 if wanted else 200, body, headers)

        def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.cut and status in (200, 206) and headers:
                self.wfile.write(body[: hub.cut])
                self.wfile.flush()
                hub.cut = None if hub.heals else 0
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(body)

    return Handler


@contextmanager
def running(root: Path) -> Iterator[FakeHub]:
    """A hub that serves `root` while the block runs."""
    hub = FakeHub(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
