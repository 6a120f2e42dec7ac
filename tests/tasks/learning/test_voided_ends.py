"""Scorers that read an end which a claim voids, and replays that lack scores."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from storage.clock import ManualClock
from storage.journal.assembly import Assembled, JournalReader
from storage.journal.claims import take_over
from storage.journal.journal import JournalWriter, PendingRows
from storage.journal.retention import settle
from storage.journal.shard import Finish
from storage.records import layout
from storage.records.prompt_table import read_prompts
from storage.records.run import read_plan
from storage.records.teacher_scores import decode_scores
from storage.stores.store import CorruptObject, ObjectMissing
from tasks.configuration.iteration_config import config_in_force
from tasks.learning.journal_follower import GroupTimeout
from tasks.learning.replaying import learner_at
from tasks.learning.score_journal import identity
from tasks.preparing.needed_state import check_replayable
from tests.dying_store import Killed
from tests.scored_run import SCORING, URL, opened, session, settings
from tests.small_run import (
    commit_iteration,
    everything,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)

OTHER_TOKENS = (20, 21, 22, 23)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rolled_out(model, larger):
    """All objects of a run whose first rollout has ended, and whose teacher has a pool."""
    store = memory_store("scored")
    config = settings(model, {"path": str(larger), "pool": "teachers"})
    plan_iteration(replace(config, trainer=replace(config.trainer, group_timeout_s=0.2)))
    roll_out(URL, 0)
    return everything(store)


def void(store, unit=0):
    """A claim of a frozen member, which saw none of its predecessor's shards, comes late; then it writes others."""
    plan, reader, name = read_plan(store, 0), JournalReader(store, read_plan(store, 0)), f"00009-{9:016x}"
    reader.book.refresh()
    [before] = {owner.incarnation for owner in reader.book.owners_of(unit)}

    class Unread:
        def advance(self, _incarnation):
            return -1

    assert take_over(store, plan, reader.book, Unread(), unit=unit, incarnation=name, slot=9, predecessors={before})
    pending, responses = PendingRows(), plan.responses_of(unit)
    for response in responses:
        pending.append(response, reader.book.epoch(unit), 0, OTHER_TOKENS, [-1.0] * len(OTHER_TOKENS), Finish.STOP)
    JournalWriter(store, 0, name, plan.weight_version).write(pending)
    return responses


def used_scores(store):
    keys = [key for key in store.list(layout.iteration(0)) if "/teacher/" in key]
    return {row.response: row for key in keys for row in decode_scores(key, store.get(key))}


def scored_by_hand(larger, store, response):
    plan = read_plan(store, 0)
    prompt = read_prompts(store, plan)[response // plan.num_generations].token_ids
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(larger).eval()(torch.tensor([[*prompt, *OTHER_TOKENS]])).logits
    logprobs = torch.log_softmax(logits[0, len(prompt) - 1 : -1] / plan.sampling.temperature, dim=1)
    return logprobs.gather(1, torch.tensor(OTHER_TOKENS)[:, None])[:, 0].numpy()


def test_scores_of_an_end_that_a_claim_voids_do_not_count(rolled_out, larger):
    """The scorers have left by then. The trainer says what it waits for, and the next scorer scores these again."""
    store = opened(rolled_out)
    assert session(store).run() == 12
    before = {key: store.get(key) for key in store.list(SCORING) if key.endswith(".arrow")}
    voided = void(store)
    with pytest.raises(GroupTimeout, match="tokens scored again, because the first scores are of tokens that do not"):
        train_small(URL, 0)
    session(store, scorer=1).run()
    train_small(URL, 0)
    scores = used_scores(store)
    assert sorted(scores) == list(range(12))
    for response in voided:
        np.testing.assert_allclose(scores[response].logprobs, scored_by_hand(larger, store, response), atol=1e-4)
    assert all(store.get(key) == body for key, body in before.items())


def test_a_half_scored_end_that_a_claim_voids_is_scored_again_once_it_is_recorded(rolled_out, larger):
    store = opened(rolled_out, 12)
    with pytest.raises(Killed):
        session(store).run()
    store.left = 1 << 30
    voided = void(store)
    # Until a micro-batch says which tokens count, the group with scores of others waits.
    clock = ManualClock()
    assert session(store, clock=clock).run() < 12
    assert clock.monotonic() >= 0.2
    with pytest.raises(GroupTimeout):
        train_small(URL, 0)
    session(store).run()
    train_small(URL, 0)
    for response in voided:
        found = used_scores(store)[response].logprobs
        np.testing.assert_allclose(found, scored_by_hand(larger, store, response), atol=1e-4)


def test_observations_are_part_of_what_was_scored():
    tokens, logprobs = np.arange(6, dtype=np.uint32), np.zeros(4, np.float32)
    response = Assembled(0, tokens, logprobs, Finish.STOP, (), (), tokens, (2, 2, 2), (b"{}",), False, 0)
    others = tokens.copy()
    others[2] = 9
    assert identity(response) == identity(replace(response, lineage=(), events=()))
    assert identity(response) != identity(replace(response, token_ids=others))
    assert identity(response) != identity(replace(response, origins=(3, 1, 2)))


def test_a_replay_names_the_scores_of_a_pool_that_are_lost(rolled_out, model):
    store = opened(rolled_out)
    session(store).run()
    train_small(URL, 0)
    config = config_in_force(store, read_plan(store, 0))
    lost = layout.teacher_scores(0, 1)
    store.delete(lost)
    for key in store.list(layout.CHECKPOINTS):
        store.delete(key)
    # While the scorers' shards are there, nothing is lost.
    check_replayable(store, 0)
    assert learner_at(store, 1, config, model, ManualClock())[1].iterations == 1
    assert lost in store.list(layout.iteration(0))
    store.delete(lost)
    commit_iteration(URL, 0)
    settle(store, 0)
    with pytest.raises(CorruptObject, match=f"{lost}.*it is missing, and iteration 0 must be replayed"):
        check_replayable(store, 0)
    with pytest.raises(ObjectMissing, match=lost):
        learner_at(store, 1, config, model, ManualClock())
