"""ObjectStore on Google Cloud Storage and Azure Blob Storage, through obstore, by each one's own create-if-absent.

It owns deadlines, retries and the translation of errors; S3 has a store of its own (storage/stores/s3.py). It never
repeats a server's text, which may hold more than a log should. `connect` imports this module on demand, because
obstore is an extra.
"""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import fsspec.asyn
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore

from storage.stores.budget import BYTES_PER_S_MIN, Budget
from storage.stores.memory import check_body, check_prefix, check_range
from storage.stores.refusals import REFUSED_S_MAX, DeniedForNow, Refusals
from storage.stores.store import ObjectMissing, StorageError, StoreDenied, StoreUnavailable, StoreUnfit, check_key

# Only this module ends a request that takes too long, and only it retries.
_CLIENT = {"timeout": "1h", "connect_timeout": "10s", "allow_http": True}
_NO_RETRIES = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
_PAGE_KEYS = 1000
# Azure says it of a clock that is off, too.
_EXPIRED = re.compile(r"AuthenticationFailed|InvalidAuthenticationInfo")
_STATUS = re.compile(r"status code: (\d{3})")
_ADVICE = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or the machine's service account; it needs the role Storage Object User",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and a credential (AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or the "
    "machine's identity); it needs the role Storage Blob Data Contributor",
}
Verdict = Literal["exists", "missing", "again", "unfit", "denied", "expired"]
Attempt = Callable[[Budget], Awaitable[Any]]


class CloudStore:
    """Objects below `prefix` (no slash at its ends) of `opened`, a store of obstore; `root` is its URL.

    `deadline_s` bounds a whole call with its retries, half of `deadline_s` an attempt; both limits grow by the time of
    the bytes at 8 MiB/s. A process that is forked after the first call cannot use any such store, and gets an error
    that says so.

    A store that has answered and then refuses the credentials is asked again for `refused_s_max`. Before each new
    attempt `reopen` returns a store of obstore with credentials read anew.
    """

    _first_process: int | None = None

    def __init__(
        self,
        root: str,
        opened: Any,
        prefix: str = "",
        *,
        deadline_s: float = 20.0,
        backoff_s: float = 0.2,
        refused_s_max: float = REFUSED_S_MAX,
        reopen: Callable[[], Any] | None = None,
    ) -> None:
        self._root = root
        self._opened = opened
        self._base = f"{prefix}/" if prefix else ""
        self._deadline_s = deadline_s
        self._backoff_s = backoff_s
        self._refusals = Refusals(refused_s_max)
        self._reopen = reopen

    @property
    def url(self) -> str:
        return f"{self._root}/{self._base}".removesuffix("/")

    def create(self, key: str, body: bytes) -> bool:
        path = self._base + check_key(key)
        check_body(key, body)
        try:
            self._call("create", key, lambda budget: self._put(path, body, "create", budget), len(body))
        except AlreadyExistsError:
            return False
        return True

    def put(self, key: str, body: bytes) -> None:
        path = self._base + check_key(key)
        self._call("put", key, lambda budget: self._put(path, body, "overwrite", budget), len(body))

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        path = self._base + check_key(key)
        check_range(start, end)
        try:
            body: bytes = self._call("get", key, lambda budget: self._read(path, start, end, budget))
        except FileNotFoundError:
            raise ObjectMissing(key) from None
        return body if end is None else body[: end - start]

    def list(self, prefix: str, after: str = "") -> list[str]:
        check_prefix(prefix)
        # obstore lists folders, and a prefix may end within a name.
        folder = self._base + prefix[: prefix.rfind("/") + 1]
        offset = self._base + after if after else None
        paths: Sequence[str] = self._call("list", prefix, lambda budget: self._paths(folder, offset, budget))
        keys = sorted(path.removeprefix(self._base) for path in paths)
        return [key for key in keys if key.startswith(prefix) and key > after]

    def delete(self, key: str) -> None:
        path = self._base + check_key(key)
        with suppress(FileNotFoundError):
            self._call("delete", key, lambda budget: _within(budget, obstore.delete_async(self._opened, path)))

    async def _put(self, path: str, body: bytes, mode: Literal["create", "overwrite"], budget: Budget) -> None:
        await _within(budget, obstore.put_async(self._opened, path, body, mode=mode, use_multipart=False))

    async def _read(self, path: str, start: int, end: int | None, budget: Budget) -> bytes:
        if not start and end is None:
            found = await _within(budget, obstore.get_async(self._opened, path))
        else:
            # HTTP has no empty range, but an empty read must still say whether the object exists: ask for one byte.
            asked = {"offset": start} if end is None else (start, max(end, start + 1))
            try:
                found = await _within(budget, obstore.get_async(self._opened, path, options={"range": asked}))
            except BaseError:
                size = (await _within(budget, obstore.head_async(self._opened, path)))["size"]
                if start < size:
                    raise
                return b""
        first, last = found.range
        budget.carry(last - first)
        return bytes(await _within(budget, found.bytes_async()))

    async def _paths(self, folder: str, offset: str | None, budget: Budget) -> Sequence[str]:
        paths: list[str] = []
        stream = obstore.list(self._opened, folder or None, offset=offset, chunk_size=_PAGE_KEYS)
        pages = stream.__aiter__()
        while True:
            try:
                page = await _within(budget, pages.__anext__())
            except StopAsyncIteration:
                return paths
            paths += [entry["path"] for entry in page]
            # A second for each page.
            budget.carry(len(paths) * BYTES_PER_S_MIN // _PAGE_KEYS)

    def _call(self, verb: str, key: str, attempt: Attempt, num_bytes: int = 0) -> Any:
        """The result of `attempt`, tried until it succeeds, is refused for good, or its time is used up.

        Raises AlreadyExistsError or FileNotFoundError where the object does or does not exist, else one of the errors
        of storage/stores/store.py.
        """
        return self._refusals.outlast(lambda: self._ask(verb, key, attempt, num_bytes))

    def _ask(self, verb: str, key: str, attempt: Attempt, num_bytes: int) -> Any:
        """The same; a refusal that can pass by itself is DeniedForNow."""
        budget = Budget(self._deadline_s, num_bytes)
        where = f"cannot {verb} {self.url}/{key}"
        self._refuse_forks(where)
        opened = self._opened
        while True:
            budget.begin_attempt()
            try:
                return asyncio.run_coroutine_threadsafe(_awaited(attempt, budget), fsspec.asyn.get_loop()).result()
            except (BaseError, OSError) as error:
                verdict = judge(error, verb)
                if verdict in ("exists", "missing"):
                    raise
                if verdict == "expired":
                    self._renew(opened)
                if verdict != "again":
                    raise self._refusal(where, verdict, error) from error
                last = error
            if not budget.pause(self._backoff_s):
                break
        unknown = "; a write may or may not have happened" if verb in ("create", "put") else ""
        raise StoreUnavailable(
            f"{where}: no answer within {budget.elapsed_s:.3g} s and {budget.attempts} attempts, last {_name(last)}"
            f"{unknown}; if this is always so, look at the endpoint and at {_ADVICE[self._scheme]}"
        ) from last

    def _refusal(self, where: str, verdict: Verdict, error: Exception) -> StorageError:
        if verdict == "unfit":
            return StoreUnfit(f"{where}: the server does not implement this request")
        if _status(error) == 404 or isinstance(error, FileNotFoundError):
            return StoreDenied(f"{where}: no such bucket or container: create it, or correct the URL or the endpoint")
        kind = DeniedForNow if verdict == "expired" else StoreDenied
        return kind(f"{where}: refused: check {_ADVICE[self._scheme]} ({_name(error)})")

    def _renew(self, refused: Any) -> None:
        """Read the credentials anew, unless another thread has done so since; what cannot be read now stays."""
        if self._reopen is not None and self._opened is refused:
            with suppress(BaseError, ValueError, OSError):
                self._opened = self._reopen()

    @property
    def _scheme(self) -> str:
        return self._root.partition(":")[0]

    @classmethod
    def _refuse_forks(cls, where: str) -> None:
        # obstore's threads do not survive a fork: a call would wait for ever.
        process = os.getpid()
        if CloudStore._first_process is None:
            CloudStore._first_process = process
        elif CloudStore._first_process != process:
            raise StoreUnfit(f"{where}: this process was forked after the first use of such a store; start a new one")


def google_store(bucket: str, prefix: str) -> CloudStore:
    """A bucket of Google Cloud Storage, or of the emulator that STORAGE_EMULATOR_HOST names."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    options: Mapping[str, Any] = {"base_url": emulator.rstrip("/"), "bearer_token": "none"} if emulator else {}
    return _opened("gs", bucket, prefix, lambda: GCSStore(bucket, **options, **_settings()))


def azure_store(container: str, prefix: str) -> CloudStore:
    """A container of Azure's account AZURE_STORAGE_ACCOUNT_NAME, or of Azurite with AZURE_STORAGE_USE_EMULATOR."""
    return _opened("az", container, prefix, lambda: AzureStore(container, **_settings()))


def judge(error: Exception, verb: str) -> Verdict:
    """What an exception of obstore means to the call `verb`."""
    if isinstance(error, AlreadyExistsError):
        return "exists"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        is_expired = isinstance(error, UnauthenticatedError) or _EXPIRED.search(str(error))
        return "expired" if is_expired else "denied"
    status = _status(error)
    if isinstance(error, FileNotFoundError):
        # Only reads and deletes can miss an object; a write misses its bucket.
        return "missing" if verb in ("get", "delete") else "denied"
    if status == 501:
        return "unfit"
    return "denied" if 400 <= status < 500 and status not in (408, 409, 412, 425, 429) else "again"


def _opened(scheme: str, name: str, prefix: str, make: Callable[[], Any]) -> CloudStore:
    try:
        return CloudStore(f"{scheme}://{name}", make(), prefix, reopen=make)
    except (BaseError, ValueError) as error:
        raise StoreDenied(f"{scheme}://{name}: check {_ADVICE[scheme]} ({_name(error)})") from error


def _settings() -> dict[str, Any]:
    return {"client_options": dict(_CLIENT), "retry_config": dict(_NO_RETRIES)}


async def _awaited(attempt: Attempt, budget: Budget) -> Any:
    return await attempt(budget)


async def _within(budget: Budget, request: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(_one(request), budget.attempt_left_s)


async def _one(request: Awaitable[Any]) -> Any:
    return await request


def _status(error: Exception) -> int:
    """The server's status in an exception; 0 if it has none."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def _name(error: Exception) -> str:
    status = _status(error)
    return f"{type(error).__name__}{f', status {status}' if status else ''}"
