"""Prefill: the tokens of prompts and prefixes that the engines computed, as a share of those without any sharing.

Pure functions of what was planned, journalled and announced; reads nothing.
"""

from collections.abc import Sequence

from storage.journal.assembly import JournalReader
from storage.journal.shard import Finish, Origin
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord, SlotLife


def prefill_metrics(lives: Sequence[SlotLife], naive: int) -> dict[str, float]:
    """Tokens computed, tokens without sharing (`naive`), and their quotient, which is absent if the second is 0.

    The first is a lower bound if a life ended after its last heartbeat.
    """
    computed = sum(life.prefill_tokens for life in lives)
    metrics = {"rollout/prefill_tokens": float(computed), "rollout/prefill_tokens_naive": float(naive)}
    return metrics | ({"rollout/prefill_share": computed / naive} if naive else {})


def naive_prefill_tokens(plan: PlanRecord, prompts: Sequence[PromptRow], reader: JournalReader, part: range) -> int:
    """The tokens that engines without any sharing compute for the responses of a part, whose rows the reader holds.

    They are prompt and prefix, each time that the policy begins or goes on after an observation. prompts: one row per
    group of the plan. A response counts as begun under a claim if the policy has tokens in the journal under that
    claim, counted or void.
    """
    return sum(
        len(prompts[response // plan.num_generations].token_ids) + start
        for response in part
        for start in _starts(response, reader)
    )


def _starts(response: int, reader: JournalReader) -> list[int]:
    """The number of tokens that a response already had, each time that the policy began a stretch of it."""
    owner = reader.book.owner(response)
    claims = [(span.incarnation, span.epoch) for span in reader.book.sealed(response)]
    claims += [] if owner is None else [(owner.incarnation, owner.epoch)]
    # A member that releases a response that it never began writes a row without tokens.
    starts = []
    for incarnation, epoch in claims:
        rows = [row for _, row in reader.shards.rows(incarnation, epoch, response)]
        rows = [row for row in rows if len(row.token_ids) or row.finish is Finish.AGAIN]
        before = [None, *(row.origin for row in rows)]
        starts += [
            row.start
            for row, last in zip(rows, before, strict=False)
            if row.origin is Origin.POLICY and last is not Origin.POLICY
        ]
    return starts
