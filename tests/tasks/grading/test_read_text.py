"""The text that rewards read, from the configuration over the plan to the batch, in a run and in its evaluation."""

import dataclasses
import json

import pytest

from storage.clock import SystemClock
from storage.journal.assembly import JournalReader
from storage.journal.compaction import read_batches
from storage.records import layout
from storage.records.run import read_plan
from storage.stores.connect import connect
from tasks.configuration.run_config import RunConfig
from tasks.evaluation.measure import measure
from tasks.preparing.evaluation import prepare as prepare_evaluation
from tasks.reporting.export import load_completion_decoder
from tests.small_run import EXECUTION, config, memory_store, plan_iteration, roll_out, train_small
from tests.tiny_model import tiny_tokenizer

pytestmark = pytest.mark.slow

URL = "memory://read-text"
# Some response has one of these, and the stop token <eos> at its end is no part of any text.
NAMES_SPECIAL = {"function": "format", "arguments": {"pattern": r"(?!.*<eos>).*<(pad|bos|unk)>.*"}}


def settings(model, *, skips: bool) -> RunConfig:
    sampling = {"max_completion_length": 40, "skip_special_tokens": skips}
    evaluation = {"data": {"source": "arithmetic", "limit": 12, "seed": 5}, "sampling": sampling}
    return config(URL, model, rewards=[NAMES_SPECIAL], sampling=sampling, evaluation=evaluation)


def texts(store) -> dict[int, str]:
    """Each response of iteration 0 with all tokens but a stop token at its end."""
    plan, reader = read_plan(store, 0), JournalReader(store, read_plan(store, 0))
    found = {}
    for batch in read_batches(store, 0):
        for graded in batch.graded:
            ids = reader.follow(graded.response, graded.lineage).token_ids.tolist()
            whole = ids[:-1] if ids[-1] in plan.sampling.stop_token_ids else ids
            found[graded.response] = tiny_tokenizer().decode(whole, skip_special_tokens=False)
    return found


@pytest.mark.parametrize("skips", [True, False])
def test_rewards_read_special_tokens_if_they_are_kept(model, skips):
    store = memory_store("read-text")
    plan_iteration(settings(model, skips=skips))
    assert read_plan(store, 0).sampling.skip_special_tokens == skips
    # An older version knows every field of a plan that keeps nothing.
    assert (b"skip_special_tokens" in json.dumps(_sampling(store)).encode()) != skips
    roll_out(URL, 0)
    train_small(URL, 0)
    (rewards,) = [{each.response: each.reward for batch in read_batches(store, 0) for each in batch.graded}]
    has_special = {r: any(tag in text for tag in ("<pad>", "<bos>", "<unk>")) for r, text in texts(store).items()}
    assert sum(has_special.values()) > 0
    assert rewards == {r: float(has and not skips) for r, has in has_special.items()}
    decode = load_completion_decoder(store)
    assert decode([1, 10, 2]) == ("6" if skips else "<bos>6")


def _sampling(store) -> dict[str, object]:
    body = store.get(layout.plan(0))
    return dict(json.loads(body)["body"]["sampling"])


@pytest.mark.parametrize("skips", [True, False])
def test_an_evaluation_is_read_by_its_own_sampling(model, skips):
    store = memory_store("read-text")
    chosen = settings(model, skips=not skips)
    sampling = dataclasses.replace(chosen.sampling, skip_special_tokens=skips)
    chosen = dataclasses.replace(chosen, evaluation=dataclasses.replace(chosen.evaluation, sampling=sampling))
    plan_iteration(chosen)
    reference, _ = prepare_evaluation(chosen, 0, EXECUTION, SystemClock())
    roll_out(reference.run_url, 0)
    record, _ = measure(reference.run_url, SystemClock())
    assert (record.metrics["val/reward/mean@1"] > 0) != skips
    assert connect(reference.run_url).url != store.url
