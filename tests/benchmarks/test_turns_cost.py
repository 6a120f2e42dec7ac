"""benchmarks/turns.py finds the faults that it is for, and its arms that reuse rows decode the same tokens."""

import json
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks.reporting import Measured
from benchmarks.row_reuse import OBSERVATION, TURN, Turns, decode_turns, turn_engine
from benchmarks.turns import Kept, endless_policy, kills_targets, records_of, reuse_targets, same, speed_targets
from examples.call_ledger import Audit
from examples.tools_warm_start import chat_tokenizer
from storage.assembly import Assembled
from storage.shard import Finish
from storage.turns import TurnRecord, encode_turn

SPEEDS = {"single": [100.0] * 6, "instant": [95.0] * 6, "slow": [85.0] * 6}


def audit(**changes):
    empty = frozenset()
    return replace(
        Audit(turns=9, calls=7, repeated=empty, unknown=empty, again=empty, untold=empty, diverged=0), **changes
    )


def kept(**changes):
    return replace(Kept(trajectories=240, identical=240, kills=20, audit=audit()), **changes)


def trajectory(**changes):
    event = encode_turn(TurnRecord(turn=0, calls=(), seconds=0.1, reward=1.0))
    tokens, logprobs = np.array([3, 4, 5], dtype=np.uint32), np.zeros(2, dtype=np.float32)
    whole = Assembled(
        0, tokens, logprobs, Finish.STOP, (), (), np.zeros(3, dtype=np.uint32), (2, 1), (event,), False, 0
    )
    return replace(whole, **changes)


def missed(targets):
    return {target.name for target in targets if not target.met}


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (kept(identical=239), "share_identical"),
        (kept(audit=audit(repeated=frozenset({"a"}))), "calls_repeated"),
        (kept(audit=audit(untold=frozenset({"a"}))), "calls_untold"),
        (kept(kills=19), "kills"),
        (kept(trajectories=100, identical=100), "trajectories"),
    ],
)
def test_fault_of_a_killed_rollout_is_missed_by_name(found, name):
    assert missed(kills_targets(kept())) == set()
    assert missed(kills_targets(found)) == {name}


def test_slow_turns_are_missed_by_name():
    slower = {**SPEEDS, "instant": [80.0] * 6, "slow": [70.0] * 6}
    assert missed(speed_targets(slower)) == {"speed_with_instant_tools", "speed_with_slow_tools"}


def test_trajectories_are_the_same_by_tokens_writers_end_and_reward():
    other_reward = encode_turn(TurnRecord(turn=0, calls=(), seconds=0.1, reward=0.0))
    other_seconds = encode_turn(TurnRecord(turn=0, calls=(), seconds=9.0, reward=1.0, rebuilt="restored"))
    assert same(trajectory(), trajectory(events=(other_seconds,)))
    assert not same(trajectory(), trajectory(events=(other_reward,)))
    assert not same(trajectory(), trajectory(token_ids=np.array([3, 4, 6], dtype=np.uint32)))
    assert not same(trajectory(), trajectory(origins=(1, 2)))
    assert not same(trajectory(), trajectory(finish=Finish.LENGTH))
    assert [record.reward for record in records_of([trajectory()])] == [1.0]


def test_single_turn_arm_has_a_policy_that_never_stops(tmp_path):
    chat_tokenizer().save_pretrained(tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "model" / name).write_text('{"eos_token_id": 2, "model_type": "qwen2"}')
    tokenizer = AutoTokenizer.from_pretrained(endless_policy(tmp_path / "model", tmp_path / "endless"))
    assert tokenizer.eos_token_id == tokenizer.pad_token_id != chat_tokenizer().eos_token_id
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((tmp_path / "endless" / name).read_text())
        assert fields == {"eos_token_id": tokenizer.pad_token_id, "model_type": "qwen2"}


@pytest.mark.slow
def test_rows_that_are_found_again_save_work_and_change_no_token(tmp_path):
    engine, weights = turn_engine(tmp_path, responses=3, turns=4)
    reused, again = (decode_turns(engine, weights, 3, 4, reuses=reuses) for reuses in (True, False))
    assert reused.token_ids == again.token_ids
    assert all(len(tokens) == 4 * (TURN + len(OBSERVATION)) for tokens in reused.token_ids)
    # A turn ends with a token that is not in the cache; the last token of an observation belongs to the next step.
    assert reused.prefill_tokens <= 3 * (15 + 3 * len(OBSERVATION))
    assert again.prefill_tokens >= 3 * (25 + 50 + 75)


def test_reuse_that_changes_tokens_is_missed():
    one = Turns(1.0, 10, ((1, 2),))
    ratio = Measured(3.0, (2.0, 4.0))
    assert missed(reuse_targets({"again": [one], "reused": [one]}, ratio)) == set()
    found = {"again": [one], "reused": [replace(one, token_ids=((1, 3),))]}
    assert missed(reuse_targets(found, ratio)) == {"rows_reused_same_tokens"}
