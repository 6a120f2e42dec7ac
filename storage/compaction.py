"""Compaction: makes one object from the responses that an iteration's batches name, and reads it back.

It knows which rows count (the lineage in the batch records) and checks that what is stored equals them. It does not
know when, or whether, the journal may be deleted.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from storage import layout, records
from storage.assembly import Assembled, JournalReader, with_environment
from storage.prompt_table import read_prompts
from storage.records import BatchRecord, GradedResponse, PlanRecord
from storage.responses import Response, decode_responses, encode_responses
from storage.run import exists, read_plan, read_report
from storage.shard import Finish, Logprobs, TokenIds
from storage.store import CorruptObject, ObjectMissing, ObjectStore, commit

ENDS = {"stop": Finish.STOP, "length": Finish.LENGTH}


def read_batches(store: ObjectStore, iteration: int) -> list[BatchRecord]:
    """The micro-batches recorded so far, in the order in which they were used."""
    batches: list[BatchRecord] = []
    while True:
        key = layout.batch(iteration, len(batches))
        try:
            batches.append(records.read(store, BatchRecord, key))
        except ObjectMissing:
            return batches


def read_responses(store: ObjectStore, iteration: int) -> list[Response]:
    """The finished responses of an iteration, by number: from its one object, or else from its journal.

    A response that the trainer has recorded, trained or filtered, is as it recorded it, with its rewards. Others are as
    the claims say now, without rewards. Unused responses are left out. Raises ObjectMissing if the iteration has no
    plan, and CorruptObject.
    """
    key = layout.responses(iteration)
    if not exists(store, key):
        try:
            rows = list(_journalled(store, iteration))
        except (CorruptObject, ObjectMissing):
            # The journal may have been compacted and deleted while it was read.
            if not exists(store, key):
                raise
        else:
            if not exists(store, key):
                return rows
    rows = decode_responses(key, store.get(key))
    for row in rows:
        if len(row.origins) > 1 or row.events:
            raise CorruptObject(key, with_environment(row.response))
    return rows


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
    counts as many. So batches that were lost are noticed before anything is deleted on their word.
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
    if len(named) != len(report.lengths):
        raise CorruptObject(key, f"{len(named)} responses are recorded; the report has {len(report.lengths)}")
    return graded


def compact(store: ObjectStore, iteration: int) -> None:
    """Make the one object of an iteration in which every response is recorded or unused, and check what is stored.

    On return the object has been read back and holds exactly what the batches name. It equals the journal token for
    token and bit for bit; if some of its shards are already deleted, it equals what the batches say. Writes nothing if
    the object exists. Raises what `recorded` raises, and CorruptObject if the object differs, or if neither it nor the
    journal is whole.
    """
    key = layout.responses(iteration)
    plan = read_plan(store, iteration)
    graded = recorded(store, plan)
    prompt_ids = _prompt_ids(store, plan)
    lineages = [response.lineage for response in graded.values()]
    reader = JournalReader(store, plan)
    reader.shards.advance_all(sorted({span.incarnation for lineage in lineages for span in lineage}))
    spans = (span for lineage in lineages for span in lineage)
    is_whole = all(reader.shards.last_sequence(span.incarnation) >= span.last_sequence for span in spans)
    if not exists(store, key):
        rows = [_follow(plan, prompt_ids, named, reader) for named in graded.values()]
        commit(store, key, encode_responses(rows))
    stored = decode_responses(key, store.get(key))
    if [row.response for row in stored] != list(graded):
        raise CorruptObject(key, f"its {len(stored)} responses are not the {len(graded)} that the batches name")
    for row in stored:
        named = graded[row.response]
        of_batches = _graded_row(plan, prompt_ids, named, row.token_ids, row.logprobs)
        expected = _follow(plan, prompt_ids, named, reader) if is_whole else of_batches
        if not row.equals(expected) or not len(row.token_ids) == len(row.logprobs) == named.length:
            raise CorruptObject(key, f"response {row.response} is not what the batches and the journal say")


def _journalled(store: ObjectStore, iteration: int) -> Iterator[Response]:
    plan = read_plan(store, iteration)
    prompt_ids = _prompt_ids(store, plan)
    batches = read_batches(store, iteration)
    graded = _by_response(batches)
    unused = unused_responses(plan, [r for b in batches for r in b.responses], [r for b in batches for r in b.filtered])
    reader = JournalReader(store, plan)
    reader.refresh()
    for response in range(plan.num_responses):
        if response in graded:
            yield _follow(plan, prompt_ids, graded[response], reader)
        elif response not in unused:
            assembled = reader.assemble(response)
            if assembled.finish.ends_response:
                yield _ungraded_row(plan, prompt_ids, assembled)


def _graded_row(
    plan: PlanRecord, prompt_ids: list[str], named: GradedResponse, token_ids: TokenIds, logprobs: Logprobs
) -> Response:
    """A response as plan and batches describe it, with its tokens."""
    group = named.response // plan.num_generations
    return Response(
        named.response,
        group,
        prompt_ids[group],
        token_ids,
        logprobs,
        ENDS[named.finish_reason],
        named.reward,
        named.rewards,
        plan.weight_version,
        len(named.lineage),
        origins=(len(token_ids),),
        events=(),
    )


def _follow(plan: PlanRecord, prompt_ids: list[str], named: GradedResponse, reader: JournalReader) -> Response:
    """A recorded response with the journal's tokens; raises CorruptObject if its end or length differs there."""
    assembled = reader.follow(named.response, named.lineage)
    if assembled.finish != ENDS[named.finish_reason] or len(assembled.token_ids) != named.length:
        raise CorruptObject(
            layout.journal(plan.iteration),
            f"response {named.response} has {len(assembled.token_ids)} tokens and ends with "
            f"{assembled.finish.name.lower()}; the batches say {named.length} and {named.finish_reason}",
        )
    return _graded_row(plan, prompt_ids, named, assembled.token_ids, assembled.logprobs)


def _ungraded_row(plan: PlanRecord, prompt_ids: list[str], assembled: Assembled) -> Response:
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
        len(assembled.lineage),
        origins=(len(assembled.token_ids),),
        events=(),
    )


def _by_response(batches: Iterable[BatchRecord]) -> Mapping[int, GradedResponse]:
    """The recorded responses by number, in ascending order."""
    named = {response.response: response for batch in batches for response in batch.graded}
    return dict(sorted(named.items()))


def _prompt_ids(store: ObjectStore, plan: PlanRecord) -> list[str]:
    return [row.prompt_id for row in read_prompts(store, plan)]
