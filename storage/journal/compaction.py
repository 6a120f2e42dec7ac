"""Compaction: stores the responses that an iteration's batches name by parts, and reads them back.

Only rows of the lineages in the batch records count, and the stored parts are checked against these rows. Deleting the
journal is left to retention.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count

from storage.journal.assembly import Assembled, JournalReader
from storage.journal.response_parts import PART_TOKENS, ResponsesRecord, StoredPart, divide, parts_of_plan
from storage.journal.responses import Response, decode_responses, encode_responses
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.framing import trailer_digest
from storage.records.prompt_table import read_prompts
from storage.records.records import BatchRecord, GradedResponse, PlanRecord
from storage.records.run import exists, read_plan, read_report
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore, commit

ENDS = {"stop": Finish.STOP, "length": Finish.LENGTH, "failed": Finish.FAILED}


def read_batches(store: ObjectStore, iteration: int) -> list[BatchRecord]:
    """The recorded micro-batches in the order of their use."""
    return list(each_batch(store, iteration))


def each_batch(store: ObjectStore, iteration: int) -> Iterator[BatchRecord]:
    """The micro-batches recorded so far, one in memory at a time."""
    for number in count():
        try:
            yield records.read(store, BatchRecord, layout.batch(iteration, number))
        except ObjectMissing:
            return


def read_responses(store: ObjectStore, iteration: int) -> Iterator[Response]:
    """The responses that `read_parts` reads, one by one; it holds one part in memory."""
    return chain.from_iterable(read_parts(store, iteration))


def read_parts(store: ObjectStore, iteration: int, part_tokens: int = PART_TOKENS) -> Iterator[list[Response]]:
    """The finished responses of an iteration, by number, a part at a time: as compacted, or else from its journal.

    No part is empty. A recorded response, trained or filtered, has the tokens and rewards of its batch record. An
    unrecorded response has the tokens that the claims give now, and no rewards. Unused responses are left out. If
    another process compacts the iteration meanwhile, the rest comes from the stored parts. Raises ObjectMissing if the
    iteration has no plan, and CorruptObject, possibly between two parts.
    """
    key, start = layout.responses(iteration), 0
    if not exists(store, key):
        try:
            for part, rows in _journalled(store, iteration, part_tokens):
                if exists(store, key):
                    break
                if rows:
                    yield rows
                start = part.stop
                del rows
            else:
                return
        except (CorruptObject, ObjectMissing):
            # The journal may have been compacted and deleted while it was read.
            if not exists(store, key):
                raise
    for stored in records.read(store, ResponsesRecord, key).parts:
        if stored.last >= start:
            yield [row for row in stored_rows(store, iteration, stored) if row.response >= start]


def stored_rows(store: ObjectStore, iteration: int, part: StoredPart) -> list[Response]:
    """The responses of a part that the record names."""
    key = layout.responses_part(iteration, part.first, part.last)
    rows = decode_responses(key, stored_body(store, iteration, part))
    numbers = [row.response for row in rows]
    if numbers != sorted(set(numbers)) or numbers[:1] != [part.first] or numbers[-1:] != [part.last]:
        raise CorruptObject(key, f"its {len(rows)} responses are not {part.first} to {part.last}, ascending")
    return rows


def stored_body(store: ObjectStore, iteration: int, part: StoredPart) -> bytes:
    """The bytes of a part that the record names."""
    key, record = layout.responses_part(iteration, part.first, part.last), layout.responses(iteration)
    try:
        body = store.get(key)
    except ObjectMissing:
        raise CorruptObject(key, f"it is gone, although {record!r} names it") from None
    if trailer_digest(body) != part.digest:
        raise CorruptObject(key, f"it is not the part that {record!r} names")
    return body


def unused_responses(
    plan: PlanRecord, trained: Collection[GradedResponse], filtered: Collection[GradedResponse]
) -> range:
    """The responses of the groups after the last one in a batch, once the plan's wanted number of groups is trained."""
    size = plan.num_generations
    if plan.groups_wanted is None or len({graded.response // size for graded in trained}) < plan.groups_wanted:
        return range(0)
    last = max(graded.response // size for graded in (*trained, *filtered))
    return range((last + 1) * size, plan.num_responses)


def recorded(store: ObjectStore, plan: PlanRecord) -> Mapping[int, GradedResponse]:
    """The responses that the batches of an iteration name, by number, ascending.

    Raises CorruptObject unless each response of the plan is recorded once or unused, and the report, if there is one,
    counts as many. This check notices lost batch records before the journal is deleted.
    """
    batches, key = read_batches(store, plan.iteration), layout.batches(plan.iteration)
    named = [response for batch in batches for response in batch.graded]
    graded = _by_response(batches)
    trained, filtered = ([r for b in batches for r in b.responses], [r for b in batches for r in b.filtered])
    unused = unused_responses(plan, trained, filtered)
    if len(graded) != len(named) or sorted([*graded, *unused]) != list(range(plan.num_responses)):
        reason = f"{len(named)} responses are recorded and {len(unused)} are unused"
        raise CorruptObject(key, f"{reason}; the plan has {plan.num_responses}, each of them once")
    try:
        report = read_report(store, plan.iteration)
    except ObjectMissing:
        return graded
    rewarded = sum(response.reward is not None for response in named)
    if rewarded != len(report.lengths):
        raise CorruptObject(key, f"{rewarded} responses are graded; the report has {len(report.lengths)}")
    return graded


def compact(store: ObjectStore, iteration: int, part_tokens: int = PART_TOKENS) -> None:
    """Store the responses of an iteration, each of them recorded or unused, by parts, and check what is stored.

    On return every part that the record names has been read back and holds exactly what the batches name. It equals the
    journal token for token and bit for bit; if some shards are already deleted, it equals what the batches say. An
    existing part is not written again, and nothing is written if the record exists. One part is in memory at a time,
    with at most `part_tokens` tokens. Raises what `recorded` raises, and CorruptObject if a part differs, or if neither
    the parts nor the journal is whole.
    """
    plan = read_plan(store, iteration)
    graded = recorded(store, plan)
    prompt_ids = _prompt_ids(store, plan)
    while True:
        attempt = _Compaction(store, plan, graded, prompt_ids, part_tokens)
        try:
            if attempt.run():
                return
        except (CorruptObject, ObjectMissing) as error:
            # Another process may have compacted the iteration meanwhile, and delete the journal, or parts that its
            # record does not name. Each time round at least one object more is gone, so this ends.
            is_damage = attempt.checks_record and isinstance(error, CorruptObject)
            if is_damage or not exists(store, layout.responses(iteration)):
                raise


class _Compaction:
    """One attempt to store the parts, or to check stored parts."""

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        graded: Mapping[int, GradedResponse],
        prompt_ids: list[str],
        part_tokens: int,
    ) -> None:
        self._store = store
        self._plan = plan
        self._graded = graded
        self._prompt_ids = prompt_ids
        self._key = layout.responses(plan.iteration)
        self._named = records.read(store, ResponsesRecord, self._key).parts if exists(store, self._key) else None
        if self._named is None:
            self._ranges = divide({number: each.length for number, each in graded.items()}, part_tokens)
        else:
            self._ranges = [range(part.first, part.last + 1) for part in self._named]
        covered = sum(number in graded for part in self._ranges for number in part)
        if covered != len(graded):
            reason = f"its parts have {covered} of the {len(graded)} responses that the batches name"
            raise CorruptObject(self._key, reason)
        self._reader = JournalReader(store, plan, parts=self._ranges)

    @property
    def checks_record(self) -> bool:
        """True if the record existed at the beginning: parts are checked and nothing is written."""
        return self._named is not None

    def run(self) -> bool:
        """True if the record names the checked parts; False if another process stored a different record first."""
        spans = {span for each in self._graded.values() for span in each.lineage}
        shards = self._reader.shards
        shards.advance_all(sorted({span.incarnation for span in spans}))
        is_whole = all(shards.last_sequence(span.incarnation) >= span.last_sequence for span in spans)
        # Without a record nobody may have deleted a shard, so one that is missing is reported.
        journalled = self._named is None or is_whole
        parts = [self._part(part, journalled=journalled) for part in self._each(journalled=journalled)]
        if self._named is not None:
            return True
        return records.commit(
            self._store, self._key, ResponsesRecord(iteration=self._plan.iteration, parts=tuple(parts))
        )

    def _each(self, *, journalled: bool) -> Iterable[range]:
        if not self._ranges:
            return ()
        return self._reader.parts() if journalled else self._ranges

    def _part(self, part: range, *, journalled: bool) -> StoredPart:
        """Store a part if that is still to be done, and check what is stored."""
        graded = [self._graded[number] for number in part if number in self._graded]
        key = layout.responses_part(self._plan.iteration, part.start, part[-1])
        expected: list[Response] = []
        if journalled:
            expected = [follow_recorded(self._plan, self._prompt_ids, named, self._reader) for named in graded]
        if self._named is None:
            if not exists(self._store, key):
                commit(self._store, key, encode_responses(expected))
            body = self._store.get(key)
        else:
            body = stored_body(self._store, self._plan.iteration, self._named[self._ranges.index(part)])
        stored = decode_responses(key, body)
        if [row.response for row in stored] != [named.response for named in graded]:
            raise CorruptObject(key, f"its {len(stored)} responses are not the {len(graded)} that the batches name")
        for index, (row, named) in enumerate(zip(stored, graded, strict=True)):
            of_batches = _graded_row(self._plan, self._prompt_ids, named, row, row.spans)
            is_same = row.equals(expected[index] if journalled else of_batches)
            is_same &= len(row.spans) == len(named.lineage)
            if not is_same or (len(row.token_ids), row.policy_length) != (named.length, named.policy_length):
                raise CorruptObject(key, f"response {row.response} is not what the batches and the journal say")
        return StoredPart(first=part.start, last=part[-1], digest=trailer_digest(body))


def unnamed_parts(store: ObjectStore, iteration: int, keys: Iterable[str]) -> list[str]:
    """The given keys that are parts of a compacted iteration without a place in its record.

    A process that divided the responses differently and finished second left them. No record will ever name them; if
    their writer still runs, it starts again from the record as soon as it misses a part. Raises ObjectMissing without a
    record: any part may then be about to be named.
    """
    record = records.read(store, ResponsesRecord, layout.responses(iteration))
    named = {layout.responses_part(iteration, part.first, part.last) for part in record.parts}
    return [key for key in keys if key.startswith(layout.responses_parts(iteration)) and key not in named]


def _journalled(store: ObjectStore, iteration: int, part_tokens: int) -> Iterator[tuple[range, list[Response]]]:
    plan = read_plan(store, iteration)
    prompt_ids = _prompt_ids(store, plan)
    batches = read_batches(store, iteration)
    graded = _by_response(batches)
    unused = unused_responses(plan, [r for b in batches for r in b.responses], [r for b in batches for r in b.filtered])
    reader = JournalReader(store, plan, parts=parts_of_plan(plan, graded.values(), part_tokens))
    reader.refresh()

    def rows_of(part: range) -> Iterator[Response]:
        for response in part:
            if response in graded:
                yield follow_recorded(plan, prompt_ids, graded[response], reader)
            elif response not in unused:
                assembled = reader.assemble(response)
                if assembled.finish.ends_response:
                    yield unrecorded_row(plan, prompt_ids, assembled)

    for part in reader.parts():
        yield part, list(rows_of(part))


def _graded_row(
    plan: PlanRecord,
    prompt_ids: Sequence[str],
    named: GradedResponse,
    tokens: Assembled | Response,
    spans: tuple[int, ...],
) -> Response:
    """A response as plan and batches describe it, with its tokens and how many of them came from each span."""
    group = named.response // plan.num_generations
    return Response(
        named.response,
        group,
        prompt_ids[group],
        tokens.token_ids,
        tokens.logprobs,
        ENDS[named.finish_reason],
        named.reward,
        named.rewards,
        plan.weight_version,
        spans,
        origins=tokens.origins,
        events=tokens.events,
    )


def follow_recorded(
    plan: PlanRecord, prompt_ids: Sequence[str], named: GradedResponse, reader: JournalReader
) -> Response:
    """A recorded response with the journal's tokens; raises CorruptObject if the journal has another end or length."""
    assembled = reader.follow(named.response, named.lineage)
    found, said = (len(assembled.token_ids), assembled.policy_length), (named.length, named.policy_length)
    if assembled.finish != ENDS[named.finish_reason] or found != said:
        raise CorruptObject(
            layout.journal(plan.iteration),
            f"response {named.response} has {found[0]} tokens, {found[1]} of them sampled, and ends with "
            f"{assembled.finish.name.lower()}; the batches say {said[0]}, {said[1]} and {named.finish_reason}",
        )
    return _graded_row(plan, prompt_ids, named, assembled, assembled.span_tokens)


def unrecorded_row(plan: PlanRecord, prompt_ids: Sequence[str], assembled: Assembled) -> Response:
    """A response that is not recorded, as far as the journal has it."""
    group = assembled.response // plan.num_generations
    return Response(
        assembled.response,
        group,
        prompt_ids[group],
        assembled.token_ids,
        assembled.logprobs,
        assembled.finish,
        None,
        {},
        plan.weight_version,
        assembled.span_tokens,
        origins=assembled.origins,
        events=assembled.events,
    )


def _by_response(batches: Iterable[BatchRecord]) -> Mapping[int, GradedResponse]:
    """The recorded responses by number, in ascending order."""
    named = {response.response: response for batch in batches for response in batch.graded}
    return dict(sorted(named.items()))


def _prompt_ids(store: ObjectStore, plan: PlanRecord) -> list[str]:
    return [row.prompt_id for row in read_prompts(store, plan)]
