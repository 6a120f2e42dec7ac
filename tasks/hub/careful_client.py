"""The HTTP client of huggingface_hub: refuses misleading answers of a hub, and bounds the time of every answer.

The library derives file names in its cache from a hub's answers, and compares digests only after writing files.
HF_ENDPOINT may name any machine, so this client inspects every answer before the library does.
"""

import json
import re
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r'(?:W/)?"?(?!\.{1,2}"?$)[A-Za-z0-9._:+=-]{1,200}"?')
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PART = r"(?!\.{1,2}(?:/|$))[^/\0\\]{1,255}"
_FILE = re.compile(rf"{_PART}(?:/{_PART})*")
# How long a hub may say nothing, and how long one may be asked to wait before the next attempt.
SILENCE_S = 10.0
RETRY_S_MAX = 60.0
# An answer that goes on for longer than this must bring so many bytes in each second of it.
GRACE_S = 20.0
BYTES_PER_S_MIN = 1024
# Of what a hub says of a repository.
DOCUMENT_BYTES_MAX = 64 << 20
# An attempt that brings less is in vain; after so many in vain a file is given up.
PROGRESS_BYTES = 1 << 20
IN_VAIN_MAX = 2
# In an answer, the names of digests and of files.
_CHECKED = {"sha": COMMIT, "oid": _DIGEST, "blobId": _DIGEST, "sha256": _DIGEST, "path": _FILE, "rfilename": _FILE}


class WrongAnswer(ValueError):  # noqa: N818 - reads as what was found
    """A hub's answer is unlike any answer of Hugging Face's hub, or too short, or too slow."""


@cache
def ask_with_care() -> None:
    """Make huggingface_hub, and every library on top of it in this process, use this client from now on."""
    from huggingface_hub import set_client_factory  # noqa: PLC0415 - few configurations need it

    set_client_factory(_client)


def _client() -> Any:
    from huggingface_hub.utils import _http  # noqa: PLC0415

    made = _http.default_client_factory()
    hooks, attempts = made.event_hooks, dict[str, int]()
    made.event_hooks = {
        "request": [*hooks["request"], _bound],
        "response": [*hooks["response"], lambda response: _look_at(response, attempts)],
    }
    return made


def _bound(request: Any) -> None:
    """Give a time limit to each part of a request."""
    given = request.extensions.get("timeout") or {}
    limits = {name: given.get(name) or SILENCE_S for name in ("connect", "read", "write", "pool")}
    request.extensions = {**request.extensions, "timeout": limits}


def _look_at(response: Any, attempts: dict[str, int]) -> None:
    """Raise WrongAnswer for a misleading answer. attempts: url -> attempts in vain in a row for a file."""
    request, url = response.request, str(response.request.url)
    _check_wait(response)
    commit = response.headers.get("X-Repo-Commit")
    if commit is not None and not COMMIT.fullmatch(commit):
        raise _wrong("the header X-Repo-Commit", commit, "a commit of 40 hexadecimal digits")
    if request.method == "HEAD":
        for name in ("ETag", "X-Linked-ETag"):
            etag = response.headers.get(name)
            if etag is not None and not _ETAG.fullmatch(etag):
                raise _wrong(f"the header {name}", etag, "a digest")
        return
    is_document = "/api/" in request.url.path and response.is_success
    response.stream = _bounded(response.stream, url, attempts, DOCUMENT_BYTES_MAX if is_document else None)
    if is_document:
        _check_document(response)


def _check_wait(response: Any) -> None:
    """Raise WrongAnswer if the hub asks for a long wait before the next attempt, because the library would sleep."""
    waits = [response.headers.get("Retry-After", "")]
    waits += re.findall(r"\bt=(\d+)", response.headers.get("RateLimit", ""))
    for wait in waits:
        if wait.strip().isdecimal() and int(wait.strip()[:12]) > RETRY_S_MAX:
            raise WrongAnswer(f"it asks to come again in {wait.strip()[:12]} s; allowed: {RETRY_S_MAX:.0f} s")


def _check_document(response: Any) -> None:
    """Raise WrongAnswer for impossible names and digests in a hub's description of a repository."""
    body = _unpacked(response)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise WrongAnswer("what it says of the repository is no JSON") from None
    waiting = [found]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            for name, pattern in _CHECKED.items():
                each = value.get(name, "")
                # What has no such value is left to the library, but for the commit, without which nothing is pinned.
                if isinstance(each, str) and each and not pattern.fullmatch(each):
                    raise _wrong(f"the field {name}", each, "a digest" if pattern is not _FILE else "a file's name")
            waiting += (each for each in value.values() if isinstance(each, dict | list))
        elif isinstance(value, list):
            waiting += (each for each in value if isinstance(each, dict | list))


def _unpacked(response: Any) -> bytes:
    """Read the whole body and keep it for the library, too; WrongAnswer for a body that unpacks to too many bytes."""
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > DOCUMENT_BYTES_MAX:
            raise _too_long()
    response._content = bytes(body)  # noqa: SLF001 - as its own `read`, which has no limit, leaves it
    return bytes(body)


def _too_long() -> WrongAnswer:
    return WrongAnswer(f"what it says of the repository is longer than {DOCUMENT_BYTES_MAX} bytes")


def _wrong(what: str, value: str, allowed: str) -> WrongAnswer:
    return WrongAnswer(f"{what} is {value[:80]!r}; allowed: {allowed}")


def _bounded(stream: Any, url: str, attempts: dict[str, int], bytes_max: int | None) -> Any:
    """Bound the stream of a body: WrongAnswer for a stream that is too slow, too long, or fails too often in vain."""
    import httpx2  # noqa: PLC0415

    class Bounded(httpx2.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            began_s, count = time.monotonic(), 0
            try:
                for piece in stream:
                    count += len(piece)
                    lasted_s = time.monotonic() - began_s
                    if lasted_s > GRACE_S and count < BYTES_PER_S_MIN * lasted_s:
                        raise WrongAnswer(f"it sent {count} bytes in {lasted_s:.0f} s")
                    if bytes_max is not None and count > bytes_max:
                        raise _too_long()
                    yield piece
            except httpx2.TransportError as error:
                in_vain = 0 if count >= PROGRESS_BYTES else attempts.get(url, 0) + 1
                attempts[url] = in_vain
                if in_vain >= IN_VAIN_MAX or (in_vain and isinstance(error, httpx2.TimeoutException)):
                    attempts.pop(url)
                    raise WrongAnswer(f"its answer ended after {count} bytes: {type(error).__name__}") from error
                raise
            attempts.pop(url, None)

        def close(self) -> None:
            stream.close()

    return Bounded()
