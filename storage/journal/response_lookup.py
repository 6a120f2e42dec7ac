"""Single responses of an iteration, or some of them at once: from their parts, or from the journal.

A reader for people: results are durable at the time of the call, for recorded, running and unbegun responses.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from storage.journal.assembly import JournalReader
from storage.journal.compaction import each_batch, follow_recorded, stored_body, unrecorded_row
from storage.journal.response_parts import PART_TOKENS, ResponsesRecord, divide
from storage.journal.responses import Response, find_response, open_responses
from storage.records import layout, records
from storage.records.records import BatchRecord, GradedResponse, PlanRecord, Span
from storage.records.run import exists
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore


@dataclass(frozen=True, slots=True)
class Traced:
    """A response, and its lineage: response.spans[i] of its tokens come from lineage[i].

    An unfinished response ends with `running` or `released`; a response that was not begun has no tokens.
    """

    response: Response
    lineage: tuple[Span, ...]


class ResponseLookup:
    """Reads single responses of one iteration, and caches the last opened part of up to 2^25 tokens."""

    def __init__(self, store: ObjectStore, plan: PlanRecord, prompt_ids: Sequence[str]) -> None:
        """prompt_ids: the prompt of each group of the plan."""
        self._store = store
        self._plan = plan
        self._prompt_ids = prompt_ids
        self._part: tuple[str, pa.Table] | None = None

    def find(self, number: int, batch: int | None) -> Traced | None:
        """Response `number`, which micro-batch `batch` records (None: no batch does yet).

        Returns None for an unused response whose journal is deleted. Raises LookupError for a number that the plan does
        not have, ObjectMissing, and CorruptObject.
        """
        if not 0 <= number < self._plan.num_responses:
            raise LookupError(f"response: value {number}; allowed: 0 to {self._plan.num_responses - 1}")
        named = None if batch is None else self._named(number, batch)
        key = layout.responses(self._plan.iteration)
        if not exists(self._store, key):
            try:
                return self._journalled(number, named)
            except (CorruptObject, ObjectMissing):
                # The journal may have been compacted and deleted while it was read.
                if not exists(self._store, key):
                    raise
        return None if named is None else self._stored(named)

    def find_all(self, numbers: Iterable[int], part_tokens: int = PART_TOKENS) -> dict[int, Traced]:
        """Map each given response that exists to the result of `find`, in ascending order.

        Batches are read once, and a shard once for each part with rows of the shard, for any number of responses. The
        result holds the tokens of every response found. Raises the errors of `find`.
        """
        wanted = sorted(numbers)
        asked = frozenset(wanted)
        recorded = (graded for batch in each_batch(self._store, self._plan.iteration) for graded in batch.graded)
        named = {graded.response: graded for graded in recorded if graded.response in asked}
        key = layout.responses(self._plan.iteration)
        if not exists(self._store, key):
            try:
                return self._all_journalled(wanted, named, part_tokens)
            except (CorruptObject, ObjectMissing):
                if not exists(self._store, key):
                    raise
                # More may be recorded than was when the batches were read.
                return self.find_all(wanted, part_tokens)
        return {number: self._stored(named[number]) for number in wanted if number in named}

    def _all_journalled(
        self, wanted: Sequence[int], named: Mapping[int, GradedResponse], part_tokens: int
    ) -> dict[int, Traced]:
        longest = self._plan.sampling.max_completion_length
        lengths = {number: named[number].length if number in named else longest for number in wanted}
        parts = divide(lengths, part_tokens)
        reader = JournalReader(self._store, self._plan, parts=parts)
        reader.refresh()
        found = {}
        for part in reader.parts() if parts else ():
            for number in filter(lengths.__contains__, part):
                found[number] = self._followed(number, named.get(number), reader)
        return found

    def _followed(self, number: int, named: GradedResponse | None, reader: JournalReader) -> Traced:
        """The response from what the reader has read."""
        if named is not None:
            return Traced(follow_recorded(self._plan, self._prompt_ids, named, reader), named.lineage)
        assembled = reader.assemble(number)
        return Traced(unrecorded_row(self._plan, self._prompt_ids, assembled), assembled.lineage)

    def _named(self, number: int, batch: int) -> GradedResponse:
        key = layout.batch(self._plan.iteration, batch)
        for graded in records.read(self._store, BatchRecord, key).graded:
            if graded.response == number:
                return graded
        raise LookupError(f"response: value {number}; allowed: one that {key!r} records")

    def _journalled(self, number: int, named: GradedResponse | None) -> Traced:
        """The response from the shards of its own incarnations alone."""
        reader = JournalReader(self._store, self._plan, parts=[range(number, number + 1)])
        if named is None:
            reader.book.refresh()
            reader.shards.advance_all(reader.incarnations_to_read([number]))
        return self._followed(number, named, reader)

    @cached_property
    def _record(self) -> ResponsesRecord:
        """The record that names the parts; the record never changes."""
        return records.read(self._store, ResponsesRecord, layout.responses(self._plan.iteration))

    def _stored(self, named: GradedResponse) -> Traced:
        iteration = self._plan.iteration
        part = next((part for part in self._record.parts if part.first <= named.response <= part.last), None)
        if part is None:
            raise CorruptObject(layout.responses(iteration), f"none of its parts holds response {named.response}")
        key = layout.responses_part(iteration, part.first, part.last)
        if self._part is None or self._part[0] != key:
            self._part = key, open_responses(key, stored_body(self._store, iteration, part))
        row = find_response(key, self._part[1], named.response)
        if row is None or len(row.spans) != len(named.lineage):
            raise CorruptObject(key, f"response {named.response} is not what the batches say")
        return Traced(row, named.lineage)
