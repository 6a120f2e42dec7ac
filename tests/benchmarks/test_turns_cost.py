"""benchmarks/turns.py finds the faults that it is for, and its single-turn arm decodes responses of given lengths."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.crew_processes import StepLog
from benchmarks.turns import EndingEngine, Kept, kills_targets, records_of, same, speed_targets
from examples.call_ledger import Audit
from storage.journal.assembly import Assembled
from storage.journal.noise_keys import noise_key
from storage.journal.shard import Finish
from storage.journal.turns import TurnRecord, encode_turn
from storage.records.records import SamplingParams
from tasks.sampling.engines.engine import GenerationRequest
from tasks.sampling.engines.torch_engine import TorchEngine
from tests.tiny_model import VOCAB_SIZE, tiny_config, tiny_model, weight_blocks

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


@pytest.mark.slow
def test_responses_of_the_single_turn_arm_end_at_their_lengths_and_at_no_token(tmp_path):
    model = tiny_model(tiny_config())
    model.config.save_pretrained(tmp_path)
    engine = TorchEngine(tmp_path, device="cpu", max_responses_in_flight=2, context_length=16)
    engine.load_weights(1, weight_blocks(model))
    ending = EndingEngine(engine, StepLog(tmp_path / "log", create=True), 0.0, {"0": 3, "1": 7})
    any_token = SamplingParams(max_completion_length=99, stop_token_ids=tuple(range(VOCAB_SIZE)))
    ending.start([GenerationRequest(each, each, (60, 61), (), noise_key(3, 0, each), any_token) for each in range(2)])
    lengths = Counter[int]()
    while deltas := ending.step():
        lengths.update({delta.response: len(delta.token_ids) for delta in deltas})
    assert lengths == {0: 3, 1: 7}
