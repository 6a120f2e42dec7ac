import statistics

import pytest

from storage.clock import ManualClock
from storage.journal.noise_keys import noise_key
from storage.records.records import SamplingParams
from tasks.sampling.engines.engine import EngineError, FinishReason
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.engines.testing import CONTEXT_LENGTH, ENDLESS, VOCAB_SIZE, EngineContract, request, run


class TestScriptedEngine(EngineContract):
    @pytest.fixture
    def engine_factory(self):
        def make(max_responses_in_flight):
            engine = ScriptedEngine(VOCAB_SIZE, max_responses_in_flight, context_length=CONTEXT_LENGTH)
            engine.load_weights(0, self.weights(0))
            return engine

        return make

    def weights(self, version):
        return {}


def test_lengths_have_a_long_tail_around_the_median():
    engine = ScriptedEngine(VOCAB_SIZE, 1, median_length=50, length_spread=1.0)
    engine.load_weights(0, {})
    lengths = [engine.scripted_length(noise_key(0, 0, response)) for response in range(2000)]
    assert 46 <= statistics.median(lengths) <= 54
    assert max(lengths) > 10 * 50
    assert min(lengths) >= 1


def test_response_has_its_scripted_length():
    engine = ScriptedEngine(VOCAB_SIZE, 1, median_length=20)
    engine.load_weights(3, {})
    item = request(0, SamplingParams(max_completion_length=10_000, stop_token_ids=(7,)))
    result = run(engine, [item])[0]
    assert len(result.token_ids) == engine.scripted_length(item.noise_key)
    assert result.token_ids[-1] == 7
    assert result.finish_reason is FinishReason.STOP


def test_every_step_sleeps_for_the_size_of_its_batch():
    clock = ManualClock()
    engine = ScriptedEngine(VOCAB_SIZE, 4, clock=clock, step_time_s=lambda batch: 0.01 * batch)
    engine.load_weights(0, {})
    run(engine, [request(r, ENDLESS) for r in range(3)])
    assert clock.monotonic() == pytest.approx(24 * 0.03)


def test_needs_weights():
    with pytest.raises(EngineError, match="load_weights"):
        ScriptedEngine(VOCAB_SIZE, 1).start([request(0)])


def test_all_tokens_may_be_stops():
    engine = ScriptedEngine(3, 1, median_length=9, length_spread=0)
    engine.load_weights(0, {})
    item = request(0, SamplingParams(stop_token_ids=(0, 1, 2)))
    item = type(item)(0, 0, (1,), (), 5, item.sampling)
    assert len(run(engine, [item])[0].token_ids) == 1
