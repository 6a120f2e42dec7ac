"""The checks after a history, from the objects in the store alone and independent of the production reader.

The reference reader and the expected fate of each group are written from docs/format.md (algorithms O, R and F). They
share nothing with storage/journal/assembly.py and tasks/learning except the decoding of a shard. A second reader, in
simulation/stored_objects.py, decodes JSON objects.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Literal

from simulation.judge_absence import check_latecomers, check_waiting, is_member
from simulation.judge_promises import Promises, ownership
from simulation.judge_releases import check_releases, takes_from_tool
from simulation.judge_run import check_run
from simulation.judge_turns import check_turns, since_last_begun, turns_of
from simulation.ledger import Claim, Ledger
from simulation.one_thread import threads_in_turn
from simulation.reference_reader import Reference, read_reference
from simulation.simulated_crew import Outcome, merged
from simulation.simulated_history import History, reward_of
from simulation.simulated_machine import ShardMemory, shards_remembered
from simulation.simulated_run import SimulatedRun
from simulation.stored_objects import batch_of
from simulation.undisturbed import Whole
from storage.journal.assembly import JournalReader
from storage.journal.shard import Finish, Row
from storage.records import layout
from storage.records.records import BatchRecord, GradedResponse, PlanRecord
from storage.stores.store import CorruptObject, ObjectStore
from tasks.reporting.verification import IntegrityError, verified_parts

# A member with a heartbeat at least every half claim_ttl_s, for three claim_ttl_s, lives in the view of every member,
# whatever clocks and stores do.
REGULAR_TTLS, GAP_TTLS = 3.0, 0.5
Fate = Literal["trained", "filtered"]


def live_and_judge(history: History) -> Outcome:
    """Simulate a history and check it; `broken` of the result lists every broken rule of every iteration.

    Counts and bounds cover all iterations, the rest of the result the first iteration.
    """
    with shards_remembered() as memory, threads_in_turn():
        run = SimulatedRun(history)
        outcomes, references = run.run(), []
        for outcome in outcomes:
            try:
                references.append(_judge(outcome, outcome.history, memory))
            except (CorruptObject, KeyError, TypeError) as error:
                outcome.ledger.breaks(f"changed: claims or shards that cannot be read: {error!r}")
        if history.iterations > 1 and len(references) == len(outcomes):
            check_run(run.ledger, outcomes, references)
    return merged(outcomes)


def _judge(outcome: Outcome, history: History, memory: ShardMemory) -> Reference:
    reference = read_reference(outcome.ledger, history.plan, memory)
    _check_store(outcome.ledger, reference.store)
    _check_batches(outcome, reference)
    _check_readers(outcome, reference)
    _check_transfers(outcome, history, reference)
    outcome.counts["cuts"] += check_releases(outcome.ledger, history, reference)
    _check_requests(outcome, history, reference)
    check_turns(outcome, reference)
    check_latecomers(outcome.ledger)
    outcome.promise_to_bound = _promises(outcome, history, reference).check()
    outcome.wait_to_bound = check_waiting(outcome.ledger, history, _news(outcome, reference))
    _count(outcome, reference)
    return reference


def _promises(outcome: Outcome, history: History, reference: Reference) -> Promises:
    ledger = outcome.ledger
    written: dict[tuple[str, int], list[tuple[float, Row]]] = defaultdict(list)
    for (name, _, response), rows in reference.rows.items():
        for sequence, row in rows:
            written[name, response].append((ledger.created_at_s[layout.shard(ledger.iteration, name, sequence)], row))
    for rows_of_one in written.values():
        rows_of_one.sort(key=itemgetter(0))
    return Promises(ledger, history, written, ownership(ledger, history.plan))


def _news(outcome: Outcome, reference: Reference) -> set[str]:
    """The shards that hold tokens that count."""
    return {
        layout.shard(reference.plan.iteration, span.incarnation, sequence)
        for response in outcome.truth
        for span in reference.lineage(response)
        for sequence, _ in reference.rows_of(response, span)
    }


def _check_store(ledger: Ledger, store: ObjectStore) -> None:
    """Check that every acknowledged object exists and has the written bytes."""
    stored = set(store.list(""))
    for key, body in ledger.created.items():
        if key not in stored or store.get(key) != body:
            ledger.breaks(f"lost: {key} is no longer what was acknowledged")


def fates_of_groups(plan: PlanRecord, truth: Mapping[int, Whole]) -> dict[int, Fate]:
    """Algorithm F: groups are taken in the order of their numbers until enough are trained; the rest is unused.

    The result depends on the undisturbed responses alone, so there is one right answer for every course of a history.
    """
    fates: dict[int, Fate] = {}
    for group in range(plan.num_groups):
        if plan.groups_wanted is not None and list(fates.values()).count("trained") == plan.groups_wanted:
            break
        members = range(group * plan.num_generations, (group + 1) * plan.num_generations)
        is_equal = len({reward_of(truth[response].token_ids) for response in members}) == 1
        fates[group] = "filtered" if is_equal and plan.groups_wanted is not None else "trained"
    return fates


def _check_batches(outcome: Outcome, reference: Reference) -> None:
    """Check that each used response is in a single batch: whole, undisturbed, and according to its claims."""
    ledger, plan = outcome.ledger, reference.plan
    fates = fates_of_groups(plan, outcome.truth)
    batches = [batch_of(key, ledger.store.get(key)) for key in ledger.store.list(layout.batches(plan.iteration))]
    trained = [response for batch in batches for response in batch.responses]
    filtered = [response for batch in batches for response in batch.filtered]
    graded = [*trained, *filtered]
    counts = Counter(response.response for response in graded)
    lost = [
        response for response in outcome.truth if not counts[response] and response // plan.num_generations in fates
    ]
    if lost:
        ledger.breaks(f"lost: responses {lost} are in no batch")
    for response, count in counts.items():
        if count > 1:
            ledger.breaks(f"doubled: response {response} is in {count} batches")
    for recorded in graded:
        whole = outcome.truth[recorded.response]
        if not reference.is_undisturbed(recorded.response, recorded.lineage, whole, to_its_end=True):
            ledger.breaks(f"changed: response {recorded.response} was trained on other tokens")
        if not _follows_claims(recorded, reference):
            ledger.breaks(f"changed: response {recorded.response} was trained on rows that no claim counts")
    if not lost:
        try:
            list(verified_parts(plan, trained, JournalReader(reference.store, plan, 1), filtered))
        except (IntegrityError, CorruptObject) as error:
            ledger.breaks(f"changed: the conclusion refuses it: {error}")
    _check_closing(ledger)
    _check_fates(outcome, plan, batches, fates)


def _check_closing(ledger: Ledger) -> None:
    """Check that no micro-batch was recorded after `closed`, the mark at which members drop their responses."""
    keys, closed = list(ledger.created), layout.closed(ledger.iteration)
    late = keys[keys.index(closed) :] if closed in keys else []
    for key in late:
        if key.startswith(layout.batches(ledger.iteration)):
            ledger.breaks(f"lost: {key} was recorded after the iteration had been closed")


def _check_fates(outcome: Outcome, plan: PlanRecord, batches: Sequence[BatchRecord], fates: Mapping[int, Fate]) -> None:
    """Check algorithm F: groups are trained, filtered and left out according to the undisturbed responses' rewards."""
    ledger, size = outcome.ledger, plan.num_generations
    order: list[int] = []
    for batch in batches:
        if not batch.graded:
            ledger.breaks(f"filter: batch {batch.number} holds nothing")
        order += sorted({recorded.response // size for recorded in batch.graded})
        for fate, responses in (("trained", batch.responses), ("filtered", batch.filtered)):
            for recorded in responses:
                due = fates.get(recorded.response // size, "unused")
                if fate != due:
                    ledger.breaks(f"filter: response {recorded.response} is {fate}; its group is to be {due}")
    if plan.groups_wanted is None:
        return
    if order != sorted(order):
        ledger.breaks(f"filter: groups were taken in the order {order}")
    for recorded in (recorded for batch in batches for recorded in batch.graded):
        worth = reward_of(outcome.truth[recorded.response].token_ids)
        if recorded.reward != worth:
            ledger.breaks(f"changed: response {recorded.response} is recorded with {recorded.reward}, not {worth}")


def _follows_claims(recorded: GradedResponse, reference: Reference) -> bool:
    """Whether all spans but the last are those of the claims; the last may reach beyond a seal made since."""
    spans = reference.lineage(recorded.response)
    last = recorded.lineage[-1]
    names = [(span.epoch, span.incarnation) for span in spans]
    if (last.epoch, last.incarnation) not in names:
        return False
    before = spans[: names.index((last.epoch, last.incarnation))]
    return reference.used(recorded.response, before) == list(recorded.lineage[:-1])


def _check_readers(outcome: Outcome, reference: Reference) -> None:
    """Check that the production reader takes exactly the reference reader's rows, and both get the right tokens."""
    ledger = outcome.ledger
    reader = JournalReader(reference.store, reference.plan, 1)
    reader.refresh()
    for response, whole in outcome.truth.items():
        spans = reference.used(response, reference.lineage(response))
        if not reference.is_undisturbed(response, spans, whole, to_its_end=False):
            ledger.breaks(f"changed: the claims of response {response} give other tokens")
        assembled = reader.assemble(response)
        rows = [row for span in spans for _, row in reference.rows_of(response, span)]
        length = sum(len(row.token_ids) for row in since_last_begun(rows))
        if list(assembled.lineage) != spans or len(assembled.token_ids) != length:
            ledger.breaks(f"changed: a reader takes other rows of response {response} than its claims say")


def _check_transfers(outcome: Outcome, history: History, reference: Reference) -> None:
    """Check that no member takes an unreleased response back from a living member after having held it before.

    So a response moves between living members at most once per member, and is not passed back and forth.
    """
    former: dict[int, set[str]] = defaultdict(set)
    owners: dict[int, str] = {}
    for claim in outcome.ledger.claims:
        unit = history.plan.responses_of(claim.unit)
        for response in unit if claim.responses is None else claim.responses:
            holder = owners.get(response)
            if holder is not None and holder not in claim.sealed:
                continue
            owners[response] = claim.incarnation
            if holder is None:
                continue
            former[response].add(holder)
            if holder.split("-")[0] == claim.incarnation.split("-")[0]:
                continue
            outcome.counts["responses moved"] += 1
            if _has_released(reference, response, holder) or not _is_alive(outcome.ledger, claim, holder, history):
                continue
            outcome.counts["responses moved from the living"] += 1
            if takes_from_tool(outcome.ledger, history, reference, response, claim):
                outcome.ledger.breaks(f"turns: {claim.incarnation} took response {response} while its tool ran")
            if _may_only_take_what_is_free(outcome.ledger, claim, history):
                outcome.ledger.breaks(f"livelock: {claim.incarnation} took response {response} from {holder}")
            if claim.incarnation in former[response]:
                outcome.ledger.breaks(f"livelock: {claim.incarnation} took response {response} back from {holder}")


def _may_only_take_what_is_free(ledger: Ledger, claim: Claim, history: History) -> bool:
    """True if the claimer's crew saves machine time, except while the claimer's clock stood still.

    To a member whose clock stood still, living members look dead.
    """
    saves = history.objective == "gpu_seconds" and history.is_crew(int(claim.incarnation.split("-")[0]))
    return saves and _is_alive(ledger, claim, claim.incarnation, history)


def _has_ended(reference: Reference, response: int) -> bool:
    spans = reference.lineage(response)
    return any(row.finish.ends_response for span in spans for _, row in reference.rows_of(response, span))


def _has_released(reference: Reference, response: int, holder: str) -> bool:
    spans = [span for span in reference.lineage(response) if span.incarnation == holder]
    return any(row.finish is Finish.RELEASED for span in spans for _, row in reference.rows_of(response, span))


def _is_alive(ledger: Ledger, claim: Claim, name: str, history: History) -> bool:
    """True if the heartbeats of `name` were regular enough up to this claim for no member to take it for dead."""
    beats = ledger.beats.get(name, [])
    beats = beats[: bisect_right(beats, claim.at_s, key=lambda beat: beat.at_s)]
    if not beats or beats[-1].state == "gone":
        return False
    since_s = claim.at_s - REGULAR_TTLS * history.claim_ttl_s
    moments = [since_s, *(beat.at_s for beat in beats if beat.at_s > since_s), claim.at_s]
    return max(b - a for a, b in pairwise(moments)) < GAP_TTLS * history.claim_ttl_s


def _check_requests(outcome: Outcome, history: History, reference: Reference) -> None:
    """Check that a member's requests are bounded by its time and the objects to read, not by the number of responses.

    A member gets every claim and shard once, and in each look asks for one missing object per journal and unit. A flush
    is a create, its read-back, a probe of every unit, and two checks for the end. A beat is one put. A look is a flush,
    a listing in pages, one heartbeat and two journals of every member that ever lived, and at most one claim per unit.
    A member that watches for others asks with every beat which slots have ended, lists the members, and gets each
    heartbeat. A turn, and its answer, may each bring a flush forward.
    """
    ledger = outcome.ledger
    objects, units = len(ledger.created), len(history.plan.slots)
    lives = sum(is_member(name) for name in ledger.lives)
    pages = objects // history.weather.page_keys if history.weather.page_keys else 0
    flush, look = units + 4, 2 * units + 6 + 3 * lives + pages
    watch = 0 if history.absence is None else 3 + lives
    used, turns = 0.0, turns_of(reference)
    for name, life in ledger.lives.items():
        if not is_member(name):
            continue
        lasted_s = life.last_s - life.first_s
        flushes = lasted_s / history.flush_interval_s + 2 + turns[name]
        beats = lasted_s / history.heartbeat_interval_s + 2
        bound = 2 * objects + flushes * flush + beats * (1 + look + watch)
        used = max(used, life.calls / bound)
        if life.calls > bound:
            ledger.breaks(f"livelock: {name} made {life.calls} requests; allowed: {bound:.0f}")
    outcome.requests_to_bound = used


def _count(outcome: Outcome, reference: Reference) -> None:
    counts = outcome.counts
    rows = [row for found in reference.rows.values() for _, row in found]
    counting = sum(
        len(reference.rows_of(response, span)) for response in outcome.truth for span in reference.lineage(response)
    )
    plan = reference.plan
    fates = fates_of_groups(plan, outcome.truth)
    unused = [response for response in outcome.truth if response // plan.num_generations not in fates]
    trained = list(fates.values()).count("trained")
    counts.update(
        {
            "groups wanted": plan.groups_wanted or 0,
            "groups wanted, not found": 0 if plan.groups_wanted is None else plan.groups_wanted - trained,
            "groups filtered": list(fates.values()).count("filtered"),
            "histories closed early": int(bool(unused)),
            "responses unused": len(unused),
            "responses unused, unended": sum(not _has_ended(reference, response) for response in unused),
            "responses": len(outcome.truth),
            "requests": sum(outcome.ledger.calls.values()),
            "claims": len(outcome.ledger.claims),
            "rows": len(rows),
            "rows released": sum(row.finish is Finish.RELEASED for row in rows),
            "rows void": len(rows) - counting,
            "tokens of drafts": sum(chunk.count - 1 for chunks in outcome.ledger.decoded.values() for chunk in chunks),
        }
    )
