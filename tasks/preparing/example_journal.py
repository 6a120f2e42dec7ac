"""The journal of an iteration of examples: the plan task writes every response as a member would, all at once.

The writer is an incarnation with a claim, so trainer, conclusion, retention and pages read examples as they read what a
policy wrote. An attempt that died in between is sealed by the next.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from storage.clock import Clock
from storage.journal.assembly import JournalReader
from storage.journal.claims import take_over
from storage.journal.journal import JournalWriter, PendingRows
from storage.journal.shard import Finish
from storage.journal.turns import TurnRecord, encode_turn
from storage.records import layout, prompt_table, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.prompt_table import PromptRow
from storage.records.records import CONTROL_POOL, PlanRecord, SlotPlan, nonce
from storage.stores.store import ObjectStore
from tasks.configuration.run_config import RunConfig
from tasks.learning.pretrained import vocabulary_size
from tasks.planning.iteration_plan import IterationPlan
from tasks.preparing.tools import model_tokenizer
from tasks.prompts.completion_comparison import compare_completions
from tasks.prompts.draw import check_tokens
from tasks.prompts.examples import COMPLETIONS, Stretch, completions_of
from tasks.prompts.prompt import PromptError, PromptSet
from tasks.prompts.row_comparison import place_of
from tasks.prompts.run_examples import RunExamples
from tasks.prompts.tokenise import Tokenizer

log = logging.getLogger(__name__)
# Of a shard, in tokens: some 8 MB.
SHARD_TOKENS = 1 << 20
SLOT = 0

# Yields the responses of each row of the prompt table, each response by its stretches.
Responses = Callable[[Sequence[PromptRow]], Iterator[Sequence[Sequence[Stretch]]]]
# Adds the rows of a response under an epoch, and returns the number of its tokens.
Add = Callable[[PendingRows, int, int], int]


def plan_of_examples(groups: int) -> IterationPlan:
    """The plan of an iteration that needs no machine to generate: one slot for the writer, and nothing to decide."""
    slot = SlotPlan(slot=SLOT, pool=CONTROL_POOL, groups=tuple(range(groups)))
    return IterationPlan(slots=(slot,), seeding=None, decisions=())


def responses_of(
    config: RunConfig, prompts: PromptSet, tokenizer: Callable[[], Tokenizer], model_dir: Path
) -> Responses:
    """Make the responses of each example of `prompts`; raises PromptError for one that does not fit."""
    vocab_size, length_max = vocabulary_size(model_dir), config.sampling.max_completion_length

    def made(rows: Sequence[PromptRow]) -> Iterator[Sequence[Sequence[Stretch]]]:
        if isinstance(prompts, RunExamples):
            return (prompts.completions(row.prompt_id, length_max) for row in rows)
        return completions_of(rows, tokenizer(), config.data, length_max, COMPLETIONS[config.algorithm.kind])

    def of_rows(rows: Sequence[PromptRow]) -> Iterator[Sequence[Sequence[Stretch]]]:
        for row, found in zip(rows, made(rows), strict=True):
            highest = max(max(each.token_ids) for stretches in found for each in stretches)
            check_tokens(row.prompt_id, highest, vocab_size)
            yield found

    return of_rows


def check_examples(
    config: RunConfig, rows: Sequence[PromptRow], prompts: PromptSet, tokenizer: Tokenizer, model_dir: Path
) -> tuple[str, list[str]]:
    """Make every response once; returns a line about them, and doubts. Raises PromptError.

    rows: all examples of `prompts`, tokenised, from running position 0 on.
    """
    responses = responses_of(config, prompts, lambda: tokenizer, model_dir)
    # Tokens of another run are what its policy wrote.
    is_text = not isinstance(prompts, RunExamples)
    lengths: list[int] = []

    def made() -> Iterator[tuple[PromptRow, Sequence[Sequence[Stretch]]]]:
        for row, found in zip(rows, responses(rows), strict=True):
            lengths.extend(sum(len(each.token_ids) for each in stretches) for stretches in found)
            if is_text and len(found) > 1 and found[0] == found[1]:
                raise PromptError(
                    f"prompt {row.prompt_id!r}: the chosen completion has the tokens of the rejected one; allowed: two "
                    "that differ"
                )
            if is_text:
                yield row, found

    columns, place = COMPLETIONS[config.algorithm.kind], partial(place_of, prompts, config.data)
    doubts = compare_completions(
        made(), columns, len(rows), place, tokenizer=model_tokenizer(tokenizer), data=config.data
    )
    return f"completions: all {len(lengths)}, tokenised, with up to {max(lengths)} tokens", doubts


def write_examples(store: ObjectStore, plan: PlanRecord, responses: Responses, clock: Clock) -> None:
    """Write the responses of a plan of examples that no earlier attempt wrote, under a claim.

    The plan has one slot. Of a data set's tokens the log-prob is 0: the data set chose each with certainty.
    """
    made = enumerate(responses(prompt_table.read_prompts(store, plan)))
    group = -1
    found: Sequence[Sequence[Stretch]] = ()

    def add(pending: PendingRows, response: int, epoch: int) -> int:
        nonlocal group, found
        its_group, number = divmod(response, plan.num_generations)
        # Missing responses come in their order.
        while group < its_group:
            group, found = next(made)
        return _add(pending, response, epoch, found[number])

    written = write_finished(store, plan, SLOT, lambda: add, clock)
    log.info("iteration %d: %d examples are written", plan.iteration, written)


def write_finished(store: ObjectStore, plan: PlanRecord, slot: int, adding: Callable[[], Add], clock: Clock) -> int:
    """Write the finished responses of a slot that no earlier attempt wrote, under a claim; returns how many.

    adding: called before the claim, and only if a response is missing.
    """
    reader, responses = JournalReader(store, plan), plan.responses_of(slot)
    incarnation = f"{slot:05d}-{nonce()[:16]}"
    add: Add | None = None
    while True:
        reader.refresh()
        if all(map(reader.has_ended, responses)):
            return 0
        add = add or adding()
        _announce(store, plan, slot, incarnation, clock)
        predecessors = {owner.incarnation for owner in reader.book.owners_of(slot)}
        if take_over(
            store,
            plan,
            reader.book,
            reader.shards,
            unit=slot,
            incarnation=incarnation,
            slot=slot,
            predecessors=predecessors,
        ):
            break
    missing = [response for response in responses if not reader.has_ended(response)]
    writer = JournalWriter(store, plan.iteration, incarnation, plan.weight_version)
    pending, tokens = PendingRows(), 0
    for response in missing:
        tokens += add(pending, response, reader.book.epoch(slot))
        if tokens >= SHARD_TOKENS:
            writer.write(pending)
            pending, tokens = PendingRows(), 0
    if tokens:
        writer.write(pending)
    return len(missing)


def _add(pending: PendingRows, response: int, epoch: int, stretches: Sequence[Stretch]) -> int:
    start = 0
    for number, stretch in enumerate(stretches):
        ids, is_last = stretch.token_ids, number == len(stretches) - 1
        if stretch.is_learned:
            finish = Finish.STOP if is_last else Finish.ACTING
            pending.append(response, epoch, start, ids, [0.0] * len(ids), finish)
        else:
            turn = TurnRecord(turn=number // 2, calls=(), seconds=0.0)
            pending.observe(response, epoch, start, ids, encode_turn(turn), Finish.RUNNING)
        start += len(ids)
    return start


def _announce(store: ObjectStore, plan: PlanRecord, slot: int, incarnation: str, clock: Clock) -> None:
    """Write a heartbeat, because conclusions estimate the cost of a claimant without one."""
    now = clock.wall()
    alive = HeartbeatRecord(
        incarnation=incarnation,
        slot=slot,
        state="gone",
        beat=1,
        pool=CONTROL_POOL,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_at_s=now,
        updated_at_s=now,
        # The seconds of the pool are those of the plan task.
        usd_per_hour=0.0,
        tokens_generated=0,
        tokens_recovered=0,
        prefill_tokens=0,
        responses_finished=0,
        engine="",
        batch_invariant=False,
    )
    records.put(store, layout.alive(plan.iteration, incarnation), alive)
