"""Whole iterations on pairs, in small: planned, trained, concluded, killed anywhere, and resumed to the bit."""

import shutil

import pytest
import torch
from transformers import AutoTokenizer

from storage.clock import ManualClock
from storage.records import layout, records
from storage.records.prompt_table import read_prompts
from storage.records.records import BatchRecord, TrainingRecord
from storage.records.run import read_plan
from storage.stores.connect import connect
from tasks.learning.collecting import collect
from tasks.preparing.checks import check_files
from tasks.prompts.prompt import PromptError
from tests.dying_store import DiesAtWrite, Killed
from tests.example_runs import URL, chatting_model, config, rows_file
from tests.small_run import (
    EXECUTION,
    assembled,
    commit_iteration,
    everything,
    learned,
    memory_store,
    model_directory,
    plan_iteration,
    same,
    train_small,
    weights,
)

# Of the generator: the worked answer is preferred to the answer alone.
DATA = {"limit": 12, "chosen_column": "worked", "rejected_column": "answer"}
DPO = {"kind": "dpo", "beta": 0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


def pairs(model, **sections):
    return config(model, **({"data": DATA, "algorithm": DPO} | sections))


@pytest.fixture(scope="module")
def planned(model):
    """All objects of a run whose first iteration is planned."""
    store = memory_store("examples")
    plan_iteration(pairs(model))
    return everything(store)


def responses(store, iteration=0):
    return [each.token_ids.tolist() for each in assembled(store, iteration)]


def test_a_plan_of_pairs_holds_the_chosen_response_and_then_the_rejected_one(model, planned):
    store = memory_store("examples", DiesAtWrite("examples", planned))
    plan, tokenizer = read_plan(store, 0), AutoTokenizer.from_pretrained(model)
    assert (plan.num_generations, plan.num_groups) == (2, 4)
    said = responses(store)
    for group, row in enumerate(read_prompts(store, plan)):
        for place, column in enumerate(("chosen", "rejected")):
            whole = tokenizer(f"{row.prompt}{row.columns[column]}<eos>")["input_ids"]
            assert [*row.token_ids, *said[2 * group + place]] == whole


def test_a_plan_killed_at_any_write_is_completed_by_the_next_with_the_same_responses(model, planned):
    expected = responses(memory_store("examples", DiesAtWrite("examples", planned)))
    counting = memory_store("examples", DiesAtWrite("examples", {}))
    plan_iteration(pairs(model))
    [first] = [each for each, key in enumerate(counting.written) if key == layout.plan(0)]
    for writes in range(first, len(counting.written)):
        store = memory_store("examples", DiesAtWrite("examples", {}, writes))
        with pytest.raises(Killed):
            plan_iteration(pairs(model))
        store.left = 1 << 30
        plan_iteration(pairs(model))
        assert responses(store) == expected, writes


@pytest.mark.slow
def test_training_killed_at_any_write_ends_with_the_same_bits(planned):
    undisturbed = memory_store("examples", DiesAtWrite("examples", planned))
    train_small(URL, 0)
    assert not same(weights(undisturbed, 0), weights(undisturbed, 1))
    for writes in range(len(undisturbed.written)):
        store = memory_store("examples", DiesAtWrite("examples", planned, writes))
        with pytest.raises(Killed):
            train_small(URL, 0)
        store.left = 1 << 30
        train_small(URL, 0)
        assert same(weights(store, 1), weights(undisturbed, 1)), writes


def run_of(model, iterations, **sections):
    """The metrics of some iterations, each of which restores its state from the store, and the last weights."""
    store, settings = memory_store("examples"), pairs(model, **sections)
    metrics = []
    for iteration in range(iterations):
        plan_iteration(settings)
        train_small(URL, iteration)
        metrics.append(commit_iteration(URL, iteration).metrics)
    return metrics, weights(store, iterations)


def test_a_replay_of_recorded_pairs_gives_the_bits_of_checkpoints(model):
    every, rare = (
        run_of(model, 3, trainer={"micro_batch_tokens_max": 320, "checkpoint_interval": each})[1] for each in (1, 4)
    )
    assert same(every, rare)


def test_the_margin_rises_from_that_of_the_reference(model):
    metrics, _ = run_of(model, 6, trainer={"micro_batch_tokens_max": 4096}, optimizer={"learning_rate": 3e-3})
    assert metrics[0]["loss"] == pytest.approx(torch.tensor(2.0).log().item())
    assert metrics[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert metrics[-1]["rewards/margins"] > 0.2
    assert metrics[-1]["loss"] < 0.9 * metrics[0]["loss"]
    assert not [name for name in metrics[0] if name.startswith(("importance", "mismatch", "kl", "actor/ppo", "turns"))]
    assert "reward" not in metrics[0]


def test_no_division_into_passes_changes_a_loss(model):
    algorithm = DPO | {"label_smoothing": 0.1, "rpo_alpha": 0.5}
    (small, few), (whole, many) = (
        run_of(model, 2, algorithm=algorithm, trainer={"micro_batch_tokens_max": most}) for most in (64, 4096)
    )
    assert [each["loss"] for each in small] == pytest.approx([each["loss"] for each in whole], abs=1e-5)
    for name, tensor in few.items():
        torch.testing.assert_close(tensor, many[name], rtol=0, atol=1e-4)


def test_epochs_and_mini_batches_learn_with_one_reference(model):
    metrics, _ = run_of(model, 1, algorithm=DPO | {"num_epochs": 3, "num_mini_batches": 2})
    assert metrics[0]["rewards/margins"] > 0
    assert metrics[0]["loss"] < torch.tensor(2.0).log().item()


def test_a_collector_without_the_model_records_pairs_as_the_trainer_does(model):
    _, expected = run_of(model, 1)
    store = memory_store("examples")
    plan_iteration(pairs(model, trainer={"micro_batch_tokens_max": 320, "placement": "pod"}))
    collect(URL, 0, EXECUTION, ManualClock())
    train_small(URL, 0)
    assert same(weights(store, 1), expected)


OPTIMIZER = {"learning_rate": 1e-3, "eps": 1e-4}
RANKED = {
    "sft": {"data": {"limit": 12, "completion_column": "worked"}, "algorithm": {"kind": "sft"}},
    "dpo": {"algorithm": DPO | {"rpo_alpha": 0.5}},
    "dpo with adapters": {"lora": {"rank": 4, "alpha": 8.0}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKED)
def test_two_ranks_learn_what_one_learns(model, tmp_path, ranks_server, name):
    one, two = tmp_path / "one", tmp_path / "two"
    run = {"url": str(one), "seed": 3, "num_prompts_per_step": 5, "num_generations": 8}
    plan_iteration(pairs(model, run=run, optimizer=OPTIMIZER, **RANKED[name]))
    shutil.copytree(one, two)
    alone = train_small(str(one), 0)
    ranks_server.launch("train_iteration 0", two, 2)
    together = records.read(connect(str(two)), TrainingRecord, layout.training(0))
    assert learned(together.metrics) == pytest.approx(learned(alone.metrics), rel=1e-4, abs=1e-5)
    theirs, mine = (weights(connect(str(place)), 1) for place in (one, two))
    before = weights(connect(str(one)), 0)
    assert any(not torch.equal(before[each], theirs[each]) for each in before)
    for each, tensor in theirs.items():
        torch.testing.assert_close(mine[each], tensor, rtol=1e-5, atol=1e-5)


def asked(*said):
    return [{"role": role, "content": text} for role, text in said]


def test_of_messages_the_assistants_tokens_alone_are_compared(tmp_path):
    model = chatting_model(tmp_path / "model")
    rows = [
        {
            "prompt": asked(("user", "1+1?")),
            "chosen": asked(("assistant", "2"), ("user", "so?"), ("assistant", "2")),
            "rejected": asked(("assistant", "it=3")),
        }
    ]
    store = memory_store("examples")
    run = {"url": URL, "seed": 3, "num_prompts_per_step": 1, "num_generations": 8}
    plan_iteration(pairs(model, run=run, data={"source": rows_file(tmp_path / "pairs.jsonl", rows)}))
    record = train_small(URL, 0)
    assert record.metrics["num_tokens"] == len("2;2;it=3;")
    batch = records.read(store, BatchRecord, layout.batch(0, 0))
    assert [each.policy_length for each in batch.responses] == [len("2;2;"), len("it=3;")]
    assert "turns/mean" not in commit_iteration(URL, 0).metrics


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "1+1=", "chosen": "2"}, r"^data\.rejected_column: value 'rejected'; allowed: a column of every"),
        (
            {"prompt": "1+1=", "chosen": "2", "rejected": "2"},
            r"line 1: the chosen completion is the rejected one; allowed: two that differ",
        ),
        (
            {"prompt": "1+1=", "chosen": "2", "rejected": "2<eos>"},
            r"prompt '0': the chosen completion has the tokens of the rejected one; allowed: two that differ",
        ),
        (
            {"prompt": "1+1=", "chosen": "2", "rejected": [{"role": "assistant", "content": "3"}]},
            r"line 1: the prompt is text, the rejected completion messages; allowed: both of one kind",
        ),
        (
            {"prompt": "1+1=", "chosen": "2", "rejected": "1+" * 60},
            r"prompt '0' has a rejected completion of 121 tokens; allowed: 90",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_refused_in_one_line(model, tmp_path, row, problem):
    memory_store("examples")
    settings = pairs(model, data={"source": rows_file(tmp_path / "pairs.jsonl", [row])})
    for look in (plan_iteration, check_files):
        with pytest.raises(PromptError, match=problem) as caught:
            look(settings)
        assert "\n" not in str(caught.value)


def test_check_and_the_first_plan_doubt_what_the_tokenizer_loses_of_a_completion(model, tmp_path, caplog):
    memory_store("examples")
    rows = [{"prompt": f"{number}+1=", "chosen": "2", "rejected": "3漢"} for number in range(4)]
    settings = pairs(model, data={"source": rows_file(tmp_path / "pairs.jsonl", rows), "shuffle": False})
    [line] = [line for line in check_files(settings) if line.startswith("not sure: data.source")]
    assert "data.source: 4 of 4 rows, the first is " in line
    assert "pairs.jsonl: line 1: the tokens of the rejected completion stand for another text" in line
    plan_iteration(settings)
    assert line in caplog.messages


def test_check_looks_at_both_completions_of_each_pair(model):
    memory_store("examples")
    seen = check_files(pairs(model))
    assert [line for line in seen if line.startswith("completions: all 24, tokenised, with up to ")]
    assert "policy loss: preference" in seen
