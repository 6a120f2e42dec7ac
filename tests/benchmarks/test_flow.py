"""The flow benchmark's own judgement: what it calls idle, and that it finds responses from other weights."""

import pytest

from benchmarks.flow import identical, idle_share
from storage.clock import SystemClock
from storage.records.records import SlotLife
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.session.member import generate_slot
from tests.small_run import config, memory_store, plan_iteration, roll_out, train_small

URL = "memory://flow"


def life(started_at_s, ended_at_s, decode_s):
    return SlotLife(
        slot=0,
        incarnation="00000-x",
        pool="rollout",
        started_at_s=started_at_s,
        ended_at_s=ended_at_s,
        state="gone",
        tokens_kept=1,
        tokens_recovered=0,
        tokens_regenerated=0,
        decode_s=decode_s,
    )


def test_idle_is_all_time_without_decode_steps():
    assert idle_share([life(0, 10, 9), life(10, 20, 6)]) == pytest.approx(0.25)


@pytest.mark.slow
def test_responses_of_other_weights_are_not_identical(model):
    store = memory_store("flow")
    plan_iteration(config(URL, model))
    roll_out(URL, 0)
    train_small(URL, 0)
    assert identical(store, 0) == 12

    class Newer(ScriptedEngine):
        def load_weights(self, version, tensors):
            super().load_weights(version + 1, tensors)

    store = memory_store("flow")
    plan_iteration(config(URL, model))
    for slot in (0, 1):
        generate_slot(URL, 0, slot, lambda: False, SystemClock(), lambda *_: Newer(_[2], 64))
    train_small(URL, 0)
    assert identical(store, 0) == 0
