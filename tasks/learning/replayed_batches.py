"""Replayed batches: the recorded micro-batches of a closed iteration, read again from its journal or its parts."""

import numpy as np

from storage.journal.assembly import Assembled
from storage.journal.compaction import stored_rows
from storage.journal.response_parts import ResponsesRecord
from storage.journal.responses import Response
from storage.records import layout, records
from storage.records.records import BatchRecord, GradedResponse, PlanRecord
from storage.records.run import exists
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from tasks.learning.recorded_batches import Batches, BatchReader


class ReplayReader(BatchReader):
    """Reads recorded micro-batches with their tokens from the journal, or from the parts once it is compacted.

    Parts stay in memory after reading, with 8 bytes per token, because batches need not follow the order of parts.
    """

    def __init__(self, store: ObjectStore, plan: PlanRecord) -> None:
        super().__init__(store, plan)
        self._key = layout.responses(plan.iteration)
        self._is_compacted = exists(store, self._key)
        self._rows: dict[int, Response] = {}

    def tokens(self, graded: GradedResponse) -> Assembled:
        if not self._is_compacted:
            try:
                return super().tokens(graded)
            except (CorruptObject, ObjectMissing):
                # It may have been compacted and deleted meanwhile.
                self._is_compacted = exists(self._store, self._key)
                if not self._is_compacted:
                    raise
        row = self._row(graded.response)
        if (len(row.token_ids), row.policy_length) != (graded.length, graded.policy_length):
            reason = f"response {row.response} has {len(row.token_ids)} tokens; its batch says {graded.length}"
            raise CorruptObject(self._key, reason)
        return Assembled(
            response=row.response,
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            finish=row.finish,
            lineage=graded.lineage,
            span_tokens=row.spans,
            weight_versions=np.full(len(row.token_ids), row.weight_version, dtype=np.uint32),
            origins=row.origins,
            events=row.events,
            owes=False,
            restarts=0,
        )

    def _row(self, response: int) -> Response:
        if response not in self._rows:
            parts = records.read(self._store, ResponsesRecord, self._key).parts
            part = next((each for each in parts if each.first <= response <= each.last), None)
            rows = [] if part is None else stored_rows(self._store, self._plan.iteration, part)
            self._rows |= {row.response: row for row in rows}
        if response not in self._rows:
            raise CorruptObject(self._key, f"no part holds response {response}, which is in a batch")
        return self._rows[response]


class ReplayedBatches(ReplayReader, Batches):
    """The micro-batches of an iteration that is trained already, so every micro-batch is recorded and nothing waits."""

    @property
    def waited_s(self) -> float:
        return 0.0

    def _batch(self, number: int) -> BatchRecord:
        return self.read(number)
