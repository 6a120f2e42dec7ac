"""A small model hub on loopback: the endpoints that huggingface_hub and datasets ask, over repositories in memory.

A repository has commits; each is a mapping from file names to bytes. Errors carry the hub's codes.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import datasets
import huggingface_hub
import pytest

Files = dict[str, bytes]
TOKEN = "hf_only_for_the_test_hub"


@dataclass
class Repository:
    """refs: the commit of each branch and tag. gated: whether a request must carry TOKEN."""

    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files: Files, ref: str = "main") -> str:
        """Add a commit with these files, to which `ref` then points; returns its hash."""
        shown = repr([sorted(files.items()), len(self.commits)])
        sha = hashlib.sha1(shown.encode(), usedforsecurity=False).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[ref] = sha
        return sha


@dataclass
class Hub:
    """A running hub: its address, its repositories by kind ("models", "datasets") and id, and what was asked of it.

    tokens: those that requests carried. sent: bytes of files, by their names.
    """

    url: str
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    sent: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, repo: str, files: Files, *, gated: bool = False) -> Repository:
        """A repository with one commit on main."""
        made = self.repositories[kind, repo] = Repository(gated=gated)
        made.commit(files)
        return made


def folder_files(folder: Path) -> Files:
    """The files of a directory, by their names in it."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub until the end of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def pointed_to(hub: Hub | None, home: Path, token: str | None = None) -> Iterator[None]:
    """This process asks `hub` with its caches in `home`, as if HF_ENDPOINT and HF_HOME had been set before it began.

    hub None: as with HF_HUB_OFFLINE=1. token: as in HF_TOKEN.
    """
    url = hub.url if hub else "http://127.0.0.1:9"
    offline = hub is None
    with pytest.MonkeyPatch.context() as patch:
        for module, values in (
            (
                huggingface_hub.constants,
                {
                    "ENDPOINT": url,
                    "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
                    "HF_HUB_OFFLINE": offline,
                    "HF_HOME": str(home),
                    "HF_HUB_CACHE": str(home / "hub"),
                    "HF_TOKEN_PATH": str(home / "token"),
                    "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
                },
            ),
            (
                datasets.config,
                {
                    "HF_ENDPOINT": url,
                    "HUB_DATASETS_URL": url + "/datasets/{repo_id}/resolve/{revision}/{path}",
                    "HF_HUB_OFFLINE": offline,
                    "HF_DATASETS_OFFLINE": offline,
                    "HF_CACHE_HOME": str(home),
                    "HF_DATASETS_CACHE": home / "datasets",
                    "DOWNLOADED_DATASETS_PATH": home / "datasets" / "downloads",
                    "HF_MODULES_CACHE": home / "modules",
                },
            ),
        ):
            for name, value in values.items():
                patch.setattr(module, name, value)
        patch.delenv("HF_TOKEN", raising=False)
        if token is not None:
            patch.setenv("HF_TOKEN", token)
        try:
            yield
        finally:
            huggingface_hub.close_session()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing: pytest's output stays readable."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        hub.tokens.add((self.headers.get("Authorization") or "").removeprefix("Bearer "))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = path.strip("/").split("/")
        if parts[0] == "api" and len(parts) >= 4:
            self._about(hub, parts[1], "/".join(parts[2:4]), parts[4:], body)
        elif "resolve" in parts:
            kind = "datasets" if parts[0] == "datasets" else "models"
            owner = parts[1:] if kind == "datasets" else parts
            self._file(hub, kind, "/".join(owner[:2]), owner[3], "/".join(owner[4:]))
        else:
            self._refuse(404, "RepoNotFound", f"nothing at {path}")

    def _about(self, hub: Hub, kind: str, repo: str, rest: list[str], body: bytes) -> None:
        """What is known of a repository: its commit, the tree of one, or some of its paths."""
        revision = rest[1] if len(rest) > 1 else "main"
        found = self._commit(hub, kind, repo, revision)
        if found is None:
            return
        sha, files = found
        if not rest or rest[0] == "revision":
            siblings = [{"rfilename": name} for name in sorted(files)]
            self._json({"id": repo, "_id": repo, "sha": sha, "siblings": siblings, "tags": [], "downloads": 0})
        elif rest[0] == "tree":
            self._json(_tree(files, "/".join(rest[2:]), parse_qs(urlsplit(self.path).query)))
        elif rest[0] == "paths-info":
            asked = _asked(body)
            self._json([_entry(name, files[name]) for name in asked if name in files])
        else:
            self._refuse(404, "EntryNotFound", f"no {rest[0]}")

    def _file(self, hub: Hub, kind: str, repo: str, revision: str, name: str) -> None:
        found = self._commit(hub, kind, repo, revision)
        if found is None:
            return
        sha, files = found
        if name not in files:
            self._refuse(404, "EntryNotFound", f"Entry not found: {name}", {"X-Repo-Commit": sha})
            return
        body = files[name]
        first, _, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        part = body[int(first) : int(last) + 1 if last else None]
        if self.command == "GET":
            hub.sent[name] = hub.sent.get(name, 0) + len(part)
        self._send(200 if len(part) == len(body) else 206, part, {"X-Repo-Commit": sha, "ETag": f'"{_blob(body)}"'})

    def _commit(self, hub: Hub, kind: str, repo: str, revision: str) -> tuple[str, Files] | None:
        """The commit of a revision and its files; None after a refusal."""
        held = hub.repositories.get((kind, repo))
        if held is None:
            self._refuse(404, "RepoNotFound", "Repository not found")
            return None
        if held.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "GatedRepo", f"Access to {repo} is restricted")
            return None
        sha = held.refs.get(revision, revision)
        if sha not in held.commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return sha, held.commits[sha]

    def _json(self, document: Any) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _tree(files: Files, below: str, query: dict[str, list[str]]) -> list[dict[str, Any]]:
    prefix = f"{below}/" if below else ""
    inside = {name: body for name, body in files.items() if name.startswith(prefix)}
    if query.get("recursive", ["false"])[0].lower() == "true":
        folders = {"/".join(name.split("/")[:depth]) for name in inside for depth in range(1, name.count("/") + 1)}
        shown = inside
    else:
        folders = {prefix + rest.split("/")[0] for name in inside if "/" in (rest := name.removeprefix(prefix))}
        shown = {name: body for name, body in inside.items() if "/" not in name.removeprefix(prefix)}
    directories = [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders)]
    return [*directories, *(_entry(name, body) for name, body in sorted(shown.items()))]


def _entry(name: str, body: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "oid": _blob(body), "size": len(body)}


def _asked(body: bytes) -> list[str]:
    """The paths of a question, which arrives as a form or as JSON."""
    text = body.decode()
    document = json.loads(text) if text.startswith("{") else parse_qs(text)
    paths: list[str] = document["paths"]
    return paths


def _blob(body: bytes) -> str:
    """Git's name of the bytes."""
    return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()
