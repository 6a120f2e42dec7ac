"""The table against a model of the cache: what it says a row holds must be what was put there."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.records.records import SamplingParams
from tasks.sampling.engines.engine import GenerationRequest
from tasks.sampling.engines.slot_table import SlotTable

ROWS = 4


def _request(response: int, prompt: int, *generated: int) -> GenerationRequest:
    return GenerationRequest(response, prompt, (prompt, 9, 8), generated, 0, SamplingParams())


class Cache:
    """The tokens in each row, computed, copied and moved as the engine does it."""

    def __init__(self):
        self.table, self.rows, self.computed = SlotTable(ROWS), {}, 0
        self.ended = []

    def start(self, requests):
        free = {row for row, slot in enumerate(self.table.slots) if slot is None}
        placements = self.table.place(requests)
        assert sorted(p.request.response for p in placements) == sorted(r.response for r in requests)
        rows = [placement.row for placement in placements]
        assert len(set(rows)) == len(rows)
        assert set(rows) <= free
        for placement in placements:
            if placement.source is None and not placement.reused:
                self._compute(placement.row, 0, placement.request.prompt_ids[:-1])
        before = dict(self.rows)
        for placement in placements:
            if placement.source is not None:
                self.rows[placement.row] = before[placement.source][: placement.reused]
        for placement in placements:
            tokens = placement.request.prompt_ids + placement.request.generated_ids
            first = placement.reused or len(placement.request.prompt_ids) - 1
            self._compute(placement.row, first, tokens[first:-1])
        return placements

    def _compute(self, row, first, tokens):
        self.rows[row] = self.rows.get(row, ())[:first] + tokens
        self.computed += len(tokens)

    def decode(self, token):
        """Feed the last token of each response, and draw one for it."""
        for row in self.table.responses.values():
            slot = self.table.slots[row]
            self.rows[row] = (*self.rows[row][: slot.cached], slot.last_token)
            slot.token_ids.append(token)

    def leave(self, row):
        slot = self.table.slots[row]
        generated = tuple(slot.token_ids[len(slot.request.prompt_ids) :])
        self.ended.append(replace(slot.request, generated_ids=generated))
        self.table.leave(row)

    def compact(self):
        before, held = self.table.responses, dict(self.rows)
        for source, target in self.table.compact():
            self.rows[target] = held.get(source, ())
        assert sorted(self.table.responses) == sorted(before)
        assert sorted(self.table.responses.values()) == list(range(len(before)))

    def check(self):
        for row in self.table.responses.values():
            slot = self.table.slots[row]
            assert self.rows[row][: slot.cached] == tuple(slot.token_ids[:-1])
            assert len(slot.token_ids) == len(slot.request.prompt_ids) + slot.generated


ACTIONS = ["start", "answer", "again", "decode", "leave", "compact", "forget"]


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 999)), max_size=60))
def test_every_row_holds_the_tokens_it_is_said_to_hold(actions):
    cache, response = Cache(), 0
    for action, choice in actions:
        live = sorted(cache.table.responses.values())
        room = ROWS - len(live)
        if action == "start":
            count = min(choice % 4, room)
            cache.start([_request(response + i, (choice // (4 + i)) % 3) for i in range(count)])
            response += count
        elif action in ("answer", "again") and cache.ended and room:
            back = cache.ended.pop(choice % len(cache.ended))
            # An answered turn is longer than what its row holds. A response that was claimed again may be shorter.
            kept = (*back.generated_ids, choice, 7) if action == "answer" else back.generated_ids[: choice % 3]
            cache.start([replace(back, generated_ids=kept)])
        elif action == "decode":
            cache.decode(choice)
        elif action == "leave" and live:
            cache.leave(live[choice % len(live)])
        elif action == "compact":
            cache.compact()
        elif action == "forget":
            cache.table.forget()
            cache.rows = {row: held for row, held in cache.rows.items() if row in live}
        cache.check()


def _origins(placements):
    """By response: the row that its prompt is copied from, and how many tokens are not computed."""
    return {placement.request.response: (placement.source, placement.reused) for placement in placements}


def test_prompt_stays_until_its_row_is_given_away():
    table = SlotTable(2)
    assert _origins(table.place([_request(0, 1)])) == {0: (None, 0)}
    table.leave(0)
    assert _origins(table.place([_request(1, 2), _request(2, 1)])) == {1: (None, 0), 2: (None, 2)}
    table.leave(0)
    table.leave(1)
    assert _origins(table.place([_request(3, 5), _request(4, 2)])) == {3: (None, 0), 4: (None, 2)}
    table.leave(0)
    assert _origins(table.place([_request(5, 1)])) == {5: (None, 0)}


def test_prompt_is_copied_from_a_response_that_may_come_back():
    table = SlotTable(3)
    table.place([_request(0, 1, 20, 21)])
    table.leave(0)
    assert _origins(table.place([_request(1, 1), _request(2, 1)])) == {1: (0, 2), 2: (0, 2)}
    assert _origins(table.place([_request(0, 1, 20, 21, 22)])) == {0: (None, 4)}


def test_response_that_comes_back_has_only_its_new_tokens_computed():
    cache = Cache()
    cache.start([_request(0, 1), _request(1, 1), _request(2, 2)])
    for token in (20, 21):
        cache.decode(token)
    cache.leave(0)
    cache.leave(1)
    cache.compact()
    before = cache.computed
    # 21 was drawn and never fed; of the last token, the first step computes what follows.
    cache.start([_request(1, 1, 20, 21, 30, 31)])
    assert cache.computed - before == 2
    cache.check()


def test_response_that_comes_back_with_other_tokens_reuses_those_before_them():
    table = SlotTable(1)
    table.place([_request(0, 1, 20, 21, 22, 23)])
    table.leave(0)
    assert table.place([_request(0, 1, 20, 99, 22, 23)])[0].reused == 4
    table.leave(0)
    assert table.place([_request(0, 2, 20, 99, 22, 23)])[0].reused == 0


def test_rows_that_were_left_last_are_given_away_last():
    table = SlotTable(3)
    table.place([_request(response, response) for response in range(3)])
    for row in (1, 0, 2):
        table.leave(row)
    assert [p.row for p in table.place([_request(7, 7), _request(8, 8)])] == [1, 0]
    assert table.place([_request(2, 2)])[0].reused == 2


def test_a_move_keeps_what_the_row_before_it_held():
    table = SlotTable(2)
    table.place([_request(0, 1, 20, 21), _request(1, 2)])
    table.leave(0)
    assert sorted(table.compact()) == [(0, 1), (1, 0)]
    assert (table.held(0), table.held(1)) == (2, 4)
    assert table.place([_request(0, 1, 20, 21, 22)])[0].reused == 4
