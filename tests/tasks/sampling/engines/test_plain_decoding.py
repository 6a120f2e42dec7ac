"""The seconds that drafts saved, against the seconds that the same responses take without drafts."""

import random
from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.records.draft_totals import DraftTotals
from tasks.sampling.engines.draft_counts import StepTimes
from tasks.sampling.engines.plain_decoding import PlainDecoding
from tasks.sampling.engines.scripted_drafter import ScriptedDrafter, perfect, wrong
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.engines.speculation import Speculation
from tasks.sampling.engines.testing import LONG, VOCAB_SIZE, request

ASK_S = 1e-4


def step_s(fed):
    """Seconds of a step that is bound by reading weights up to 100 tokens, and by arithmetic beyond."""
    return 0.01 + 2e-5 * fed + 2e-4 * max(0, fed - 100)


class Paced(ScriptedEngine):
    """Its steps take `step_s` of the tokens fed."""

    def __init__(self, rows, clock, speculation):
        super().__init__(VOCAB_SIZE, rows, speculation=speculation)
        self._paces = clock

    def _drafts(self, live):
        drafts = super()._drafts(live)
        self._paces.sleep(step_s(sum(1 + len(guessed) for guessed in drafts)))
        return drafts


class Slow(ScriptedDrafter):
    """Each call takes ASK_S. Without a share it is right never, always or mostly, by response."""

    def __init__(self, share, clock, **given):
        super().__init__(VOCAB_SIZE, wrong, **given)
        self._shares = (wrong, perfect, lambda _: 0.7) if share is None else (share,) * 3
        self._clock = clock
        self.calls = 0

    def _takes_time(self):
        self.calls += 1
        self._clock.sleep(ASK_S)

    def start(self, requests):
        self._takes_time()
        super().start(requests)

    def extend(self, tokens):
        self._takes_time()
        super().extend(tokens)

    def leave(self, responses):
        self._takes_time()
        super().leave(responses)

    def remember(self, prompt_ids, responses):
        self._takes_time()

    def draft(self, responses, most):
        self._takes_time()
        found = []
        for response in responses:
            self._share = self._shares[response % 3]
            found += super().draft([response], most)
        return found


def decoded(items, rows, drafts=0, share=None):
    """Seconds until all responses have ended, as many as fit at a time; and the engine."""
    clock, speculation = ManualClock(), None
    if drafts:
        drafter = Slow(share, clock, answer=lambda item: engine.scripted_tokens(item, 250))
        speculation = Speculation(drafter, drafts, now_s=clock.monotonic)
    engine = Paced(rows, clock, speculation)
    engine.load_weights(0, {})
    waiting, flying = list(items), 0
    while waiting or flying:
        engine.start(waiting[: rows - flying])
        waiting, flying = waiting[rows - flying :], flying + len(waiting[: rows - flying])
        flying -= sum(delta.finish_reason is not None for delta in engine.step())
    return clock.monotonic(), engine


def responses(count, longest=240):
    lengths = random.Random(3)
    return [
        replace(request(r), sampling=replace(LONG, max_completion_length=lengths.randint(1, longest)))
        for r in range(count)
    ]


@pytest.mark.parametrize(("count", "rows"), [(12, 12), (60, 16), (30, 1)])
@pytest.mark.parametrize("share", [None, perfect, lambda _: 0.5], ids=["of each its own", "all", "half"])
def test_auto_says_what_it_saved(count, rows, share):
    items = responses(count)
    plain_s, _ = decoded(items, rows)
    took_s, engine = decoded(items, rows, "auto", share)
    assert took_s < 0.95 * plain_s
    assert engine.draft_totals.saved_s == pytest.approx(plain_s - took_s, rel=0.05)


@pytest.mark.parametrize("drafts", [1, 4, 8])
def test_a_fixed_number_says_what_it_saved(drafts):
    items = responses(12)
    plain_s, _ = decoded(items, 12)
    took_s, engine = decoded(items, 12, drafts, lambda _: 0.7)
    assert engine.draft_totals.saved_s == pytest.approx(plain_s - took_s, rel=0.1)


def test_drafts_that_only_cost_have_saved_less_than_nothing():
    """200 responses in flight are bound by arithmetic, so two wrong drafts make a step three times as long."""
    items = responses(300, longest=40)
    plain_s, _ = decoded(items, 200)
    took_s, engine = decoded(items, 200, 2, wrong)
    assert took_s > 2 * plain_s
    assert engine.draft_totals.accepted == 0
    assert engine.draft_totals.saved_s == pytest.approx(plain_s - took_s, rel=0.1)


def test_while_no_draft_pays_only_the_drafter_costs():
    items = responses(12)
    _, engine = decoded(items, 12, "auto", wrong)
    speculation = engine._speculation
    assert engine.draft_totals.drafted == 0
    assert engine.draft_totals.saved_s == pytest.approx(-speculation._drafter.calls * ASK_S)
    speculation.remember((1, 2), [(3,)])
    engine.start(responses(13)[12:])
    engine.step()
    engine.abort([12])
    engine.start(responses(1))
    engine.step()
    assert engine.draft_totals.saved_s == pytest.approx(-speculation._drafter.calls * ASK_S)


def test_where_no_step_tells_what_a_plain_one_takes_nothing_is_said():
    """All steps feed five tokens."""
    items = [replace(request(0), sampling=replace(LONG, max_completion_length=100))]
    _, engine = decoded(items, 1, 4, perfect)
    assert engine.draft_totals == DraftTotals(steps=20, tokens=100, drafted=80, accepted=80)


def times(**by_tokens):
    found = StepTimes()
    for tokens, seconds in by_tokens.items():
        for _ in range(2):
            found.measured(int(tokens.removeprefix("of")), 1, seconds)
    return found


def test_unlucky_responses_of_which_plain_decoding_would_not_have_been_the_last():
    """The lucky response has eight tokens at once; plain decoding would give both theirs in eight steps of two."""
    plain = PlainDecoding(times(of1=1.0, of2=1.25))
    plain.start([0, 1])
    plain.follow({0: 8, 1: 1}, [0], 3.0, plain=False)
    assert plain.seconds == 1.25
    for _ in range(6):
        plain.follow({1: 1}, [], 1.0, plain=True)
    assert plain.seconds == 7 * 1.25
    plain.follow({1: 2}, [1], 3.0, plain=False)
    assert plain.seconds == 8 * 1.25 + 1.0


def test_a_response_that_waits_for_a_row_begins_when_plain_decoding_would_have_one():
    plain = PlainDecoding(times(of1=1.0, of2=1.25))
    plain.start([0, 1])
    plain.follow({0: 4, 1: 4}, [0], 3.0, plain=False)
    plain.start([2])
    plain.follow({1: 1, 2: 6}, [1, 2], 3.0, plain=False)
    # Four steps of 0 and 1, one of 1 and 2, and five of 2 alone.
    assert plain.seconds == pytest.approx(5 * 1.25 + 5 * 1.0)


def test_a_plain_step_costs_what_it_took():
    plain = PlainDecoding(times(of2=1.25))
    plain.start([0, 1])
    plain.follow({0: 1, 1: 1}, [], 1.75, plain=True)
    assert plain.seconds == 1.75


def test_steps_are_counted_once_their_time_is_known():
    known = StepTimes()
    plain = PlainDecoding(known)
    plain.start([0, 1])
    plain.follow({0: 2, 1: 2}, [], 3.0, plain=False)
    assert plain.seconds is None
    for _ in range(2):
        known.measured(2, 1, 1.5)
    plain.follow({0: 2, 1: 2}, [], 3.0, plain=False)
    assert plain.seconds == 4 * 1.5


def test_of_an_aborted_response_nothing_is_owed():
    plain = PlainDecoding(times(of1=1.0, of2=1.25))
    plain.start([0, 1])
    plain.follow({0: 8, 1: 1}, [], 3.0, plain=False)
    plain.leave([0])
    plain.follow({1: 2}, [1], 3.0, plain=False)
    assert plain.seconds == 1.25 + 2 * 1.0


def test_nothing_of_a_plan_is_left_for_the_next():
    plain = PlainDecoding(times(of1=1.0, of2=1.25))
    plain.start([0, 1])
    plain.follow({0: 8, 1: 1}, [0], 3.0, plain=False)
    plain.leave([1])
    plain.start([0])
    plain.follow({0: 2}, [0], 3.0, plain=False)
    assert plain.seconds == 1.25 + 2 * 1.0


def test_a_response_goes_on_after_its_turn_is_answered():
    plain = PlainDecoding(times(of1=1.0, of2=1.25))
    plain.start([0, 1])
    plain.follow({0: 5, 1: 1}, [0], 3.0, plain=False)
    plain.start([0])
    plain.follow({0: 1, 1: 5}, [0, 1], 3.0, plain=False)
    assert plain.seconds == 6 * 1.25


def test_smaller_steps_than_any_measured_lie_on_a_line_and_no_larger_step_is_shorter():
    assert StepTimes().outside(1) is None
    assert times(of8=1.0).outside(4) is None
    two = times(of8=1.0, of16=1.4)
    assert two.outside(4) == pytest.approx(0.8)
    assert two.outside(99) == 1.4
    assert times(of8=1.0, of16=2.5).outside(1) == pytest.approx(1 / 8)
    assert times(of8=1.0, of16=0.6).outside(4) == 0.6
    assert times(of8=1.0, of16=0.6).outside(99) == 1.0
    assert two.between(4) is two.between(32) is None
    assert two.between(12) == pytest.approx(1.2, rel=0.02)


def test_plain_steps_tell_more_than_steps_that_feed_as_many_tokens():
    plain = PlainDecoding(times(of2=9.0))
    plain.start([0, 1])
    for _ in range(2):
        plain.follow({0: 1, 1: 1}, [], 1.25, plain=True)
    plain.follow({0: 3, 1: 3}, [0, 1], 2.0, plain=False)
    assert plain.seconds == 5 * 1.25


def test_an_engine_that_aborts_a_slow_response_still_saves_by_the_others():
    clock = ManualClock()
    drafter = Slow(None, clock, answer=lambda item: engine.scripted_tokens(item, 250))
    engine = Paced(2, clock, Speculation(drafter, "auto", now_s=clock.monotonic))
    engine.load_weights(0, {})
    slow, fast = (replace(request(r), sampling=replace(LONG, max_completion_length=200)) for r in (0, 1))
    engine.start([slow, fast])
    while engine.draft_totals.accepted < 20:
        engine.step()
    engine.abort([0])
    began_s, steps = clock.monotonic(), 0
    before = engine.draft_totals
    while engine.step():
        steps += 1
    new = engine.draft_totals.since(before)
    took_s = clock.monotonic() - began_s
    # Tokens that were found before the abort are decoded plainly by now, too.
    assert new.saved_s > new.tokens * step_s(1) - took_s > 0.5
