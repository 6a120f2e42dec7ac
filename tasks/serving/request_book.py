"""The request book: what a run knows of requests under keys of their clients, whichever process accepted them."""

from collections.abc import Callable, Sequence
from functools import lru_cache

from storage.records import layout, prompt_table
from storage.records.requests import RequestRecord, accept
from storage.records.run import exists, read_plan
from storage.stores.store import ObjectStore
from tasks.external.groups import groups_of
from tasks.learning.replayed_batches import ReplayedBatches
from tasks.serving.windows import REQUEST, Answer
from tasks.turns.chat_request import Refusal


class RequestBook:
    """Reads and writes the requests of a run, from any thread."""

    def __init__(self, store: ObjectStore, text: Callable[[Sequence[int]], str]) -> None:
        """text: makes the text of a response from token ids."""
        self._store, self._text = store, text
        self._names = lru_cache(1024)(self._read_names)

    def accept(self, name: str, body: str, step: int) -> int:
        """Record a request, unless it is recorded; returns the first iteration that can have it.

        body: the digest of what is asked. step: the iteration that is under way, or planned next. Raises Refusal if the
        key was used for another body.
        """
        record = accept(self._store, name, RequestRecord(body=body, first_iteration=step))
        if record.body != body:
            message = "Idempotency-Key: the key was used for another request; allowed: a new key, or the same request"
            raise Refusal(message, code="idempotency_key_reused", status=422)
        return record.first_iteration

    def planned(self, name: str, first: int) -> int | None:
        """The iteration that has the request among its prompts, from `first` on; None: it is not planned."""
        step = first
        while exists(self._store, layout.plan(step)):
            if name in self._names(step):
                return step
            step += 1
        return None

    def answer(self, name: str, step: int) -> Answer | None:
        """The recorded answer to a request of an iteration; None while the iteration is not closed."""
        if not exists(self._store, layout.closed(step)):
            return None
        plan = read_plan(self._store, step)
        prompts = prompt_table.read_prompts(self._store, plan)
        batches = ReplayedBatches(self._store, plan)
        groups = (each for batch in batches for each in groups_of(batch, plan, prompts, batches, self._text))
        found = [group for group in groups if group.columns.get(REQUEST) == name]
        return Answer(tuple(sorted(found, key=lambda group: group.number)), int(plan.created_at_s))

    def _read_names(self, step: int) -> frozenset[str]:
        rows = prompt_table.read_prompts(self._store, read_plan(self._store, step))
        return frozenset(str(row.columns.get(REQUEST)) for row in rows)
