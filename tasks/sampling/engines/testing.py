"""What every Engine must do: tests for pytest that the author of an engine inherits.

A test file subclasses EngineContract, supplies the fixture `engine_factory` and overrides `weights`. The functions and
constants of this module make requests and run engines in an engine's own tests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from storage.journal.noise_keys import noise_key
from storage.records.records import SamplingParams
from storage.weights.tensor_sets import TensorBlock
from tasks.sampling.engines.engine import Engine, EngineError, FinishReason, GenerationRequest

VOCAB_SIZE = 96
CONTEXT_LENGTH = 256
STOPS = (2, 11, 12)
SAMPLING = SamplingParams(max_completion_length=40, stop_token_ids=STOPS)
ENDLESS = SamplingParams(max_completion_length=24)
LONG = SamplingParams(max_completion_length=100)
TURNS = SamplingParams(max_completion_length=120, stop_token_ids=tuple(range(3, VOCAB_SIZE, 6)))
OBSERVATION = (40, 41, 42, 43, 44)

EngineFactory = Callable[[int], Engine]


@dataclass
class Result:
    """What an engine said about one response."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


def request(response: int, sampling: SamplingParams = SAMPLING, group_size: int = 4) -> GenerationRequest:
    group = response // group_size
    prompt = tuple((7 * group + 5 * k) % 80 + 4 for k in range(3 + 5 * (group % 4)))
    return GenerationRequest(response, group, prompt, (), noise_key(3, 1, response), sampling)


def resumed(original: GenerationRequest, token_ids: Sequence[int]) -> GenerationRequest:
    return replace(original, generated_ids=tuple(token_ids))


def answered(item: GenerationRequest, result: Result, turns: list[Result]) -> GenerationRequest | None:
    """The request after a turn, to which an environment has added OBSERVATION; None after the last one."""
    turns.append(result)
    tokens = (*item.generated_ids, *result.token_ids, *OBSERVATION)
    if result.finish_reason is not FinishReason.STOP or len(tokens) >= item.sampling.max_completion_length:
        return None
    return resumed(item, tokens)


def long_request(response: int, prompt_length: int) -> GenerationRequest:
    """A request of group 99, whose prompt begins like no prompt of `request`."""
    prompt = tuple((11 * k) % 80 + 5 for k in range(prompt_length))
    return replace(request(response, ENDLESS), group=99, prompt_ids=prompt)


def drain(engine: Engine, results: dict[int, Result], max_steps: int = 10_000) -> dict[int, Result]:
    """Step until nothing is in flight, or max_steps times, collecting deltas."""
    for _ in range(max_steps):
        deltas = engine.step()
        if not deltas:
            break
        assert len({delta.response for delta in deltas}) == len(deltas)
        for delta in deltas:
            result = results[delta.response]
            assert result.finish_reason is None, "a delta came after the last one"
            assert len(delta.token_ids) == len(delta.logprobs) >= 1
            result.token_ids += delta.token_ids
            result.logprobs += delta.logprobs
            result.finish_reason = delta.finish_reason
    return results


def run(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[int, Result]:
    """All requests at once, to the end."""
    engine.start(requests)
    return drain(engine, {item.response: Result() for item in requests})


def assert_same(found: Mapping[int, Result], wanted: Mapping[int, Result], within: float = 1e-4) -> None:
    """Of the same responses the same tokens and ends; sums, and so log-probs, may differ in their last bits."""
    assert found.keys() == wanted.keys()
    for response, result in found.items():
        assert result.token_ids == wanted[response].token_ids
        assert result.finish_reason == wanted[response].finish_reason
        assert result.logprobs == pytest.approx(wanted[response].logprobs, abs=within)


class EngineContract:
    """`engine_factory(max_responses_in_flight)` makes an engine of VOCAB_SIZE and CONTEXT_LENGTH with weights 0.

    It may give an engine to several tests, in which nothing is in flight then, and whose `release` does not close it.
    """

    prefill_block = 1  # tokens; what the responses of a group share of their prompt is a multiple of it
    logprobs_within = 1e-4  # nats, between two ways to compute a token, such as two batch sizes

    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        raise NotImplementedError

    def weights(self, version: int) -> Mapping[str, TensorBlock]:
        """Weights of a version, different for each."""
        raise NotImplementedError

    def release(self, engine: Engine) -> None:
        """A test is done with an engine."""
        engine.close()

    @pytest.fixture
    def new_engine(self, engine_factory: EngineFactory) -> Iterator[EngineFactory]:
        made: dict[int, Engine] = {}

        def make(max_responses_in_flight: int) -> Engine:
            engine = engine_factory(max_responses_in_flight)
            made[id(engine)] = engine
            return engine

        yield make
        for engine in made.values():
            self.release(engine)

    @pytest.fixture
    def engine(self, new_engine: EngineFactory) -> Engine:
        return new_engine(8)

    def test_two_engines_agree(self, new_engine: EngineFactory) -> None:
        requests = [request(r) for r in range(8)]
        assert_same(run(new_engine(8), requests), run(new_engine(8), requests), self.logprobs_within)

    def test_batch_mates_and_order_do_not_matter(self, engine: Engine) -> None:
        requests = [request(r) for r in range(8)]
        together = run(engine, requests)
        assert_same(run(engine, requests[::-1]), together, self.logprobs_within)
        for item in requests:
            assert_same(run(engine, [item]), {item.response: together[item.response]}, self.logprobs_within)

    def test_responses_differ_within_a_group(self, engine: Engine) -> None:
        results = run(engine, [request(r, ENDLESS) for r in range(4)])
        assert len({tuple(result.token_ids) for result in results.values()}) == 4

    def test_refilled_slots_change_nothing(self, engine: Engine, new_engine: EngineFactory) -> None:
        requests = [request(r) for r in range(12)]
        wanted: dict[int, Result] = {}
        for item in requests:
            wanted |= run(engine, [item])
        small = new_engine(3)
        results = {item.response: Result() for item in requests}
        waiting = list(requests)
        while any(result.finish_reason is None for result in results.values()):
            finished = sum(result.finish_reason is not None for result in results.values())
            room = 3 - (len(results) - len(waiting) - finished)
            small.start(waiting[:room])
            del waiting[:room]
            drain(small, results, max_steps=1)
        assert_same(results, wanted, self.logprobs_within)

    def test_resumed_anywhere_is_uninterrupted(self, engine: Engine) -> None:
        requests = [request(r) for r in range(8)]
        whole = run(engine, requests)
        for cut in (1, 2, 5, 13, 30):
            self.forget_tokens(engine)
            again = [
                resumed(item, whole[item.response].token_ids[:cut])
                for item in requests
                if len(whole[item.response].token_ids) > cut
            ]
            for response, rest in run(engine, again).items():
                assert rest.token_ids == whole[response].token_ids[cut:]
                assert rest.logprobs == pytest.approx(whole[response].logprobs[cut:], abs=self.logprobs_within)
                assert rest.finish_reason == whole[response].finish_reason

    def test_resumed_response_has_only_the_remaining_budget(self, engine: Engine) -> None:
        original = request(0, ENDLESS)
        token_ids = run(engine, [original])[0].token_ids
        assert len(token_ids) == 24
        rest = run(engine, [resumed(original, token_ids[:23])])[0]
        assert (len(rest.token_ids), rest.finish_reason) == (1, FinishReason.LENGTH)

    def test_stop_token_is_the_last_and_only_there(self, engine: Engine) -> None:
        results = [run(engine, [request(r)])[r] for r in range(24)]
        assert {result.finish_reason for result in results} >= {FinishReason.STOP}
        for result in results:
            stopped = [token in STOPS for token in result.token_ids]
            assert not any(stopped[:-1])
            assert stopped[-1] == (result.finish_reason is FinishReason.STOP)
            assert stopped[-1] or len(result.token_ids) == SAMPLING.max_completion_length

    def test_context_ends_a_response(self, engine: Engine) -> None:
        sampling = SamplingParams(max_completion_length=10_000)
        item = replace(long_request(0, CONTEXT_LENGTH - 100), sampling=sampling)
        result = run(engine, [item])[0]
        assert len(result.token_ids) == 100
        assert result.finish_reason is FinishReason.LENGTH
        rest = run(engine, [resumed(item, result.token_ids[:70])])[0]
        assert rest.token_ids == result.token_ids[70:]

    def test_logprobs_are_logprobs(self, engine: Engine) -> None:
        for result in run(engine, [request(r) for r in range(8)]).values():
            assert all(-50 < logprob <= 0 for logprob in result.logprobs)

    def test_aborted_response_is_silent_and_can_start_again(self, engine: Engine) -> None:
        requests = [request(r, LONG) for r in range(4)]
        whole = run(engine, requests)
        engine.start(requests)
        results = drain(engine, {r: Result() for r in range(4)}, max_steps=7)
        aborted = [r for r in (1, 3) if results[r].finish_reason is None]
        assert aborted, "so few steps gave whole responses"
        engine.abort([1, 3, 99])
        before = {r: len(results[r].token_ids) for r in (1, 3)}
        drain(engine, results, max_steps=2)
        assert {r: len(results[r].token_ids) for r in (1, 3)} == before
        engine.start([resumed(requests[r], results[r].token_ids) for r in aborted])
        assert_same(drain(engine, results), whole, self.logprobs_within)

    def test_nothing_in_flight_gives_nothing(self, engine: Engine) -> None:
        assert engine.step() == []
        engine.start([])
        assert engine.step() == []

    def test_never_more_than_the_maximum_in_flight(self, new_engine: EngineFactory) -> None:
        engine = new_engine(3)
        assert engine.max_responses_in_flight == 3
        engine.start([request(r, ENDLESS) for r in range(2)])
        with pytest.raises(EngineError, match="response 41"):
            engine.start([request(40, ENDLESS), request(41, ENDLESS)])
        engine.start([request(40, ENDLESS)])
        results = drain(engine, {r: Result() for r in (0, 1, 40)})
        assert [len(result.token_ids) for result in results.values()] == [24, 24, 24]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"prompt_ids": ()}, "response 5: prompt_ids is empty"),
            ({"prompt_ids": tuple([4] * CONTEXT_LENGTH)}, f"response 5: prompt of {CONTEXT_LENGTH} tokens"),
            ({"prompt_ids": (4, VOCAB_SIZE)}, "response 5: prompt_ids has token id 96; allowed: 0..95"),
            ({"generated_ids": (4, -1)}, "response 5: generated_ids has token id -1"),
            ({"generated_ids": (4, 2)}, "response 5: its 2 generated tokens end it already"),
            ({"generated_ids": tuple([4] * 40)}, "response 5: its 40 generated tokens end it already"),
            ({"sampling": replace(SAMPLING, temperature=-1.0)}, "response 5: temperature -1.0"),
            ({"sampling": replace(SAMPLING, top_p=0.0)}, "response 5: top_p 0.0"),
            ({"sampling": replace(SAMPLING, top_k=-2)}, "response 5: top_k -2"),
            ({"response": 0}, "response 0 is in flight already"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_bad_request_is_refused_and_changes_nothing(
        self, engine: Engine, changes: dict[str, Any], message: str
    ) -> None:
        engine.start([request(0)])
        with pytest.raises(EngineError, match=message.replace(".", r"\.")):
            engine.start([request(4), replace(request(5), **changes)])
        results = drain(engine, {0: Result()})
        assert_same(results, run(engine, [request(0)]), self.logprobs_within)

    def test_weights_are_not_replaced_under_responses_in_flight(self, engine: Engine) -> None:
        engine.start([request(0, ENDLESS)])
        with pytest.raises(EngineError, match="1 responses in flight"):
            engine.load_weights(1, self.weights(1))
        engine.abort([0])
        engine.load_weights(1, self.weights(1))

    def test_new_weights_take_effect_and_old_ones_come_back(self, engine: Engine) -> None:
        old = run(engine, [request(0, ENDLESS)])
        assert engine.weight_version == 0
        engine.load_weights(1, self.weights(1))
        assert engine.weight_version == 1
        assert run(engine, [request(0, ENDLESS)])[0].token_ids != old[0].token_ids
        engine.load_weights(0, self.weights(0))
        assert_same(run(engine, [request(0, ENDLESS)]), old, self.logprobs_within)

    def forget_tokens(self, engine: Engine) -> int:
        """Drop the cache, as new weights do; the engine's prefill_tokens then."""
        engine.load_weights(0, self.weights(0))
        return engine.prefill_tokens

    def test_prompt_is_computed_once_per_group(self, engine: Engine) -> None:
        length, before = 3 * self.prefill_block + 5, self.forget_tokens(engine)
        items = [long_request(r, length) for r in range(4)]
        results = {r: Result() for r in range(4)}
        engine.start(items[:1])
        while not results[0].token_ids:
            drain(engine, results, max_steps=1)
        one = engine.prefill_tokens - before
        assert length - 1 <= one <= length
        engine.start(items[1:3])  # beside it, and then after all the others have left
        drain(engine, results)
        engine.start(items[3:])
        drain(engine, results)
        assert engine.prefill_tokens - before - one <= 3 * (self.prefill_block + 1)

    def test_tokens_of_drafts_are_counted(self, engine: Engine) -> None:
        before = engine.draft_totals
        tokens = sum(len(result.token_ids) for result in run(engine, [request(r) for r in range(6)]).values())
        after = engine.draft_totals
        assert (before is None) == (after is None)
        if before is not None and after is not None:
            new = after.since(before)
            assert 0 < new.steps <= new.tokens == tokens <= new.steps + new.accepted
            assert new.accepted <= new.drafted

    def test_prefix_is_counted_as_prefill(self, engine: Engine) -> None:
        original = request(0, ENDLESS)
        token_ids = run(engine, [original])[0].token_ids
        before = self.forget_tokens(engine)
        run(engine, [resumed(original, token_ids[:20])])
        assert 19 <= engine.prefill_tokens - before - len(original.prompt_ids) <= 20

    def test_resumed_beside_its_group_only_the_prefix_is_computed(self, engine: Engine) -> None:
        mate, original = (long_request(r, 3 * self.prefill_block + 5) for r in (0, 1))
        token_ids = run(engine, [original])[1].token_ids
        self.forget_tokens(engine)
        run(engine, [mate])
        before = engine.prefill_tokens
        run(engine, [resumed(original, token_ids[:20])])
        assert 19 <= engine.prefill_tokens - before <= 20 + self.prefill_block + 1

    def test_answered_turns_go_on_as_in_an_engine_that_never_saw_them(self, new_engine: EngineFactory) -> None:
        """With fewer rows than responses, which come and go; every turn but the last ends by a stop token."""
        items = [replace(request(r), sampling=TURNS) for r in range(9)]
        wanted: dict[int, list[Result]] = {}
        engine = new_engine(8)
        for item in items:
            turns: list[Result] = []
            back: GenerationRequest | None = item
            while back is not None:
                self.forget_tokens(engine)
                back = answered(back, run(engine, [back])[item.response], turns)
            wanted[item.response] = turns
        assert sum(len(turns) - 1 for turns in wanted.values()) > 9, "so few turns were answered"
        small = new_engine(3)
        found: dict[int, list[Result]] = {item.response: [] for item in items}
        waiting = list(items)
        running: dict[int, tuple[GenerationRequest, Result]] = {}
        while waiting or running:
            started = [waiting.pop(0) for _ in range(min(3 - len(running), len(waiting)))]
            small.start(started)
            running |= {item.response: (item, Result()) for item in started}
            drain(small, {response: result for response, (_, result) in running.items()}, max_steps=1)
            for response in [r for r, (_, result) in running.items() if result.finish_reason]:
                item, result = running.pop(response)
                # Every other one comes back before the responses that wait.
                back = answered(item, result, found[response])
                if back is not None:
                    waiting.insert(0 if response % 2 else len(waiting), back)
        for response, turns in wanted.items():
            assert len(found[response]) == len(turns)
            for mine, theirs in zip(found[response], turns, strict=True):
                assert_same({response: mine}, {response: theirs}, self.logprobs_within)

    def test_of_an_answered_turn_only_the_observation_is_computed(self, engine: Engine) -> None:
        length = 3 * self.prefill_block + 5
        items = [replace(long_request(r, length), sampling=TURNS) for r in range(24)]
        ended = ((item, run(engine, [item])[item.response]) for item in items)
        item, result = next((i, r) for i, r in ended if r.finish_reason is FinishReason.STOP)
        back = answered(item, result, [])
        assert back is not None
        before = engine.prefill_tokens
        again = run(engine, [back])
        # The stop token was sampled and not fed; the last token of the observation belongs to the first step.
        assert len(OBSERVATION) <= engine.prefill_tokens - before <= len(OBSERVATION) + self.prefill_block
        for version in (1, 0):
            engine.load_weights(version, self.weights(version))
            before = engine.prefill_tokens
            anew = run(engine, [back])
            assert engine.prefill_tokens - before >= length + len(result.token_ids)
        assert_same(anew, again, self.logprobs_within)

    def test_restarted_it_knows_nothing_and_goes_on_as_before_after_new_weights(self, engine: Engine) -> None:
        requests = [request(r, LONG) for r in range(4)]
        whole = run(engine, requests)
        engine.start(requests)
        results = drain(engine, {r: Result() for r in range(4)}, max_steps=3)
        before = engine.prefill_tokens
        engine.restart()
        assert engine.prefill_tokens >= before
        assert engine.weight_version is None
        with pytest.raises(EngineError, match="load_weights"):
            engine.start(requests[:1])
        engine.load_weights(0, self.weights(0))
        assert engine.step() == []
        stopped = [resumed(requests[r], result.token_ids) for r, result in results.items() if not result.finish_reason]
        assert stopped, "so few steps gave whole responses"
        engine.start(stopped)
        assert_same(drain(engine, results), whole, self.logprobs_within)
        engine.restart()
        engine.load_weights(1, self.weights(1))
        engine.load_weights(0, self.weights(0))
        assert_same(run(engine, requests), whole, self.logprobs_within)

    def test_says_what_it_is(self, engine: Engine) -> None:
        assert engine.name
        assert engine.batch_invariant
