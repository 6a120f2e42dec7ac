"""The table against a model of the cache: what it says a row holds must be what was put there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.records import SamplingParams
from tasks.sampling.engines.engine import GenerationRequest
from tasks.sampling.engines.slot_table import SlotTable

ROWS = 4


def _request(response: int, prompt: int) -> GenerationRequest:
    return GenerationRequest(response, prompt, (prompt, 9), (), 0, SamplingParams())


def _apply(held, placements):
    """Compute, then copy, as the engine does."""
    for placement in placements:
        if placement.computes_prompt:
            held[placement.row] = placement.request.prompt_ids
    before = dict(held)
    for placement in placements:
        if placement.source is not None:
            held[placement.row] = before[placement.source]
    for placement in placements:
        assert held[placement.row] == placement.request.prompt_ids


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(["start", "leave", "compact", "forget"]), st.integers(0, 999)), max_size=60))
def test_every_row_holds_the_prompt_it_is_said_to_hold(actions):
    table, held, response = SlotTable(ROWS), {}, 0
    for action, choice in actions:
        live = sorted(table.responses.values())
        if action == "start":
            count = min(choice % 4, ROWS - len(live))
            requests = [_request(response + i, (choice // (4 + i)) % 3) for i in range(count)]
            response += count
            placements = table.place(requests)
            rows = [placement.row for placement in placements]
            assert len(set(rows)) == count
            assert not set(rows) & set(live)
            _apply(held, placements)
        elif action == "leave" and live:
            table.leave(live[choice % len(live)])
        elif action == "compact":
            before = table.responses
            for source, target in table.compact():
                held[target] = held[source]
            assert sorted(table.responses) == sorted(before)
            assert sorted(table.responses.values()) == list(range(len(before)))
        elif action == "forget" and not live:
            table.forget_prompts()
            held.clear()
        for slot, row in ((table.slots[row], row) for row in table.responses.values()):
            assert held[row] == slot.request.prompt_ids


def test_prompt_stays_until_its_row_is_given_away():
    table = SlotTable(2)
    assert table.place([_request(0, 1)])[0].computes_prompt
    table.leave(0)
    again = table.place([_request(1, 2), _request(2, 1)])
    assert {p.request.response: (p.row, p.computes_prompt) for p in again} == {1: (1, True), 2: (0, False)}
