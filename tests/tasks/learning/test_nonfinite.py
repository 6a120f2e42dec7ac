"""A step that is not finite: what stays in the run, what the error says, and how the responses are looked at."""

import re

import numpy as np
import pytest
from click.testing import CliRunner

from gleaner import main
from storage.fleet.phase_failure import NonFiniteRecord
from storage.journal.retention import sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout, records
from storage.records.run import read_plan, read_run
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from storage.stores.store import StoreUnavailable
from tasks.learning.nonfinite import keep_nonfinite
from tasks.learning.optimizer import NonFiniteGradient
from tasks.reporting.export import export_rollouts
from tasks.reporting.nonfinite import nonfinite_line, nonfinite_responses, read_nonfinite
from tests.journals import Incarnation, a_plan
from tests.small_run import commit_iteration, config, everything, model_directory, plan_iteration, train_small

BROKEN = 4


def gleaner(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The url of a run of 4 groups of 3 in whose journal response 4 has log-probs that are no numbers."""
    settings = config(
        str(tmp_path / "run"),
        model_directory(tmp_path / "model"),
        algorithm={"old_logprobs": "sampler"},
        trainer={"micro_batch_tokens_max": 1},
    )
    plan_iteration(settings)
    store = connect(settings.run.url)
    plan = read_plan(store, 0)
    crew = [Incarnation(store, plan, slot, f"0000{slot}-{'a' * 16}") for slot in range(2)]
    for response in range(plan.num_responses):
        with monkeypatch.context() as patch:
            patch.setattr("tests.journals.LOGPROB", float("nan") if response == BROKEN else -1.5)
            crew[response // 3 % 2].write(response, [7] * (1 + response % 3) + [2])
    for member in crew:
        member.announce(started_at_s=1.0, updated_at_s=2.0, tokens_generated=1, gone=True)
    return settings.run.url


def test_what_stopped_a_step_is_kept_and_its_responses_can_be_had(run, tmp_path):
    store = connect(run)
    assert nonfinite_line(store) is None
    with pytest.raises(LookupError, match=r"holds no iterations/000000/nonfinite\.json"):
        nonfinite_responses(store, 0)
    command = f"gleaner export {store.url} --rollouts --iterations 0 --to FOLDER"
    message = f"non-finite loss; responses {BROKEN}; it is recorded in {layout.nonfinite(0)}; "
    message += "get its tokens and log-probs by: "
    with pytest.raises(NonFiniteGradient, match=re.escape(message + command) + "$") as raised:
        train_small(run, 0)
    assert (raised.value.quantity, raised.value.responses) == ("loss", (BROKEN,))
    assert read_nonfinite(store, 0) == NonFiniteRecord(
        iteration=0,
        quantity="loss",
        responses=(BROKEN,),
        batches=(1,),
        weight_version=0,
        message=f"non-finite loss; responses {BROKEN}",
    )
    [response] = nonfinite_responses(store, 0)
    assert (response.response, response.token_ids.tolist()) == (BROKEN, [7, 7, 2])
    assert np.isnan(response.logprobs).all()
    [file] = export_rollouts(store, "0", tmp_path / "out")
    assert (file.responses, file.planned) == (12, 12)
    line = nonfinite_line(store)
    assert line == (
        "iteration 0: training stopped: non-finite loss, 1 responses of micro-batches 1, weight version 0; " + command
    )
    assert gleaner("status", run).stdout.splitlines() == [
        f"{run} holds no committed iteration yet",
        line,
    ]


@pytest.mark.slow
def test_nothing_of_it_is_deleted_and_the_next_attempt_finds_the_same(run):
    store = connect(run)
    for _ in range(2):
        with pytest.raises(NonFiniteGradient):
            train_small(run, 0)
        before = everything(store)
        assert layout.nonfinite(0) in before
        assert sweep(store, RetentionConfig()).problems == ()
        assert everything(store) == before
    assert layout.manifest(layout.weights(1)) not in before
    assert layout.training(0) not in before


@pytest.mark.slow
def test_once_the_iteration_is_committed_the_record_stays_and_status_is_silent(run):
    store = connect(run)
    with pytest.raises(NonFiniteGradient):
        train_small(run, 0)
    # What decides what is learned may not change in a real run; here it mends the loss.
    for key, record in ((layout.RUN, read_run(store)), (layout.plan(0), read_plan(store, 0))):
        record.config["algorithm"]["old_logprobs"] = "trainer"
        records.put(store, key, record)
    train_small(run, 0)
    commit_iteration(run, 0)
    assert sweep(store, RetentionConfig()).compacted == (0,)
    assert read_nonfinite(store, 0) is not None
    assert [row.response for row in nonfinite_responses(store, 0)] == [BROKEN]
    assert nonfinite_line(store) is None


def test_a_store_that_does_not_take_the_record_does_not_hide_the_error():
    class Full(MemoryStore):
        def put(self, key, body):
            raise StoreUnavailable("disk full")

    told = pytest.raises(NonFiniteGradient, match="non-finite gradient; responses 1, 2; it is recorded in")
    with told, keep_nonfinite(Full("run"), a_plan(2, 2)):
        raise NonFiniteGradient("gradient", (1, 2))


def test_other_errors_and_none_leave_nothing():
    store = MemoryStore("run")
    with keep_nonfinite(store, a_plan(2, 2)):
        pass
    with pytest.raises(ZeroDivisionError), keep_nonfinite(store, a_plan(2, 2)):
        raise ZeroDivisionError
    assert store.list("") == []


def test_a_later_attempt_overwrites_the_record_of_an_earlier_one():
    store = MemoryStore("run")
    for quantity in ("loss", "gradient"):
        with pytest.raises(NonFiniteGradient), keep_nonfinite(store, a_plan(2, 2)):
            raise NonFiniteGradient(quantity, (0,))
    assert records.read(store, NonFiniteRecord, layout.nonfinite(0)).quantity == "gradient"
