"""A server with the endpoints of the Hugging Face Hub that a download uses, over repositories in memory."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """One repository with one commit."""

    files: dict[str, bytes]
    kind: str = "model"
    refused: int = 0
    """Status of every answer; 0: it is served."""
    error_code: str = ""
    """The Hub's own word for why it is refused."""
    lost_after: int | None = None
    """Bytes of a file after which the connection is closed."""

    @property
    def commit(self) -> str:
        return hashlib.sha1(json.dumps(sorted((k, v.hex()) for k, v in self.files.items())).encode()).hexdigest()


@dataclass
class Hub:
    """What the server has, and what it was asked."""

    repos: dict[str, Repo] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(method and path, authorization) of every request."""
    url: str = ""

    def find(self, path: str) -> tuple[Repo | None, str, str]:
        """(repository, what is asked of it, the rest of the path)."""
        parts = path.strip("/").split("/")
        kind = "model"
        if parts[0] == "api":
            kind, parts = parts[1][:-1], [*parts[2:4], *(parts[4:] or ["info"])]
        elif parts[0] == "datasets":
            kind, parts = "dataset", parts[1:]
        repo = self.repos.get("/".join(parts[:2])) if len(parts) > 2 else None
        if repo is None:
            return None, "", ""
        return (repo if repo and repo.kind == kind else None), parts[2], "/".join(parts[3:])


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None: ...

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((f"{self.command} {path}", self.headers.get("authorization", "")))
            repo, what, rest = hub.find(path)
            if repo is None:
                self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
            elif repo.refused:
                self.send(repo.refused, b"{}", {"X-Error-Code": repo.error_code} if repo.error_code else {}, body)
            elif what in ("info", "revision", "tree"):
                if rest not in ("", "main", repo.commit):
                    self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
                else:
                    self.send(200, json.dumps(self.told(repo, what, path)).encode(), {}, body)
            else:
                self.file(repo, rest.partition("/")[2], body)

        def told(self, repo: Repo, what: str, path: str) -> Any:
            if what == "tree":
                return [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in repo.files.items()
                ]
            files = [{"rfilename": name, "size": len(data)} for name, data in repo.files.items()]
            return {"id": "/".join(path.split("/")[3:5]), "sha": repo.commit, "siblings": files}

        def file(self, repo: Repo, name: str, body: bool) -> None:
            if name not in repo.files:
                self.send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit}, body)
                return
            data, status = repo.files[name], 200
            etag = hashlib.sha1(data).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
            if (given := self.headers.get("range")) and body:
                start = int(given.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                data, status = data[start:], 206
            lost = repo.lost_after if body and repo.lost_after is not None and len(data) > repo.lost_after else None
            self.send(status, data, headers, body, lost_after=lost)

        def send(
            self, status: int, data: bytes, headers: Mapping[str, str], body: bool, lost_after: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data[:lost_after])
            if lost_after is not None:
                self.close_connection = True

    return Handler


@contextmanager
def serving(repos: Mapping[str, Repo]) -> Iterator[Hub]:
    """A running server of `repos`, by OWNER/NAME."""
    hub = Hub(dict(repos))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
