"""What prefill took and what it takes without sharing, worked out by hand for hand-written journals."""

from collections.abc import Mapping

import pytest

from storage.journal.assembly import JournalReader
from storage.journal.shard import Finish
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord, SlotLife
from storage.stores.memory import MemoryStore
from tasks.reporting.conclusion import naive_prefill_tokens, prefill_metrics
from tests.journals import Incarnation, a_plan

PLAN = a_plan(groups=1, generations=4)
PROMPTS = [PromptRow("p0", (1,) * 100, "", {})]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def life(incarnation: str, prefill_tokens: int) -> SlotLife:
    return SlotLife(
        slot=0,
        incarnation=incarnation,
        pool="rollout",
        started_at_s=0.0,
        ended_at_s=1.0,
        state="gone",
        tokens_kept=0,
        tokens_recovered=0,
        tokens_regenerated=0,
        prefill_tokens=prefill_tokens,
    )


def read(store: MemoryStore, plan: PlanRecord = PLAN) -> JournalReader:
    reader = JournalReader(store, plan)
    reader.refresh()
    return reader


def metrics(store: MemoryStore, prefilled: Mapping[str, int]) -> dict[str, float]:
    lives = [life(incarnation, tokens) for incarnation, tokens in prefilled.items()]
    return prefill_metrics(lives, naive(store))


def naive(store: MemoryStore) -> int:
    return naive_prefill_tokens(PLAN, PROMPTS, read(store), range(PLAN.num_responses))


def test_an_undisturbed_group_with_one_prefill_is_one_part_in_num_generations(store: MemoryStore):
    only = Incarnation(store, PLAN, 0, "00000-a")
    for response in range(4):
        only.write(response, [5, 5], Finish.RUNNING)
        only.write(response, [5, 2])
    assert metrics(store, {"00000-a": 100}) == {
        "rollout/prefill_tokens": 100,
        "rollout/prefill_tokens_naive": 400,
        "rollout/prefill_share": 0.25,
    }


def test_a_resumed_response_adds_its_prompt_and_its_prefix(store: MemoryStore):
    victim = Incarnation(store, PLAN, 0, "00000-a")
    for response in (1, 2, 3):
        victim.write(response, [5, 2])
    victim.write(0, [5] * 30, Finish.RUNNING)
    victim.write(0, [5] * 10, Finish.RUNNING)
    successor = Incarnation(store, PLAN, 0, "00000-b")
    successor.write(0, [2])
    assert metrics(store, {"00000-a": 100, "00000-b": 140}) == {
        "rollout/prefill_tokens": 240,
        "rollout/prefill_tokens_naive": 540,
        "rollout/prefill_share": pytest.approx(240 / 540),
    }


def test_each_group_counts_with_its_own_prompt(store: MemoryStore):
    plan = a_plan(groups=3, generations=2)
    prompts = [PromptRow(f"p{length}", (1,) * length, "", {}) for length in (1, 10, 100)]
    only = Incarnation(store, plan, 0, "00000-a")
    for response in (0, 2, 3, 4):
        only.write(response, [2])
    assert naive_prefill_tokens(plan, prompts, read(store, plan), range(plan.num_responses)) == 1 + 2 * 10 + 100


def test_work_that_was_void_was_begun_too(store: MemoryStore):
    """The third took the response over before the second's tokens came; the prefix is the first's for both."""
    first = Incarnation(store, PLAN, 0, "00000-a")
    first.write(0, [5, 5, 5], Finish.RUNNING)
    second = Incarnation(store, PLAN, 0, "00000-b")
    second.write(1, [2])
    third = Incarnation(store, PLAN, 0, "00000-c")
    second.write(0, [7], Finish.RUNNING)
    third.write(0, [2])
    assert [span.incarnation for span in read(store).assemble(0).lineage] == ["00000-a", "00000-c"]
    assert naive(store) == 100 + 103 + 103 + 100


def test_what_was_released_before_it_was_begun_does_not_count(store: MemoryStore):
    holder = Incarnation(store, PLAN, 0, "00000-a")
    holder.write(0, [], Finish.RELEASED)
    assert naive(store) == 0
    successor = Incarnation(store, PLAN, 0, "00000-b")
    successor.write(0, [2])
    assert naive(store) == 100


def test_without_anything_begun_there_is_no_share(store: MemoryStore):
    assert metrics(store, {}) == {"rollout/prefill_tokens": 0, "rollout/prefill_tokens_naive": 0}
