"""The metrics of turns, and what else a report counts, from a journal written by hand."""

from dataclasses import replace

import pytest

from storage.journal.shard import Finish
from storage.records.prompt_table import PromptRow
from tasks.reporting.conclusion import naive_prefill_tokens, response_metrics
from tasks.reporting.slot_lives import JournalTally
from tasks.reporting.verification import IntegrityError, verified_parts
from tests.turn_journals import NAME, PLAN, read_back, said, turns_metrics


def test_turns_are_counted_as_they_count():
    assert turns_metrics() == {
        "turns/mean": 4 / 3,
        "turns/answers": 4,
        "turns/max": 2,
        "turns/calls": 4,
        "turns/calls_invalid": 1,
        "turns/calls_raised": 1,
        "turns/calls_timed_out": 0,
        "turns/calls_unknown": 1,
        "turns/diverged": 1,
        "turns/restarted": 1,
        "turns/failed_share": 1 / 3,
        "turns/tool_seconds": 4.0,
    }


def test_without_turns_nothing_is_said_of_them():
    assert turns_metrics([said(response, 0, [1, 2], Finish.STOP) for response in range(3)]) == {}


def test_metrics_leave_failed_responses_out_and_count_sampled_tokens():
    _, recorded = read_back()
    found = response_metrics([each for each in recorded if each.reward is not None], PLAN)
    assert (found["num_tokens"], found["completions/max_length"], found["reward"]) == (5, 4, 0.5)
    assert (found["completions/clipped_ratio"], found["reward_std"]) == (0.5, 0.5)


def test_lives_keep_the_sampled_tokens_of_the_last_attempt():
    reader, recorded = read_back()
    tally = JournalTally(reader, recorded, (), ())
    tally.add(range(PLAN.num_responses))
    assert tally.kept == {NAME: 4 + 1 + 2}
    assert reader.shards.tokens(NAME) == 4 + 3 + 1 + 2


def test_without_sharing_each_stretch_of_the_policy_is_computed_from_the_prompt():
    reader, _ = read_back()
    prompts = [PromptRow("p", (1, 2), "?", {})]
    # Response 0 from 0 and from 5, response 1 twice from 0, response 2 from 0; each with the two tokens of its prompt.
    assert naive_prefill_tokens(PLAN, prompts, reader, range(3)) == (2 + 0) + (2 + 5) + 2 * (2 + 0) + (2 + 0)


def test_a_failed_response_that_is_recorded_as_another_is_noticed():
    reader, recorded = read_back()
    assert list(verified_parts(PLAN, recorded, reader)) == [range(3)]
    wrong = [*recorded[:2], replace(recorded[2], finish_reason="stop", reward=0.0)]
    with pytest.raises(IntegrityError, match=r"response 2.*ended by 'stop'; the journal holds 2, 2 .* by 'failed'"):
        list(verified_parts(PLAN, wrong, reader))
