"""ObjectStore on S3 and on servers that speak its protocol, through s3fs.

This module owns the connection, the deadlines and the retries; storage/stores/s3_answers.py says what an answer means.
Every call has its own deadline, because the libraries below can wait for ever for a silent peer. The libraries must not
retry, or a call could outlive its deadline. The module is slow to import: `connect` imports it on demand.
"""

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import aiobotocore.session
import botocore.configprovider
import botocore.exceptions
import botocore.loaders
import botocore.session
import fsspec.asyn
import s3fs

from storage.stores import s3_answers
from storage.stores.budget import Budget
from storage.stores.memory import check_body, check_prefix, check_range
from storage.stores.refusals import REFUSED_S_MAX, Refusals
from storage.stores.s3_answers import AnswerNotBelieved, Verdict
from storage.stores.store import ObjectMissing, StoreUnavailable, check_key

CLOSE_S = 1.0
# The most that one request may write. More needs an upload in parts, whose condition some servers ignore.
BODY_BYTES_MAX = 5 << 30
ADDRESSING_STYLES = ("path", "virtual", "auto")
# By the name of botocore's setting: the variable that says when checksums are sent, and when they are asked for.
CHECKSUMS = {
    "request_checksum_calculation": "AWS_REQUEST_CHECKSUM_CALCULATION",
    "response_checksum_validation": "AWS_RESPONSE_CHECKSUM_VALIDATION",
}
CHECKSUM_TIMES = ("when_supported", "when_required")

NOTHING: frozenset[Verdict] = frozenset()
EXISTS: frozenset[Verdict] = frozenset({"exists"})
MISSING: frozenset[Verdict] = frozenset({"missing", "outside"})
WRITES = frozenset({"create", "put"})
Operation = Callable[["Session", "Budget"], Any]


class AnswerError(Exception):
    """A refusal that is part of the protocol: the object exists, is missing, or ends before the range."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict)
        self.verdict = verdict


class S3Store:
    """Objects of `bucket` below `prefix` (no slash at its ends).

    `deadline_s` bounds a whole call with its retries, half of `deadline_s` an attempt; both limits grow by the time of
    the bytes at 8 MiB/s. A call without an answer, a throttled one and a server error are retried until then, after a
    random part of `backoff_s` * 2^n, at most 5 s. A body is one request, at most 5 GiB. The environment gives endpoint,
    region and credentials: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION, AWS_S3_ADDRESSING_STYLE,
    AWS_ACCESS_KEY_ID and all else that botocore reads; FLYTE_AWS_* stand in for absent ones. S3's checksums are left to
    AWS: the signature covers a body's SHA-256, and what is stored here has digests of its own.

    A store that has answered and then refuses for a reason that can pass by itself is asked again for `refused_s_max`;
    refused credentials are read anew, from the environment, its files and every other source of botocore.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        deadline_s: float = 20.0,
        backoff_s: float = 0.2,
        refused_s_max: float = REFUSED_S_MAX,
    ) -> None:
        self._bucket = bucket
        self._base = f"{prefix}/" if prefix else ""
        self._deadline_s = deadline_s
        self._backoff_s = backoff_s
        self._refusals = Refusals(refused_s_max)
        self._options = session_options(os.environ, _configured_endpoint())
        self._sessions: dict[int, Session] = {}

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._base}".removesuffix("/")

    def create(self, key: str, body: bytes) -> bool:
        request = self._upload(key, check_body(key, body)) | {"IfNoneMatch": "*"}
        try:
            self._call("create", key, lambda s3, budget: s3.write(request, budget), EXISTS, len(body))
        except AnswerError:
            return False
        return True

    def put(self, key: str, body: bytes) -> None:
        request = self._upload(key, body)
        self._call("put", key, lambda s3, budget: s3.write(request, budget), num_bytes=len(body))

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_key(key)
        check_range(start, end)
        request = {"Bucket": self._bucket, "Key": self._base + key}
        try:
            body: bytes = self._call("get", key, lambda s3, budget: s3.read(request, budget, start, end), MISSING)
        except AnswerError as answer:
            if answer.verdict == "outside":
                return b""
            raise ObjectMissing(key) from None
        return body if end is None else body[: end - start]

    def list(self, prefix: str, after: str = "") -> list[str]:
        check_prefix(prefix)
        request = {"Bucket": self._bucket, "Prefix": self._base + prefix}
        if after:
            request["StartAfter"] = self._base + after
        keys: list[str] = []
        while True:
            found, token = self._call("list", prefix, lambda s3, budget: s3.page(request, self._base, prefix, budget))
            keys += found
            if token is None:
                return keys
            request["ContinuationToken"] = token

    def delete(self, key: str) -> None:
        check_key(key)
        request = {"Bucket": self._bucket, "Key": self._base + key}
        with suppress(AnswerError):
            self._call("delete", key, lambda s3, budget: s3.remove(request, budget), MISSING)

    def close(self) -> None:
        """Close this process's connections; the next call opens new ones. Dropping the store closes them, too."""
        session = self._sessions.pop(os.getpid(), None)
        if session is not None:
            session.close()

    def _upload(self, key: str, body: bytes) -> dict[str, Any]:
        check_key(key)
        if len(body) > BODY_BYTES_MAX:
            raise ValueError(f"body of {key!r}: {len(body)} bytes; allowed: up to {BODY_BYTES_MAX} (5 GiB) on S3")
        return {"Bucket": self._bucket, "Key": self._base + key, "Body": body}

    def _session(self) -> "Session":
        # One session per process, because connections do not survive a fork; the parent's stay in the table, untouched.
        process = os.getpid()
        return self._sessions.get(process) or self._sessions.setdefault(process, Session(self._options))

    def _renew(self, refused: "Session") -> None:
        """Let the next call read the credentials anew, unless another thread has done so since it was refused."""
        if self._sessions.get(os.getpid()) is refused:
            self._options = session_options(os.environ, _configured_endpoint())
            self._sessions.pop(os.getpid(), None)

    def _call(
        self, verb: str, key: str, operation: Operation, answers: frozenset[Verdict] = NOTHING, num_bytes: int = 0
    ) -> Any:
        """Run `operation` until it succeeds, is refused for good, or its time is used up.

        Raises AnswerError for the verdicts in `answers`, else one of the errors of storage/stores/store.py.
        """
        return self._refusals.outlast(lambda: self._ask(verb, key, operation, answers, num_bytes))

    def _ask(self, verb: str, key: str, operation: Operation, answers: frozenset[Verdict], num_bytes: int) -> Any:
        """The same; a refusal that can pass by itself is DeniedForNow."""
        budget = Budget(self._deadline_s, num_bytes)
        where = f"cannot {verb} {self.url}/{key} at {self._endpoint()}"
        last: Exception | None = None
        while True:
            budget.begin_attempt()
            session = self._session()
            try:
                return operation(session, budget)
            except Exception as error:
                verdict = s3_answers.judge(error)
                if verdict is None:
                    raise
                if verdict in answers:
                    raise AnswerError(verdict) from error
                if verdict in s3_answers.OF_CREDENTIALS:
                    self._renew(session)
                if verdict != "again":
                    raise s3_answers.refusal(where, verdict, error) from error
                # The deadline cuts the last attempt short: what an earlier one was told says more.
                last = error if last is None or not isinstance(error, TimeoutError) else last
            if not budget.pause(self._backoff_s):
                break
        unknown = "; a write may or may not have happened" if verb in WRITES else ""
        raise StoreUnavailable(
            f"{where}: no answer within {budget.elapsed_s:.3g} s and {budget.attempts} attempts, "
            f"last {s3_answers.name_of(last)}{unknown}{s3_answers.advice_after(last)}"
        ) from last

    def _endpoint(self) -> str:
        """The endpoint without user and password, for messages."""
        url = self._options["endpoint_url"]
        return url.replace(f"{urlsplit(url).netloc.rpartition('@')[0]}@", "") if url else "AWS"


class Session:
    """One process's s3fs file system on fsspec's event loop, closed when dropped and at exit.

    Every method blocks at most until the attempt's time is used up, then raises TimeoutError.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        session = aiobotocore.session.AioSession()
        session.register_component("data_loader", _loader())
        self._filesystem: Any = s3fs.S3FileSystem(
            session=session, asynchronous=True, use_listings_cache=False, skip_instance_cache=True, **options
        )
        # S3Store counts retries, against one deadline.
        self._filesystem.retries = 1
        self._loop = fsspec.asyn.get_loop()
        self.close = weakref.finalize(self, _close, self._filesystem, self._loop, os.getpid())

    def ask(self, method: str, request: Mapping[str, Any], budget: Budget) -> Any:
        return self._run(self._asked(method, request), budget.attempt_left_s)

    def write(self, request: Mapping[str, Any], budget: Budget) -> None:
        """Upload; an answer without what S3 states of an upload counts only if the object can be read back."""
        answer = self.ask("put_object", request, budget)
        if not s3_answers.states_what_it_stored(answer) and self._stored(request, budget) != request["Body"]:
            raise AnswerNotBelieved("an answer to a write without an ETag, after which the object is not there")

    def read(self, request: Mapping[str, Any], budget: Budget, start: int = 0, end: int | None = None) -> bytes:
        """The body from byte `start` on, at least to `end` if the object is as long."""
        # HTTP has no empty range, but an empty read must still say whether the object exists: ask for one byte.
        last = None if end is None else max(start, end - 1)
        if start or last is not None:
            request = {**request, "Range": f"bytes={start}-{'' if last is None else last}"}
        answer = self.ask("get_object", request, budget)
        try:
            size = s3_answers.body_size(answer, start, last)
            if size is not None:
                budget.carry(size)
            body: bytes = self._run(_drain(answer["Body"]), budget.attempt_left_s)
        except Exception:
            # Where no time was left, nothing has begun to read.
            self._run(_discard(answer["Body"]), CLOSE_S)
            raise
        # A server may send the whole object where a part of it was asked for.
        return body[start:] if answer["ResponseMetadata"]["HTTPStatusCode"] == 200 else body

    def page(self, request: Mapping[str, Any], base: str, prefix: str, budget: Budget) -> tuple[list[str], str | None]:
        """Keys of one page of a listing, without `base`, and the token of the next page."""
        answer = self.ask("list_objects_v2", request, budget)
        return s3_answers.listed(answer, base, prefix, request.get("ContinuationToken"))

    def remove(self, request: Mapping[str, Any], budget: Budget) -> None:
        answer = self.ask("delete_object", request, budget)
        if not s3_answers.states_a_deletion(answer) and self._stored(request, budget) is not None:
            raise AnswerNotBelieved("an answer to a deletion of no status 204, after which the object is there")

    def _stored(self, request: Mapping[str, Any], budget: Budget) -> bytes | None:
        """The object that an upload or a deletion names; None if there is none."""
        try:
            return self.read({name: request[name] for name in ("Bucket", "Key")}, budget)
        except Exception as error:
            if s3_answers.judge(error) != "missing":
                raise
            return None

    async def _asked(self, method: str, request: Mapping[str, Any]) -> Any:
        client = await self._filesystem.set_session()
        # Repeated for each request, because s3fs may have made a new client; a known name is registered once.
        client.meta.events.register("before-call.s3.HeadBucket", _state_no_region, unique_id="gleaner-region")
        return await self._filesystem._call_s3(method, **request)  # noqa: SLF001 - no public coroutine

    def _run(self, operation: Coroutine[Any, Any, Any], limit_s: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(_bounded(operation, limit_s), self._loop)
        try:
            # The inner limit first waits until the cancelled operation has cleaned up, which can itself take for ever.
            return future.result(limit_s + CLOSE_S)
        finally:
            future.cancel()


@cache
def _loader() -> botocore.loaders.Loader:
    """S3's description in botocore, which every session would read again: 12 MB and 0.1 s."""
    return botocore.loaders.create_loader()


async def _bounded(operation: Coroutine[Any, Any, Any], limit_s: float) -> Any:
    return await asyncio.wait_for(operation, limit_s)


def _state_no_region(**_: Any) -> None:
    """Answers botocore in the server's place where it asks for the region of a bucket that a refusal does not name.

    botocore takes a refusal of that question for another reason to ask it, without an end.
    """
    nowhere: Any = {"ResponseMetadata": {"HTTPHeaders": {}}}
    raise botocore.exceptions.ClientError(nowhere, "HeadBucket")


async def _discard(stream: Any) -> None:
    """Close the connection of an answer whose body is not read."""
    await stream.aclose()


async def _drain(stream: Any) -> bytes:
    async with stream:
        body: bytes = await stream.read()
    return body


def _close(filesystem: Any, loop: asyncio.AbstractEventLoop, process: int) -> None:
    client = filesystem._s3  # noqa: SLF001 - the client, or None when nothing was asked yet
    if process != os.getpid():
        # A child must not close its parent's sockets; it only must not complain that they are open.
        loop.set_exception_handler(lambda _loop, _context: None)
        return
    if client is None or not loop.is_running():
        return
    closing = asyncio.run_coroutine_threadsafe(client.close(), loop)
    # The garbage collector may be calling in the loop's own thread, which must not wait for itself.
    if fsspec.asyn.running_async():
        return
    with suppress(Exception):
        closing.result(CLOSE_S)


def _configured_endpoint() -> str | None:
    """The endpoint that a file of AWS's settings names for S3."""
    session = botocore.session.Session()
    with suppress(botocore.exceptions.BotoCoreError):
        provider = botocore.configprovider.ConfiguredEndpointProvider(
            full_config=session.full_config, scoped_config=session.get_scoped_config(), client_name="s3", environ={}
        )
        found: str | None = provider.provide()
        return found
    # The first request says what is wrong with the files.
    return None


def session_options(environment: Mapping[str, str], configured_endpoint: str | None = None) -> dict[str, Any]:
    """Arguments of S3FileSystem from environment variables; Flyte's FLYTE_AWS_* replace absent AWS_*.

    Servers other than AWS are addressed by path unless AWS_S3_ADDRESSING_STYLE says otherwise, because few of them have
    a host name per bucket. They get no checksums that S3 does not require, unless the variables of CHECKSUMS say
    otherwise: many refuse them, and some store them as part of the body. Raises ValueError, which names the variable.
    """

    def first(*names: str) -> str | None:
        return next((environment[name] for name in names if environment.get(name)), None)

    endpoint = first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "FLYTE_AWS_ENDPOINT") or configured_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ValueError("AWS_ENDPOINT_URL or FLYTE_AWS_ENDPOINT: allowed: a URL that begins http:// or https://")
    style = first("AWS_S3_ADDRESSING_STYLE", "FLYTE_AWS_ADDRESSING_STYLE") or ("path" if endpoint else "auto")
    if style not in ADDRESSING_STYLES:
        raise ValueError(f"AWS_S3_ADDRESSING_STYLE: value {style!r}; allowed: {', '.join(ADDRESSING_STYLES)}")
    region = first("AWS_REGION", "AWS_DEFAULT_REGION")
    checksums: dict[str, str] = {}
    for setting, variable in CHECKSUMS.items():
        time = environment.get(variable) or ("when_required" if endpoint else "")
        if time and time.lower() not in CHECKSUM_TIMES:
            raise ValueError(f"{variable}: value {time!r}; allowed: {', '.join(CHECKSUM_TIMES)}")
        checksums |= {setting: time.lower()} if time else {}
    flyte = not environment.get("AWS_ACCESS_KEY_ID")
    return {
        "endpoint_url": endpoint,
        "key": environment.get("FLYTE_AWS_ACCESS_KEY_ID") if flyte else None,
        "secret": environment.get("FLYTE_AWS_SECRET_ACCESS_KEY") if flyte else None,
        "client_kwargs": {"region_name": region} if region else {},
        "config_kwargs": {
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "max_pool_connections": 32,
            "s3": {"addressing_style": style},
            **checksums,
        },
    }
