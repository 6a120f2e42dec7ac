"""ObjectStore on S3 and on servers that speak its protocol, through s3fs.

This module owns the connection, the deadlines, the retries and the translation of errors. Every call has its own
deadline, because the libraries below can wait for ever for a silent peer. Only this module retries, so that no call
outlives its deadline. It knows nothing about what the bodies mean, and is slow to import: `connect` imports it on
demand.
"""

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import urlsplit

import botocore.exceptions
import botocore.parsers
import fsspec.asyn
import s3fs

from storage.budget import Budget
from storage.memory import check_body, check_prefix, check_range
from storage.store import ObjectMissing, StorageError, StoreDenied, StoreUnavailable, StoreUnfit, check_key

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

Verdict = Literal[
    "exists", "missing", "outside", "again", "bucket", "credentials", "region", "request", "unfit", "denied"
]
VERDICTS: dict[str, Verdict] = {
    "PreconditionFailed": "exists",
    "412": "exists",
    "NoSuchKey": "missing",
    "404": "missing",
    "InvalidRange": "outside",
    "416": "outside",
    "NoSuchBucket": "bucket",
    "InvalidBucketName": "bucket",
    "AuthorizationHeaderMalformed": "region",
    "IllegalLocationConstraintException": "region",
    "PermanentRedirect": "region",
    "301": "region",
    "NotImplemented": "unfit",
    "501": "unfit",
    # Of status 400, unlike the others that are about credentials.
    "ExpiredToken": "denied",
    "InvalidToken": "denied",
    "TokenRefreshRequired": "denied",
    # Another conditional write or a delete of the same key was under way (409).
    "ConditionalRequestConflict": "again",
    "OperationAborted": "again",
    "RequestTimeout": "again",
    "SlowDown": "again",
    "Throttling": "again",
    "ThrottlingException": "again",
    "TooManyRequests": "again",
    "XAmzContentSHA256Mismatch": "again",
    "BadDigest": "again",
}
_CHECKSUM_ADVICE = (
    "some servers know no checksums, which are sent and asked for with AWS_REQUEST_CHECKSUM_CALCULATION and "
    "AWS_RESPONSE_CHECKSUM_VALIDATION when_supported: set both to when_required"
)
ADVICE: dict[Verdict, str] = {
    "bucket": "no such bucket: create it, or correct the URL or the endpoint",
    "credentials": "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or FLYTE_AWS_ACCESS_KEY_ID and "
    "FLYTE_AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine a role)",
    "region": "the bucket is in another region: set AWS_REGION",
    "request": f"the server refuses something in this request; {_CHECKSUM_ADVICE}",
    "unfit": f"the server does not implement something in this request; {_CHECKSUM_ADVICE}",
    "denied": "refused: check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN or the "
    "machine's role); they need s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket",
}
NO_CREDENTIALS = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.ProfileNotFound,
)
TRANSIENT = (
    # These include aiohttp's error for a body that breaks off.
    *s3fs.core.S3_RETRYABLE_ERRORS,
    OSError,
    EOFError,
    botocore.exceptions.ConnectionError,
    botocore.exceptions.CredentialRetrievalError,
    botocore.exceptions.FlexibleChecksumError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    botocore.exceptions.MetadataRetrievalError,
    botocore.parsers.ResponseParserError,
)
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

    `deadline_s` bounds a whole call with its retries, and half of it one attempt; both grow by the time that the bytes
    take at 8 MiB/s. A call without an answer, a throttled one and a server error are retried until then, after a random
    part of `backoff_s` * 2^n, at most 5 s. A body is one request, at most 5 GiB. The environment gives endpoint, region
    and credentials: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION, AWS_S3_ADDRESSING_STYLE, AWS_ACCESS_KEY_ID and
    all else that botocore reads; FLYTE_AWS_* stand in for absent ones. S3's checksums are left to AWS: the signature
    covers a body's SHA-256, and what is stored here has digests of its own.
    """

    def __init__(self, bucket: str, prefix: str = "", *, deadline_s: float = 20.0, backoff_s: float = 0.2) -> None:
        self._bucket = bucket
        self._base = f"{prefix}/" if prefix else ""
        self._deadline_s = deadline_s
        self._backoff_s = backoff_s
        self._options = session_options(os.environ)
        self._sessions: dict[int, Session] = {}

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._base}".removesuffix("/")

    def create(self, key: str, body: bytes) -> bool:
        request = self._upload(key, check_body(key, body)) | {"IfNoneMatch": "*"}
        try:
            self._call("create", key, lambda s3, budget: s3.ask("put_object", request, budget), EXISTS, len(body))
        except AnswerError:
            return False
        return True

    def put(self, key: str, body: bytes) -> None:
        request = self._upload(key, body)
        self._call("put", key, lambda s3, budget: s3.ask("put_object", request, budget), num_bytes=len(body))

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_key(key)
        check_range(start, end)
        request = {"Bucket": self._bucket, "Key": self._base + key}
        if start or end is not None:
            # HTTP has no empty range, but an empty read must still say whether the object exists: ask for one byte.
            request["Range"] = f"bytes={start}-" if end is None else f"bytes={start}-{max(start, end - 1)}"
        try:
            body: bytes = self._call("get", key, lambda s3, budget: s3.read(request, budget), MISSING)
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
            page = self._call("list", prefix, lambda s3, budget: s3.ask("list_objects_v2", request, budget))
            keys += [entry["Key"].removeprefix(self._base) for entry in page.get("Contents", ())]
            if not page.get("IsTruncated"):
                return keys
            request["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, key: str) -> None:
        check_key(key)
        request = {"Bucket": self._bucket, "Key": self._base + key}
        with suppress(AnswerError):
            self._call("delete", key, lambda s3, budget: s3.ask("delete_object", request, budget), MISSING)

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

    def _call(
        self, verb: str, key: str, operation: Operation, answers: frozenset[Verdict] = NOTHING, num_bytes: int = 0
    ) -> Any:
        """Run `operation` until it succeeds, is refused for good, or its time is used up.

        Raises AnswerError for the verdicts in `answers`, else one of the errors of storage/store.py.
        """
        budget = Budget(self._deadline_s, num_bytes)
        where = f"cannot {verb} {self.url}/{key} at {self._endpoint()}"
        while True:
            budget.begin_attempt()
            try:
                return operation(self._session(), budget)
            except Exception as error:
                verdict = judge(error)
                if verdict is None:
                    raise
                if verdict in answers:
                    raise AnswerError(verdict) from error
                if verdict != "again":
                    raise _refusal(where, verdict, error) from error
                last = error
            if not budget.pause(self._backoff_s):
                break
        unknown = "; a write may or may not have happened" if verb in WRITES else ""
        advice = f"; {_CHECKSUM_ADVICE}" if isinstance(last, botocore.exceptions.FlexibleChecksumError) else ""
        raise StoreUnavailable(
            f"{where}: no answer within {budget.elapsed_s:.3g} s and {budget.attempts} attempts, "
            f"last {_name(last)}{unknown}{advice}"
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
        self._filesystem: Any = s3fs.S3FileSystem(
            asynchronous=True, use_listings_cache=False, skip_instance_cache=True, **options
        )
        # S3Store counts retries, against one deadline.
        self._filesystem.retries = 1
        self._loop = fsspec.asyn.get_loop()
        self.close = weakref.finalize(self, _close, self._filesystem, self._loop, os.getpid())

    def ask(self, method: str, request: Mapping[str, Any], budget: Budget) -> Any:
        answer = self._filesystem._call_s3(method, **request)  # noqa: SLF001 - no public coroutine
        return self._run(answer, budget.attempt_left_s)

    def read(self, request: Mapping[str, Any], budget: Budget) -> bytes:
        response = self.ask("get_object", request, budget)
        budget.carry(response["ContentLength"])
        body: bytes = self._run(_drain(response["Body"]), budget.attempt_left_s)
        return body

    def _run(self, operation: Coroutine[Any, Any, Any], limit_s: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(_bounded(operation, limit_s), self._loop)
        try:
            # The inner limit first waits until the cancelled operation has cleaned up, which can itself take for ever.
            return future.result(limit_s + CLOSE_S)
        finally:
            future.cancel()


async def _bounded(operation: Coroutine[Any, Any, Any], limit_s: float) -> Any:
    return await asyncio.wait_for(operation, limit_s)


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


def session_options(environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of S3FileSystem from environment variables; Flyte's FLYTE_AWS_* replace absent AWS_*.

    Servers other than AWS are addressed by path unless AWS_S3_ADDRESSING_STYLE says otherwise, because few of them have
    a host name per bucket. They get no checksums that S3 does not require, unless the variables of CHECKSUMS say
    otherwise: many refuse them, and some store them as part of the body. Raises ValueError, which names the variable.
    """

    def first(*names: str) -> str | None:
        return next((environment[name] for name in names if environment.get(name)), None)

    endpoint = first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "FLYTE_AWS_ENDPOINT")
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


def judge(error: Exception) -> Verdict | None:
    """The meaning of an exception of s3fs; None if the exception is not about the store.

    s3fs translates errors into OSErrors that differ between servers, so this looks at the server's answer, in the
    cause.
    """
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if response is None:
        if isinstance(error, NO_CREDENTIALS):
            return "credentials"
        if isinstance(error, TRANSIENT):
            return "again"
        return "denied" if isinstance(error, botocore.exceptions.BotoCoreError) else None
    verdict = VERDICTS.get(_name(error))
    if verdict is not None:
        return verdict
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status >= 500 or status in (408, 409, 425, 429):
        return "again"
    return "request" if 400 <= status < 500 and status not in (401, 403) else "denied"


def _name(error: Exception) -> str:
    """The server's error code, or the kind of exception; never its text, which may hold more than a log should."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code") or type(error).__name__)


def _refusal(where: str, verdict: Verdict, error: Exception) -> StorageError:
    kind = StoreUnfit if verdict in ("request", "unfit") else StoreDenied
    return kind(f"{where}: {ADVICE.get(verdict, ADVICE['denied'])} ({_name(error)})")
