"""The checks after a history with scorers, from the objects in the store, apart from the production readers.

A micro-batch's tokens are read by the reference reader along the recorded lineage. The teacher is a function of tokens,
so there is one right score for each of them.
"""

import numpy as np

from simulation.judge_turns import since_last_begun
from simulation.ledger import Ledger
from simulation.one_thread import threads_in_turn
from simulation.reference_reader import Reference, read_reference
from simulation.simulated_machine import ShardMemory, shards_remembered
from simulation.simulated_scorer import row_of
from simulation.simulated_scoring import ScoringHistory, ScoringOutcome, live_scoring
from simulation.stored_objects import batch_of
from simulation.undisturbed import prompt
from storage.journal.shard import Origin
from storage.records import layout
from storage.records.records import GradedResponse
from storage.records.teacher_scores import ScoredResponse, decode_scores
from storage.stores.store import CorruptObject


def live_and_judge_scoring(scoring: ScoringHistory) -> ScoringOutcome:
    """Simulate a history and check it; `broken` of the result lists every broken rule."""
    with shards_remembered() as memory, threads_in_turn():
        outcome = live_scoring(scoring)
        ledger = outcome.ledgers.iterations[0]
        try:
            reference = read_reference(ledger, scoring.crew.plan, memory)
            _check_scores(outcome, ledger, reference)
        except (CorruptObject, KeyError, TypeError) as error:
            ledger.breaks(f"changed: objects that cannot be read: {error!r}")
        _count(outcome, memory)
    return outcome


def _check_scores(outcome: ScoringOutcome, ledger: Ledger, reference: Reference) -> None:
    """Check that each trained response has the scores of its recorded tokens, once."""
    plan, store = outcome.scoring.crew.plan, ledger.store
    scored: dict[int, list[ScoredResponse]] = {}
    wanted: dict[int, GradedResponse] = {}
    for number, recorded in enumerate(store.list(layout.batches(plan.iteration))):
        batch = batch_of(recorded, store.get(recorded))
        wanted |= {each.response: each for each in batch.responses if each.finish_reason != "failed"}
        key = layout.teacher_scores(plan.iteration, number)
        if key in ledger.created:
            for row in decode_scores(key, store.get(key)):
                scored.setdefault(row.response, []).append(row)
    outcome.counts["responses trained"] += len(wanted)
    for response, graded in wanted.items():
        rows = scored.pop(response, [])
        if len(rows) != 1:
            ledger.breaks(f"{'doubled' if rows else 'lost'}: response {response} has {len(rows)} scores")
        elif not _is_right(outcome, reference, graded, rows[0]):
            ledger.breaks(f"changed: response {response} has scores of other tokens")
    if scored:
        ledger.breaks(f"doubled: responses {sorted(scored)} have scores, and are in no batch")


def _is_right(outcome: ScoringOutcome, reference: Reference, graded: GradedResponse, found: ScoredResponse) -> bool:
    plan, top_k = outcome.scoring.crew.plan, outcome.scoring.top_k
    rows = since_last_begun([row for span in graded.lineage for _, row in reference.rows_of(graded.response, span)])
    context = list(prompt(graded.response // plan.num_generations).token_ids)
    right = []
    for row in rows:
        for token in row.token_ids.tolist():
            context.append(token)
            if row.origin is Origin.POLICY:
                right.append(row_of(context, max(1, top_k or 0)))
    logprobs, agrees, ids, head = zip(*right, strict=True)
    width = top_k or 0
    return (
        np.array_equal(found.logprobs, np.array(logprobs, np.float32))
        and np.array_equal(found.agrees, np.array(agrees))
        and np.array_equal(found.head_ids, np.array(ids, np.uint32)[:, :width])
        and np.array_equal(found.head_logprobs, np.array(head, np.float32)[:, :width])
    )


def _count(outcome: ScoringOutcome, memory: ShardMemory) -> None:
    scorers, responses = outcome.ledgers.scorers, outcome.scoring.crew.plan.num_responses
    shards = {key: body for key, body in scorers.created.items() if "/journal/" in key}
    again = {row.response for key, body in shards.items() for row in memory.decode(key, body)} - set(range(responses))
    outcome.counts.update(
        {
            "claims of scorers": len(scorers.claims),
            "claims on groups of others": sum(claim.epoch > 1 for claim in scorers.claims),
            "shards of scores": len(shards),
            "responses scored again": len(again),
        }
    )
