"""Verification: checks that an iteration was trained on exactly what was planned and journalled."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from storage.errors import GleanerError
from storage.journal.assembly import JournalReader
from storage.journal.compaction import ENDS, unused_responses
from storage.records.records import GradedResponse, PlanRecord, is_filtered


class IntegrityError(GleanerError):
    """What was trained is not what was planned; the iteration is not committed."""


def verified_parts(
    plan: PlanRecord,
    trained: Sequence[GradedResponse],
    reader: JournalReader,
    filtered: Sequence[GradedResponse] = (),
) -> Iterator[range]:
    """Check every response of the plan against batches and journal, part by part.

    Yields each part of the reader when it is verified, while its rows are in memory. Each response is trained once. If
    the plan says how many groups are wanted, it may instead be filtered once, or be unused
    (`storage.journal.compaction.unused_responses`). Raises IntegrityError; for what the batches alone say, before the
    first part.
    """
    _check_batches(plan, trained, filtered)
    graded = {response.response: response for response in (*trained, *filtered)}
    for part in reader.parts():
        for number in part:
            if number in graded:
                _check_journal(plan, graded[number], reader)
        yield part


def _check_batches(plan: PlanRecord, trained: Sequence[GradedResponse], filtered: Sequence[GradedResponse]) -> None:
    """Check that each response of the plan is in one batch, or unused, and that the filter was right."""
    counts = Counter(response.response for response in (*trained, *filtered))
    doubled = sorted(response for response, count in counts.items() if count > 1)
    missing = sorted(set(range(plan.num_responses)) - set(counts) - set(unused_responses(plan, trained, filtered)))
    foreign = sorted(set(counts) - set(range(plan.num_responses)))
    if doubled or missing or foreign:
        raise IntegrityError(
            f"iteration {plan.iteration}: {plan.num_responses} responses planned; trained more than once: "
            f"{doubled[:8]}, never: {missing[:8]}, not planned: {foreign[:8]}",
        )
    _check_filter(plan, trained, filtered)


def _check_journal(plan: PlanRecord, recorded: GradedResponse, reader: JournalReader) -> None:
    """Check that the journal's response equals the response of the batch."""
    assembled = reader.follow(recorded.response, recorded.lineage)
    found, said = (len(assembled.token_ids), assembled.policy_length), (recorded.length, recorded.policy_length)
    if found != said or assembled.finish != ENDS[recorded.finish_reason]:
        raise IntegrityError(
            f"iteration {plan.iteration}, response {recorded.response}: trained on {said[0]} tokens, {said[1]} of them "
            f"sampled, ended by {recorded.finish_reason!r}; the journal holds {found[0]}, {found[1]} of them sampled, "
            f"ended by {assembled.finish.name.lower()!r}",
        )


def _check_filter(plan: PlanRecord, trained: Sequence[GradedResponse], filtered: Sequence[GradedResponse]) -> None:
    """Check that exactly the groups with equal rewards are filtered, whole, and at most the wanted number trained."""
    wanted = plan.groups_wanted
    if wanted is None:
        if filtered:
            raise IntegrityError(
                f"iteration {plan.iteration}: response {filtered[0].response} is filtered; allowed: none"
            )
        return
    groups: dict[int, list[GradedResponse]] = defaultdict(list)
    for response in (*trained, *filtered):
        groups[response.response // plan.num_generations].append(response)
    due = {group: is_filtered(plan, responses) for group, responses in groups.items()}
    for kind, responses in (("trained", trained), ("filtered", filtered)):
        for response in responses:
            group = response.response // plan.num_generations
            if due[group] != (kind == "filtered"):
                found = f"iteration {plan.iteration}, response {response.response}: {kind}"
                what = "has no two" if due[group] else "has"
                raise IntegrityError(f"{found}, although group {group} {what} different rewards")
    count = len({response.response // plan.num_generations for response in trained})
    if count > wanted:
        raise IntegrityError(f"iteration {plan.iteration}: {count} groups are trained; allowed: the {wanted} wanted")
