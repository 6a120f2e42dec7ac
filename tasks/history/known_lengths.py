"""Lengths: the expectation of a plan from the run's learned table, and the learning at the end of an iteration.

A missing or unreadable table never stops a run: the plan then expects all groups alike, and learning begins anew.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from storage.records.length_tables import LengthTable, commit_lengths, empty_table, known_lengths, newest_lengths
from storage.records.planning_records import LengthsRecord
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord
from storage.stores.store import ObjectStore
from tasks.configuration.planning import PlanningConfig
from tasks.planning.capacity import GroupLengths
from tasks.planning.lengths import choose_predictor, learn, predict, recent_recalls, score
from tasks.planning.prompt_features import prompt_features

log = logging.getLogger(__name__)


def expected_lengths(
    store: ObjectStore, iteration: int, rows: Sequence[PromptRow], settings: PlanningConfig, *, length_max: int
) -> GroupLengths:
    """The expected lengths of each row's group, from the newest table of an earlier iteration.

    length_max: the most tokens of a response. If iterations overlap, the previous iteration is not concluded yet, and
    the table is older. Raises StoreUnavailable and StoreDenied.
    """
    table = _table_before(store, iteration)
    predictor = choose_predictor(recent_recalls(table), settings)
    return predict(predictor, table, prompt_features(rows), length_max)


def lengths_record(lengths: GroupLengths) -> LengthsRecord | None:
    """The expected lengths as a record; None if all groups are expected alike."""
    if lengths.predictor == "none":
        return None
    expected, high = (tuple(map(float, values)) for values in (lengths.expected, lengths.high))
    return LengthsRecord(predictor=lengths.predictor, expected=expected, high=high)


def learn_lengths(
    store: ObjectStore, plan: PlanRecord, rows: Sequence[PromptRow], lengths: Mapping[int, int]
) -> dict[str, float]:
    """Score the expectations, learn from the real lengths, and commit this iteration's table; returns its metrics.

    lengths: tokens of every graded response, by number; a group with a missing response does not count. Every predictor
    is scored with the table of the previous iteration. `lengths/recall` and `lengths/rank_correlation` score the
    expectations of the plan. Repeatable until the report is committed, with equal metrics and an equal table. Raises
    StoreUnavailable and StoreDenied.
    """
    size = plan.num_generations
    whole = np.array([all(g * size + k in lengths for k in range(size)) for g in range(len(rows))], dtype=bool)
    groups = [[lengths[group * size + sample] for sample in range(size)] for group in np.flatnonzero(whole).tolist()]
    found = np.array(groups, dtype=np.float64).reshape(-1, size)
    before, prompts = _table_before(store, plan.iteration), prompt_features(rows).take(whole)
    length_max = plan.sampling.max_completion_length
    table, scored = learn(before, prompts, found, iteration=plan.iteration, length_max=length_max)
    named = {f"{name}/": one for name, one in scored.items()}
    if plan.lengths is not None and len(plan.lengths.expected) == len(rows) and len(groups) > 1:
        named[""] = score(np.array(plan.lengths.expected)[whole], found.mean(axis=1))
    if not commit_lengths(store, table):
        log.warning("iteration %d: a different table of learned lengths exists already", plan.iteration)
    return {
        f"lengths/{name}{field}": value
        for name, one in named.items()
        for field, value in (("recall", one.recall), ("rank_correlation", one.rank_correlation))
    }


def _table_before(store: ObjectStore, iteration: int) -> LengthTable:
    table = newest_lengths(store, iteration)
    if table is None:
        table = known_lengths(store)
    if table is None:
        if iteration:
            log.warning(
                "iteration %d: no table of learned lengths can be read; all groups are expected alike", iteration
            )
        return empty_table()
    return table
