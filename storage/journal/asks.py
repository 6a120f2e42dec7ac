"""Asks: how a member that could decode a running response asks its holder to hand it over (docs/format.md section 5).

A response that is claimed while it runs loses what its holder has decoded since its last flush. A holder that is asked
writes that first and releases the response. Asks are hints: one that is damaged, or goes unanswered, changes nothing.
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
    """An incarnation asks for these responses of another one."""

    KIND: ClassVar[str] = "ask"
    __pydantic_config__ = STRICT
    asker: str
    responses: tuple[int, ...]
    nonce: str = field(default_factory=nonce)


class Asks:
    """The asks of an iteration, as one member writes and reads them. Those to one holder are numbered without gaps."""

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
        """The responses that the holder was asked for since the last call, with one GET if there are none."""
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
