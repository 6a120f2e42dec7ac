"""The checks after a history with scorers, from the objects in the store, apart from the production readers.

A micro-batch's tokens are read by the reference reader along the recorded lineage. The teacher is a function of tokens,
so there is one right score for each of them.
"""

import numpy as np

from simulation.judge_absence import is_member
from simulation.judge_turns import since_last_begun
from simulation.ledger import Ledger
from simulation.ledger_of_fleet import FASTEST_CLOCK
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
            _check_requests(outcome, ledger)
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


def _check_requests(outcome: ScoringOutcome, ledger: Ledger) -> None:
    """Check that a scorer's requests are bounded by its time and the objects to read.

    A scorer gets every claim, shard and micro-batch once. A look asks three times for the end, lists claims of members
    and of scorers in pages, gets the heartbeat of each scorer that ever lived, and asks for one missing object per
    member that ever lived, for one per group, and for the next micro-batch. After a group is taken, a look comes at
    once; its own group a scorer takes again only for recorded tokens. A beat is one put, and each take has two.
    """
    scoring, scorers = outcome.scoring, outcome.ledgers.scorers
    page, rollout, groups = scoring.crew.weather.page_keys, scoring.config.rollout, scoring.crew.plan.num_groups
    objects, lives = len(ledger.created) + len(scorers.created), scorers.beats.keys() & ledger.lives.keys()
    members = sum(map(is_member, ledger.lives)) - len(lives)
    look = 3 + 2 + (objects // page if page else 0) + len(lives) + members + groups + 1
    for name in sorted(lives):
        life = ledger.lives[name]
        lasted_s = FASTEST_CLOCK * (life.last_s - life.first_s)
        takes = 2 * sum(claim.incarnation == name for claim in scorers.claims)
        looks, beats = lasted_s / rollout.poll_interval_s + takes + 2, lasted_s / rollout.heartbeat_interval_s + 2
        bound = 2 * objects + looks * look + beats + 2 * takes
        outcome.requests_to_bound = max(outcome.requests_to_bound, life.calls / bound)
        if life.calls > bound:
            ledger.breaks(f"livelock: {name} made {life.calls} requests; allowed: {bound:.0f}")


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
