"""Finds the store that a URL names. Knows which stores exist, and nothing about their content."""

import re
import threading
from pathlib import Path
from urllib.parse import unquote

from storage.local import LocalStore
from storage.memory import MemoryStore, NestedStore
from storage.store import ObjectStore

ALLOWED = "a path, file:///path, s3://bucket/prefix or memory://name"
SCHEME_PATTERN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]+")
NESTED_PATTERN = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)+")
PREFIX_PATTERN = re.compile(r"[A-Za-z0-9._=+@~:,-]+(/[A-Za-z0-9._=+@~:,-]+)*")

_memory_stores: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def connect(url: str) -> ObjectStore:
    """The store rooted at `url`: a path, file:///path, s3://bucket/prefix, memory://name or memory://name/prefix.

    Opens no connection and makes no directory. The same memory:// name is the same store within a process. Raises
    ValueError for anything else, without repeating a password that the URL may hold.
    """
    scheme = SCHEME_PATTERN.match(url)
    if scheme is None:
        if not url:
            raise ValueError(f"storage URL: value ''; allowed: {ALLOWED}")
        return LocalStore(Path(url))
    before, separator, rest = url.partition("://")
    match before.lower() if separator else "":
        case "file" if rest.startswith("/") and rest.strip("/"):
            return LocalStore(Path(unquote(rest)))
        case "memory" if NAME_PATTERN.fullmatch(rest):
            return _memory_store(rest)
        case "memory" if NESTED_PATTERN.fullmatch(rest) and not {".", ".."} & set(rest.split("/")):
            name, _, prefix = rest.partition("/")
            return NestedStore(_memory_store(name), prefix)
        case "s3":
            return _s3_store(rest)
    shown = url if "@" not in url else f"{scheme[1]}://..."
    raise ValueError(f"storage URL: value {shown!r}; allowed: {ALLOWED}")


def _memory_store(name: str) -> MemoryStore:
    with _memory_lock:
        return _memory_stores.setdefault(name, MemoryStore(name))


def _s3_store(address: str) -> ObjectStore:
    bucket, _, prefix = address.rstrip("/").partition("/")
    if not NAME_PATTERN.fullmatch(bucket):
        shown = "a bucket with credentials" if "@" in bucket or ":" in bucket else f"bucket {bucket!r}"
        raise ValueError(f"storage URL: value {shown}; allowed: s3://bucket/prefix, credentials by environment only")
    if prefix and (not PREFIX_PATTERN.fullmatch(prefix) or {".", ".."} & set(prefix.split("/"))):
        raise ValueError(
            f"storage URL: prefix {prefix!r}; allowed: parts of letters, digits and ._=+@~:,- joined by '/'"
        )
    from storage.s3 import S3Store  # noqa: PLC0415 - importing s3fs takes longer than a local run's whole start

    return S3Store(bucket, prefix)
