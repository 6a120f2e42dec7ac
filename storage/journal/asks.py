"""Asks: how a member that could decode a running response asks its holder to hand it over (docs/format.md section 5).

A claim on a running response loses the tokens since the last flush of its holder. A holder with an ask flushes first
and releases the response afterwards. Asks are hints: a damaged or unanswered ask changes nothing.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from storage.records import layout, records
from storage.records.records import STRICT, nonce
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AskRecord:
    """An incarnation asks for `responses` of another incarnation."""

    KIND: ClassVar[str] = "ask"
    __pydantic_config__ = STRICT
    asker: str
    responses: tuple[int, ...]
    nonce: str = field(default_factory=nonce)


class Asks:
    """The asks of an iteration, as a member writes and reads them. Asks to one holder are numbered without gaps."""

    def __init__(self, store: ObjectStore, iteration: int) -> None:
        self._store = store
        self._iteration = iteration
        self._next: Counter[str] = Counter()

    def write(self, holder: str, ask: AskRecord) -> None:
        """Ask a holder."""
        while not records.commit(self._store, self._key(holder), ask):
            self._next[holder] += 1
        self._next[holder] += 1

    def read(self, holder: str) -> tuple[int, ...]:
        """The responses that the holder was asked for since the last call, with one GET if there is no ask."""
        responses: list[int] = []
        while True:
            try:
                responses += records.read(self._store, AskRecord, self._key(holder)).responses
            except ObjectMissing:
                return tuple(responses)
            except CorruptObject as error:
                log.warning("an ask is passed over: %s", error)
            self._next[holder] += 1

    def _key(self, holder: str) -> str:
        return layout.ask(self._iteration, holder, self._next[holder])
