"""Whole iterations on examples, in small: planned, trained, concluded, killed anywhere, and resumed to the bit."""

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from storage.clock import ManualClock
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.prompt_table import read_prompts
from storage.records.records import BatchRecord
from storage.records.run import read_plan
from tasks.configuration.data import DataConfig
from tasks.configuration.run_config import parse
from tasks.forecasting.inputs import gather
from tasks.forecasting.probe import NoProbe
from tasks.preparing import example_journal
from tasks.preparing.checks import check_files
from tasks.preparing.evaluation import prepare_beside
from tasks.preparing.example_journal import write_examples
from tasks.preparing.iteration import prepare
from tasks.prompts.examples import Stretch
from tasks.prompts.loading import load_prompts
from tasks.prompts.prompt import PromptError
from tasks.regrading.regrading import regrade
from tasks.viewing.run_reader import RunReader
from tests.dying_store import DiesAtWrite, Killed
from tests.example_runs import URL, chatting_model, config, conversations
from tests.small_run import (
    EXECUTION,
    SHORTER,
    assembled,
    commit_iteration,
    document,
    everything,
    memory_store,
    model_directory,
    plan_iteration,
    same,
    train_small,
    weights,
)

HELD_OUT = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def planned(model):
    """All objects of a run whose first iteration is planned."""
    store = memory_store("examples")
    plan_iteration(config(model))
    return everything(store)


@pytest.fixture(scope="module")
def undisturbed(planned):
    store = memory_store("examples", DiesAtWrite("examples", planned))
    train_small(URL, 0)
    return store


def responses(store, iteration=0):
    """The tokens and stretches of every response of an iteration, which all have ended by themselves."""
    found = assembled(store, iteration)
    assert {each.finish for each in found} == {Finish.STOP}
    return [(each.token_ids.tolist(), each.origins) for each in found]


def test_a_plan_of_examples_starts_no_member_and_holds_every_response(model):
    store = memory_store("examples")
    _, slots = prepare(config(model), EXECUTION, ManualClock())
    assert slots == [[]]
    plan = read_plan(store, 0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert (plan.num_generations, plan.num_groups, plan.seeding, plan.decisions) == (1, 4, None, ())
    for row, (ids, origins) in zip(read_prompts(store, plan), responses(store), strict=True):
        whole = f"{row.prompt}{row.columns['completion']}<eos>"
        assert [*row.token_ids, *ids] == tokenizer(whole)["input_ids"]
        assert origins == (len(ids),)


def test_a_plan_killed_at_any_write_is_completed_by_the_next_with_the_same_responses(model, planned):
    expected = responses(memory_store("examples", DiesAtWrite("examples", planned)))
    counting = memory_store("examples", DiesAtWrite("examples", {}))
    plan_iteration(config(model))
    plans = [each for each, key in enumerate(counting.written) if key == layout.plan(0)]
    assert any("/journal/" in key for key in counting.written[plans[0] :])
    for writes in range(plans[0], len(counting.written)):
        store = memory_store("examples", DiesAtWrite("examples", {}, writes))
        with pytest.raises(Killed):
            plan_iteration(config(model))
        store.left = 1 << 30
        plan_iteration(config(model))
        assert responses(store) == expected, writes
        train_small(URL, 0)
        assert commit_iteration(URL, 0).metrics["num_tokens"] == sum(len(ids) for ids, _ in expected)


def test_a_plan_killed_between_two_shards_writes_only_the_rest(model, planned, monkeypatch):
    expected = responses(memory_store("examples", DiesAtWrite("examples", planned)))
    monkeypatch.setattr(example_journal, "SHARD_TOKENS", 1)
    counting = memory_store("examples", DiesAtWrite("examples", {}))
    plan_iteration(config(model))
    shards = [each for each, key in enumerate(counting.written) if "/journal/" in key]
    assert len(shards) == len(expected)
    store = memory_store("examples", DiesAtWrite("examples", {}, shards[2]))
    with pytest.raises(Killed):
        plan_iteration(config(model))
    store.left = 1 << 30
    plan_iteration(config(model))
    assert responses(store) == expected
    assert sum("/journal/" in key for key in store.written) == len(expected)


def test_a_writer_that_was_overtaken_changes_nothing(planned):
    objects = {key: body for key, body in planned.items() if "/claims/" not in key and "/journal/" not in key}
    store = memory_store("examples", DiesAtWrite("examples", objects))
    plan = read_plan(store, 0)

    def others(rows):
        return ([[Stretch((7, 8), is_learned=True)]] for _ in rows)

    def overtaken(rows):
        for number, _ in enumerate(rows):
            if number == 1:
                write_examples(store, plan, others, ManualClock())
            yield [[Stretch((5,), is_learned=True)]]

    write_examples(store, plan, overtaken, ManualClock())
    assert responses(store) == [([7, 8], (2,))] * plan.num_responses


@pytest.mark.slow
def test_training_killed_at_any_write_ends_with_the_same_bits(planned, undisturbed):
    assert not same(weights(undisturbed, 0), weights(undisturbed, 1))
    for writes in range(len(undisturbed.written)):
        store = memory_store("examples", DiesAtWrite("examples", planned, writes))
        with pytest.raises(Killed):
            train_small(URL, 0)
        store.left = 1 << 30
        train_small(URL, 0)
        assert same(weights(store, 1), weights(undisturbed, 1)), writes
        assert everything(store).keys() == everything(undisturbed).keys()


def test_check_looks_at_every_completion_and_names_the_one_that_is_too_long(model):
    memory_store("examples")
    seen = check_files(config(model))
    assert [line for line in seen if line.startswith("completions: all 64, tokenised, with up to ")]
    with pytest.raises(PromptError, match=r"has a completion of \d+ tokens; allowed: 30 .sampling.max_completion"):
        check_files(config(model, sampling={"max_completion_length": 30}))


def test_an_evaluation_of_the_trained_policy_is_planned_with_rewards_of_its_own(model):
    memory_store("examples")
    held_out = {"data": {"source": "arithmetic", "seed": 5, "limit": 4}, "rewards": SHORTER, "interval": 1}
    settings = config(model, evaluation=held_out)
    plan_iteration(settings)
    train_small(URL, 0)
    commit_iteration(URL, 0)
    reference, slots, _ = prepare_beside(settings, 1, EXECUTION, ManualClock(), resume=False)
    assert (reference.weight_version, len(slots)) == (1, 2)


def test_a_forecast_is_refused_because_examples_need_no_crew(model):
    with pytest.raises(ValueError, match=r"^algorithm\.kind: value 'sft'; allowed in a forecast: 'rl'"):
        gather(config(model), NoProbe(reason="nothing"))


def run_of(model, iterations, **sections):
    """The weights after some iterations, each of which restores its state from the store."""
    store, settings = memory_store("examples"), config(model, **sections)
    for iteration in range(iterations):
        plan_iteration(settings)
        train_small(URL, iteration)
        commit_iteration(URL, iteration)
    return weights(store, iterations)


def test_examples_are_not_graded_again(model, planned):
    store = memory_store("examples", DiesAtWrite("examples", planned))
    for given, line in (
        (config(model), "^rewards: none; allowed: at least one"),
        (parse(document(URL, model)), f"^run: value '{URL}', whose responses are examples"),
    ):
        with pytest.raises(ValueError, match=line):
            regrade(store, given, range(1), "again")
    assert everything(store) == planned


def test_a_replay_of_recorded_examples_gives_the_bits_of_checkpoints(model):
    every, rare = ({"trainer": {"micro_batch_tokens_max": 320, "checkpoint_interval": each}} for each in (1, 4))
    assert same(run_of(model, 3, **every), run_of(model, 3, **rare))


def test_epochs_and_mini_batches_train_without_an_older_policy(model):
    store = memory_store("examples")
    plan_iteration(config(model, algorithm={"kind": "sft", "num_epochs": 2, "num_mini_batches": 2}))
    metrics = train_small(URL, 0).metrics
    assert metrics["num_tokens"] == sum(len(ids) for ids, _ in responses(store))
    assert not [name for name in metrics if name.startswith(("importance", "mismatch", "clip", "actor/ppo", "kl"))]


def test_of_conversations_the_assistants_tokens_alone_are_trained_and_the_iteration_is_committed(tmp_path):
    folder = chatting_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    store = memory_store("examples")
    run = {"url": URL, "seed": 3, "num_prompts_per_step": 3, "num_generations": 8}
    plan_iteration(config(folder, run=run, data=conversations(tmp_path)))
    said = []
    for ids, origins in responses(store):
        start, turns = 0, []
        for number, length in enumerate(origins):
            turns += [tokenizer.decode(ids[start : start + length])] if number % 2 == 0 else []
            start += length
        said.append(turns)
    assert said == [["2;", "4;"], ["it=6;", "6;"], ["5;"]]
    record = train_small(URL, 0)
    assert record.metrics["num_tokens"] == sum(len(text) for turns in said for text in turns)
    batch = records.read(store, BatchRecord, layout.batch(0, 0))
    assert [each.policy_length for each in batch.responses] == [sum(map(len, turns)) for turns in said]
    report = commit_iteration(URL, 0)
    assert report.metrics["loss"] == pytest.approx(record.metrics["loss"])
    assert report.metrics["cost/lives_estimated"] == 0
    view = RunReader(store).iteration(0).view(0)
    assert "2+2?" in "".join(stretch.text for stretch in view.stretches)


def held_out_loss(model, store, version):
    """The mean negative log-likelihood of completions that no iteration has seen, by transformers' model."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy.load_state_dict(weights(store, version), strict=False)
    tokenizer = AutoTokenizer.from_pretrained(model)
    total, count = 0.0, 0
    for prompt in load_prompts(DataConfig(seed=99, limit=HELD_OUT, completion_column="worked"), kind="sft"):
        asked = tokenizer(prompt.text_or_messages)["input_ids"]
        whole = torch.tensor([[*asked, *tokenizer(f"{prompt.columns['completion']}<eos>")["input_ids"]]])
        with torch.no_grad():
            logits = policy(whole).logits[0, len(asked) - 1 : -1]
        total += functional.cross_entropy(logits, whole[0, len(asked) :], reduction="sum").item()
        count += whole.shape[1] - len(asked)
    return total / count


def test_the_loss_of_held_out_examples_falls(model):
    store = memory_store("examples")
    run = {"url": URL, "seed": 3, "num_prompts_per_step": 16, "num_generations": 8}
    settings = config(model, run=run, trainer={"micro_batch_tokens_max": 4096})
    for iteration in range(12):
        plan_iteration(settings)
        train_small(URL, iteration)
        commit_iteration(URL, iteration)
    first, last = held_out_loss(model, store, 0), held_out_loss(model, store, 12)
    assert last < 0.6 * first, (first, last)
