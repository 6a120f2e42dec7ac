"""The checks of turns: what is promised of calls, by the calls that reached the tools' server and the final journal.

A call with side effects is made after its turn reached the journal. A call whose answer is in the journal is not made
again, but by a process whose claim is older than one that the server has seen, which the server can refuse. An answer
says so if an earlier claim may have made its call.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from simulation.reference_reader import Reference
from simulation.simulated_crew import Outcome
from storage.journal.shard import Finish, Origin, Row
from storage.journal.turns import CallRecord, decode_turn
from storage.records import layout
from tasks.turns.scripted_environments import NotedCall


def since_last_begun(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows of a response, in order, since it last began again."""
    begun = [number for number, row in enumerate(rows) if row.finish is Finish.AGAIN]
    return rows[begun[-1] + 1 :] if begun else rows


def turns_of(reference: Reference) -> Counter[str]:
    """How many turns and answers each incarnation has written."""
    written: Counter[str] = Counter()
    for (incarnation, _, _), rows in reference.rows.items():
        written[incarnation] += sum(row.finish is Finish.ACTING or row.event is not None for _, row in rows)
    return written


def check_turns(outcome: Outcome, reference: Reference) -> None:
    """Check every call that was made, and count turns and calls."""
    ledger, calls = outcome.ledger, outcome.ledger.server.calls
    if outcome.history.script is None:
        return
    acted_at_s, answers, begun_again = _written(outcome, reference)
    by_call: dict[str, list[NotedCall]] = defaultdict(list)
    for call in calls:
        by_call[call.call_id].append(call)
        if call.has_effects and not acted_at_s.get((call.response, call.end), ledger.now() + 1) <= call.at_s:
            ledger.breaks(f"turns: a call of response {call.response} was made before its turn was in the journal")
    known_acts = {response: _known_acts(reference, response) for response in {call.response for call in calls}}
    for name, all_made in by_call.items():
        if all_made[0].response in begun_again:
            continue
        # Its process began the response again, and ended before that reached the journal.
        if any(call.restarts and call.has_effects for call in all_made):
            ledger.breaks(f"turns: call {name} was made after a new beginning that is not in the journal")
        if made := [call for call in all_made if not call.restarts]:
            _check_call(outcome, made, answers.get(name), known_acts[made[0].response])
    counts = outcome.counts
    records = [call for _, _, call in answers.values()]
    counts["histories with turns"] += 1
    counts["calls"] += len(calls)
    counts["calls repeated"] += len(calls) - len(by_call)
    counts["calls unknown"] += sum(record.unknown for record in records)
    counts["responses that began again"] += len(begun_again)


Answers = Mapping[str, tuple[float, int, CallRecord]]


def _written(outcome: Outcome, reference: Reference) -> tuple[Mapping[tuple[int, int], float], Answers, set[int]]:
    """What the journal says of turns.

    Returns the first arrival of each turn in the journal, by (response, number of tokens so far); by call, the answers
    that count, with time and epoch; and the responses that began again.
    """
    acted_at_s: dict[tuple[int, int], float] = {}
    begun_again: set[int] = set()
    for (incarnation, _, response), rows in reference.rows.items():
        for sequence, row in rows:
            if row.finish is Finish.ACTING:
                at_s, place = _at_s(outcome, incarnation, sequence), (response, row.start + len(row.token_ids))
                acted_at_s[place] = min(at_s, acted_at_s.get(place, at_s))
            if row.finish is Finish.AGAIN:
                begun_again.add(response)
    answers: dict[str, tuple[float, int, CallRecord]] = {}
    for response in outcome.truth:
        for incarnation, sequence, row in _counting(reference, response):
            for call in decode_turn(row.event).calls if row.event is not None else ():
                answers[call.call_id] = _at_s(outcome, incarnation, sequence), row.epoch, call
    return acted_at_s, answers, begun_again


def _counting(reference: Reference, response: int) -> Iterator[tuple[str, int, Row]]:
    for span in reference.lineage(response):
        for sequence, row in reference.rows_of(response, span):
            if row.origin is Origin.OBSERVATION:
                yield span.incarnation, sequence, row


def _known_acts(reference: Reference, response: int) -> set[tuple[int, int]]:
    """The turns of a response that count, by its tokens until then and the epoch of the claim."""
    rows = [row for span in reference.lineage(response) for _, row in reference.rows_of(response, span)]
    return {(row.start + len(row.token_ids), row.epoch) for row in rows if row.finish is Finish.ACTING}


def _at_s(outcome: Outcome, incarnation: str, sequence: int) -> float:
    return outcome.ledger.created_at_s[layout.shard(outcome.ledger.iteration, incarnation, sequence)]


def _check_call(
    outcome: Outcome,
    made: Sequence[NotedCall],
    answer: tuple[float, int, CallRecord] | None,
    known_acts: Collection[tuple[int, int]],
) -> None:
    """Check one call of a response that never began again, by the times it was made."""
    ledger, what = outcome.ledger, f"call {made[0].call_id} of response {made[0].response}"
    epochs = [call.epoch for call in made]
    if len(set(epochs)) < len(epochs):
        ledger.breaks(f"turns: {what} was made twice under one claim, by those of epochs {epochs}")
    if answer is None:
        return
    answered_s, epoch, record = answer
    late = [call.epoch for call in made if call.at_s > answered_s and call.epoch >= epoch]
    if late:
        ledger.breaks(f"turns: {what} was made again by claims {late} after its answer was in the journal")
    # What a process wrote after it was taken for dead, the next one cannot know.
    known = any(call.epoch < epoch and (call.end, call.epoch) in known_acts for call in made)
    if made[0].has_effects and known and not record.unknown:
        ledger.breaks(f"turns: {what} may have been made by an earlier claim, and its answer does not say so")
    if epoch not in epochs:
        ledger.breaks(f"turns: {what} has an answer under claim {epoch}, which never made it: {epochs}")
