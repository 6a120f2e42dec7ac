"""Whole iterations with a teacher, in small: scored, trained, killed anywhere, replayed, and resumed to the bit."""

import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from storage.clock import ManualClock, SystemClock
from storage.journal.assembly import JournalReader
from storage.journal.retention import settle
from storage.records import layout, records
from storage.records.prompt_table import read_prompts
from storage.records.records import TrainingRecord
from storage.records.run import read_plan
from storage.records.teacher_scores import decode_scores, encode_scores
from storage.stores.connect import connect
from storage.weights import tensor_sets
from tasks.configuration.run_config import parse
from tasks.learning.parking import park
from tasks.learning.replaying import learner_at
from tasks.learning.score_iteration import score_iteration
from tests.dying_store import DiesAtWrite, Killed
from tests.small_run import (
    commit_iteration,
    config,
    document,
    everything,
    learned,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    same,
    train_small,
    weights,
)

URL = "memory://distilled"
TWO_BATCHES = {"trainer": {"micro_batch_tokens_max": 640}}
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


def distilling(model, teacher, **sections):
    """A run that learns from a teacher alone."""
    sampling = {"sampling": {"max_completion_length": 40, "temperature": TEMPERATURE}}
    given = document(URL, model, **(TWO_BATCHES | sampling | sections), teacher=teacher)
    del given["rewards"]
    return parse(given)


def rolled_out_run(settings):
    store = memory_store("distilled")
    plan_iteration(settings)
    roll_out(URL, 0)
    return everything(store)


@pytest.fixture(scope="module", params=[None, 4], ids=["sampled", "head"])
def rolled_out(request, model, larger):
    """All objects of a run whose first rollout has ended."""
    return rolled_out_run(distilling(model, {"path": str(larger), "top_k": request.param}))


@pytest.fixture(scope="module")
def undisturbed(rolled_out):
    store = memory_store("distilled", DiesAtWrite("distilled", rolled_out))
    train_small(URL, 0)
    return store


def stored_scores(store, iteration=0):
    keys = [key for key in store.list(layout.iteration(iteration)) if "/teacher/" in key]
    return {row.response: row for key in keys for row in decode_scores(key, store.get(key))}


def plain(directory, store):
    """The log-softmax of a model at each sampled token of every response, and the tokens, by Hugging Face's model."""
    module = AutoModelForCausalLM.from_pretrained(directory).eval()
    plan = read_plan(store, 0)
    prompts, reader = read_prompts(store, plan), JournalReader(store, plan)
    reader.refresh()
    found = {}
    for response in range(plan.num_responses):
        tokens = reader.assemble(response).token_ids.tolist()
        prompt = prompts[response // plan.num_generations].token_ids
        with torch.no_grad():
            logits = module(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        found[response] = torch.log_softmax(logits / TEMPERATURE, dim=1), torch.tensor(tokens)
    return found


def test_scores_are_those_of_the_teacher_at_each_sampled_token(undisturbed, larger):
    scores = stored_scores(undisturbed)
    expected = plain(larger, undisturbed)
    assert scores.keys() == expected.keys()
    for response, (logprobs, tokens) in expected.items():
        row = scores[response]
        own = logprobs.gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row.logprobs), own, rtol=0, atol=1e-4)
        assert row.agrees.tolist() == (logprobs.argmax(1) == tokens).tolist()
        width = row.head_ids.shape[1]
        torch.testing.assert_close(torch.tensor(row.head_logprobs), logprobs.topk(width).values, rtol=0, atol=1e-4)


def test_a_step_moves_the_policy_and_measures_the_teacher(undisturbed, larger, model):
    metrics = records.read(undisturbed, TrainingRecord, layout.training(0)).metrics
    gaps, agreed = [], []
    policy, teacher = plain(model, undisturbed), plain(larger, undisturbed)
    for response, (logprobs, tokens) in policy.items():
        place = tokens[:, None]
        gaps.append((logprobs.gather(1, place) - teacher[response][0].gather(1, place))[:, 0])
        agreed.append(teacher[response][0].argmax(1) == tokens)
    assert metrics["teacher/kl"] == pytest.approx(torch.cat(gaps).mean().item(), abs=1e-3)
    assert metrics["teacher/agreement"] == pytest.approx(torch.cat(agreed).double().mean().item())
    assert "reward" not in metrics
    assert metrics["actor/grad_norm"] > 0
    assert not same(weights(undisturbed, 0), weights(undisturbed, 1))


@pytest.mark.slow
def test_killed_at_any_write_the_next_attempt_ends_with_the_same_bits(rolled_out, undisturbed):
    expected = everything(undisturbed)
    metrics = records.read(undisturbed, TrainingRecord, layout.training(0)).metrics
    assert sum("/teacher/" in key for key in undisturbed.written) >= 2
    for writes in range(len(undisturbed.written)):
        store = memory_store("distilled", DiesAtWrite("distilled", rolled_out, writes))
        with pytest.raises(Killed):
            train_small(URL, 0)
        store.left = 1 << 30
        record = train_small(URL, 0)
        assert learned(record.metrics) == learned(metrics)
        after = everything(store)
        assert after.keys() == expected.keys()
        assert all(after[key] == expected[key] for key in after if "/teacher/" in key)
        for prefix in (layout.weights(1), layout.checkpoint(1)):
            pair = [tensor_sets.read_manifest(each, prefix).tensors for each in (store, undisturbed)]
            assert pair[0] == pair[1], (writes, prefix)


def without_teachers(objects):
    """A run that has lost its teachers' tensors."""
    return {key: body for key, body in objects.items() if not key.startswith(layout.TEACHERS)}


def test_a_restarted_trainer_and_a_replay_ask_no_teacher_again(undisturbed, model, larger):
    settings = distilling(model, {"path": str(larger)})
    objects = without_teachers(everything(undisturbed))
    kept = {key: body for key, body in objects.items() if "training.json" not in key and "0001/" not in key}
    store = memory_store("distilled", DiesAtWrite("distilled", kept))
    train_small(URL, 0)
    assert same(weights(store, 1), weights(undisturbed, 1))
    # A replay, also of a compacted iteration.
    store = memory_store("distilled", DiesAtWrite("distilled", objects))
    commit_iteration(URL, 0)
    settle(store, 0)
    for key in store.list(layout.CHECKPOINTS):
        store.delete(key)
    learner, replayed = learner_at(store, 1, settings, model, ManualClock())
    assert replayed.iterations == 1
    assert learner.teachers.loaded == []
    published = weights(store, 1)
    assert all(
        torch.equal(value, published[name]) for name, value in learner.policy.state().items() if name in published
    )


def test_a_loaded_teacher_is_parked_with_the_learner_and_has_no_gradient(rolled_out, model, larger):
    store = memory_store("distilled", DiesAtWrite("distilled", rolled_out))
    learner, _ = learner_at(store, 0, distilling(model, {"path": str(larger)}), model, ManualClock())
    before, drawn = park(learner).num_bytes, torch.get_rng_state()
    teacher = learner.teachers.named("teacher")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert learner.teachers.named("teacher") is teacher
    assert not any(parameter.requires_grad for parameter in teacher.module.parameters())
    assert park(learner).num_bytes - before == sum(tensor.nbytes for tensor in teacher.memory())


class AnotherIsFirst(DiesAtWrite):
    """A store in which another trainer creates its scores just before those of this trainer, each time."""

    def create(self, key: str, body: bytes) -> bool:
        if "/teacher/" in key:
            rows = [replace(row, logprobs=row.logprobs - 1) for row in decode_scores(key, body)]
            super().create(key, encode_scores(rows))
        return super().create(key, body)


def test_scores_that_another_trainer_stored_first_are_the_ones_that_count(rolled_out, undisturbed):
    store = memory_store("distilled", AnotherIsFirst("distilled", rolled_out))
    record = train_small(URL, 0)
    own = records.read(undisturbed, TrainingRecord, layout.training(0)).metrics
    assert record.metrics["teacher/kl"] == pytest.approx(own["teacher/kl"] + 1, abs=1e-5)
    assert stored_scores(store).keys() == stored_scores(undisturbed).keys()


def test_scores_that_do_not_fit_their_batch_are_refused(rolled_out, undisturbed):
    objects = everything(undisturbed)
    first, second = (layout.teacher_scores(0, number) for number in (0, 1))
    swapped = {**objects, first: objects[second]}
    del swapped[layout.training(0)]
    kept = {key: body for key, body in swapped.items() if "0001/" not in key}
    memory_store("distilled", DiesAtWrite("distilled", kept))
    with pytest.raises(Exception, match=r"teacher/000000\.arrow.*not those of its micro-batch"):
        train_small(URL, 0)


def test_a_teacher_beside_a_reward_changes_the_advantages(model, larger):
    learnt = []
    for teacher in (None, {"path": str(larger), "weight": 0.3}):
        store = memory_store("distilled")
        plan_iteration(config(URL, model, **TWO_BATCHES, teacher=teacher))
        roll_out(URL, 0)
        record = train_small(URL, 0)
        assert record.metrics["reward"] != 0
        assert ("teacher/kl" in record.metrics) == (teacher is not None)
        learnt.append(weights(store, 1))
    assert not same(*learnt)


def test_later_steps_of_an_iteration_are_scored_once(model, larger):
    settings = distilling(
        model, {"path": str(larger), "top_k": 3, "kl": "jsd"}, algorithm={"num_mini_batches": 2, "num_epochs": 2}
    )
    rolled_out_run(settings)
    record = train_small(URL, 0)
    assert record.metrics["teacher/divergence"] > 0


def test_each_prompt_has_the_teacher_that_its_column_names(tmp_path, model, larger):
    rows = tmp_path / "rows.jsonl"
    lines = [f'{{"prompt": "{n}+1=", "subject": "{("sums", "rest")[n % 2]}"}}' for n in range(8)]
    rows.write_text("\n".join(lines))
    teacher = {"paths": {"sums": str(larger), "rest": str(model)}, "column": "subject"}
    settings = distilling(model, teacher, data={"source": str(rows), "shuffle": False})
    store = memory_store("distilled")
    plan_iteration(settings)
    roll_out(URL, 0)
    train_small(URL, 0)
    scores, plan = stored_scores(store), read_plan(store, 0)
    subjects = [row.columns["subject"] for row in read_prompts(store, plan)]
    assert set(subjects) == {"sums", "rest"}
    assert {n: row.teacher for n, row in scores.items()} == {n: subjects[n // 3] for n in scores}
    by_name = {"sums": plain(larger, store), "rest": plain(model, store)}
    for response, row in scores.items():
        logprobs, tokens = by_name[row.teacher][response]
        own = logprobs.gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row.logprobs), own, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [None, 4])
def test_two_ranks_score_and_learn_what_one_does(tmp_path, ranks_server, model, larger, top_k):
    one, two = tmp_path / "one", tmp_path / "two"
    optimizer = {"learning_rate": 1e-3, "eps": 1e-4}
    plan_iteration(
        config(str(one), model, optimizer=optimizer, teacher={"path": str(larger), "top_k": top_k, "weight": 0.5})
    )
    roll_out(str(one), 0)
    shutil.copytree(one, two)
    alone = train_small(str(one), 0)
    ranks_server.launch("train_iteration 0", two, 2)
    stores = [connect(str(folder)) for folder in (one, two)]
    together = records.read(stores[1], TrainingRecord, layout.training(0))
    assert learned(together.metrics) == pytest.approx(learned(alone.metrics), rel=1e-4, abs=1e-5)
    ours, theirs = (stored_scores(store) for store in stores)
    assert list(ours) == list(theirs)
    for response, row in ours.items():
        other = theirs[response]
        assert row.head_ids.tolist() == other.head_ids.tolist()
        assert row.logprobs.tolist() == pytest.approx(other.logprobs.tolist(), abs=1e-5)
    left, right = (weights(store, 1) for store in stores)
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_two_ranks_read_the_scores_that_the_first_has_waited_for(tmp_path, ranks_server, model, larger):
    pools = {"rollout": {"count": 2, "interruptible": True}, "scoring": {"teachers": {}}}
    teacher, sampling = {"path": str(larger), "pool": "teachers"}, {"temperature": TEMPERATURE}
    plan_iteration(config(str(tmp_path), model, pools=pools, teacher=teacher, sampling=sampling))
    roll_out(str(tmp_path), 0)
    assert score_iteration(str(tmp_path), 0, 0, lambda: False, SystemClock()) == 12
    ranks_server.launch("train_iteration 0", tmp_path, 2)
    store = connect(str(tmp_path))
    expected = plain(larger, store)
    scores = stored_scores(store)
    assert scores.keys() == expected.keys()
    for response, (logprobs, tokens) in expected.items():
        own = logprobs.gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scores[response].logprobs), own, rtol=0, atol=1e-4)
    assert "teacher/kl" in records.read(store, TrainingRecord, layout.training(0)).metrics
