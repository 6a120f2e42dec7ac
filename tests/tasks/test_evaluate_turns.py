"""An evaluation with an environment, from plan to record, of policies that know one conversation by heart."""

import json

import pytest

from examples.tools_warm_start import chat_tokenizer
from storage.clock import ManualClock, SystemClock
from storage.journal.compaction import read_responses
from storage.records.prompt_table import read_prompts
from storage.records.run import read_plan
from storage.stores.connect import connect
from tasks.evaluation.measure import measure
from tasks.preparing.evaluation import prepare
from tasks.sampling.session.member import generate_slot
from tests.chat_tokenizers import written
from tests.memorised_policy import memorised
from tests.small_run import config, memory_store, plan_iteration

URL = "memory://evaluated-turns"
ENVIRONMENT = "tests.tasks.turns.environments_for_evaluation:Drawer"
LOOKS = "?f!<eos>3=#3<eos>"
GUESSES = "#3<eos>"


@pytest.mark.slow
@pytest.mark.parametrize(("text", "calls", "reward"), [(LOOKS, 1, 1.0), (GUESSES, 0, 0.0)])
def test_held_out_prompts_meet_the_environment_of_training(tmp_path, text, calls, reward):
    rows = tmp_path / "drawers.jsonl"
    row = {"prompt": [{"role": "user", "content": "f"}], "digit": 3}
    rows.write_text("".join(json.dumps(row | {"id": str(k)}) + "\n" for k in range(4)))
    memory_store("evaluated-turns")
    settings = config(
        URL,
        memorised(tmp_path / "model", text),
        data={"source": str(rows)},
        turns={"environment": ENVIRONMENT},
        rewards=[{"function": "environment"}],
        sampling={"max_completion_length": 24},
        rollout={"engine": "torch", "dtype": "float32", "context_length": 64},
        evaluation={
            "data": {"source": str(rows), "limit": 3},
            "num_generations": 2,
            "sampling": {"max_completion_length": 24, "temperature": 0.1},
        },
    )
    plan_iteration(settings)
    reference, slots = prepare(settings, 0, "e1", ManualClock())
    store = connect(reference.run_url)
    assert [row.opening for row in read_prompts(store, read_plan(store, 0))] == ["h"] * 3
    for slot in slots:
        generate_slot(reference.run_url, 0, slot, lambda: False, SystemClock())
    record, _ = measure(reference.run_url, SystemClock())
    said = [written(chat_tokenizer(), text)] * 6
    assert [list(row.token_ids) for row in read_responses(store, 0)] == said
    found = {name: record.metrics[f"val/{name}"] for name in ("turns/mean", "turns/calls", "turns/calls_raised")}
    assert found == {"turns/mean": calls + 1, "turns/calls": calls * 6, "turns/calls_raised": 0}
    assert (record.metrics["val/pass@1"], record.metrics["val/turns/failed_share"]) == (reward, 0)
