"""A member that goes on with others' groups drafts from what was finished there, without a request to the store."""

import pytest

from storage.journal.assembly import JournalReader
from storage.stores.memory import MemoryStore
from storage.stores.metered import metered, requests_of
from tasks.sampling.session.draft_corpus import DraftCorpus
from tests.sessions import EXPECTED, GENERATIONS, PROMPTS, DiesAfter, Killed, a_plan, a_session, live, responses


class Remembering(DiesAfter):
    """An engine that may draft, and notes from what."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.remembered = []

    def remember(self, prompt_ids, responses):
        self.remembered += [(tuple(prompt_ids), list(response)) for response in responses]


def begun(steps=21):
    """A store in which a member of slot 0 died, after it had finished some responses and begun others."""
    store = MemoryStore()
    with pytest.raises(Killed):
        live(a_session(store, 0, steps=steps, flush_interval_s=1.0))
    return store


def finished_in(store):
    """The finished responses in the journal."""
    reader = JournalReader(store, a_plan())
    reader.refresh()
    return {r for r in range(len(EXPECTED)) if reader.has_ended(r)}


@pytest.mark.parametrize("slot", [0, 1])
def test_finished_siblings_reach_the_engine_of_the_member_that_goes_on(slot):
    """Slot 0 starts again, or the member of slot 1 takes over."""
    store = begun()
    finished = finished_in(store)
    session = a_session(store, slot, engine=Remembering, corpus=DraftCorpus(PROMPTS), idle_timeout_s=60.0)
    session.run()
    if slot == 0:
        live(a_session(store, 1))
    assert responses(store) == EXPECTED
    divided = {response // GENERATIONS for response in set(range(len(EXPECTED))) - finished}
    wanted = [(PROMPTS[r // GENERATIONS].token_ids, EXPECTED[r][0]) for r in finished if r // GENERATIONS in divided]
    assert len(wanted) >= 2
    assert sorted(wanted) == sorted(session.engine.remembered)


def requests(corpus):
    store = metered(begun())
    for slot in (1, 0):
        live(
            a_session(store, slot, corpus=corpus(PROMPTS) if corpus else None, idle_timeout_s=60.0, engine=Remembering)
        )
    return requests_of(store)


def test_finished_siblings_cost_no_request(monkeypatch):
    monkeypatch.setattr("uuid.uuid4", Numbered)
    Numbered.count = 0
    without = requests(None)
    Numbered.count = 0
    assert requests(DraftCorpus) == without
    assert without.gets > 10


class Numbered:
    """Names of incarnations that are the same in both runs: a member chooses at random by its name."""

    count = 0

    def __init__(self):
        Numbered.count += 1
        self.hex = f"{Numbered.count:016x}"
