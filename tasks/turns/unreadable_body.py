"""Bodies of requests that a server of ours cannot read, as OpenAI's clients are told of it."""

from aiohttp import web

from tasks.turns.chat_request import Refusal

BODY_BYTES_MAX = 16 << 20
# What aiohttp, or Python's reader of JSON, raises for such a body.
UNREADABLE = (web.RequestPayloadError, web.HTTPRequestEntityTooLarge, RecursionError)


def unreadable(error: BaseException) -> Refusal:
    """The refusal for one of UNREADABLE."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return Refusal(f"the body is too long; allowed: {BODY_BYTES_MAX} bytes", status=413)
    if isinstance(error, RecursionError):
        # The reader of JSON takes a little more than what shows the value in a message.
        return Refusal("the body is nested too deeply; allowed: less deeply")
    return Refusal("the body is not of its Content-Encoding, or not whole; allowed: the same request, sent whole")
