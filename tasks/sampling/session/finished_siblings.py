"""FinishedSiblings: a group's responses that other members have ended, from journals that were read for other reasons.

The plan gives whole groups to slots, so a group is divided only when a member takes responses, and the taker has read
the journal of the holder.
"""

from collections.abc import Iterator
from contextlib import suppress

from storage.journal.assembly import JournalReader
from storage.journal.shard import TokenIds
from storage.stores.store import CorruptObject


class FinishedSiblings:
    """The ended responses of groups of which an incarnation holds responses. Asks the store for nothing."""

    def __init__(self, reader: JournalReader, incarnation: str, num_generations: int) -> None:
        self._reader = reader
        self._incarnation = incarnation
        self._num_generations = num_generations
        self._told: set[int] = set()

    def new(self) -> Iterator[tuple[int, TokenIds]]:
        """The group and the token ids of each ended response, once; corrupt responses are passed over."""
        ended = self._reader.shards.ended
        new = ended - self._told
        if not new:
            return
        held = self._reader.book.held_by(self._incarnation)
        groups = {response // self._num_generations for response in held if response not in ended}
        for response in sorted(new):
            group = response // self._num_generations
            if group in groups and self._reader.is_at_hand(response):
                self._told.add(response)
                with suppress(CorruptObject):
                    yield group, self._reader.assemble(response).token_ids
