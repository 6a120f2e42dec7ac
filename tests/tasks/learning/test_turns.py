"""Responses with turns: what is recorded, graded and trained of them, from a journal written by hand."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage.clock import ManualClock
from storage.digests import digest_of
from storage.journal.assembly import JournalReader
from storage.journal.compaction import read_batches
from storage.journal.retention import settle
from storage.records import layout, records
from storage.records.prompt_table import PromptRow, encode_prompts
from storage.records.records import Span
from storage.stores.memory import MemoryStore
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.rewards import RewardConfig
from tasks.grading.grader import Grader
from tasks.grading.reward import GradingError
from tasks.learning.advantage import advantages_of
from tasks.learning.batching import collate
from tasks.learning.estimates import by_response, padded
from tasks.learning.forward_passes import ForwardPasses
from tasks.learning.journal_follower import FollowConfig
from tasks.learning.ranks import Ranks
from tasks.learning.recorded_batches import BatchReader, RecordedBatches, check_some_graded
from tasks.learning.replayed_batches import ReplayReader
from tests.turn_journals import LOGPROB, PLAN, ROWS, journalled

PROMPTS = [PromptRow("p", (1, 2), [{"role": "user", "content": "look"}], {})]
ENVIRONMENT = (RewardConfig(function="environment"),)
FOLLOW = FollowConfig(in_plan_order=True, timeout_s=1.0, poll_interval_s=0.1, flush_interval_s=0.1)


def read_messages(prompt, token_ids, origins, events):
    """The policy's stretches as text, without a tokenizer."""
    found, start = [], 0
    for stretch, length in enumerate(origins):
        if stretch % 2 == 0:
            found.append({"role": "assistant", "content": str(token_ids[start : start + length])})
        else:
            found.append({"role": "tool", "content": "8"})
        start += length
    return prompt.prompt, found


def recorded(store, plan=PLAN, rewards=ENVIRONMENT, **settings):
    fields = {"prompts": PROMPTS, "decode": str, "read_messages": read_messages} | settings
    with Grader(rewards) as grader:
        batches = RecordedBatches(
            store, plan, grader=grader, follow=FOLLOW, tokens_max=1000, clock=ManualClock(), **fields
        )
        return list(batches)


@pytest.fixture
def store():
    found = MemoryStore("run")
    journalled(found)
    return found


def test_a_response_that_failed_stands_in_its_batch_without_a_reward(store):
    [batch] = recorded(store)
    first, second, failed = batch.responses
    assert (first.length, first.policy_length, first.finish_reason, first.reward) == (7, 4, "stop", 0.5)
    assert (second.length, second.policy_length, second.finish_reason, second.reward) == (1, 1, "length", -1.0)
    assert (failed.length, failed.finish_reason, failed.reward, failed.rewards) == (2, "failed", None, {})
    assert read_batches(store, 0) == [batch]


def test_a_replay_reads_the_same_turns_from_the_parts_as_from_the_journal(store):
    """But for the version that sampled each token: of a compacted iteration, only its plan's is known."""
    prompts = encode_prompts(PROMPTS)
    plan = replace(PLAN, prompts_key=layout.prompts(0, digest_of(prompts)))
    store.put(plan.prompts_key, prompts)
    records.commit(store, layout.plan(0), plan)
    [batch] = recorded(store, plan)
    journal, replay = BatchReader(store, plan), ReplayReader(store, plan)
    before = [journal.tokens(graded) for graded in batch.responses]
    assert sum(map(len, (each.events for each in before))) > 2
    settle(store, 0)
    assert store.list(layout.journal(0)) == []
    for reader in (replay, ReplayReader(store, plan)):
        for first, again in zip(before, map(reader.tokens, batch.responses), strict=True):
            assert again.token_ids.tolist() == first.token_ids.tolist()
            assert again.logprobs.tobytes() == first.logprobs.tobytes()
            assert (again.origins, again.events, again.finish) == (first.origins, first.events, first.finish)
            assert (again.lineage, again.span_tokens, again.owes) == (first.lineage, first.span_tokens, False)


def test_equal_rewards_beside_a_failure_are_filtered_and_others_are_not(store):
    [batch] = recorded(store, replace(PLAN, groups_wanted=1))
    assert len(batch.responses) == 3  # 0.5 and -1 differ
    # If all others fail, a single response is left, which has nothing to be compared with.
    lonely, alone = MemoryStore("run"), [row for row in ROWS if row.response == 0]
    journalled(lonely, [*alone, *(replace(row, response=r) for r in (1, 2) for row in ROWS[-2:])])
    [batch] = recorded(lonely, replace(PLAN, groups_wanted=1))
    assert (batch.responses, len(batch.filtered)) == ((), 3)


def test_turns_without_a_reader_of_conversations_are_refused(store):
    with pytest.raises(ValueError, match="response 0 has turns; allowed: none, in a run without the section"):
        recorded(store, read_messages=None)


def test_an_iteration_whose_responses_all_failed_is_refused():
    with pytest.raises(GradingError, match="iteration 0: every response failed, because its environment was lost"):
        check_some_graded(PLAN, [])


def test_length_counts_what_the_policy_sampled(store):
    penalty = RewardConfig(function="length", arguments={"free_tokens": 0, "scale_tokens": 8})
    [batch] = recorded(store, rewards=(penalty,))
    assert [graded.reward for graded in batch.responses] == [-4 / 8, -1 / 8, None]


@pytest.mark.slow
def test_answers_that_are_given_up_count_as_zero_and_are_recorded_though_all_are(store):
    rewards = (RewardConfig(function="format", arguments={"pattern": "(x+)+y"}, time_limit_s=1.0, on_failure=-2.0),)
    [batch] = recorded(
        store, rewards=rewards, read_messages=lambda *_: ([], [{"role": "assistant", "content": "x" * 60}])
    )
    assert ([graded.reward for graded in batch.responses], batch.reward_errors) == ([0.0, 0.0, None], ())
    assert batch.given_up[0] == "reward format of response 0 did not answer within 1 s"
    assert len(batch.given_up) == 2


def test_a_pass_trains_the_policys_tokens_alone(store):
    [batch] = recorded(store)
    passes = ForwardPasses(BatchReader(store, PLAN), PLAN, PROMPTS, 1000, Ranks(device=torch.device("cpu")))
    [found] = passes(batch.responses[:2])
    assert found.completion_ids.tolist() == [[5, 6, 9, 9, 9, 7, 2], [4, 0, 0, 0, 0, 0, 0]]
    assert found.response_mask.int().tolist() == [[1, 1, 0, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0, 0]]
    one = [LOGPROB, LOGPROB - 1]
    assert found.sampler_logprobs.tolist() == [[*one, 0, 0, 0, *one], [LOGPROB, 0, 0, 0, 0, 0, 0]]
    assert found.lengths.tolist() == [4, 1]
    assert len(passes.weight_versions(found)) == 5


def stretches(draw_from):
    """Origins of a response, and its number of sampled tokens."""
    return st.lists(st.integers(1, 4), min_size=1, max_size=draw_from).map(tuple)


def batch_of(origins):
    completions = [[3] * sum(each) for each in origins]
    sampled = [[-1.0 - k for k in range(sum(each[::2]))] for each in origins]
    return collate(range(len(origins)), [[1]] * len(origins), completions, sampled, origins)


@given(st.lists(stretches(5), min_size=1, max_size=4))
def test_rows_of_sampled_tokens_go_into_a_batch_and_come_out_of_it(origins):
    batch = batch_of(origins)
    rows = by_response(batch.sampler_logprobs, batch)
    assert [row.tolist() for row in rows.values()] == [[-1.0 - k for k in range(sum(each[::2]))] for each in origins]
    assert torch.equal(padded(rows, batch), batch.sampler_logprobs)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_without_turns_a_batch_is_bit_for_bit_what_it_is_without_origins(lengths):
    columns = (range(len(lengths)), [[1]] * len(lengths), [[3] * n for n in lengths], [[-0.1 * n] * n for n in lengths])
    plain, given_origins = collate(*columns), collate(*columns, [(n,) for n in lengths])
    for name in ("input_ids", "completion_ids", "response_mask", "sampler_logprobs"):
        assert torch.equal(getattr(plain, name), getattr(given_origins, name))
        assert getattr(plain, name).dtype == getattr(given_origins, name).dtype


def gae_of_masked_rows(rewards, values, mask, gamma, gae_lambda):
    """GAE of multi-turn responses, token by token from the last: a masked token passes on what follows it."""
    advantages = torch.zeros_like(values)
    for row in range(len(values)):
        following = carried = 0.0
        for t in reversed(range(values.shape[1])):
            if not mask[row, t]:
                continue
            carried = rewards[row, t] + gamma * following - values[row, t] + gamma * gae_lambda * carried
            following = values[row, t]
            advantages[row, t] = carried
    return advantages


@given(st.lists(stretches(5), min_size=1, max_size=4), st.integers(0, 1000))
def test_values_of_observations_are_skipped_in_gae(origins, seed):
    batch = batch_of(origins)
    mask, draw = batch.response_mask, torch.Generator().manual_seed(seed)
    values = torch.randn(mask.shape, generator=draw, dtype=torch.float64)
    scores = torch.randn(len(origins), generator=draw, dtype=torch.float64)
    algorithm = AlgorithmConfig(advantage_estimator="gae", gamma=0.9, gae_lambda=0.8)
    rows = list(by_response(values, batch).values())
    _, returns = advantages_of(scores, batch.lengths, 1, algorithm, values=rows)
    rewards = torch.zeros_like(values)
    for row, score in enumerate(scores):
        rewards[row, int(mask[row].nonzero()[-1])] = score
    expected = (gae_of_masked_rows(rewards, values, mask, 0.9, 0.8) + values).masked_fill(~mask, 0.0)
    found = padded(dict(enumerate(returns)), batch)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


REWARDS = torch.tensor([1.0, 0.0, 7.0, 2.0, 3.0, 0.5], dtype=torch.float64)
COUNTED = torch.tensor([True, True, False, True, True, True])


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_group_with_a_failure_is_trained_as_if_it_were_smaller(estimator):
    algorithm, lengths = AlgorithmConfig(advantage_estimator=estimator), torch.tensor([3, 3, 0, 3, 3, 3])
    found, _ = advantages_of(REWARDS, lengths, 3, algorithm, counted=COUNTED)
    small, _ = advantages_of(REWARDS[:2], lengths[:2], 2, algorithm)
    whole, _ = advantages_of(REWARDS[3:], lengths[3:], 3, algorithm)
    assert torch.equal(torch.stack(found), torch.stack([*small, torch.zeros_like(small[0]), *whole]))


@pytest.mark.parametrize(
    "settings", [{"scale_rewards": "batch"}, {"advantage_estimator": "reinforce_plus_plus_baseline"}], ids=str
)
def test_what_failed_does_not_touch_the_statistics_of_the_step(settings):
    algorithm, lengths = AlgorithmConfig(**settings), torch.tensor([3, 1, 0, 3, 2, 3])
    found, _ = advantages_of(REWARDS, lengths, 3, algorithm, counted=COUNTED)
    centred = torch.cat([REWARDS[:2] - REWARDS[:2].mean(), REWARDS[3:] - REWARDS[3:].mean()])
    if settings.get("scale_rewards"):
        expected = centred / (REWARDS[COUNTED].std() + algorithm.advantage_eps)
    else:
        tokens = centred.repeat_interleave(lengths[COUNTED])
        expected = (centred - tokens.mean()) / (tokens.std() + algorithm.advantage_eps)
    torch.testing.assert_close(torch.stack(found)[COUNTED], expected)
    assert float(found[2]) == 0.0
    other = REWARDS.clone()
    other[2] = -50.0
    again, _ = advantages_of(other, lengths, 3, algorithm, counted=COUNTED)
    assert torch.equal(torch.stack(found), torch.stack(again))


def test_the_lineage_of_a_response_that_began_again_gives_the_last_attempt(store):
    reader = JournalReader(store, PLAN)
    reader.refresh()
    found = reader.follow(1, (Span(epoch=1, incarnation="00000-7777777777777777", last_sequence=0),))
    assert (found.token_ids.tolist(), found.restarts, len(found.events)) == ([4], 1, 1)
