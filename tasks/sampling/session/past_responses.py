"""PastResponses: a thread that reads the last epoch's responses to a plan's prompts, for an engine that drafts.

The order of the data tells which iteration drew a prompt last, and the iteration's stored parts hold the responses. The
thread reads beside the pull of the weights and the first steps, within limits, and everything that is wrong with what
it reads only ends the reading: without these responses the engine has fewer drafts.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Self

from storage.clock import Clock
from storage.journal.compaction import stored_body
from storage.journal.response_parts import ResponsesRecord, StoredPart
from storage.journal.responses import find_response, open_responses
from storage.journal.shard import TokenIds
from storage.records import layout, records
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord
from storage.records.run import num_drawn, read_plan
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from tasks.configuration.data import DataConfig
from tasks.configuration.run_config import RunConfig
from tasks.prompts.order import position_before
from tasks.sampling.engines.drafter import Remembers
from tasks.sampling.engines.engine import Engine
from tasks.sampling.session.draft_corpus import DraftCorpus

log = logging.getLogger(__name__)
# Limits of one session. A part of 2^25 tokens, the most that one holds, has 100 to 160 MB.
BYTES_MAX, SECONDS_MAX = 256 << 20, 60.0
# A part is read whole, at 3 to 5 bytes a token, and the least share of it that is wanted pays: a token that is read
# takes a tenth of a microsecond at 50 MB/s, and one that is drafted rightly saves some ten microseconds.
SHARE_MIN = 1 / 64
# A member that was told to go has little time left, and the thread dies with its process.
_END_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class WantedPart:
    """A stored part, and what is wanted of it.

    Attributes:
        iteration: the iteration whose responses the part holds.
        part: the part, as responses.json names it.
        groups: by number of a wanted response of that iteration, the group of the present plan with the same prompt.
    """

    iteration: int
    part: StoredPart
    groups: Mapping[int, int]

    @property
    def share(self) -> float:
        """The share of the part's responses that are wanted."""
        return len(self.groups) / (self.part.last + 1 - self.part.first)

    @cached_property
    def key(self) -> str:
        return layout.responses_part(self.iteration, self.part.first, self.part.last)


class PastDrawings:
    """Finds where a run has stored earlier responses to prompts of a plan; reads each record at most once."""

    def __init__(self, store: ObjectStore, plan: PlanRecord, data: DataConfig) -> None:
        """data: the order of the data set; the plan must have `prompts_per_epoch`."""
        self._store = store
        self._plan = plan
        self._data = data
        self._plans: dict[int, PlanRecord] = {plan.iteration: plan}

    @cached_property
    def _begins(self) -> int:
        """The run's first position; a run that began with another run's optimizer has the positions before it there."""
        return self._read(0).first_prompt if self._plan.counted_from else 0

    def parts(self, groups: range | tuple[int, ...]) -> list[WantedPart]:
        """The parts with responses to the prompts of these groups, those with the largest share wanted first.

        Prompts that were never drawn, and iterations that are not compacted, have none. Raises the store's errors and
        CorruptObject.
        """
        found: list[WantedPart] = []
        for iteration, wanted in self._wanted(groups).items():
            try:
                record = records.read(self._store, ResponsesRecord, layout.responses(iteration))
            except ObjectMissing:
                continue
            for part in record.parts:
                inside = {number: group for number, group in wanted.items() if part.first <= number <= part.last}
                if inside:
                    found.append(WantedPart(iteration, part, inside))
        return sorted(found, key=lambda part: part.share, reverse=True)

    def _wanted(self, groups: range | tuple[int, ...]) -> dict[int, dict[int, int]]:
        """By iteration, the numbers of the responses that it drew for the prompts of these groups, with the groups."""
        wanted: dict[int, dict[int, int]] = defaultdict(dict)
        drawn = num_drawn(self._plan)
        for group in (each for each in sorted(groups) if each < drawn):
            position = self._last(self._plan.first_prompt + group)
            if position is not None and position >= self._begins:
                past = self._drawn_by(position)
                first = (position - past.first_prompt) * past.num_generations
                wanted[past.iteration] |= dict.fromkeys(range(first, first + past.num_generations), group)
        return wanted

    def _last(self, position: int) -> int | None:
        """The last position of the same prompt ahead of the plan; None if there is none."""
        size, found = self._plan.prompts_per_epoch, position_before
        earlier = found(position, size, self._data.seed, self._data.shuffle)
        while earlier is not None and earlier >= self._plan.first_prompt:
            earlier = found(earlier, size, self._data.seed, self._data.shuffle)
        return earlier

    def _drawn_by(self, position: int) -> PlanRecord:
        """The last plan that begins at a position or ahead of it: prompts of unused responses are drawn again."""
        number = position * self._plan.iteration // self._plan.first_prompt
        while self._read(number).first_prompt > position:
            number -= 1
        while self._read(number + 1).first_prompt <= position:
            number += 1
        return self._read(number)

    def _read(self, iteration: int) -> PlanRecord:
        if iteration not in self._plans:
            self._plans[iteration] = read_plan(self._store, iteration)
        return self._plans[iteration]


@contextmanager
def opened_corpus(
    store: ObjectStore,
    plan: PlanRecord,
    config: RunConfig,
    *,
    slot: int,
    prompts: Sequence[PromptRow],
    engine: Engine,
    clock: Clock,
) -> Iterator[DraftCorpus | None]:
    """The corpus of a session whose engine drafts from others' responses; None for any other engine.

    Inside the block PastResponses reads; the arguments are those of PastResponses and DraftCorpus.
    """
    if not config.rollout.speculation.from_siblings or not isinstance(engine, Remembers):
        yield None
        return
    corpus = DraftCorpus(prompts)
    with PastResponses(store, plan, config.data, slot, corpus, clock):
        yield corpus


class PastResponses:
    """Adds the last epoch's responses to a plan's prompts to a corpus, in a thread that ends with the block."""

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        data: DataConfig,
        slot: int,
        corpus: DraftCorpus,
        clock: Clock,
        *,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        """Prepare the reading; the thread begins with the block.

        Args:
            store: the directory of the run.
            plan: the plan whose prompts count; without `prompts_per_epoch`, and for an evaluation, nothing is read.
            data: the order of the data set.
            slot: a slot of the plan, whose groups count; a number beyond stands for a member of all groups.
            corpus: what the responses are added to.
            clock: the clock of the limit of SECONDS_MAX.
            bytes_max: the most bytes of parts that are read.
        """
        self._store = store
        self._drawings = PastDrawings(store, plan, data)
        self._groups = plan.slots[slot].groups if slot < len(plan.slots) else range(plan.num_groups)
        self._corpus = corpus
        self._clock = clock
        self._bytes_left = bytes_max
        self._end_s = clock.monotonic() + SECONDS_MAX
        self._is_given_up = False
        self._has_past = bool(plan.prompts_per_epoch) and plan.weights_url is None
        self._thread = threading.Thread(target=self._run, name="past-responses", daemon=True)

    def __enter__(self) -> Self:
        if self._has_past:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_given_up = True
        if self._thread.is_alive():
            self._thread.join(_END_TIMEOUT_S)

    def _run(self) -> None:
        try:
            count = self.read()
            log.info("drafts: %d responses of an earlier epoch", count)
        except Exception as error:  # noqa: BLE001 - nothing depends on drafts
            log.info("drafts: no more responses of an earlier epoch: %s", error)

    def read(self) -> int:
        """Read within the limits, and return the number of responses added; raises the errors of `PastDrawings`."""
        count = 0
        for part in self._drawings.parts(self._groups) if self._has_past else ():
            if self._is_given_up or self._clock.monotonic() > self._end_s or part.share < SHARE_MIN:
                break
            try:
                for group, token_ids in self._rows(part):
                    self._corpus.extend([(group, token_ids)])
                    count += 1
            except (ObjectMissing, CorruptObject) as error:
                log.info("drafts: without %s: %s", part.key, error)
        return count

    def _rows(self, part: WantedPart) -> Iterator[tuple[int, TokenIds]]:
        """The wanted responses of a part, by their groups, if the bytes left allow."""
        if self._store.get(part.key, self._bytes_left, self._bytes_left + 1):
            return
        body = stored_body(self._store, part.iteration, part.part)
        self._bytes_left -= len(body)
        table = open_responses(part.key, body)
        for number, group in part.groups.items():
            row = find_response(part.key, table, number)
            if row is not None:
                yield group, row.token_ids.copy()
