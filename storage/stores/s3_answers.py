"""Judges the answers of S3 servers: whether an answer is from S3 at all, and which remedy a refusal needs.

Proxies, portals and load balancers answer, too. An answer that lacks what S3 always states is not believed: the request
is made again, as after no answer. This module knows no connection, and never repeats a server's text, which may hold
more than a log should.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

import botocore.exceptions
import botocore.parsers
import s3fs

from storage.stores.refusals import DeniedForNow
from storage.stores.store import StorageError, StoreDenied, StoreUnfit

Verdict = Literal[
    "exists",
    "missing",
    "outside",
    "again",
    "bucket",
    "credentials",
    "region",
    "request",
    "unfit",
    "denied",
    "expired",
    "clock",
    "full",
    "large",
    "encryption",
    "archived",
    "unknown",
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
    "TemporaryRedirect": "region",
    "NotImplemented": "unfit",
    "501": "unfit",
    "AccessDenied": "denied",
    # Keys may have been exchanged for others, too.
    "ExpiredToken": "expired",
    "ExpiredTokenException": "expired",
    "InvalidAccessKeyId": "expired",
    "InvalidClientTokenId": "expired",
    "InvalidToken": "expired",
    "SignatureDoesNotMatch": "expired",
    "TokenRefreshRequired": "expired",
    "UnrecognizedClientException": "expired",
    "RequestTimeTooSkewed": "clock",
    "RequestExpired": "clock",
    "RequestInTheFuture": "clock",
    "507": "full",
    "EntityTooLarge": "large",
    "InvalidObjectState": "archived",
    # Another conditional write or a delete of the same key was under way (409).
    "ConditionalRequestConflict": "again",
    "OperationAborted": "again",
    "RequestTimeout": "again",
    "SlowDown": "again",
    "Throttling": "again",
    "ThrottlingException": "again",
    "KMS.ThrottlingException": "again",
    "TooManyRequests": "again",
    "XAmzContentSHA256Mismatch": "again",
    "BadDigest": "again",
}
# By what the names of a kind of refusal have in common, because each server has its own.
NAMED: dict[str, Verdict] = {
    r"^KMS\.|Kms|KMS": "encryption",
    r"Quota|StorageFull|InsufficientStorage": "full",
}
CHECKSUM_ADVICE = (
    "some servers know no checksums, which are sent and asked for with AWS_REQUEST_CHECKSUM_CALCULATION and "
    "AWS_RESPONSE_CHECKSUM_VALIDATION when_supported: set both to when_required"
)
UNBELIEVED_ADVICE = (
    "what answers is no S3 server: correct the endpoint (AWS_ENDPOINT_URL), or take away the proxy that answers in its "
    "place"
)
ROOM_ADVICE = (
    "the store has no room for the object: a quota or limit of the bucket, the user or the server is reached; raise "
    "it, or delete what is no longer needed"
)
CREDENTIALS_ADVICE = (
    "refused: check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN or the machine's "
    "role); they need s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket"
)
# What these refuse passes when credentials are read anew, and the others of PASSING by itself.
OF_CREDENTIALS: frozenset[Verdict] = frozenset({"credentials", "expired"})
PASSING: frozenset[Verdict] = OF_CREDENTIALS | {"clock", "full"}
ADVICE: dict[Verdict, str] = {
    "bucket": "no such bucket: create it, or correct the URL or the endpoint",
    "credentials": "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or FLYTE_AWS_ACCESS_KEY_ID and "
    "FLYTE_AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine a role)",
    "region": "the server sends the request elsewhere: if the bucket is in another region, set AWS_REGION, else "
    "correct the endpoint (AWS_ENDPOINT_URL)",
    "request": f"the server refuses something in this request; {CHECKSUM_ADVICE}",
    "unfit": f"the server does not implement something in this request; {CHECKSUM_ADVICE}",
    "denied": CREDENTIALS_ADVICE,
    "expired": CREDENTIALS_ADVICE,
    "clock": "this machine's clock is minutes away from the server's, which therefore refuses every signature: set the "
    "clock right (timedatectl set-ntp true)",
    "full": ROOM_ADVICE,
    "large": ROOM_ADVICE,
    "encryption": "the key that encrypts the bucket cannot be used: it must be enabled, and the credentials need "
    "kms:GenerateDataKey and kms:Decrypt for it",
    "archived": "the object was moved to an archive: restore it, and end the bucket's rule that archives objects",
    "unknown": "refused for the reason in brackets, which is the server's code",
}
NO_CREDENTIALS = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.ProfileNotFound,
)
EXPIRED = (
    botocore.exceptions.LoginError,
    botocore.exceptions.SSOError,
    botocore.exceptions.TokenRetrievalError,
)


class AnswerNotBelieved(Exception):  # noqa: N818 - reads as what happened
    """An answer that S3 does not give; the text says what it lacks."""


TRANSIENT = (
    # These include aiohttp's error for a body that breaks off.
    *s3fs.core.S3_RETRYABLE_ERRORS,
    AnswerNotBelieved,
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

# Of exceptions without an answer; the first that fits.
KINDS: tuple[tuple[tuple[type[Exception], ...], Verdict], ...] = (
    (NO_CREDENTIALS, "credentials"),
    (EXPIRED, "expired"),
    (TRANSIENT, "again"),
    ((botocore.exceptions.BotoCoreError,), "denied"),
)


def judge(error: Exception) -> Verdict | None:
    """The meaning of an exception of s3fs; None if the exception is not about the store.

    s3fs translates errors into OSErrors that differ between servers, so this looks at the server's answer, in the
    cause.
    """
    response = _response(error)
    if response is None:
        return next((verdict for kinds, verdict in KINDS if isinstance(error, kinds)), None)
    if _is_a_page(response):
        return "again"
    name = name_of(error)
    # S3 says AccessDenied of the key, too, and which right is missing only in its text.
    if name == "AccessDenied" and "kms:" in str(response.get("Error", {}).get("Message")):
        return "encryption"
    verdict = VERDICTS.get(name) or next((found for words, found in NAMED.items() if re.search(words, name)), None)
    return verdict or _by_status(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0), name)


def _by_status(status: int, name: str) -> Verdict:
    if status >= 500 or status in (408, 409, 425, 429):
        return "again"
    if 300 <= status < 400:
        return "region"
    if status in (401, 403):
        # Without a code of its own, or with one that no version of S3 explains.
        if status == 401:
            return "expired"
        return "denied" if name in ("", "403", "Forbidden") else "unknown"
    return "request" if 400 <= status < 500 else "denied"


def name_of(error: Exception) -> str:
    """The server's error code, what an answer lacks, or the kind of exception; never the server's text."""
    if isinstance(error, AnswerNotBelieved):
        return str(error)
    response = _response(error) or {}
    if _is_a_page(response):
        return f"an answer of status {response['ResponseMetadata'].get('HTTPStatusCode', 0)} that is a page for people"
    return str(response.get("Error", {}).get("Code") or type(error).__name__)


def advice_after(error: Exception) -> str:
    """What to look at where the last of many attempts ended so; empty where only waiting helps."""
    if isinstance(error, botocore.exceptions.FlexibleChecksumError):
        return f"; {CHECKSUM_ADVICE}"
    is_answer = isinstance(error, AnswerNotBelieved | botocore.parsers.ResponseParserError)
    return f"; {UNBELIEVED_ADVICE}" if is_answer or _is_a_page(_response(error) or {}) else ""


def refusal(where: str, verdict: Verdict, error: Exception) -> StorageError:
    """The error of storage/stores/store.py for a verdict that is no part of the protocol."""
    lasting = StoreUnfit if verdict in ("request", "unfit") else StoreDenied
    kind = DeniedForNow if verdict in PASSING else lasting
    return kind(f"{where}: {ADVICE.get(verdict, ADVICE['unknown'])} ({name_of(error)})")


def states_what_it_stored(answer: Mapping[str, Any]) -> bool:
    """Whether an answer to an upload has the ETag that S3 gives each object."""
    return bool(answer.get("ETag"))


def states_a_deletion(answer: Mapping[str, Any]) -> bool:
    return bool(answer["ResponseMetadata"].get("HTTPStatusCode") == 204)


def body_size(answer: Mapping[str, Any], first: int, last: int | None) -> int | None:
    """Bytes of the body that follows the headers of a read of bytes `first` to `last`; None if it comes in chunks.

    Raises AnswerNotBelieved without an ETag, for another range than the one that was asked for, and where neither a
    length nor chunks would show that the body was cut off.
    """
    if not answer.get("ETag"):
        raise AnswerNotBelieved("an answer to a read without an ETag")
    if answer["ResponseMetadata"].get("HTTPStatusCode") == 206:
        stated = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", str(answer.get("ContentRange")))
        begins, ends, total = map(int, stated.groups()) if stated else (-1, -1, 0)
        if (begins, ends) != (first, total - 1 if last is None else min(last, total - 1)):
            raise AnswerNotBelieved("an answer to a read with another range than was asked for")
    size = answer.get("ContentLength")
    if size is None and answer["ResponseMetadata"]["HTTPHeaders"].get("transfer-encoding") != "chunked":
        raise AnswerNotBelieved("an answer to a read without a length")
    return None if size is None else int(size)


def listed(page: Mapping[str, Any], base: str, prefix: str, token: str | None) -> tuple[list[str], str | None]:
    """Keys of a page of a listing, without `base`, and the token of the next page, if there is one.

    `token`: of this page. Raises AnswerNotBelieved for what is no listing of `base` + `prefix`.
    """
    keys = [entry.get("Key") or "" for entry in page.get("Contents", ())]
    if "IsTruncated" not in page or not all(key.startswith(base + prefix) for key in keys):
        raise AnswerNotBelieved("an answer that is no listing of that prefix")
    following = page.get("NextContinuationToken") if page["IsTruncated"] else None
    if page["IsTruncated"] and following in (None, "", token):
        raise AnswerNotBelieved("a listing that has no next page and says that it goes on")
    return [key.removeprefix(base) for key in keys], following


def _response(error: Exception) -> Mapping[str, Any] | None:
    found = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    return found if isinstance(found, Mapping) else None


def _is_a_page(response: Mapping[str, Any]) -> bool:
    """Whether a refusal is HTML: an error of S3 has a code of its own, which such a page cannot state.

    Except 501, with which every server says that the request is in vain.
    """
    code = str(response.get("Error", {}).get("Code") or "")
    if code == "501":
        return False
    kind = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("content-type", "")
    return (not code or code.isdigit()) and "html" in str(kind).lower()
