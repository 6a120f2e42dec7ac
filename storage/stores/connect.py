"""Finds the store that a URL names, from the scheme and without a request."""

import importlib.util
import os
import re
import threading
from collections.abc import Callable
from functools import partial
from urllib.parse import unquote

from storage.paths import expanded
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore, NestedStore
from storage.stores.store import ObjectStore, StoreUnfit

ALLOWED = "a path, file:///path, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or memory://name"
SCHEME_PATTERN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
LOCAL = "file"
NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]+")
NESTED_PATTERN = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)+")
PREFIX_PATTERN = re.compile(r"[A-Za-z0-9._=+@~:,-]+(/[A-Za-z0-9._=+@~:,-]+)*")
# Control characters and lone surrogates: no url that a record or a message repeats may hold them.
UNWRITABLE_PATTERN = re.compile("[\0-\x1f\x7f-\x9f\ud800-\udfff]")
# Of the 1,024 bytes that S3 allows for a key, and the 4,096 and 255 that Linux allows for a path and a part of it, with
# room for the keys below the root.
PREFIX_BYTES_MAX = 768
PATH_BYTES_MAX = 3072
PART_BYTES_MAX = 255

_memory_stores: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def connect(url: str) -> ObjectStore:
    """The store rooted at `url`, in a form of ALLOWED; memory://name may have a prefix, too.

    Opens no connection and makes no directory. The same memory:// name is the same store within a process. Raises
    ValueError for anything else, without repeating a password that the URL may hold, and StoreUnfit without the package
    that a store needs.
    """
    return _opener(url)()


def check_url(url: str) -> None:
    """Raise the ValueError that `connect` would raise; imports nothing that takes long."""
    _opener(url)


def overlap(one: str, other: str) -> bool:
    """True if two urls that `check_url` accepts name the same place, or a place and its ancestor."""
    a, b = (place(url) for url in (one, other))
    shorter = min(len(a), len(b))
    return a[:shorter] == b[:shorter]


def place(url: str) -> tuple[str, ...]:
    """The scheme (LOCAL for a path) and the parts of a url that `check_url` accepts, however it is written."""
    scheme, separator, rest = url.partition("://")
    if SCHEME_PATTERN.match(url) and separator and scheme.lower() != LOCAL:
        return (scheme.lower(), *rest.strip("/").split("/"))
    path = unquote(rest) if SCHEME_PATTERN.match(url) and separator else url
    return (LOCAL, *expanded(path).resolve().parts)


def is_below(url: str, prefix: str) -> bool:
    """Whether `url` names the place that `prefix` names, or one below it, however both are written.

    False for urls that `check_url` refuses, and for a url with a part that is or encodes "." or "..", or encodes a
    separator.
    """
    try:
        check_url(url)
        check_url(prefix)
        below, above = place(url), place(prefix)
    except (ValueError, OSError, RuntimeError):
        # A path through a circle of links, or through a folder that may not be read, lies nowhere.
        return False
    return not any(map(_leads_elsewhere, url.split("/"))) and below[: len(above)] == above


def _leads_elsewhere(part: str) -> bool:
    """Whether a part of a url is a dot segment, or hides one or a separator, encoded once or several times."""
    while (decoded := unquote(part)) != part:
        part = decoded
    return part in (".", "..") or "/" in part or "\\" in part


def _opener(url: str) -> Callable[[], ObjectStore]:
    """What opens the store at `url`; raises ValueError as `connect` does."""
    scheme = SCHEME_PATTERN.match(url)
    if UNWRITABLE_PATTERN.search(url) or url != url.strip():
        raise ValueError(
            f"storage URL: value {_shown(url)}; allowed: {ALLOWED}, without control characters, halves of characters "
            "and spaces around it"
        )
    if scheme is None:
        if not url:
            raise ValueError(f"storage URL: value ''; allowed: {ALLOWED}")
        return _local(url)
    before, separator, rest = url.partition("://")
    match before.lower() if separator else "":
        case "file" if rest.startswith("/") and rest.strip("/"):
            return _local(unquote(rest))
        case "memory" if NAME_PATTERN.fullmatch(rest):
            return partial(_memory_store, rest)
        case "memory" if NESTED_PATTERN.fullmatch(rest) and not {".", ".."} & set(rest.split("/")):
            name, _, prefix = rest.partition("/")
            return lambda: NestedStore(_memory_store(name), prefix)
        case "s3" | "gs" | "az" as kind:
            return _bucket(kind, rest)
    raise ValueError(f"storage URL: value {_shown(url)}; allowed: {ALLOWED}")


def _shown(url: str) -> str:
    """The url for a message, without a password."""
    return repr(url) if "@" not in url else repr(f"{url.partition(':')[0]}://...")


def _local(path: str) -> Callable[[], ObjectStore]:
    root = expanded(path)
    sizes = [len(os.fsencode(part)) for part in root.parts]
    if "\0" in path or max(sizes, default=0) > PART_BYTES_MAX or len(os.fsencode(root)) > PATH_BYTES_MAX:
        raise ValueError(
            f"storage URL: value {path[:80]!r}...; allowed: a path of up to {PATH_BYTES_MAX} bytes without NUL, each "
            f"part up to {PART_BYTES_MAX}"
        )
    return partial(LocalStore, root)


def _memory_store(name: str) -> MemoryStore:
    with _memory_lock:
        return _memory_stores.setdefault(name, MemoryStore(name))


def _bucket(scheme: str, address: str) -> Callable[[], ObjectStore]:
    bucket, _, prefix = address.rstrip("/").partition("/")
    if not NAME_PATTERN.fullmatch(bucket) or bucket in (".", ".."):
        shown = "a bucket with credentials" if "@" in bucket or ":" in bucket else f"bucket {bucket!r}"
        raise ValueError(
            f"storage URL: value {shown}; allowed: {scheme}://bucket/prefix, credentials by environment only"
        )
    if prefix and (not PREFIX_PATTERN.fullmatch(prefix) or {".", ".."} & set(prefix.split("/"))):
        raise ValueError(
            f"storage URL: prefix {prefix.partition('?')[0]!r}; allowed: parts of letters, digits and ._=+@~:,- joined "
            "by '/'"
        )
    if len(prefix) > PREFIX_BYTES_MAX:
        raise ValueError(f"storage URL: a prefix of {len(prefix)} bytes; allowed: up to {PREFIX_BYTES_MAX}")
    return partial({"s3": _s3_store, "gs": _google_store, "az": _azure_store}[scheme], bucket, prefix)


def _s3_store(bucket: str, prefix: str) -> ObjectStore:
    from storage.stores.s3 import S3Store  # noqa: PLC0415 - importing s3fs takes longer than a local run's whole start

    return S3Store(bucket, prefix)


def _google_store(bucket: str, prefix: str) -> ObjectStore:
    _need_obstore("gs")
    from storage.stores.cloud import google_store  # noqa: PLC0415 - obstore is an extra

    return google_store(bucket, prefix)


def _azure_store(container: str, prefix: str) -> ObjectStore:
    _need_obstore("az")
    from storage.stores.cloud import azure_store  # noqa: PLC0415 - obstore is an extra

    return azure_store(container, prefix)


def _need_obstore(scheme: str) -> None:
    if importlib.util.find_spec("obstore") is None:
        raise StoreUnfit(f"{scheme}:// needs the package obstore: pip install -c constraints.txt -e '.[obstore]'")
