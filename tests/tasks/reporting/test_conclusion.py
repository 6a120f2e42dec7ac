"""Verifying, measuring and committing an iteration whose journal and records are written by hand."""

from dataclasses import replace

import pytest

from resources.prices import GET_USD, PUT_USD
from storage.clock import ManualClock
from storage.digests import digest_of
from storage.fleet.fleet_records import DueRecord
from storage.journal.assembly import JournalReader
from storage.journal.compaction import read_batches
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.prompt_table import PromptRow, encode_prompts
from storage.records.records import BatchRecord, GradedResponse, ReportRecord, TrainingRecord
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject, ObjectMissing
from storage.weights.objects import encode_header
from storage.weights.tensor_sets import PUBLISHED_AT_S, WRITE_S, TensorBlock, publish
from tasks.reporting.conclusion import conclude_iteration, response_metrics
from tasks.reporting.verification import IntegrityError
from tests.journals import Incarnation, a_plan

PRICES = {"rollout": 3.6, "train": 36.0}
REWARDS = {0: 1.0, 1: 0.0, 2: 0.5, 3: 0.5}
PROMPTS = [PromptRow("p0", (1,) * 10, "", {}), PromptRow("p1", (1,) * 20, "", {})]
PROMPT_TABLE = encode_prompts(PROMPTS)
PROMPTS_KEY = layout.prompts(0, digest_of(PROMPT_TABLE))
PLAN = a_plan(groups=2, generations=2, slots=2, first_prompt=6, created_at_s=1000.0, prompts_key=PROMPTS_KEY)
TOLD = {
    "00000-a": {"prefill_tokens": 10},
    "00000-b": {"prefill_tokens": 13, "working_at_s": 1029.0, "decode_s": 30.0, "step_s": ((1, 0.5), (2, 0.75))},
    "00001-c": {
        "prefill_tokens": 20,
        "working_at_s": 1017.0,
        "decode_s": 60.0,
        "step_s": ((2, 0.25),),
        "puts": 200,
        "gets": 400,
        "bytes_read": 500_000_000,
    },
}
REQUESTS_USD = 300 * PUT_USD + 500 * GET_USD


def an_iteration():
    """Slot 0 is killed once: response 0 has 3 tokens by the victim and 2 by its successor; 4 tokens were lost or void.

    Responses 1, 2 and 3 have 4, 6 and 1 tokens; 3 was cut at the limit.
    """
    store = MemoryStore()
    store.create(PLAN.prompts_key, PROMPT_TABLE)
    records.commit(store, layout.plan(0), PLAN)
    victim = Incarnation(store, PLAN, 0, "00000-a")
    victim.write(0, [11, 12, 13], Finish.RUNNING)
    successor = Incarnation(store, PLAN, 0, "00000-b")
    victim.write(0, [99, 99], Finish.RUNNING)  # after the seal: void
    successor.write(0, [14, 2])
    successor.write(1, [1, 1, 1, 2])
    other = Incarnation(store, PLAN, 1, "00001-c")
    other.write(2, [5, 5, 5, 5, 5, 2])
    other.write(3, [7], Finish.LENGTH)
    # The victim had decoded 7 when it last told: 3 count, 2 are void, 2 were never flushed.
    victim.announce(started_at_s=1010, updated_at_s=1020, tokens_generated=7, gone=False)
    successor.announce(started_at_s=1025, updated_at_s=1065, tokens_generated=6, gone=True)
    other.announce(started_at_s=1012, updated_at_s=1062, tokens_generated=7, gone=True)
    for name, fields in TOLD.items():
        key = layout.alive(0, name)
        told = records.read(store, HeartbeatRecord, key)
        records.put(store, key, replace(told, **fields))
    commit_batches(store, [[2, 3], [0, 1]])
    training = TrainingRecord(
        iteration=0,
        weight_version=1,
        metrics={"loss": -0.25, "timing_s/wait": 8, "requests/train_puts": 100, "requests/train_gets": 100},
        reward_errors=(),
        started_at_s=1015,
        ended_at_s=1070,
    )
    records.commit(store, layout.training(0), training)
    block = TensorBlock("F32", (1,), bytes(4))
    publish(store, layout.weights(1), {"w": block}, {PUBLISHED_AT_S: 1075.0})
    return store


def graded(store, response):
    reader = JournalReader(store, PLAN)
    reader.refresh()
    assembled = reader.assemble(response)
    return GradedResponse(
        response=response,
        length=len(assembled.token_ids),
        policy_length=len(assembled.token_ids),
        finish_reason="stop" if assembled.finish == Finish.STOP else "length",
        lineage=assembled.lineage,
        reward=REWARDS[response],
        rewards={"exact": REWARDS[response], "style": None if response == 0 else 0.25},
    )


def commit_batches(store, division):
    for number, responses in enumerate(division):
        batch = BatchRecord(iteration=0, number=number, responses=tuple(graded(store, r) for r in responses))
        records.put(store, layout.batch(0, number), batch)


def change(store, response, **fields):
    """Alter what the trainer recorded of one response."""
    for key in store.list(layout.batches(0)):
        batch = records.read(store, BatchRecord, key)
        changed = tuple(replace(r, **fields) if r.response == response else r for r in batch.responses)
        records.put(store, key, replace(batch, responses=changed))


def conclude(store):
    return conclude_iteration(store, 0, PRICES, ManualClock(1100.0), egress_usd_per_gb={"rollout": 0.02})


def test_a_trainer_of_the_runs_own_ends_with_its_checkpoint_and_one_on_a_host_with_the_weights():
    saved = {PUBLISHED_AT_S: 1090.0, WRITE_S: 12.0}
    for on_host, ended_at_s, took in ((False, 1090.0, (20.0, 12.0)), (True, 1075.0, (5.0, None))):
        store = an_iteration()
        if on_host:
            records.commit(store, layout.due(0), DueRecord(iteration=0, groups=2))
        publish(store, layout.checkpoint(1), {"parameter.w": TensorBlock("F32", (1,), bytes(4))}, saved)
        report = conclude(store)
        assert report.train_ended_at_s == ended_at_s
        assert (report.metrics["timing_s/publish"], report.metrics.get("timing_s/checkpoint")) == took


def test_the_report_is_that_of_the_hand_made_case():
    report = conclude(an_iteration())
    assert (report.iteration, report.weight_version, report.next_prompt) == (0, 1, 8)
    assert report.rewards == (0.5, 0.5, 1.0, 0.0)  # in the order in which they were trained on
    assert report.lengths == (6, 1, 5, 4)
    assert (report.train_started_at_s, report.train_ended_at_s, report.created_at_s) == (1015, 1075, 1100)
    measured = {name: value for name, value in report.metrics.items() if not name.startswith("lengths/")}
    assert measured == pytest.approx(
        {
            "loss": -0.25,
            "reward": 0.5,
            "reward_std": 0.25,
            "frac_reward_zero_std": 0.5,
            "completions/mean_length": 4.0,
            "completions/min_length": 1,
            "completions/max_length": 6,
            "completions/clipped_ratio": 0.25,
            "num_tokens": 16,
            "rewards/exact/mean": 0.5,
            "rewards/exact/std": (0.5 / 3) ** 0.5,
            "rewards/style/mean": 0.25,
            "rewards/style/std": 0.0,
            "preempt/count": 1,
            "resume/tokens_recovered": 3,
            "resume/tokens_regenerated": 4,
            # Response 0 was begun at 0 and at 3 tokens, 1 at 0, with 10 of the prompt each; 2 and 3 with 20 each.
            "rollout/prefill_tokens": 43,
            "rollout/prefill_tokens_naive": 10 + 13 + 10 + 20 + 20,
            "rollout/prefill_share": 43 / 73,
            "timing_s/rollout": 55,
            "timing_s/rollout_machines": 100,
            "timing_s/train": 60,
            "timing_s/publish": 5,
            "weights/bytes": len(encode_header({"w": ("F32", (1,))})) + 4,
            # The victim told no times: 3 of its 7 tokens count. The successor waited 4 s for its weights and decoded
            # for 30 s, the third decoded for all of its 50 s but 5 for the weights.
            "cost/usd_rollout": 0.1,
            "cost/usd_useful": 1e-3 * (10 * 3 / 7 + 30 + 45) + 0.01 * 52,
            "cost/usd_wasted": 1e-3 * 10 * 4 / 7,
            "cost/usd_starting": 1e-3 * (4 + 5),
            "cost/usd_idle": 1e-3 * 6 + 0.01 * 8,
            "cost/usd_requests": 300 * PUT_USD + 500 * GET_USD,
            "cost/usd_egress": 0.5 * 0.02,
            "cost/usd_control": 0,
            "cost/usd_train": 0.6,
            "cost/usd_iter": 0.71 + REQUESTS_USD,
            "cost/usd_run": 0.71 + REQUESTS_USD,
            "cost/usd_per_mtok": (0.71 + REQUESTS_USD) / 16 * 1e6,
            "cost/lives_estimated": 0,
            "requests/crew_puts": 200,
            "requests/crew_gets": 400,
            "requests/crew_bytes_read": 500_000_000,
            "requests/train_puts": 100,
            "requests/train_gets": 100,
            "timing_s/wait": 8,
            "reward_errors": 0,
            "answers_given_up": 0,
            "balance/responses_moved": 0,
            "timing_s/iteration": 100,
        }
    )


def test_what_was_written_after_the_last_heartbeat_counts_as_decoded():
    store = an_iteration()
    key = layout.alive(0, "00000-a")
    records.put(store, key, replace(records.read(store, HeartbeatRecord, key), tokens_generated=1))
    # 5 tokens are in its shards, of which 3 count.
    assert conclude(store).lives[0].tokens_regenerated == 2


def test_concluding_again_gives_the_first_report_and_writes_nothing():
    store = an_iteration()
    first = conclude(store)
    before = {key: store.get(key) for key in store.list("")}
    assert conclude_iteration(store, 0, {"rollout": 9.0, "train": 9.0}, ManualClock(2000.0)) == first
    for key in store.list(layout.journal(0)):
        store.delete(key)
    assert conclude(store) == first
    assert {key: body for key, body in before.items() if "journal" not in key} == {
        key: store.get(key) for key in store.list("")
    }


def test_of_two_that_conclude_at_once_both_give_the_report_that_is_stored():
    class OtherIsFirst(MemoryStore):
        def create(self, key, body):
            if key == layout.report(0):
                other = records.decode(ReportRecord, key, body)
                records.put(self, key, replace(other, created_at_s=1.0, nonce="other"))
            return super().create(key, body)

    store = OtherIsFirst()
    store._objects.update(an_iteration()._objects)
    assert conclude(store).created_at_s == 1.0


@pytest.mark.slow
def test_whatever_is_deleted_by_one_that_concludes_at_once_both_give_its_report():
    class ConcludedAt(MemoryStore):
        """Another process commits the report before the n-th read, and deletes the journal behind it."""

        def __init__(self, objects, at):
            super().__init__()
            self._objects.update(objects)
            self.left = at

        def _tick(self):
            self.left -= 1
            if self.left == 0:
                conclude_iteration(self, 0, PRICES, ManualClock(1200.0))
                for prefix in (layout.journal(0), layout.alive_all(0), layout.claims(0)):
                    for key in self.list(prefix):
                        self.delete(key)

        def get(self, key, start=0, end=None):
            self._tick()
            return super().get(key, start, end)

        def list(self, prefix, after=""):
            self._tick()
            return super().list(prefix, after)

    objects = an_iteration()._objects
    for at in range(1, 40):
        store = ConcludedAt(objects, at)
        assert conclude(store).created_at_s == (1200.0 if store.left <= 0 else 1100.0), at
    assert store.left > 0, "every read was disturbed once"


def test_a_response_that_was_never_trained_on_is_named():
    store = an_iteration()
    commit_batches(store, [[2], [0, 1]])
    with pytest.raises(IntegrityError, match=r"4 responses planned; trained more than once: \[\], never: \[3\]"):
        conclude(store)
    assert layout.report(0) not in store.list("")


def test_a_response_that_was_trained_on_twice_is_named():
    store = an_iteration()
    commit_batches(store, [[2, 3], [0, 1], [2]])
    with pytest.raises(IntegrityError, match=r"trained more than once: \[2\], never: \[\]"):
        conclude(store)
    assert layout.report(0) not in store.list("")


def test_a_response_that_nobody_planned_is_refused():
    store = an_iteration()
    foreign = BatchRecord(iteration=0, number=2, responses=(replace(graded(store, 3), response=4),))
    records.commit(store, layout.batch(0, 2), foreign)
    with pytest.raises(IntegrityError, match="4 responses planned"):
        conclude(store)
    assert layout.report(0) not in store.list("")


def test_a_response_that_nobody_planned_is_named():
    store = an_iteration()
    foreign = BatchRecord(iteration=0, number=2, responses=(replace(graded(store, 3), response=777),))
    records.commit(store, layout.batch(0, 2), foreign)
    with pytest.raises(IntegrityError, match="777"):
        conclude(store)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 6}, "response 0: trained on 6 tokens, 5 of them sampled, ended by 'stop'; the journal holds 5, 5"),
        (
            {"policy_length": 4},
            "response 0: trained on 5 tokens, 4 of them sampled, ended by 'stop'; the journal holds 5, 5",
        ),
        (
            {"finish_reason": "length"},
            "of them sampled, ended by 'length'; the journal holds 5, 5 of them sampled, ended by 'stop'",
        ),
        (
            {"lineage": ()},
            "response 0: trained on 5 tokens, 5 of them sampled, ended by 'stop'; the journal holds 0, 0",
        ),
    ],
)
def test_a_response_that_is_not_what_the_journal_holds_is_named(fields, message):
    store = an_iteration()
    change(store, 0, **fields)
    with pytest.raises(IntegrityError, match=message):
        conclude(store)
    assert layout.report(0) not in store.list("")


def test_a_token_of_another_weight_version_is_found_out():
    store = an_iteration()
    plan = replace(PLAN, weight_version=3)
    records.put(store, layout.plan(0), plan)
    with pytest.raises(CorruptObject, match="sampled from weight version 0, the plan names 3"):
        conclude(store)


@pytest.mark.parametrize(
    "key",
    [
        layout.plan(0),
        PLAN.prompts_key,
        layout.training(0),
        layout.batch(0, 1),
        layout.claim(0, 0, 2),
    ],
)
def test_a_damaged_record_is_named_and_nothing_is_committed(key):
    store = an_iteration()
    store.put(key, store.get(key)[:-1])
    with pytest.raises(CorruptObject) as caught:
        conclude(store)
    assert caught.value.key == key
    assert layout.report(0) not in store.list("")


def test_a_damaged_shard_is_named_and_nothing_is_committed():
    store = an_iteration()
    key = layout.shard(0, "00001-c", 1)
    store.put(key, store.get(key)[1:])
    with pytest.raises(CorruptObject) as caught:
        conclude(store)
    assert caught.value.key == key
    assert layout.report(0) not in store.list("")


@pytest.mark.parametrize("key", [layout.training(0), layout.manifest(layout.weights(1))])
def test_before_the_weights_are_published_there_is_nothing_to_conclude(key):
    store = an_iteration()
    store.delete(key)
    with pytest.raises(ObjectMissing) as caught:
        conclude(store)
    assert caught.value.key == key
    assert layout.report(0) not in store.list("")


def test_batches_are_read_until_one_is_missing():
    store = an_iteration()
    commit_batches(store, [[0], [1], [2], [3]])
    store.delete(layout.batch(0, 2))
    assert [batch.number for batch in read_batches(store, 0)] == [0, 1]


def test_a_group_of_equal_rewards_counts_as_such_whatever_its_mean_rounds_to():
    """The mean of three times 0.1 is not 0.1, so their standard deviation is not 0."""
    plan = a_plan(1, 3, 1)
    equal = [
        GradedResponse(response=k, length=1, policy_length=1, finish_reason="stop", lineage=(), reward=0.1, rewards={})
        for k in range(3)
    ]
    assert response_metrics(equal, plan)["frac_reward_zero_std"] == 1.0
    assert response_metrics([*equal[:2], replace(equal[2], reward=0.2)], plan)["frac_reward_zero_std"] == 0.0
