"""What asking a drafter may cost: a thousandth of the time, and what its drafts save."""

from dataclasses import replace

import pytest

from tasks.sampling.engines.engine import TokenDelta
from tasks.sampling.engines.scripted_drafter import ScriptedDrafter, perfect, wrong
from tasks.sampling.engines.slot_table import Slot
from tasks.sampling.engines.speculation import Speculation, verified
from tasks.sampling.engines.testing import CONTEXT_LENGTH, ENDLESS, VOCAB_SIZE, request

ROWS, STEP_S, TOKEN = 24, 0.01, 7


class Paced:
    """Steps of an engine that always draws TOKEN, on a clock on which steps and questions to the drafter take time."""

    def __init__(self, share, *, asking_s=0.0, pass_s=None, finds_every=1, step_s=lambda _fed: STEP_S):
        """pass_s: what each draft of all responses takes, of a drafter that computes."""
        self.now_s, self.asked, self.most, self.step_s = 0.0, [], [], step_s
        paced = self

        class Slow(ScriptedDrafter):
            def draft(self, responses, most):
                paced.now_s += asking_s + most * (pass_s or 0.0)
                paced.asked.append(len(responses))
                paced.most.append(most)
                found = super().draft(responses, most)
                return found if len(paced.asked) % finds_every == 0 else [()] * len(responses)

            def restart(self): ...

        drafter = Slow(VOCAB_SIZE, share, answer=lambda _: [TOKEN] * 100_000)
        if pass_s is not None:
            drafter.pass_s = pass_s
        self.speculation = Speculation(drafter, "auto", now_s=lambda: self.now_s)
        items = [replace(request(r), sampling=replace(ENDLESS, max_completion_length=100_000)) for r in range(ROWS)]
        self.slots = [Slot(item, list(item.prompt_ids)) for item in items]
        self.speculation.start(self.slots)

    def run(self, steps):
        """The clock's seconds over those of plain decoding of the same tokens."""
        began_s, before = self.now_s, self.speculation.totals.tokens
        for _ in range(steps):
            drafts = self.speculation.drafts(self.slots, 200_000, VOCAB_SIZE)
            width = 1 + len(drafts[0])
            self.now_s += self.step_s(ROWS * width)
            deltas = []
            for slot, guessed in zip(self.slots, drafts, strict=True):

                def append(token, logprob, slot=slot):
                    slot.token_ids.append(token)
                    return TokenDelta(slot.request.response, (token,), (logprob,), None)

                deltas.append(verified(guessed, ((TOKEN, -1.0) for _ in range(width)), append))
            self.speculation.settle(deltas)
        plain_s = (self.speculation.totals.tokens - before) / ROWS * self.step_s(ROWS)
        return (self.now_s - began_s) / plain_s


@pytest.mark.parametrize("asking_s", [1e-5, 1e-3, 5e-3])
def test_wrong_drafts_cost_no_more_than_their_budget(asking_s):
    paced = Paced(wrong, asking_s=asking_s)
    paced.run(100)  # the first look costs what it costs
    asked = len(paced.asked)
    assert paced.run(4000) <= 1 + 0.0015 + asking_s / (4000 * STEP_S)
    assert len(paced.asked) > asked, "it looks again"
    assert max(paced.asked) < ROWS
    assert paced.speculation.totals.drafted == 0


def test_a_full_batch_costs_no_more_though_drafts_are_right():
    """Each token fed costs the same, so no draft pays; the rule tries one now and then."""
    paced = Paced(lambda _: 0.6, asking_s=2e-3, step_s=lambda fed: STEP_S * fed / ROWS)
    assert paced.run(8000) <= 1 + 0.005
    assert max(paced.asked) == ROWS


def test_right_drafts_pay_for_asking():
    paced = Paced(perfect, asking_s=1e-3)
    paced.run(200)
    assert paced.run(500) < 0.2
    assert len(paced.asked) > 500


def test_drafts_that_come_seldom_pay_for_the_questions_between():
    """One question in five finds eight right drafts, so five questions cost less than eight steps."""
    paced = Paced(perfect, asking_s=2e-3, finds_every=5)
    paced.run(3000)
    assert paced.run(500) < 0.55
    dear = Paced(perfect, asking_s=STEP_S * 3, finds_every=5)
    dear.run(1500)
    assert dear.run(4000) < 1.006


def test_a_drafter_that_becomes_good_is_found():
    quality = [0.0]
    paced = Paced(lambda _: quality[0], asking_s=1e-3)
    assert paced.run(1000) > 0.99
    quality[0] = 1.0
    paced.run(500)
    assert paced.run(200) < 0.3


def test_what_was_saved_is_not_spent_on_looks_once_drafts_are_wrong():
    quality = [1.0]
    paced = Paced(lambda _: quality[0], asking_s=1e-3)
    paced.run(1000)
    quality[0], asked = 0.0, len(paced.asked)
    assert paced.run(1500) < 1.03, "what it takes to see the change, and the budget"
    assert len(paced.asked) - asked < 200


def test_a_fixed_number_is_asked_for_in_each_step():
    paced = Paced(wrong, asking_s=1e-3)
    fixed = Speculation(paced.speculation._drafter, 2, now_s=lambda: paced.now_s)
    fixed.start(paced.slots)
    for asked in range(3):
        assert len(fixed.drafts(paced.slots, CONTEXT_LENGTH * 100, VOCAB_SIZE)[0]) == 2
        fixed.settle([TokenDelta(slot.request.response, (TOKEN,), (-1.0,), None) for slot in paced.slots])
        assert paced.asked == [ROWS] * (asked + 1)


@pytest.mark.parametrize(
    ("pass_s", "most", "least_gain"), [(0.05 * STEP_S, 8, 2.2), (0.3 * STEP_S, 2, 1.35), (0.9 * STEP_S, 1, 0.99)]
)
def test_a_drafter_that_computes_is_asked_for_what_pays_and_no_more(pass_s, most, least_gain):
    paced = Paced(lambda _: 0.8, pass_s=pass_s)
    paced.run(300)
    before = paced.speculation.totals
    assert paced.run(1000) < 1 / least_gain
    assert max(paced.most[-100:]) == most
    counts = paced.speculation.totals.since(before)
    if most > 1:
        assert counts.drafted == ROWS * sum(paced.most[-1000:]), "every draft that was computed is verified"
    else:
        assert counts.drafted == 0


def test_a_drafter_that_computes_is_left_when_it_is_wrong_and_taken_again_when_it_is_right():
    quality = [0.9]
    paced = Paced(lambda _: quality[0], pass_s=0.1 * STEP_S)
    paced.run(300)
    assert paced.run(300) < 0.5
    quality[0] = 0.0
    paced.run(500)
    asked = len(paced.asked)
    assert paced.run(2000) < 1.002
    assert 0 < len(paced.asked) - asked < 200, "it looks again"
    assert paced.most[-1] == 1
    quality[0] = 0.9
    paced.run(2000)
    assert paced.run(300) < 0.5
