"""What another run knows of the prompts of a run (`data.from`): lengths for the planner, and pass rates for a choice.

A prompt is known by its text or messages, so the rows may have other places and ids there. The other run is read alone.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from storage.digests import digest_of
from storage.errors import WrongInputError
from storage.journal.compaction import each_batch
from storage.records import canonical, layout, records
from storage.records.length_tables import LengthTable, encode_lengths, newest_lengths, store_known_lengths
from storage.records.lineage import KeptPromptsRecord, PromptsOrigin
from storage.records.prompt_table import read_prompts
from storage.records.run import connect_to_run, count_committed, read_plan, read_run
from storage.stores.connect import connect
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore, StorageError
from tasks.configuration.data import DataConfig
from tasks.configuration.evaluation import PASS_THRESHOLD
from tasks.configuration.origins import iterations_of
from tasks.configuration.run_config import RunConfig
from tasks.planning.prompt_features import prompt_digest
from tasks.prompts.openings import reset_columns
from tasks.prompts.prompt import Message, Prompt, PromptSet
from tasks.prompts.run_examples import RunExamples
from tasks.reporting.export import parse_range


class KnownPromptsError(WrongInputError):
    """The other run knows nothing of the prompts, or no prompt has a pass rate within the bounds."""


class KeptPrompts:
    """A PromptSet of some rows of another, in order."""

    def __init__(self, prompts: PromptSet, rows: Sequence[int]) -> None:
        """Raises KnownPromptsError for a row that the source does not have."""
        if rows and rows[-1] >= len(prompts):
            raise KnownPromptsError(f"data.source: {len(prompts)} rows; allowed: {rows[-1] + 1}, as the run began with")
        self._prompts, self._rows = prompts, rows
        self.columns = prompts.columns
        self.doubts: Sequence[str] = getattr(prompts, "doubts", ())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[self._rows[index]]

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))

    def place(self, index: int) -> str:
        """The place of the row in the source."""
        return self._prompts.place(self._rows[index])


@dataclass(frozen=True)
class Known:
    """What another run knows of a run's prompts.

    Attributes:
        origin: What run.json states.
        rows: The rows that are kept; None: all.
        lengths: The learned lengths of the prompts; None without any.
    """

    origin: PromptsOrigin
    rows: tuple[int, ...] | None
    lengths: LengthTable | None = None

    def kept(self, prompts: PromptSet) -> PromptSet:
        """The prompts of the run among those of the source."""
        if self.rows is None:
            return prompts
        return prompts.kept(self.rows) if isinstance(prompts, RunExamples) else KeptPrompts(prompts, self.rows)

    def save(self, store: ObjectStore) -> PromptsOrigin:
        """Store rows and lengths, named by their content, ahead of run.json; returns what run.json states."""
        if self.rows is not None and self.origin.kept is not None:
            records.commit(store, layout.kept_prompts(self.origin.kept), KeptPromptsRecord(rows=self.rows))
        if self.lengths is not None:
            store_known_lengths(store, self.lengths)
        return self.origin


@dataclass
class _Tally:
    """A prompt in the other run: the ids, and the numbers of graded and of correct responses."""

    ids: set[str]
    graded: int = 0
    correct: int = 0


def known_prompts(store: ObjectStore, config: RunConfig, prompts: PromptSet) -> Known | None:
    """What is known of the prompts of a run: as the run has it, or for a new run as `find_known`; None without any.

    prompts: those of the source. Raises KnownPromptsError, and CorruptObject if the run's own is damaged.
    """
    if config.data.from_ is None:
        return None
    try:
        origin = read_run(store).prompts_origin
    except ObjectMissing:
        return find_known(config.data, prompts)
    if origin is None:
        raise CorruptObject(layout.RUN, "no prompts_origin, although its configuration has data.from")
    if origin.kept is None:
        return Known(origin, None)
    record = records.read(store, KeptPromptsRecord, layout.kept_prompts(origin.kept))
    if _digest(record.rows) != origin.kept:
        raise CorruptObject(layout.kept_prompts(origin.kept), f"it is not the one that {layout.RUN} names")
    return Known(origin, record.rows)


def known_to_check(config: RunConfig, prompts: PromptSet) -> Known | None:
    """`known_prompts` for `gleaner check`, which may be out of reach of the run's own store."""
    try:
        return known_prompts(connect(config.run.url), config, prompts)
    except StorageError:
        return None if config.data.from_ is None else find_known(config.data, prompts)


def find_known(data: DataConfig, prompts: PromptSet) -> Known:
    """What the run in `data.from` knows of the prompts of a source; raises KnownPromptsError, one line.

    A prompt's pass rate is the share of its graded responses, in all chosen iterations, whose reward is at least 1. A
    prompt without any stays.
    """
    assert data.from_ is not None
    named, field = iterations_of(data.from_), f"data.from: value {data.from_!r}"
    try:
        store = connect_to_run(named.url)
        count = count_committed(store)
        chosen = parse_range(named.iterations, count) if count else range(0)
    except StorageError:
        raise
    except (LookupError, ValueError) as error:
        raise KnownPromptsError(f"{field}; {error}") from None
    if not chosen:
        raise KnownPromptsError(f"{field}; {store.url} holds no committed iteration")
    if data.pass_rate is not None and not read_plan(store, chosen.start).is_graded:
        raise KnownPromptsError(
            f"data.pass_rate: value {list(data.pass_rate)}; allowed with {store.url}: null, because it grades nothing"
        )
    tallies = _tallies(store, chosen)
    keys = [_key(prompt.text_or_messages) for prompt in prompts]
    found = [tallies.get(key) for key in keys]
    if not any(found):
        raise KnownPromptsError(
            f"{field}; none of its {len(tallies)} prompts is in data.source {data.source!r}; allowed: a run of prompts "
            f"of this source, and that one's is {_source(store)!r}"
        )
    low, high = data.pass_rate or (0.0, 1.0)
    rates = [None if each is None or not each.graded else each.correct / each.graded for each in found]
    rows = tuple(row for row, rate in enumerate(rates) if rate is None or low <= rate <= high)
    table = newest_lengths(store, chosen.stop)
    ids = [(prompts[row].id, each.ids) for row, each in enumerate(found) if each is not None]
    lengths = None if table is None else _renamed(table, ids)
    origin = PromptsOrigin(
        url=named.url,
        first=chosen.start,
        stop=chosen.stop,
        prompts=len(prompts),
        seen=sum(rate is not None for rate in rates),
        below=sum(rate is not None and rate < low for rate in rates),
        above=sum(rate is not None and rate > high for rate in rates),
        kept=None if data.pass_rate is None else _digest(rows),
        lengths=None if lengths is None else digest_of(encode_lengths(lengths)),
    )
    if not rows:
        raise KnownPromptsError(
            f"data.pass_rate: value {[low, high]}; no prompt of {len(prompts)} is left: {origin.below} have a lower "
            f"pass rate, {origin.above} a higher one"
        )
    return Known(origin, None if data.pass_rate is None else rows, lengths)


def _tallies(store: ObjectStore, chosen: range) -> dict[str, _Tally]:
    """What each prompt has in the chosen iterations, by `_key`."""
    tallies: dict[str, _Tally] = {}
    for iteration in chosen:
        plan = read_plan(store, iteration)
        of_group = []
        for row in read_prompts(store, plan):
            tally = tallies.setdefault(_key(_before_opening(row.prompt, row.columns, row.opening)), _Tally(set()))
            tally.ids.add(row.prompt_id)
            of_group.append(tally)
        for batch in each_batch(store, iteration):
            for graded in batch.graded:
                if graded.reward is not None:
                    tally = of_group[graded.response // plan.num_generations]
                    tally.graded += 1
                    tally.correct += graded.reward >= PASS_THRESHOLD
    return tallies


def _before_opening(
    prompt: str | list[Message], columns: dict[str, object], opening: str | None
) -> str | list[Message]:
    found: str | list[Message] = reset_columns(prompt, columns, opening)["prompt"]
    return found


def _digest(rows: tuple[int, ...]) -> str:
    return digest_of(canonical.encode(KeptPromptsRecord(rows=rows)))


def _key(prompt: str | list[Message]) -> str:
    return digest_of(json.dumps(prompt, sort_keys=True).encode())


def _source(store: ObjectStore) -> str:
    return str(read_run(store).config.get("data", {}).get("source"))


def _renamed(table: LengthTable, ids: Sequence[tuple[str, set[str]]]) -> LengthTable:
    """A table with the prompts of this run, each with what the other run has under the first of its ids there.

    Of its iterations nothing is left: every prompt was seen before the first.
    """
    places = {int(digest): place for place, digest in enumerate(table.prompts)}
    chosen: dict[int, int] = {}
    for ours, theirs in ids:
        for digest in map(prompt_digest, sorted(theirs)):
            if digest in places:
                chosen[prompt_digest(ours)] = places[digest]
                break
    digests = np.array(sorted(chosen), dtype=np.uint64)
    rows = np.array([chosen[int(digest)] for digest in digests], dtype=np.int64)
    return replace(
        table,
        iteration=0,
        prompts=digests,
        mean=table.mean[rows],
        deviation=table.deviation[rows],
        count=table.count[rows],
        last_seen=np.zeros(len(rows), np.uint32),
    )
