"""Conclusion: verifies that an iteration trained on exactly what was planned, measures it, and commits its report.

It reads only records and shards. The report is the same whichever process concludes, and however often.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from resources.prices import RequestPrices
from storage import layout, records
from storage.assembly import JournalReader
from storage.clock import Clock
from storage.collected import collected
from storage.compaction import read_batches, unused_responses
from storage.liveness import read_heartbeat
from storage.prompt_table import read_prompts
from storage.records import (
    JOINED_POOL,
    TRAIN_POOL,
    AliveRecord,
    GradedResponse,
    PlanRecord,
    ReportRecord,
    SlotLife,
    TrainingRecord,
)
from storage.run import exists, read_plan
from storage.shard import Finish
from storage.store import ObjectStore, StorageError
from storage.weights.tensor_sets import PUBLISHED_AT_S, read_manifest
from tasks.history.known_lengths import learn_lengths
from tasks.history.spent import USD_RUN, spent_usd
from tasks.reporting.costs import Rates, cost_metrics
from tasks.reporting.one_clock import CLOCKS_AGREE_S, on_one_clock
from tasks.reporting.pool_observations import pool_observations
from tasks.reporting.prefill import prefill_metrics

log = logging.getLogger(__name__)


class IntegrityError(Exception):
    """What was trained is not what was planned; the iteration is not committed."""


def conclude_iteration(
    store: ObjectStore,
    iteration: int,
    prices_usd_per_h: Mapping[str, float],
    clock: Clock,
    *,
    egress_usd_per_gb: Mapping[str, float] | None = None,
    requests: RequestPrices | None = None,
) -> ReportRecord:
    """Verify, measure and commit; a report that exists, or is committed meanwhile by another process, is returned.

    prices_usd_per_h, egress_usd_per_gb, requests: see Rates. Raises IntegrityError, which names the first response that
    is missing, doubled or not as in the journal.
    """
    key = layout.report(iteration)
    rates = Rates(
        usd_per_h=prices_usd_per_h, egress_usd_per_gb=egress_usd_per_gb or {}, requests=requests or RequestPrices()
    )
    if exists(store, key):
        return records.read(store, ReportRecord, key)
    try:
        report = _measure(store, iteration, rates, clock)
    except (StorageError, IntegrityError):
        # The process that commits the report deletes the journal that is read here.
        if not exists(store, key):
            raise
    else:
        if records.commit(store, key, report):
            return report
    return records.read(store, ReportRecord, key)


def _measure(store: ObjectStore, iteration: int, rates: Rates, clock: Clock) -> ReportRecord:
    """Read what was planned, sampled and trained; verify it, and measure it."""
    began_s = clock.wall()
    plan = read_plan(store, iteration)
    training = records.read(store, TrainingRecord, layout.training(iteration))
    training = _published(store, training, longest_s=began_s - plan.created_at_s + CLOCKS_AGREE_S)
    batches = read_batches(store, iteration)
    trained = [response for batch in batches for response in batch.responses]
    filtered = [response for batch in batches for response in batch.filtered]
    graded = [response for batch in batches for response in batch.graded]
    reader = JournalReader(store, plan)
    reader.refresh()
    kept = verify(plan, trained, reader, filtered)
    unused = unused_responses(plan, trained, filtered)
    prompts = read_prompts(store, plan)
    heartbeats, training = on_one_clock(read_heartbeats(store, plan), training, plan.created_at_s, clock.wall())
    silent = _unannounced(plan, heartbeats, reader, training.ended_at_s)
    heartbeats += silent
    lives = _lives(heartbeats, reader, kept, unused)
    lengths = learn_lengths(store, plan, prompts, {response.response: response.length for response in graded})
    tokens = sum(response.length for response in graded)
    spent_before_usd = spent_usd(store, iteration)
    now = clock.wall()
    metrics = {
        **training.metrics,
        **response_metrics(graded, plan),
        **filter_metrics(plan, trained, filtered, lives),
        **resume_metrics(lives),
        **prefill_metrics(lives, plan, prompts, reader),
        "balance/responses_moved": float(reader.book.moved),
        **lengths,
        **cost_metrics(lives, training, rates, tokens, plan.created_at_s, now - began_s, collected(store, iteration)),
        "cost/lives_estimated": float(len(silent)),
        "reward_errors": float(sum(len(batch.reward_errors) for batch in batches)),
        "timing_s/iteration": now - plan.created_at_s,
    }
    metrics[USD_RUN] = spent_before_usd + metrics["cost/usd_iter"]
    metrics |= prediction_metrics(plan, metrics)
    return ReportRecord(
        iteration=iteration,
        weight_version=training.weight_version,
        # Prompts whose responses were not used are drawn again.
        next_prompt=plan.first_prompt + plan.num_groups - len(unused) // plan.num_generations,
        metrics=metrics,
        rewards=tuple(response.reward for response in graded),
        lengths=tuple(response.length for response in graded),
        lives=tuple(lives),
        train_started_at_s=training.started_at_s,
        train_ended_at_s=training.ended_at_s,
        created_at_s=now,
        pools=pool_observations(
            lives, heartbeats, (slot.pool for slot in plan.slots if slot.groups), plan.created_at_s
        ),
    )


def _published(store: ObjectStore, training: TrainingRecord, longest_s: float) -> TrainingRecord:
    """The training record; if the weights say when they were published, training ends then.

    Another machine may have published them, after the trainer was lost; by a clock that is provably wrong if that took
    less than no time, or longer than `longest_s`. Training then ends as its record says.
    """
    published_s = read_manifest(store, layout.weights(training.weight_version)).metadata.get(PUBLISHED_AT_S)
    if not published_s:
        return training
    took_s = published_s - training.ended_at_s
    if not 0 <= took_s <= longest_s:
        return replace(training, metrics=training.metrics | {"timing_s/publish": 0.0})
    metrics = training.metrics | {"timing_s/publish": took_s}
    return replace(training, ended_at_s=published_s, metrics=metrics)


def prediction_metrics(plan: PlanRecord, metrics: Mapping[str, float]) -> dict[str, float]:
    """The relative error of the plan's last prediction of the rollout's time; empty if there was none."""
    predicted = {name: value for decision in plan.decisions for name, value in decision.predicted.items()}
    rollout_s = metrics["timing_s/rollout"]
    if "timing_s/rollout" not in predicted or not rollout_s:
        return {}
    return {"plan/rollout_error": predicted["timing_s/rollout"] / rollout_s - 1}


def verify(
    plan: PlanRecord,
    trained: Sequence[GradedResponse],
    reader: JournalReader,
    filtered: Sequence[GradedResponse] = (),
) -> dict[str, int]:
    """Check every response of the plan against batches and journal; returns the tokens kept by incarnation.

    Each response is trained once. If the plan says how many groups are wanted, it may instead be filtered once, or be
    unused (`storage.compaction.unused_responses`). Raises IntegrityError.
    """
    graded = [*trained, *filtered]
    counts = Counter(response.response for response in graded)
    doubled = sorted(response for response, count in counts.items() if count > 1)
    missing = sorted(set(range(plan.num_responses)) - set(counts) - set(unused_responses(plan, trained, filtered)))
    foreign = sorted(set(counts) - set(range(plan.num_responses)))
    if doubled or missing or foreign:
        raise IntegrityError(
            f"iteration {plan.iteration}: {plan.num_responses} responses planned; trained more than once: "
            f"{doubled[:8]}, never: {missing[:8]}, not planned: {foreign[:8]}",
        )
    _check_filter(plan, trained, filtered)
    kept: dict[str, int] = defaultdict(int)
    for response in graded:
        assembled = reader.follow(response.response, response.lineage)
        ended = {"stop": Finish.STOP, "length": Finish.LENGTH}[response.finish_reason]
        if len(assembled.token_ids) != response.length or assembled.finish != ended:
            raise IntegrityError(
                f"iteration {plan.iteration}, response {response.response}: trained on {response.length} tokens "
                f"ended by {response.finish_reason!r}; the journal holds {len(assembled.token_ids)}",
            )
        for span in response.lineage:
            for sequence, row in reader.shards.rows(span.incarnation, span.epoch, response.response):
                kept[span.incarnation] += len(row.token_ids) if sequence <= span.last_sequence else 0
    return kept


def _check_filter(plan: PlanRecord, trained: Sequence[GradedResponse], filtered: Sequence[GradedResponse]) -> None:
    """Check that exactly the groups with equal rewards are filtered, whole, and at most the wanted number trained."""
    wanted = plan.groups_wanted
    if wanted is None:
        if filtered:
            raise IntegrityError(
                f"iteration {plan.iteration}: response {filtered[0].response} is filtered; allowed: none"
            )
        return
    rewards: dict[int, set[float | None]] = defaultdict(set)
    for response in (*trained, *filtered):
        rewards[response.response // plan.num_generations].add(response.deciding(plan))
    for kind, responses in (("trained", trained), ("filtered", filtered)):
        for response in responses:
            group = response.response // plan.num_generations
            if (len(rewards[group]) == 1) != (kind == "filtered"):
                found = f"iteration {plan.iteration}, response {response.response}: {kind}"
                raise IntegrityError(f"{found}, although group {group} has {len(rewards[group])} different rewards")
    count = len({response.response // plan.num_generations for response in trained})
    if count > wanted:
        raise IntegrityError(f"iteration {plan.iteration}: {count} groups are trained; allowed: the {wanted} wanted")


def slot_lives(
    store: ObjectStore,
    plan: PlanRecord,
    reader: JournalReader,
    kept: Mapping[str, int],
    unused: Sequence[int] = (),
    *,
    until_s: float,
) -> list[SlotLife]:
    """The life of every incarnation that announced itself or made a claim, by slot and start; until_s: see below."""
    announced = read_heartbeats(store, plan)
    return _lives([*announced, *_unannounced(plan, announced, reader, until_s)], reader, kept, unused)


def read_heartbeats(store: ObjectStore, plan: PlanRecord) -> list[AliveRecord]:
    """The last heartbeat of every incarnation, where there is one that can be read and names a pool with a price."""
    found = (read_heartbeat(store, key) for key in store.list(layout.alive_all(plan.iteration)))
    pools = {JOINED_POOL, TRAIN_POOL, *(place.pool for place in plan.slots)}
    return [record for record in found if record is not None and record.pool in pools]


def _unannounced(
    plan: PlanRecord, announced: Sequence[AliveRecord], reader: JournalReader, until_s: float
) -> list[AliveRecord]:
    """For each incarnation that made claims and has no readable heartbeat, one that claims and journal allow.

    When it lived is not known. It counts as paid for since the plan, until the last heartbeat of the others (without
    any, until `until_s`), so its cost is an upper bound.
    """
    missing = set(reader.book.incarnations) - {alive.incarnation for alive in announced}
    if not missing:
        return []
    log.warning(
        "iteration %d: %s made claims, and no heartbeat can be read; what they cost is estimated",
        plan.iteration,
        ", ".join(sorted(missing)),
    )
    recovered: Counter[str] = Counter()
    for response in range(plan.num_responses):
        for span in reader.assemble(response).lineage:
            rows = reader.shards.rows(span.incarnation, span.epoch, response)
            recovered[span.incarnation] += rows[0][1].start
    pools = {place.slot: place.pool for place in plan.slots}
    ended_at_s = max((alive.updated_at_s for alive in announced), default=until_s)
    estimated = []
    for incarnation in sorted(missing):
        slot, held = reader.book.incarnations[incarnation], reader.book.held_by(incarnation)
        estimated.append(
            AliveRecord(
                incarnation=incarnation,
                slot=slot,
                state="gone" if held and held <= reader.shards.ended else "working",
                beat=0,
                pool=pools.get(slot, JOINED_POOL),
                host="",
                pid=0,
                started_at_s=min(plan.created_at_s, ended_at_s),
                updated_at_s=ended_at_s,
                tokens_generated=reader.shards.tokens(incarnation),
                tokens_recovered=recovered[incarnation],
                prefill_tokens=0,
                responses_finished=len(held & reader.shards.ended),
                engine="",
                batch_invariant=False,
            )
        )
    return estimated


def _lives(
    announced: Sequence[AliveRecord], reader: JournalReader, kept: Mapping[str, int], unused: Sequence[int]
) -> list[SlotLife]:
    """Lives by slot and start.

    tokens_regenerated: what it decoded, as far as its last heartbeat told, less what counts and what is unused. These
    tokens were unflushed at a kill, or void because another member had claimed the response.
    """
    journalled, stopped = _unused_tokens(reader, unused)
    lives = []
    for alive in announced:
        incarnation = alive.incarnation
        decoded = max(alive.tokens_generated, reader.shards.tokens(incarnation))
        tokens_unused = journalled[incarnation]
        if incarnation in stopped and alive.state == "gone":
            # What it was decoding when the iteration closed is dropped, and no member decodes it again.
            tokens_unused += decoded - reader.shards.tokens(incarnation)
        lives.append(
            SlotLife(
                slot=alive.slot,
                incarnation=incarnation,
                pool=alive.pool,
                started_at_s=alive.started_at_s,
                ended_at_s=alive.updated_at_s,
                state="lost" if alive.state != "gone" else "left" if alive.unfinished else "gone",
                tokens_kept=kept.get(incarnation, 0),
                tokens_recovered=alive.tokens_recovered,
                tokens_regenerated=decoded - kept.get(incarnation, 0) - tokens_unused,
                prefill_tokens=alive.prefill_tokens,
                usd_per_hour=alive.usd_per_hour,
                tokens_unused=tokens_unused,
                working_at_s=alive.working_at_s,
                decode_s=alive.decode_s,
                puts=alive.puts,
                gets=alive.gets,
                bytes_read=alive.bytes_read,
            ),
        )
    return sorted(lives, key=lambda life: (life.slot, life.started_at_s))


def _unused_tokens(reader: JournalReader, unused: Sequence[int]) -> tuple[Counter[str], set[str]]:
    """Journalled tokens of unused responses by incarnation, and the incarnations that hold an unfinished one."""
    journalled: Counter[str] = Counter()
    holders: set[str] = set()
    for response in unused:
        assembled, owner = reader.assemble(response), reader.book.owner(response)
        for span in assembled.lineage:
            rows = reader.shards.rows(span.incarnation, span.epoch, response)
            journalled[span.incarnation] += sum(len(row.token_ids) for at, row in rows if at <= span.last_sequence)
        if owner is not None and not assembled.finish.ends_response:
            holders.add(owner.incarnation)
    return journalled, holders


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
    """Rewards and lengths, under TRL's names, over all graded responses, so that filtering does not improve them."""
    ordered = sorted(graded, key=lambda response: response.response)
    rewards = np.array([response.reward for response in ordered]).reshape(-1, plan.num_generations)
    lengths = np.array([response.length for response in ordered])
    metrics = {
        "reward": rewards.mean(),
        "reward_std": rewards.std(axis=1).mean(),
        "frac_reward_zero_std": (rewards.max(axis=1) == rewards.min(axis=1)).mean(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": np.mean([response.finish_reason == "length" for response in ordered]),
        "num_tokens": lengths.sum(),
    }
    for name in ordered[0].rewards:
        values = [value for response in ordered if (value := response.rewards.get(name)) is not None]
        if values:
            metrics[f"rewards/{name}/mean"] = np.mean(values)
            # As TRL's, with the divisor n - 1; for a single value TRL gives nan, which no chart can show.
            metrics[f"rewards/{name}/std"] = np.std(values, ddof=1) if len(values) > 1 else 0.0
    return {name: float(value) for name, value in metrics.items()}


def resume_metrics(lives: Sequence[SlotLife]) -> dict[str, float]:
    """Interruptions, and tokens recovered and regenerated, summed over all lives."""
    return {
        "preempt/count": float(sum(life.state != "gone" for life in lives)),
        "resume/tokens_recovered": float(sum(life.tokens_recovered for life in lives)),
        "resume/tokens_regenerated": float(sum(life.tokens_regenerated for life in lives)),
    }
