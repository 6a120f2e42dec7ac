"""Conclusion: verify that an iteration trained exactly on its plan, measure the iteration, and commit the report.

The inputs are records and shards alone. Every process that concludes an iteration gets an equal report.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

import numpy as np

from resources.prices import RequestPrices
from storage.clock import Clock
from storage.journal.assembly import JournalReader
from storage.journal.compaction import read_batches, unused_responses
from storage.journal.response_parts import PART_TOKENS, parts_of_plan
from storage.journal.shard import Finish, Origin
from storage.records import layout, records
from storage.records.draft_totals import summed
from storage.records.hints import collected
from storage.records.prompt_table import PromptRow, read_prompts
from storage.records.records import GradedResponse, PlanRecord, ReportRecord, SlotLife, TrainingRecord
from storage.records.run import exists, num_drawn, read_plan
from storage.stores.store import ObjectMissing, ObjectStore, StorageError
from storage.weights.tensor_sets import PUBLISHED_AT_S, WRITE_S, read_manifest
from tasks.history.known_lengths import learn_lengths
from tasks.history.run_cost import USD_RUN, spent_usd
from tasks.reporting.costs import Rates, cost_metrics
from tasks.reporting.one_clock import CLOCKS_AGREE_S, concluded_at, on_one_clock
from tasks.reporting.pool_observations import pool_observations
from tasks.reporting.scorer_costs import with_scorers
from tasks.reporting.slot_lives import JournalTally, read_heartbeats, slot_lives, unannounced
from tasks.reporting.turns_tally import TurnsTally
from tasks.reporting.verification import IntegrityError, verified_parts

log = logging.getLogger(__name__)
CLIPPED = "completions/clipped_ratio"
# With a policy that ends its responses at all, far fewer are cut.
CLIPPED_SHARE_MAX = 0.95


def conclude_iteration(
    store: ObjectStore,
    iteration: int,
    prices_usd_per_h: Mapping[str, float],
    clock: Clock,
    *,
    egress_usd_per_gb: Mapping[str, float] | None = None,
    requests: RequestPrices | None = None,
    part_tokens: int = PART_TOKENS,
) -> ReportRecord:
    """Verify, measure and commit; a report that exists, or is committed meanwhile by another process, is returned.

    prices_usd_per_h, egress_usd_per_gb, requests: see Rates. part_tokens: how many tokens of recorded responses are in
    memory at a time. Raises IntegrityError, which names the first response that is missing, doubled or not as in the
    journal.
    """
    key = layout.report(iteration)
    rates = Rates(
        usd_per_h=prices_usd_per_h, egress_usd_per_gb=egress_usd_per_gb or {}, requests=requests or RequestPrices()
    )
    if exists(store, key):
        return records.read(store, ReportRecord, key)
    try:
        report = with_scorers(store, _measure(store, iteration, rates, clock, part_tokens), prices_usd_per_h)
    except (StorageError, IntegrityError):
        # The process that commits the report deletes the journal that is read here.
        if not exists(store, key):
            raise
    else:
        if records.commit(store, key, report):
            return report
    return records.read(store, ReportRecord, key)


def _measure(store: ObjectStore, iteration: int, rates: Rates, clock: Clock, part_tokens: int) -> ReportRecord:
    """Read what was planned, sampled and trained; verify it, and measure it."""
    began_s = clock.monotonic()
    plan = read_plan(store, iteration)
    training = records.read(store, TrainingRecord, layout.training(iteration))
    began_at_s = concluded_at(plan.created_at_s, training, clock.wall())
    training = _published(store, training, longest_s=began_at_s - plan.created_at_s + CLOCKS_AGREE_S)
    batches = read_batches(store, iteration)
    trained = [response for batch in batches for response in batch.responses]
    filtered = [response for batch in batches for response in batch.filtered]
    recorded = [response for batch in batches for response in batch.graded]
    graded = [response for response in recorded if response.reward is not None]
    unused = unused_responses(plan, trained, filtered)
    prompts = read_prompts(store, plan)
    reader = JournalReader(store, plan, parts=parts_of_plan(plan, recorded, part_tokens))
    reader.refresh()
    announced = read_heartbeats(store, plan)
    tally, naive = JournalTally(reader, recorded, unused, announced), 0
    # The turns of a conversation in a data set are not the policy's.
    turns = TurnsTally(reader, recorded if plan.is_sampled else ())
    for part in verified_parts(plan, trained, reader, filtered):
        tally.add(part)
        turns.add(part)
        naive += naive_prefill_tokens(plan, prompts, reader, part)
    heartbeats, training = on_one_clock(announced, training, plan.created_at_s, began_at_s)
    silent = unannounced(plan, heartbeats, tally, training.ended_at_s)
    heartbeats += silent
    lives = slot_lives(heartbeats, tally)
    # What other runs have stored says nothing of this policy, and cost nothing now.
    drawn = num_drawn(plan)
    own = [response for response in graded if response.response < drawn * plan.num_generations]
    lengths = learn_lengths(store, plan, prompts[:drawn], {response.response: response.length for response in own})
    tokens = sum(response.policy_length for response in own)
    took_s = clock.monotonic() - began_s
    # The weights may have been published by a clock that is seconds ahead.
    now = max(began_at_s + took_s, training.ended_at_s)
    metrics = {
        **training.metrics,
        **response_metrics(own, plan),
        **turns.metrics(),
        **filter_metrics(plan, trained, filtered, lives),
        **resume_metrics(lives),
        **prefill_metrics(lives, naive),
        **draft_metrics(lives),
        "balance/responses_moved": float(reader.book.moved),
        **lengths,
        **cost_metrics(lives, training, rates, tokens, plan.created_at_s, took_s, collected(store, iteration)),
        "cost/lives_estimated": float(len(silent)),
        "reward_errors": float(sum(len(batch.reward_errors) for batch in batches)),
        "answers_given_up": float(sum(len(batch.given_up) for batch in batches)),
        "timing_s/iteration": now - plan.created_at_s,
    }
    metrics[USD_RUN] = spent_usd(store, iteration) + metrics["cost/usd_iter"]
    metrics |= prediction_metrics(plan, metrics)
    return ReportRecord(
        iteration=iteration,
        weight_version=training.weight_version,
        # Prompts whose responses were not used are drawn again.
        next_prompt=plan.first_prompt + num_drawn(plan) - len(unused) // plan.num_generations,
        metrics=metrics,
        rewards=tuple(response.reward for response in graded if response.reward is not None and plan.is_graded),
        lengths=tuple(response.policy_length for response in graded),
        lives=tuple(lives),
        train_started_at_s=training.started_at_s,
        train_ended_at_s=training.ended_at_s,
        created_at_s=now,
        pools=pool_observations(
            lives, heartbeats, (slot.pool for slot in plan.slots if slot.groups), plan.created_at_s
        ),
    )


def _published(store: ObjectStore, training: TrainingRecord, longest_s: float) -> TrainingRecord:
    """Return the training record with the bytes of the published weights; training ends at the publication.

    A run's own trainer holds the machine until a due checkpoint is stored, and training ends then. A host stores
    the checkpoint beside the next rollout. After the loss of a trainer another machine may have stored weights: a
    time of publication before the end of training, or more than `longest_s` after, proves a wrong clock. Training
    then ends as the record says.
    """
    manifest = read_manifest(store, layout.weights(training.weight_version))
    stored_bytes = float(sum(entry.bytes for entry in manifest.objects.values()))
    metrics = training.metrics | {"weights/bytes": stored_bytes}
    published_s = manifest.metadata.get(PUBLISHED_AT_S)
    if not exists(store, layout.due(training.iteration)):
        with suppress(ObjectMissing):
            saved = read_manifest(store, layout.checkpoint(training.weight_version)).metadata
            if saved.get(PUBLISHED_AT_S):
                published_s = saved[PUBLISHED_AT_S]
                metrics["timing_s/checkpoint"] = saved[WRITE_S]
    if not published_s:
        return replace(training, metrics=metrics)
    took_s = published_s - training.ended_at_s
    if not 0 <= took_s <= longest_s:
        return replace(training, metrics=metrics | {"timing_s/publish": 0.0})
    return replace(training, ended_at_s=published_s, metrics=metrics | {"timing_s/publish": took_s})


def prediction_metrics(plan: PlanRecord, metrics: Mapping[str, float]) -> dict[str, float]:
    """The relative error of the plan's last prediction of the rollout's time; empty if there was none."""
    predicted = {name: value for decision in plan.decisions for name, value in decision.predicted.items()}
    rollout_s = metrics["timing_s/rollout"]
    if "timing_s/rollout" not in predicted or not rollout_s:
        return {}
    return {"plan/rollout_error": predicted["timing_s/rollout"] / rollout_s - 1}


def filter_metrics(
    plan: PlanRecord,
    trained: Sequence[GradedResponse],
    filtered: Sequence[GradedResponse],
    lives: Sequence[SlotLife],
) -> dict[str, float]:
    """Groups filtered, groups wanted and not found, and tokens decoded in vain; empty if all groups are wanted."""
    if plan.groups_wanted is None:
        return {}
    size = plan.num_generations
    return {
        "filter_groups/filtered": len(filtered) / size,
        "filter_groups/missing": plan.groups_wanted - len(trained) / size,
        "filter_groups/unused_tokens": float(sum(life.tokens_unused for life in lives)),
    }


def response_metrics(graded: Sequence[GradedResponse], plan: PlanRecord) -> dict[str, float]:
    """Return rewards and lengths, under TRL's names, over all graded responses: filtering must not improve them.

    Lengths count the tokens that the policy sampled, or learns from examples. A run without rewards has lengths alone.
    """
    ordered = sorted(graded, key=lambda response: response.response)
    lengths = np.array([response.policy_length for response in ordered])
    metrics = (_reward_metrics(ordered, plan.num_generations) if plan.is_graded else {}) | {
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        CLIPPED: np.mean([response.finish_reason == "length" for response in ordered]),
        "num_tokens": lengths.sum(),
    }
    for name in ordered[0].rewards:
        values = [value for response in ordered if (value := response.rewards.get(name)) is not None]
        if values:
            metrics[f"rewards/{name}/mean"] = np.mean(values)
            # As TRL's, with the divisor n - 1; for a single value TRL gives nan, which no chart can show.
            metrics[f"rewards/{name}/std"] = np.std(values, ddof=1) if len(values) > 1 else 0.0
    return {name: float(value) for name, value in metrics.items()}


def _reward_metrics(ordered: Sequence[GradedResponse], num_generations: int) -> dict[str, float]:
    by_group = groupby(ordered, key=lambda response: response.response // num_generations)
    groups = [np.array([response.reward for response in group], dtype=np.float64) for _, group in by_group]
    return {
        "reward": np.concatenate(groups).mean(),
        "reward_std": np.mean([group.std() for group in groups]),
        "frac_reward_zero_std": np.mean([group.max() == group.min() for group in groups]),
    }


def cut_line(report: ReportRecord) -> str | None:
    """What people should know if hardly any response of the run's first iteration has ended by itself; else None."""
    share = report.metrics.get(CLIPPED, 0.0)
    if report.iteration > 0 or share <= CLIPPED_SHARE_MAX:
        return None
    return (
        f"iteration {report.iteration}: {100 * share:.1f} % of the responses were cut at the length limit; either "
        "sampling.max_completion_length is too small, or the policy ends its responses with no stop token of the run, "
        "which `gleaner check --files` prints"
    )


def resume_metrics(lives: Sequence[SlotLife]) -> dict[str, float]:
    """Interruptions, and tokens recovered and regenerated, summed over all lives."""
    return {
        "preempt/count": float(sum(life.state != "gone" for life in lives)),
        "resume/tokens_recovered": float(sum(life.tokens_recovered for life in lives)),
        "resume/tokens_regenerated": float(sum(life.tokens_regenerated for life in lives)),
    }


def prefill_metrics(lives: Sequence[SlotLife], naive: int) -> dict[str, float]:
    """Tokens computed, tokens without sharing (`naive`), and their quotient, which is absent if the second is 0.

    The first is a lower bound if a life ended after its last heartbeat.
    """
    computed = sum(life.prefill_tokens for life in lives)
    metrics = {"rollout/prefill_tokens": float(computed), "rollout/prefill_tokens_naive": float(naive)}
    return metrics | ({"rollout/prefill_share": computed / naive} if naive else {})


def draft_metrics(lives: Sequence[SlotLife]) -> dict[str, float]:
    """Drafts verified and accepted, tokens that a response got from a step, and seconds saved; empty without drafts.

    Only lives that drafted count. The tokens are absent without a step, and the seconds if no life measured any. Counts
    are lower bounds if a life ended after its last heartbeat.
    """
    drafting = [life.drafts for life in lives if life.drafts is not None]
    if not drafting:
        return {}
    drafts = summed(drafting)
    metrics = {"rollout/drafted": float(drafts.drafted), "rollout/accepted": float(drafts.accepted)}
    if drafts.steps:
        metrics["rollout/tokens_per_step"] = drafts.tokens / drafts.steps
    if drafts.saved_s is not None:
        metrics["rollout/draft_saved_s"] = drafts.saved_s
    return metrics


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
