"""What a member measures of an engine with drafts: seconds per token, so planner, rebalancing, forecast need no more.

The heartbeat gives these seconds as `step_s`, from which the planner's and the forecast's curves are pooled, and
`per_response` is what dispatch and cuts compare.
"""

import pytest

from storage.clock import ManualClock
from tasks.crew_model.decode_rate import DecodeRate
from tasks.sampling.engines.scripted_drafter import ScriptedDrafter, perfect, wrong
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.engines.speculation import Speculation
from tasks.sampling.engines.testing import ENDLESS, VOCAB_SIZE, request

STEP_S, DRAFTS = 0.01, 2


def measured(share) -> DecodeRate:
    """The rate of a scripted engine with drafts of this share, decoding one response, and four together."""
    rate = DecodeRate()
    for batch in (1, 4):
        decode(share, batch, rate)
    return rate


def decode(share, batch, rate):
    def answer(item):
        return engine.scripted_tokens(item, item.sampling.max_completion_length)

    clock, speculation = ManualClock(), Speculation(ScriptedDrafter(VOCAB_SIZE, share, answer=answer), DRAFTS)
    engine = ScriptedEngine(VOCAB_SIZE, batch, clock=clock, step_time_s=lambda _: STEP_S, speculation=speculation)
    engine.load_weights(0, {})
    for first in range(0, 8 * batch, batch):
        engine.start([request(response, ENDLESS) for response in range(first, first + batch)])
        began_s = clock.monotonic()
        while deltas := engine.step():
            rate.record(batch, clock.monotonic() - began_s, sum(len(delta.token_ids) for delta in deltas))
            began_s = clock.monotonic()


def test_seconds_of_a_step_are_those_of_one_token_per_response():
    assert dict(measured(wrong).points()) == pytest.approx({1: STEP_S, 4: STEP_S})
    assert dict(measured(perfect).points()) == pytest.approx({1: STEP_S / (1 + DRAFTS), 4: STEP_S / (1 + DRAFTS)})


def test_dispatch_and_cuts_see_a_response_as_fast_as_its_drafts_make_it():
    plain, drafted = measured(wrong).per_response(4), measured(perfect).per_response(4)
    assert drafted == pytest.approx([(1 + DRAFTS) * rate for rate in plain])


def test_drafts_for_few_responses_do_not_move_the_plateau_of_a_machine_that_gains_from_more():
    rate = DecodeRate()
    for _ in range(20):
        rate.record(4, 0.012, 4 * 3)  # three tokens of each response
        rate.record(64, 0.014, 64)  # a full batch decodes without drafts
    assert rate.plateau() == 64
