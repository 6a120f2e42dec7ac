"""Candidates: the responses of a holder that another member may take, and how much of each is expected to be left."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from storage.assembly import JournalReader
from storage.claims import ClaimBook
from storage.records import PlanRecord
from storage.shard import Finish
from tasks.planning.offer import GroupLengths
from tasks.planning.rebalance import Candidate
from tasks.planning.sibling_lengths import expected_left


def candidates_of(reader: JournalReader, holder: str, taker: str, *, acting: bool) -> list[Candidate]:
    """The unfinished responses of a member, as its journal shows them; `acting`: also those owed an answer.

    A living member makes the call of a response that it took with an answer owed before it decodes the response.
    """
    book, found = reader.book, []
    for response in book.holdings().get(holder, ()):
        assembled = reader.assemble(response)
        owner = book.owner(response)
        if assembled.finish.ends_response or owner is None or (assembled.owes and not acting):
            continue
        begun = bool(assembled.lineage) and assembled.lineage[-1].epoch == owner.epoch
        found.append(
            Candidate(
                response=response,
                length=len(assembled.token_ids),
                begun=begun,
                released=begun and assembled.finish == Finish.RELEASED,
                held_before=taker in book.former_owners(response),
            )
        )
    return found


def compared_with(plan: PlanRecord, book: ClaimBook, holder: str) -> list[int]:
    """The responses whose tokens say what to take from a holder: its own, and those of their groups."""
    held, size = book.holdings().get(holder, ()), plan.num_generations
    if plan.lengths is None:
        return list(held)
    groups = sorted({response // size for response in held})
    return [group * size + sample for group in groups for sample in range(size)]


def with_what_is_left(plan: PlanRecord, reader: JournalReader, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Add the expected remaining length, from the plan's length prediction and the responses of their groups."""
    if plan.lengths is None:
        return list(candidates)
    size = plan.num_generations
    groups = sorted({candidate.response // size for candidate in candidates})
    finished = np.full((len(groups), size), np.nan)
    running = finished.copy()
    for row, group in enumerate(groups):
        for sample in range(size):
            assembled = reader.assemble(group * size + sample)
            if len(assembled.token_ids):
                found = finished if assembled.finish.ends_response else running
                found[row, sample] = len(assembled.token_ids)
    expected, high = (np.array(told)[groups] for told in (plan.lengths.expected, plan.lengths.high))
    left = expected_left(GroupLengths(plan.lengths.predictor, expected, high), finished, running)
    row_of = {group: row for row, group in enumerate(groups)}
    places = [(row_of[candidate.response // size], candidate.response % size) for candidate in candidates]
    return [
        candidate if np.isnan(left[place]) else replace(candidate, left=float(left[place]))
        for candidate, place in zip(candidates, places, strict=True)
    ]
