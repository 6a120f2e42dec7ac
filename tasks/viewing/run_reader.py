"""Reads what people look at of a run, and keeps what does not change: plans, prompts, indexes of ended iterations."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from storage.journal.compaction import each_batch
from storage.journal.response_lookup import ResponseLookup, Traced
from storage.records import layout
from storage.records.crew_records import HeartbeatRecord
from storage.records.gradings import GradedRecord, gradings_of
from storage.records.prompt_table import PromptRow, read_prompts
from storage.records.records import PlanRecord
from storage.records.run import exists, next_iteration, read_plan, read_report
from storage.stores.connect import connect
from storage.stores.store import ObjectMissing, ObjectStore
from tasks.prompts.decode import Decode
from tasks.reporting.export import load_decoder
from tasks.reporting.slot_lives import read_heartbeats
from tasks.viewing.response_index import ResponseIndex, read_index
from tasks.viewing.response_view import Fate, ResponseView, view_response
from tasks.viewing.token_pieces import token_texts

ITERATIONS_KEPT = 4
# A prompt is looked for in so many of the newest iterations; each costs two requests, once.
PLACES_ITERATIONS = 500
# So many tokens are coloured at once; a longer response is coloured piece by piece.
TOKENS_AT_ONCE = 4096


@dataclass(frozen=True)
class _Moment:
    """Responses read at one time.

    Attributes:
        traced: The responses, by number.
        fates: The fate of each incarnation at the time.
        gradings: The gradings of the iteration, by name.
    """

    traced: dict[int, Traced]
    fates: dict[str, Fate]
    gradings: dict[str, GradedRecord]


class IterationReader:
    """One iteration; its index is read again while the iteration is open."""

    def __init__(self, store: ObjectStore, iteration: int, decode: Decode | None) -> None:
        """Raises LookupError if the iteration has no plan."""
        try:
            self.plan: PlanRecord = read_plan(store, iteration)
        except ObjectMissing:
            raise LookupError(f"iteration: value {iteration}; {store.url} has no plan of it") from None
        self._store = store
        self._decode = decode
        self._index: ResponseIndex | None = None
        self._is_closed = False
        self._moment: _Moment | None = None

    @cached_property
    def prompts(self) -> list[PromptRow]:
        """The prompts by group."""
        return read_prompts(self._store, self.plan)

    @cached_property
    def _lookup(self) -> ResponseLookup:
        return ResponseLookup(self._store, self.plan, [prompt.prompt_id for prompt in self.prompts])

    def index(self) -> ResponseIndex:
        """What is known of all responses now; of a closed iteration it is read once."""
        if self._index is None or not (self._is_closed or self._moment):
            # Asked before it is read, so that an index that is kept is complete.
            self._is_closed = exists(self._store, layout.closed(self.plan.iteration))
            self._index = read_index(self._store, self.plan)
        return self._index

    @contextmanager
    def read_together(self, responses: Iterable[int]) -> Iterator[list[int]]:
        """Read responses with few requests, and answer from memory inside the block.

        Yields the numbers of the responses that can be viewed; an unused response cannot. Memory holds the tokens of
        all responses. A block inside another block reads nothing.
        """
        if self._moment is not None:
            yield [number for number in responses if number in self._moment.traced]
            return
        states = self._last_index().states
        traced = self._lookup.find_all(number for number in responses if states[number] != "unused")
        self._moment = _Moment(traced, self._fates(), gradings_of(self._store, self.plan.iteration))
        try:
            yield list(traced)
        finally:
            self._moment = None

    def view(self, number: int, *, with_advantage: bool = True) -> ResponseView:
        """One response. Raises LookupError if the plan does not have it, or if it is unused and was deleted."""
        traced, index = self._traced(number)
        advantage = (
            (self.advantages or {}).get(number) if with_advantage and index.batches[number] is not None else None
        )
        prompt = self.prompts[number // self.plan.num_generations]
        moment = self._moment
        gradings = gradings_of(self._store, self.plan.iteration) if moment is None else moment.gradings
        return view_response(self.plan, index, prompt, traced, self._fates(), self._decode, advantage, gradings)

    def tokens(self, number: int, first: int = 0) -> list[tuple[str, float | None]]:
        """(text, log-prob) of at most TOKENS_AT_ONCE tokens from position `first` on; ids as text without a tokenizer.

        Tokens of observations have no log-prob. Raises what `view` raises.
        """
        traced, _ = self._traced(number)
        ids = traced.response.token_ids.tolist()[first : first + TOKENS_AT_ONCE]
        texts = token_texts(self._decode, ids) if self._decode else [f"{token_id} " for token_id in ids]
        sampled = iter(traced.response.logprobs.tolist())
        logprobs = [
            None if stretch % 2 else next(sampled)
            for stretch, length in enumerate(traced.response.origins)
            for _ in range(length)
        ]
        return list(zip(texts, logprobs[first : first + TOKENS_AT_ONCE], strict=True))

    @property
    def advantages(self) -> dict[int, float] | None:
        """By response, as the train step computed them; None while the iteration is open, or if they are not known."""
        is_closed = self._is_closed or exists(self._store, layout.closed(self.plan.iteration))
        return self._advantages if is_closed else None

    @property
    def has_advantages(self) -> bool:
        """Whether asking for the advantages takes no time, because they were asked for before."""
        return "_advantages" in vars(self)

    @cached_property
    def _advantages(self) -> dict[int, float] | None:
        from tasks.learning.recorded_advantages import recorded_advantages  # noqa: PLC0415 - imports torch

        trained = [graded for batch in each_batch(self._store, self.plan.iteration) for graded in batch.responses]
        return recorded_advantages(self.plan, trained)

    def _traced(self, number: int) -> tuple[Traced, ResponseIndex]:
        index = self._last_index()
        traced = None if self._moment is None else self._moment.traced.get(number)
        if traced is None:
            batch = index.batches[number] if 0 <= number < self.plan.num_responses else None
            traced = self._lookup.find(number, batch)
        if traced is None:
            raise LookupError(f"response {number} of iteration {self.plan.iteration} was not used, and is deleted")
        if len(traced.response.token_ids) < index.lengths[number] and not exists(
            self._store, layout.plan(self.plan.iteration)
        ):
            # A journal that is deleted reads like one that is empty.
            raise LookupError(f"iteration {self.plan.iteration} is deleted from {self._store.url}")
        return traced, index

    def _last_index(self) -> ResponseIndex:
        """The index as it was last read, unless the iteration was closed since; reading it may take long."""
        is_newer = not (self._is_closed or self._moment) and exists(self._store, layout.closed(self.plan.iteration))
        return self.index() if self._index is None or is_newer else self._index

    def _fates(self) -> dict[str, Fate]:
        """What became of the incarnations, by the report, or else by their last heartbeats."""
        if self._moment is not None:
            return self._moment.fates
        try:
            return {life.incarnation: life.state for life in read_report(self._store, self.plan.iteration).lives}
        except ObjectMissing:
            return fates_so_far(read_heartbeats(self._store, self.plan))


def fates_so_far(heartbeats: Sequence[HeartbeatRecord]) -> dict[str, Fate]:
    """What became of the incarnations of an open iteration, as far as their last heartbeats tell.

    One that did not say good-bye, and whose slot has a later incarnation, was lost.
    """
    newest: dict[int, float] = {}
    for beat in heartbeats:
        newest[beat.slot] = max(beat.started_at_s, newest.get(beat.slot, beat.started_at_s))
    fates: dict[str, Fate] = {}
    for beat in heartbeats:
        was_succeeded = beat.started_at_s < newest[beat.slot]
        fates[beat.incarnation] = "left" if beat.state == "gone" else "lost" if was_succeeded else "gone"
    return fates


class RunReader:
    """The iterations of a run. Its methods may be called by several threads; one of them reads at a time."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.lock = threading.RLock()
        self._readers: OrderedDict[int, IterationReader] = OrderedDict()
        self._places: dict[int, dict[str, int]] = {}

    def count(self) -> int:
        """How many iterations have a plan."""
        count = next_iteration(self.store)
        while exists(self.store, layout.plan(count)):
            count += 1
        return count

    def places(self, prompt_id: str) -> list[tuple[int, int]]:
        """(iteration, first response) of every group of a prompt, in the newest PLACES_ITERATIONS iterations."""
        with self.lock:
            count = self.count()
            for iteration in range(max(0, count - PLACES_ITERATIONS), count):
                if iteration not in self._places:
                    plan = read_plan(self.store, iteration)
                    prompts = enumerate(read_prompts(self.store, plan))
                    self._places[iteration] = {row.prompt_id: group * plan.num_generations for group, row in prompts}
            return [(n, first[prompt_id]) for n, first in sorted(self._places.items()) if prompt_id in first]

    @cached_property
    def decode(self) -> Decode | None:
        """Token ids to text, with special tokens; None, with a warning, if the run holds no tokenizer."""
        try:
            # An evaluation uses the model files of its run.
            run_url, _ = layout.evaluated(self.store.url)
            holder = connect(run_url)
        except ValueError:
            holder = self.store
        return load_decoder(holder, "responses are shown as token ids")

    def iteration(self, number: int) -> IterationReader:
        """The reader of an iteration; the last few are kept. Raises LookupError."""
        with self.lock:
            if number not in self._readers:
                self._readers[number] = IterationReader(self.store, number, self.decode)
            self._readers.move_to_end(number)
            while len(self._readers) > ITERATIONS_KEPT:
                self._readers.popitem(last=False)
            return self._readers[number]
