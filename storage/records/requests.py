"""Requests to `gleaner serve` under keys of their clients: a key has one body, and one answer."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import Field

from storage.records import layout, records
from storage.records.records import STRICT, nonce
from storage.stores.store import ObjectStore


@dataclass(frozen=True)
class KeptRequest:
    """What a client has asked that comes back with the name of its request alone.

    Attributes:
        prompt_token_ids: the prompt.
        n: the number of responses.
        max_tokens: the most tokens of each answer.
    """

    __pydantic_config__ = STRICT
    prompt_token_ids: tuple[int, ...]
    n: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """requests/<digest of the key>.json: a request that was accepted, written before any of its tokens.

    Attributes:
        body: digest of what was asked.
        first_iteration: no earlier iteration has the request among its prompts.
        kept: left out for a client that sends its request again.
    """

    KIND: ClassVar[str] = "request"
    __pydantic_config__ = STRICT
    body: str
    first_iteration: int
    kept: Annotated[KeptRequest | None, Field(exclude_if=lambda held: held is None)] = None
    nonce: str = field(default_factory=nonce)


def accept(store: ObjectStore, name: str, record: RequestRecord) -> RequestRecord:
    """Record a request, unless an earlier attempt has; returns the record that is stored, perhaps of another body."""
    key = layout.request(name)
    return record if records.commit(store, key, record) else records.read(store, RequestRecord, key)
