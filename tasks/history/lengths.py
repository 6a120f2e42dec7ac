"""Lengths: what a plan expects by what the run has learned, and what it learns when an iteration is concluded.

No table, or none that can be read, never stops a run: it expects all groups alike, and begins to learn anew.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from storage.length_tables import LengthTable, commit_lengths, empty_table, newest_lengths
from storage.prompt_table import PromptRow
from storage.records import PlanRecord
from storage.store import ObjectStore
from tasks.planning.config import PlanningConfig
from tasks.planning.lengths import choose_predictor, learn, predict, recent_recalls, score
from tasks.planning.offer import GroupLengths
from tasks.planning.prompt_features import prompt_features

log = logging.getLogger(__name__)


def expected_lengths(
    store: ObjectStore, iteration: int, rows: Sequence[PromptRow], settings: PlanningConfig, *, length_max: int
) -> GroupLengths:
    """What is expected of each row's group, by the newest table of an iteration before this one.

    length_max: most tokens of a response. Where iterations overlap, the one before is not concluded yet, and the table
    is an older one. Raises StoreUnavailable and StoreDenied.
    """
    table = _table_before(store, iteration)
    predictor = choose_predictor(recent_recalls(table), settings)
    return predict(predictor, table, prompt_features(rows, ngrams=predictor == "ranker"), length_max)


def learn_lengths(
    store: ObjectStore, plan: PlanRecord, rows: Sequence[PromptRow], lengths: Mapping[int, int]
) -> dict[str, float]:
    """Score what was expected, learn from what came out, and commit the table of this iteration; its metrics.

    lengths: tokens by response, of every graded one; groups of which a member is missing do not count. Every predictor
    is scored by the table before this iteration; `lengths/recall` and `lengths/rank_correlation` are of what the plan
    itself expected. May be repeated before the report is committed: metrics and table are the same. Raises
    StoreUnavailable and StoreDenied.
    """
    size = plan.num_generations
    whole = np.array([all(g * size + m in lengths for m in range(size)) for g in range(len(rows))], dtype=bool)
    groups = [[lengths[group * size + member] for member in range(size)] for group in np.flatnonzero(whole).tolist()]
    found = np.array(groups, dtype=np.float64).reshape(-1, size)
    table, scored = learn(
        _table_before(store, plan.iteration),
        prompt_features(rows).take(whole),
        found,
        iteration=plan.iteration,
        length_max=plan.sampling.max_completion_length,
    )
    if not commit_lengths(store, table):
        log.warning("iteration %d: what was learned of lengths is there already, and differs", plan.iteration)
    named = {f"{name}/": one for name, one in scored.items()}
    if plan.lengths is not None and len(plan.lengths.expected) == len(rows) and len(groups) > 1:
        named[""] = score(np.array(plan.lengths.expected)[whole], found.mean(axis=1))
    return {
        f"lengths/{name}{field}": value
        for name, one in named.items()
        for field, value in (("recall", one.recall), ("rank_correlation", one.rank_correlation))
    }


def _table_before(store: ObjectStore, iteration: int) -> LengthTable:
    table = newest_lengths(store, iteration)
    if table is None:
        if iteration:
            log.warning(
                "iteration %d: nothing that was learned of lengths can be read; all are expected alike", iteration
            )
        return empty_table()
    return table
