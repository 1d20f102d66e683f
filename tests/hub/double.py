"""A double of the hub: the part of its HTTP API that downloads use, with faults on demand."""

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = "acme/tiny"
COMMIT = "1" * 40
_PIECE = 64 << 10


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Request:
    """A request that the hub or its CDN got. range: the value of the header Range."""

    server: str
    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class HubDouble:
    """A hub with one model, and the CDN to which it redirects for files in Git LFS.

    files: the content by name. revisions: the commits of branches and tags. served: what is sent in place of a file.
    listed: what is listed in place of the files. next_page: the URL to which the listing refers, whose page is empty.
    token: the one that is needed. gated, missing: the model is. ranges: whether ranges are known. bytes_per_s: of each
    answer. failures: answers with 503 before the next good one. cut: bytes after which the next answers break off.
    """

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1.0": COMMIT})
    served: dict[str, bytes] = field(default_factory=dict)
    listed: list[Any] | None = None
    next_page: str | None = None
    token: str | None = None
    gated: bool = False
    missing: bool = False
    ranges: bool = True
    bytes_per_s: float | None = None
    failures: int = 0
    cuts: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    cdn: str = ""

    @classmethod
    def of_folder(cls, folder: Path) -> "HubDouble":
        return cls({path.name: path.read_bytes() for path in folder.iterdir()})

    @contextmanager
    def running(self) -> Iterator["HubDouble"]:
        with _Server(self, "hub") as hub, _Server(self, "cdn") as cdn:
            self.url, self.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in (hub, cdn))
            for server in (hub, cdn):
                threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            yield self
            for server in (hub, cdn):
                server.shutdown()

    def downloads(self, name: str) -> list[Request]:
        """Return the requests that fetched the content of a file."""
        ends = (f"/resolve/{COMMIT}/{name}", f"/{sha256(self.files[name])}")
        found = [request for request in self.requests if request.path.endswith(ends) and request.method == "GET"]
        return [request for request in found if request.server == ("cdn" if is_lfs(name) else "hub")]

    def tree(self, folder: str, recursive: bool) -> list[Any]:
        """Return the listing of a folder, "" = the root, as the API answers it. recursive: with all files inside."""
        if self.listed is not None:
            return self.listed
        inside = {name.rpartition("/")[0] for name in self.files} - {""}
        entries: list[dict[str, Any]] = []
        if not folder:
            entries += [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in inside]
        for name, content in self.files.items():
            if name.rpartition("/")[0] != folder and not recursive:
                continue
            entry: dict[str, Any] = {"type": "file", "oid": git_oid(content), "size": len(content), "path": name}
            if is_lfs(name):
                pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256(content)}\n".encode()
                entry["oid"] = git_oid(pointer)
                entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": len(pointer)}
            entries.append(entry)
        return entries


def is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, double: HubDouble, role: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.double = double
        self.role = role

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that are killed close their connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        double = self.server.double
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization")
        double.requests.append(Request(self.server.role, self.command, path, self.headers.get("Range"), token))
        if double.failures > 0:
            double.failures -= 1
            self._empty(503)
        elif self.server.role == "cdn":
            self._cdn(path)
        elif double.missing or not path.startswith((f"/api/models/{REPO}/", f"/{REPO}/resolve/")):
            self._empty(404 if token else 401, "RepoNotFound", "Repository not found")
        elif path.startswith("/api/"):
            self._api(path.removeprefix(f"/api/models/{REPO}/"))
        elif double.token is not None and token != f"Bearer {double.token}":
            self._empty(403 if token else 401, "GatedRepo" if double.gated else "", "Access is restricted")
        else:
            self._resolve(*path.removeprefix(f"/{REPO}/resolve/").split("/", 1))

    do_HEAD = do_GET

    def _api(self, path: str) -> None:
        double = self.server.double
        kind, _, revision = path.partition("/")
        folder = ""
        if kind == "tree":
            revision, _, folder = revision.partition("/")
        commit = double.revisions.get(revision, revision if revision in double.revisions.values() else None)
        if commit is None:
            self._empty(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif kind == "revision":
            self._send(json.dumps({"id": REPO, "sha": commit}).encode(), {})
        else:
            first = "cursor=" not in self.path
            headers = {"Link": f'<{double.next_page}>; rel="next"'} if double.next_page and first else {}
            self._send(
                json.dumps(double.tree(folder, "recursive=true" in self.path.lower()) if first else []).encode(),
                headers,
            )

    def _resolve(self, commit: str, name: str) -> None:
        double = self.server.double
        content = double.files.get(name)
        if content is None or commit not in double.revisions.values():
            self._empty(404, "EntryNotFound", "Entry not found")
        elif is_lfs(name):
            headers = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{sha256(content)}"'}
            location = f"{double.cdn}/{sha256(content)}?Signature=secret-signature"
            self._empty(302, headers={**headers, "X-Repo-Commit": commit, "Location": location})
        else:
            headers = {"X-Repo-Commit": commit, "ETag": f'"{git_oid(content)}"'}
            self._send(double.served.get(name, content), headers)

    def _cdn(self, path: str) -> None:
        double = self.server.double
        [name] = [name for name, content in double.files.items() if path == f"/{sha256(content)}"][:1]
        self._send(double.served.get(name, double.files[name]), {})

    def _send(self, content: bytes, headers: dict[str, str]) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        ranged = found is not None and self.server.double.ranges
        if found is not None and ranged:
            first, end = int(found[1]), int(found[2] or len(content) - 1) + 1
            headers = {**headers, "Content-Range": f"bytes {first}-{end - 1}/{len(content)}"}
            content = content[first:end]
        self.send_response(206 if ranged else 200)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self._body(content)

    def _body(self, content: bytes) -> None:
        double = self.server.double
        cut = double.cuts.pop(0) if double.cuts and len(content) > _PIECE else None
        for first in range(0, len(content), _PIECE):
            piece = content[first : first + _PIECE]
            if cut is not None and first >= cut:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.wfile.write(piece)
            if double.bytes_per_s is not None:
                time.sleep(len(piece) / double.bytes_per_s)

    def _empty(self, status: int, code: str = "", message: str = "", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if message:
            self.send_header("X-Error-Message", message)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass
