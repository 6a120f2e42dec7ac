"""Responses of the last epoch, read from stored parts, shorten the decoding of the next epoch and change no token."""

import threading
from dataclasses import replace

import numpy as np
import pytest

import gleaner
from storage.clock import ManualClock
from storage.journal.compaction import compact
from storage.journal.response_parts import ResponsesRecord, StoredPart
from storage.journal.responses import Response, decode_responses, encode_responses
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.framing import trailer_digest
from storage.records.prompt_table import PromptRow
from storage.stores.memory import MemoryStore
from storage.stores.metered import Requests, metered, requests_of
from storage.stores.store import StorageError, StoreUnavailable
from tasks.configuration.data import DataConfig
from tasks.prompts.order import prompt_index
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.engines.speculation import Speculation
from tasks.sampling.session import past_responses
from tasks.sampling.session.draft_corpus import DraftCorpus
from tasks.sampling.session.past_responses import PastDrawings, PastResponses
from tests.journals import a_plan
from tests.small_run import (
    commit_iteration,
    config,
    memory_store,
    plan_iteration,
    roll_out,
    train_small,
)
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model

DRAFTED = {"drafts": 4, "source": "siblings"}


class PartsFirst(MemoryStore):
    """Gives the second epoch's weights only when parts of the first were read or missed, so that no test is a race."""

    def __init__(self, name):
        super().__init__(name)
        self.waits = self.fails = self.hangs = False
        self.part_asked, self.freed = threading.Event(), threading.Event()

    def get(self, key, start=0, end=None):
        if self.waits and key.startswith("weights/") and not self.part_asked.wait(5):
            self.part_asked.set()
        if not self.waits or not key.startswith("iterations/000000/responses"):
            return super().get(key, start, end)
        try:
            if self.hangs:
                self.part_asked.set()
                self.freed.wait(30)
            if self.fails:
                raise StoreUnavailable("no answer")
            body = super().get(key, start, end)
        except StorageError:
            self.part_asked.set()
            raise
        if not start and "/responses/" in key:
            self.part_asked.set()
        return body


class Accepted:
    """The drafts that engines have verified and accepted since the last look."""

    def __init__(self, monkeypatch):
        self._settled, settle = {}, Speculation.settle

        def noted(speculation, deltas):
            settle(speculation, deltas)
            self._settled[id(speculation)] = speculation

        monkeypatch.setattr(Speculation, "settle", noted)

    def take(self):
        found = sum(each.totals.accepted for each in self._settled.values())
        self._settled.clear()
        return found


def untouched(_store):
    pass


def two_epochs(name, model, speculation, accepted, between=untouched, *, after=untouched, compacts=True):
    """The tokens of both epochs of 4 prompts, and the accepted drafts of each; the crew is new in each."""
    store = PartsFirst(name)
    memory_store(name, store)
    url, tokens, counts = f"memory://{name}", [], []
    for iteration in range(2):
        settings = config(
            url,
            model,
            data={"limit": 4, "shuffle": True},
            sampling={"temperature": 0.05, "max_completion_length": 40},
            optimizer={"learning_rate": 1e-4},
            rollout={"engine": "torch", "max_responses_in_flight": 8, "speculation": speculation},
        )
        plan_iteration(settings)
        if iteration:
            between(store)
            store.waits = speculation["drafts"] != 0 and compacts
        roll_out(url, iteration)
        counts.append(accepted.take())
        if iteration:
            after(store)
        train_small(url, iteration)
        commit_iteration(url, iteration)
        if compacts:
            compact(store, iteration)
        rows = gleaner.open(url).responses(iteration).to_pylist()
        tokens.append({row["response"]: row["token_ids"] for row in rows})
    return tokens, counts, store


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A policy that hardly repeats itself within a response, because its embeddings are not tied."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "tie_word_embeddings": False}
    return save_tiny_model(tmp_path_factory.mktemp("model"), tiny_model(tiny_config(**shape)))


@pytest.fixture(scope="module")
def plain(model):
    """The tokens of both epochs without drafts."""
    with pytest.MonkeyPatch.context() as patch:
        tokens, counts, _ = two_epochs("plain", model, {"drafts": 0}, Accepted(patch))
    assert counts == [0, 0]
    return tokens


@pytest.fixture(scope="module")
def forgetful(model):
    """The tokens of both epochs, and the accepted drafts of the second, where no parts are stored."""
    with pytest.MonkeyPatch.context() as patch:
        tokens, (_, accepted), _ = two_epochs("forgetful", model, DRAFTED, Accepted(patch), compacts=False)
    return tokens, accepted


@pytest.mark.slow
def test_the_second_epoch_drafts_from_the_first_and_has_the_tokens_of_a_run_without_drafts(
    model, plain, forgetful, monkeypatch
):
    drafted, (_, accepted), store = two_epochs("past", model, DRAFTED, Accepted(monkeypatch))
    assert drafted == forgetful[0] == plain
    assert sum(len(tokens) for tokens in plain[1].values()) > 200
    assert store.part_asked.is_set()
    assert accepted > 1.3 * forgetful[1] > 0


def part_key(store):
    (key,) = store.list("iterations/000000/responses/")
    return key


def lost(store):
    store.delete(part_key(store))


def unnamed(store):
    store.delete(layout.responses(0))


def torn(store):
    body = store.get(part_key(store))
    store.put(part_key(store), body[: len(body) // 2] + b"x" + body[len(body) // 2 + 1 :])


def anothers(store):
    """A whole part of other responses than the record names."""
    key = part_key(store)
    store.put(key, encode_responses(decode_responses(key, store.get(key))[:-1]))


def silent(store):
    store.fails = True


def without_plan(store):
    store.put(layout.plan(0), b"{}")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [lost, unnamed, torn, anothers, silent, without_plan])
def test_without_good_parts_there_are_fewer_drafts_and_the_same_tokens(model, plain, forgetful, monkeypatch, damage):
    accepted = Accepted(monkeypatch)
    kept = {}

    def between(store):
        kept.update({key: store.get(key) for key in store.list("iterations/000000/")})
        damage(store)

    def repaired(store):
        store.fails = False
        for key, body in kept.items():
            store.put(key, body)

    tokens, counts, _ = two_epochs("damaged", model, DRAFTED, accepted, between, after=repaired)
    assert tokens == plain
    assert counts[1] == forgetful[1]


@pytest.mark.slow
def test_a_store_that_does_not_answer_for_parts_holds_up_no_member(model, plain, forgetful, monkeypatch):
    monkeypatch.setattr(past_responses, "_END_TIMEOUT_S", 0.1)

    def between(store):
        store.hangs = True

    def after(store):
        store.hangs = False
        store.freed.set()

    tokens, counts, _ = two_epochs("hanging", model, DRAFTED, Accepted(monkeypatch), between, after=after)
    assert tokens == plain
    assert counts[1] == forgetful[1]


def a_run(size, steps):
    """The plans of a run of 3 groups of 2 responses per iteration, of which `steps` say how many groups were used."""
    store, first = MemoryStore("run"), 0
    plans = []
    for iteration, used in enumerate(steps):
        plan = a_plan(3, 2, slots=2, iteration=iteration, first_prompt=first, prompts_per_epoch=size)
        records.put(store, layout.plan(iteration), plan)
        parts = (StoredPart(first=0, last=3, digest="0"), StoredPart(first=4, last=5, digest="1"))
        records.put(store, layout.responses(iteration), ResponsesRecord(iteration=iteration, parts=parts))
        plans.append(plan)
        first += used
    return store, plans


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("size", "steps"), [(7, [3] * 9), (3, [3] * 4), (2, [3] * 5), (11, [3, 2, 1, 3, 2, 2, 3, 1, 3, 3])]
)
def test_a_prompt_is_found_in_the_last_iteration_that_used_it(size, steps, shuffle):
    data = DataConfig(seed=5, shuffle=shuffle)
    store, plans = a_run(size, steps)

    def index(position):
        return prompt_index(position, size, data.seed, shuffle)[1]

    found_any = 0
    for plan in plans:
        used = [(p.iteration, p.first_prompt + k) for p, n in zip(plans, steps, strict=True) for k in range(n)]
        parts = PastDrawings(store, plan, data).parts(range(3))
        found = {(part.iteration, number): group for part in parts for number, group in part.groups.items()}
        prompts = [index(plan.first_prompt + group) for group in range(3)]
        for group, wanted in enumerate(prompts):
            past = [(i, at) for i, at in used if i < plan.iteration and index(at) == wanted]
            numbers = {place for place, each in found.items() if prompts[each] == wanted}
            if past and past[-1][1] // size < (plan.first_prompt + group) // size:
                iteration, at = past[-1]
                first = 2 * (at - plans[iteration].first_prompt)
                assert numbers == {(iteration, first), (iteration, first + 1)}
                found_any += 1
    assert found_any > 2
    assert [part.share for part in parts] == sorted((part.share for part in parts), reverse=True)


def test_a_slot_asks_for_its_own_groups_and_a_member_beyond_the_plan_for_all():
    store, plans = a_run(3, [3, 3])
    data = DataConfig(shuffle=False)
    own = PastDrawings(store, plans[1], data).parts(plans[1].slots[1].groups)
    assert {group for part in own for group in part.groups.values()} == set(plans[1].slots[1].groups)
    assert {
        group for part in PastDrawings(store, plans[1], data).parts(range(3)) for group in part.groups.values()
    } == {0, 1, 2}


def row(number, tokens):
    values = np.array(tokens, dtype=np.uint32)
    scores = np.zeros(len(tokens), dtype=np.float32)
    ends = (Finish.STOP, 1.0, {}, 0, (len(tokens),), (len(tokens),), ())
    return Response(number, number // 2, "p", values, scores, *ends)


class Remembering(ScriptedEngine):
    """An engine that may draft, and notes from what."""

    def __init__(self):
        super().__init__(50, 4)
        self.remembered = []

    def remember(self, prompt_ids, responses):
        self.remembered += [(tuple(prompt_ids), list(response)) for response in responses]


PROMPTS = [PromptRow(str(k), (7, k), "p", {}) for k in range(3)]


def what_is_read(plan_changes, **given):
    """What a member of a second epoch, beyond the plan's slots, hands to its engine; and the bytes of the part."""
    store, plans = a_run(3, [3, 3])
    body = encode_responses([row(number, [number, 5, 6]) for number in range(6)])
    store.put(layout.responses_part(0, 0, 5), body)
    named = ResponsesRecord(iteration=0, parts=(StoredPart(first=0, last=5, digest=trailer_digest(body)),))
    records.put(store, layout.responses(0), named)
    corpus, engine = DraftCorpus(PROMPTS), Remembering()
    asked = metered(store)
    past = PastResponses(
        asked, replace(plans[1], **plan_changes), DataConfig(shuffle=False), 2, corpus, ManualClock(), **given
    )
    past.read()
    corpus.feed(engine)
    return sorted(engine.remembered), requests_of(asked), len(body)


def test_each_prompt_gets_the_responses_of_its_last_drawing_at_the_cost_of_the_part():
    remembered, requests, part = what_is_read({})
    assert remembered == [((7, number // 2), [number, 5, 6]) for number in range(6)]
    assert part < requests.bytes_read < part + 2000
    assert requests.gets <= 8


def test_a_part_that_is_longer_than_the_bytes_left_is_not_read():
    _, _, part = what_is_read({})
    assert what_is_read({}, bytes_max=part)[0]
    remembered, requests, _ = what_is_read({}, bytes_max=part - 1)
    assert remembered == []
    assert requests.bytes_read < 2500


def test_nothing_is_asked_for_by_an_evaluation_or_a_plan_without_the_size_of_the_data_set():
    for changes in ({"weights_url": "../.."}, {"prompts_per_epoch": 0}):
        assert what_is_read(changes)[:2] == ([], Requests())


def test_a_part_of_which_little_is_wanted_is_not_read(monkeypatch):
    monkeypatch.setattr(past_responses, "SHARE_MIN", 1.1)
    assert what_is_read({})[0] == []


def test_an_engine_that_cannot_draft_from_others_is_told_nothing():
    corpus = DraftCorpus(PROMPTS)
    corpus.extend([(0, np.zeros(3, dtype=np.uint32))])
    assert not corpus.feed(ScriptedEngine(50, 4))
    engine = Remembering()
    assert not corpus.feed(engine)
    assert engine.remembered == [((7, 0), [0, 0, 0])]


def test_a_step_is_fed_few_tokens_at_once():
    corpus, engine = DraftCorpus(PROMPTS), Remembering()
    corpus.extend([(0, np.zeros(2_500, dtype=np.uint32))] * 5)
    counts = []
    for _ in range(4):
        corpus.feed(engine)
        counts.append(len(engine.remembered))
    assert counts == [2, 4, 5, 5]
