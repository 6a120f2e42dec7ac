"""The checks of a run of several iterations: what each was sampled from, published, concluded and left by the sweeps.

They compare the final store with the judged responses of each iteration, and what it holds of them with the journal
that was written, deleted or not. A last sweep without faults stands for the next one that would come: it finishes what
others began.
"""

import math
from collections.abc import Mapping, Sequence

from simulation.judge_turns import since_last_begun
from simulation.ledger_of_run import LedgerOfRun
from simulation.reference_reader import Reference
from simulation.simulated_crew import Outcome
from simulation.simulated_history import reward_of
from simulation.simulated_path import swept_by
from simulation.simulated_step import Blocks, bits_of, factors_of, first_weights, restored, stepped
from simulation.stored_objects import batch_of, body_of
from simulation.undisturbed import Whole
from storage.clock import ManualClock
from storage.journal.compaction import read_responses
from storage.journal.responses import Response
from storage.records import layout, records
from storage.records.records import BatchRecord, GradedResponse, PlanRecord, ReportRecord, SlotLife
from storage.records.run import reports
from storage.stores.memory import MemoryStore
from storage.stores.store import StorageError
from storage.weights.versions import pull_version


def check_run(run: LedgerOfRun, outcomes: Sequence[Outcome], references: Sequence[Reference]) -> None:
    """Check every iteration of a run that has ended; references: the journal of each iteration."""
    try:
        told = reports(run.store)
        _check_left(run, outcomes, references)
        swept = swept_by(run.store)
        if swept.problems:
            run.common.breaks(f"changed: the next sweep leaves alone: {swept.problems}")
        if len(told) != len(outcomes):
            run.common.breaks(f"lost: {len(told)} of {len(outcomes)} iterations are committed")
        weights = first_weights()
        for outcome, report in zip(outcomes, told, strict=False):
            batches = _batches(run.store, outcome.history.plan)
            weights = _check_saved(run, report.weight_version, stepped(weights, batches))
            _check_report(run, outcome, report, batches)
            _check_corrections(run, outcome.history.plan)
            _check_published(run, outcome, report.weight_version, weights)
            _check_erased(run, outcome.history.plan.iteration)
        _check_plans(run, outcomes, told)
        _check_left(run, outcomes, references)
    except StorageError as error:
        run.common.breaks(f"lost: what the run needs cannot be read: {error!r}")


def _batches(store: MemoryStore, plan: PlanRecord) -> list[BatchRecord]:
    return [batch_of(key, store.get(key)) for key in store.list(layout.batches(plan.iteration))]


def _check_report(run: LedgerOfRun, outcome: Outcome, report: ReportRecord, batches: Sequence[BatchRecord]) -> None:
    """Check the report against the ledger: lengths, rewards, lives, and the next prompt."""
    plan, truth, ledger = outcome.history.plan, outcome.truth, outcome.ledger
    graded = [each.response for batch in batches for each in batch.graded]
    lengths = tuple(len(truth[response].logprobs) for response in graded)
    rewards = tuple(reward_of(truth[response].token_ids) for response in graded)
    size = plan.num_generations
    wanted = plan.groups_wanted
    trained = {each.response // size for batch in batches for each in batch.responses}
    used = max(graded) // size + 1 if wanted is not None and len(trained) == wanted else plan.num_groups
    concluded_s = ledger.created_at_s[layout.report(plan.iteration)]
    claimed = {claim.incarnation for claim in ledger.claims if claim.at_s < concluded_s}
    lives = {life.incarnation for life in report.lives}
    said = (report.iteration, report.weight_version, report.next_prompt, report.lengths)
    seen = (plan.iteration, plan.iteration + 1, plan.first_prompt + used, lengths)
    if said != seen or (wanted is not None and report.rewards != rewards):
        run.common.breaks(f"changed: report {plan.iteration} says {said} {report.rewards}, not {seen} {rewards}")
    if sum(life.tokens_kept for life in report.lives) != sum(lengths):
        run.common.breaks(f"changed: the lives of report {plan.iteration} do not keep as many tokens as were trained")
    if not all(_is_in_order(life) for life in report.lives):
        run.common.breaks(f"changed: a life of report {plan.iteration} ends before it begins")
    if not claimed <= lives:
        run.common.breaks(f"lost: report {plan.iteration} does not know {sorted(claimed - lives)}, which made claims")


def _is_in_order(life: SlotLife) -> bool:
    working_at_s = life.started_at_s if life.working_at_s is None else life.working_at_s
    return life.started_at_s <= working_at_s <= life.ended_at_s


def _check_corrections(run: LedgerOfRun, plan: PlanRecord) -> None:
    """Check that tokens of older weights were trained with importance weights, and those of an exact engine without.

    Which it is must not depend on how old the weights of one iteration happen to be.
    """
    key = layout.training(plan.iteration)
    metrics = body_of(key, "training", run.store.get(key))["metrics"]
    corrected, staleness = "importance/ess" in metrics, plan.config["algorithm"]["max_staleness"]
    if corrected != (staleness > 0) or (plan.weight_version < plan.iteration and not corrected):
        said = "with" if corrected else "without"
        run.common.breaks(f"changed: iteration {plan.iteration} was trained {said} importance weights at {staleness}")


def _check_saved(run: LedgerOfRun, version: int, weights: Blocks) -> Blocks:
    """Check that the first saved state follows from the recorded batches; returns the state, to the last bit."""
    folder, saved = layout.checkpoint(version), MemoryStore()
    for key, body in run.common.created.items():
        if key.startswith(folder):
            saved.put(key, body)
    if layout.manifest(folder) not in run.common.created:
        run.common.breaks(f"lost: the state of version {version} was not saved")
        return weights
    found = restored(saved, version, ManualClock())
    if not _are_same(found, {**weights, **bits_of(found)}):
        run.common.breaks(f"changed: the state of version {version} is not what the recorded batches lead to")
    return found


def _are_same(one: Blocks, other: Blocks) -> bool:
    return {name: bytes(block.data) for name, block in one.items()} == {n: bytes(b.data) for n, b in other.items()}


def _check_published(run: LedgerOfRun, outcome: Outcome, version: int, weights: Blocks) -> None:
    """Check that a weight version came after its objects and follows from the recorded batches.

    The last bits may differ from the saved state if two lives of the trainer computed them. The state precedes the
    report: after the end of the train task, no process has the state in memory.
    """
    key, written = layout.manifest(layout.weights(version)), list(run.common.created)
    if key not in written:
        run.common.breaks(f"lost: weight version {version} was not published")
        return
    before = written[: written.index(key)]
    prefix = layout.weights(version)
    objects = [
        layout.tensor_object(prefix, name) for name in body_of(key, "manifest", run.common.created[key])["objects"]
    ]
    if missing := set(objects) - set(before):
        run.common.breaks(f"lost: weight version {version} was there before {sorted(missing)}")
    state, report = layout.manifest(layout.checkpoint(version)), layout.report(version - 1)
    saved_s, reported_s = run.common.created_at_s.get(state, math.inf), outcome.ledger.created_at_s[report]
    if run.common.zero_s + saved_s > outcome.ledger.zero_s + reported_s:
        run.common.breaks(f"lost: {report} was there before the state that is due, {state}")
    if key not in run.store.list(layout.weights(version)):
        return
    _, found = pull_version(run.store, version, None, ManualClock())
    weights = {**weights, **bits_of(found)}
    if not _are_same(found, factors_of(weights) if outcome.history.adapts else weights):
        run.common.breaks(f"changed: weight version {version} is not what the recorded batches, or its state, lead to")


def _check_erased(run: LedgerOfRun, iteration: int) -> None:
    """Check that the last sweep has left nothing of a committed iteration that it is to delete."""
    folders = (layout.journal, layout.asks, layout.alive_all, layout.claims)
    prefixes = [folder(iteration) for folder in folders]
    left = [key for prefix in prefixes for key in run.store.list(prefix)]
    if left:
        run.common.breaks(f"lost: the sweeps have left {left[:3]}")


def _check_plans(run: LedgerOfRun, outcomes: Sequence[Outcome], told: Sequence[ReportRecord]) -> None:
    """Check the weight version that each plan samples from, and that prompts continue from plan to plan."""
    for outcome, before in zip(outcomes[1:], told, strict=False):
        plan = outcome.history.plan
        version = max(0, plan.iteration - outcome.history.ahead)
        said, due = (plan.weight_version, plan.first_prompt), (version, before.next_prompt)
        if said != due:
            run.common.breaks(f"changed: plan {plan.iteration} has the version and prompt {said}, not {due}")
        if records.read(run.store, PlanRecord, layout.plan(plan.iteration)) != plan:
            run.common.breaks(f"doubled: plan {plan.iteration} is not the one that was worked on")


def _check_left(run: LedgerOfRun, outcomes: Sequence[Outcome], references: Sequence[Reference]) -> None:
    """Check that the responses of each iteration can be read whole, from its parts or its journal.

    Recorded responses equal the journal in log-probs, stretches, events and spans, and the batches in rewards.
    """
    for outcome, reference in zip(outcomes, references, strict=True):
        plan = outcome.history.plan
        rows = list(read_responses(run.store, plan.iteration))
        check_rows(run, plan, outcome.truth, rows)
        recorded = {each.response: each for batch in _batches(run.store, plan) for each in batch.graded}
        for row in rows:
            graded = recorded.get(row.response)
            if graded is not None and (lack := _lack(row, graded, reference)):
                run.common.breaks(f"changed: response {row.response} of {plan.iteration} is read with other {lack}")


def _lack(row: Response, graded: GradedResponse, reference: Reference) -> str:
    """What of a recorded response is not as it was journalled and recorded; empty if all is."""
    found = [
        (place, each) for place, span in enumerate(graded.lineage) for _, each in reference.rows_of(row.response, span)
    ]
    rows = since_last_begun([each for _, each in found])
    spans = [0] * len(graded.lineage)
    for place, each in found[len(found) - len(rows) :]:
        spans[place] += len(each.token_ids)
    logprobs = b"".join(each.logprobs.tobytes() for each in rows)
    events = tuple(each.event for each in rows if each.event is not None)
    by_policy = sum(len(each.logprobs) for each in rows)
    checks = {
        "log-probs": row.logprobs.tobytes() == logprobs,
        "events": row.events == events,
        "stretches": sum(row.origins[::2]) == by_policy and sum(row.origins) == sum(spans),
        "spans": list(row.spans) == spans,
        "rewards": (row.reward, row.rewards) == (graded.reward, graded.rewards),
        "end": row.finish is rows[-1].finish,
    }
    return ", ".join(name for name, holds in checks.items() if not holds)


def check_rows(run: LedgerOfRun, plan: PlanRecord, truth: Mapping[int, Whole], rows: Sequence[Response]) -> None:
    """Check responses as read: tokens equal the undisturbed responses, and every trained response is present."""
    for row in rows:
        whole = truth[row.response]
        if list(row.token_ids) != list(whole.token_ids) or row.weight_version != plan.weight_version:
            run.common.breaks(f"changed: a reader got wrong tokens of response {row.response} of {plan.iteration}")
    recorded = {each.response for batch in _batches(run.store, plan) for each in batch.graded}
    if not recorded <= {row.response for row in rows}:
        run.common.breaks(f"lost: a reader of iteration {plan.iteration} got {len(rows)} of {len(recorded)} responses")
