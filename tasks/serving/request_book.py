"""The request book: finds the answer to a request in this process or in the run, or has it generated.

A request under a key of its client is recorded before any of its tokens, so whichever process accepts the key later
finds the same answer.
"""

import threading
from concurrent.futures import Future
from functools import lru_cache

from storage.records import layout, prompt_table
from storage.records.records import read
from storage.records.requests import KeptRequest, RequestRecord, accept
from storage.records.run import exists, read_plan
from storage.stores.store import ObjectMissing, ObjectStore
from tasks.external.groups import groups_of
from tasks.learning.replayed_batches import ReplayedBatches
from tasks.prompts.prompt import PromptError
from tasks.prompts.submitted import TOKENS
from tasks.serving.served_model import ServedModel
from tasks.serving.served_request import ServedRequest
from tasks.serving.windows import REQUEST, WAITING_MAX, Answer, Windows
from tasks.turns.chat_request import Refusal


class RequestBook:
    """The requests of a run, from any thread."""

    def __init__(self, store: ObjectStore, windows: Windows, model: ServedModel) -> None:
        self._store, self._windows, self._model = store, windows, model
        self._names = lru_cache(1024)(self._read_names)
        self._lock = threading.Lock()
        # Newest last. A record never changes.
        self._records: dict[str, RequestRecord] = {}

    def begin(
        self, name: str, asked: ServedRequest, *, has_key: bool, is_kept: bool = False
    ) -> "Future[Answer] | None":
        """The answer to a request, which is generated unless it is there or on its way.

        is_kept: a request for token ids under a key, which `kept` finds by its name from now on.
        None: a window has just ended, or the request's iteration is between two states; a later call finds more.
        Raises Refusal for a prompt that does not fit, and for a key that was used for another request; StorageError.
        """
        held = self._records.get(name) if has_key else None
        # Clients of which thousands wait look each 30 s, which is to take no request to the store.
        if held is not None and held.body == asked.body and (waits := self._windows.answer(name)) is not None:
            return waits
        try:
            # First, because what is refused binds no key.
            prompt = self._model.prompt(asked.prompt, asked.tools)
        except PromptError as error:
            raise Refusal(str(error), param="prompt" if asked.chat is None else "messages") from None
        if not has_key:
            return self._windows.ask(name, prompt, asked.n)
        begun = self._windows.step
        kept = KeptRequest(tuple(prompt[TOKENS]), asked.n, asked.max_tokens) if is_kept else None
        record = accept(self._store, name, RequestRecord(body=asked.body, first_iteration=begun, kept=kept))
        self._hold(name, record)
        if record.body != asked.body:
            message = "Idempotency-Key: the key was used for another request; allowed: a new key, or the same request"
            raise Refusal(message, code="idempotency_key_reused", status=422)
        known = self._windows.answer(name)
        if known is not None:
            return known
        step = self._planned(name, record.first_iteration)
        if step is None:
            return self._windows.ask(name, prompt, asked.n, step=begun)
        if not exists(self._store, layout.closed(step)):
            return self._windows.answer(name)
        found: Future[Answer] = Future()
        found.set_result(self._recorded(name, step))
        return found

    def kept(self, name: str) -> ServedRequest | None:
        """The request that a client has left under a name, for any life of the server; None: there is none."""
        record = self._records.get(name)
        if record is None:
            try:
                record = read(self._store, RequestRecord, layout.request(name))
            except ObjectMissing:
                return None
            self._hold(name, record)
        if record.kept is None:
            return None
        kept = record.kept
        return ServedRequest(kept.prompt_token_ids, kept.n, kept.max_tokens, True, True, None, record.body)

    def _hold(self, name: str, record: RequestRecord) -> None:
        with self._lock:
            self._records[name] = record
            if len(self._records) > WAITING_MAX:
                del self._records[next(iter(self._records))]

    def _planned(self, name: str, first: int) -> int | None:
        """The iteration that has the request among its prompts, from `first` on; None: it is not planned."""
        step = first
        while exists(self._store, layout.plan(step)):
            if name in self._names(step):
                return step
            step += 1
        return None

    def _recorded(self, name: str, step: int) -> Answer:
        """The answer in a closed iteration."""
        plan = read_plan(self._store, step)
        prompts = prompt_table.read_prompts(self._store, plan)
        batches = ReplayedBatches(self._store, plan)
        groups = (each for batch in batches for each in groups_of(batch, plan, prompts, batches, self._model.text))
        return Answer.of([group for group in groups if group.columns.get(REQUEST) == name], plan.created_at_s)

    def _read_names(self, step: int) -> frozenset[str]:
        rows = prompt_table.read_prompts(self._store, read_plan(self._store, step))
        return frozenset(str(row.columns.get(REQUEST)) for row in rows)
