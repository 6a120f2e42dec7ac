"""Concluding part by part: the report is the same as if the whole journal were in memory, and damage is found."""

from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.records import layout
from storage.records.records import ReportRecord
from storage.stores.memory import MemoryStore
from tasks.reporting.conclusion import conclude_iteration
from tasks.reporting.verification import IntegrityError
from tests.tasks.reporting.test_conclusion import PRICES, an_iteration, change
from tests.tasks.reporting.test_conclusion_filtered import wanting

# The responses have 5, 4, 6 and 1 tokens; one that is not recorded counts as 16.
SIZES = pytest.mark.parametrize("part_tokens", [1, 9, 10, 1 << 20])


def conclude(store: MemoryStore, part_tokens: int) -> ReportRecord:
    report = conclude_iteration(store, 0, PRICES, ManualClock(1100.0), part_tokens=part_tokens)
    return replace(report, nonce="")


def without_heartbeats(store: MemoryStore) -> MemoryStore:
    for key in store.list(layout.alive_all(0)):
        store.delete(key)
    return store


ITERATIONS = {
    "trained": an_iteration,
    "filtered": lambda: wanting(2, responses=[0, 1], filtered=[2, 3]),
    "unused": lambda: wanting(1, responses=[0, 1]),
    "unannounced": lambda: without_heartbeats(an_iteration()),
    "unused and unannounced": lambda: without_heartbeats(wanting(1, responses=[0, 1])),
}


@SIZES
@pytest.mark.parametrize("name", ITERATIONS)
def test_the_report_does_not_depend_on_the_size_of_a_part(name, part_tokens):
    whole = conclude(ITERATIONS[name](), part_tokens=1 << 30)
    assert conclude(ITERATIONS[name](), part_tokens) == whole


@SIZES
@pytest.mark.parametrize("response", range(4))
def test_a_response_that_is_not_what_the_journal_holds_is_found_in_every_part(response, part_tokens):
    store = an_iteration()
    change(store, response, length=3, policy_length=1)
    with pytest.raises(IntegrityError, match=f"response {response}: trained on 3 tokens, 1 of them sampled, ended by"):
        conclude(store, part_tokens)
    assert layout.report(0) not in store.list("")


@pytest.mark.slow
def test_whatever_another_process_deletes_between_two_parts_both_give_its_report():
    class ConcludedAt(MemoryStore):
        """Another process commits the report before the n-th read, and deletes the journal behind it."""

        def __init__(self, at: int) -> None:
            super().__init__()
            self._objects.update(an_iteration()._objects)
            self.left = at

        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            self.left -= 1
            if self.left == 0:
                conclude_iteration(self, 0, PRICES, ManualClock(1200.0))
                for prefix in (layout.journal(0), layout.alive_all(0), layout.claims(0)):
                    for name in self.list(prefix):
                        self.delete(name)
            return super().get(key, start, end)

    for at in range(1, 50):
        store = ConcludedAt(at)
        assert conclude(store, 1).created_at_s == (1200.0 if store.left <= 0 else 1100.0), at
    assert store.left > 0, "every read was disturbed once"
