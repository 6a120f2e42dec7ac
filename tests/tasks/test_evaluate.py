"""Evaluations in this process: planned, sampled by the ordinary crew, measured, told; and what is refused before."""

import json
import shutil
from dataclasses import replace

import pytest
from click.testing import CliRunner
from flytekit.exceptions.user import FlyteRecoverableException

from gleaner import main
from resources import user_process
from storage.clock import ManualClock, SystemClock
from storage.journal.compaction import read_responses
from storage.records import layout, records
from storage.records.evaluation_records import EvaluationRecord
from storage.records.evaluations import evaluations
from storage.records.failures import last_failures
from storage.records.records import PlanRecord
from storage.records.run import read_plan
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from storage.stores.store import ConflictingRecord, StoreUnavailable
from tasks.conclude import conclude
from tasks.configuration.references import TrainOutcome
from tasks.configuration.run_config import dump
from tasks.evaluate import EvaluationNotPlanned, evaluate, plan_evaluation
from tasks.evaluation.measure import measure
from tasks.preparing.evaluation import prepare_beside
from tasks.preparing.iteration import prepare as plan_training
from tasks.reporting.watch import Watcher
from tasks.sampling.engines.engine import EngineError
from tasks.sampling.session.crew_watch import CrewLost
from tasks.sampling.session.join import JoinLimits, join_run
from tasks.sampling.session.member import generate_slot
from tests.evaluated_run import EVALUATION, URL, planned, sampled
from tests.forked import ForkedWorker
from tests.small_run import (
    OWN_REWARD,
    Unreachable,
    config,
    everything,
    memory_store,
    plan_iteration,
    roll_out,
    train_small,
)
from tests.tasks.grading.tiny_reward_model import save_reward_model
from workflows.evaluation import evaluation_rewards, grading_pool

MATH = [{"function": "math"}]
# Of as many other prompts.
OTHER = EVALUATION | {"data": {"source": "arithmetic", "limit": 5, "seed": 12}}


def test_a_plan_is_an_iteration_without_training_below_the_run(store, settings):
    reference, slots = planned(settings)
    run_url, name = layout.evaluated(reference.run_url)
    assert (run_url, name[:9], reference.iteration, reference.weight_version) == (URL, "00000001-", 0, 1)
    assert slots == [0, 1]
    plan = read_plan(connect(reference.run_url), 0)
    assert (plan.weights_url, plan.weight_version, plan.run_seed, plan.num_generations) == ("../..", 1, 0, 3)
    assert (plan.sampling.temperature, plan.sampling.max_completion_length) == (0.7, 20)
    assert plan.num_groups == 5
    new = {key for key in store.list("") if key.startswith(layout.EVALUATIONS)}
    assert all(key.startswith(f"{layout.EVALUATIONS}{name}/") for key in new)
    of_its_own = {key.removeprefix(f"{layout.EVALUATIONS}{name}/").split("-")[0] for key in new}
    assert of_its_own == {layout.RUN, layout.plan(0), "iterations/000000/prompts", layout.settings(0)}
    assert planned(settings) == (reference, slots)
    assert planned(settings, version=-1) == (reference, slots)


@pytest.mark.slow
def test_where_training_takes_no_slot_of_the_pool_an_evaluation_takes_one(store, settings):
    pools = replace(settings.pools, rollout=replace(settings.pools.rollout, count=0, count_min=0))
    run_tasks(replace(settings, pools=pools, planning=replace(settings.planning, seeding="auto")))
    assert len(evaluations(store)) == 1


def test_an_evaluation_from_plan_to_record(store, settings):
    url = sampled(settings)
    before = {key: body for key, body in everything(store).items() if not key.startswith(layout.EVALUATIONS)}
    record, is_new = measure(url, SystemClock())
    assert is_new
    assert (record.weight_version, len(record.prompts)) == (1, 5)
    rows = list(read_responses(connect(url), 0))
    assert len(rows) == 15
    for index, prompt in enumerate(record.prompts):
        group = rows[3 * index : 3 * index + 3]
        assert {row.prompt_id for row in group} == {prompt.prompt_id}
        assert prompt.correct == sum(row.reward >= 1 for row in group)
        assert prompt.length == pytest.approx(sum(len(row.token_ids) for row in group) / 3)
    assert record.metrics["val/pass@3"] == sum(prompt.correct > 0 for prompt in record.prompts) / 5
    assert record.metrics["val/num_tokens"] == sum(len(row.token_ids) for row in rows)
    assert record.settings["rewards"][0]["function"] == "tests.reward_functions:even_length"
    assert {key: body for key, body in everything(store).items() if not key.startswith(layout.EVALUATIONS)} == before


def test_its_journal_becomes_one_object(store, settings):
    url = sampled(settings)
    nested = connect(url)
    live = list(read_responses(nested, 0))
    measure(url, SystemClock())
    assert not any(nested.list(folder(0)) for folder in (layout.journal, layout.claims, layout.alive_all))
    for before, after in zip(live, list(read_responses(nested, 0)), strict=True):
        assert (before.token_ids.tolist(), before.logprobs.tolist()) == (
            after.token_ids.tolist(),
            after.logprobs.tolist(),
        )


def test_evaluating_again_changes_nothing(store, settings):
    url = sampled(settings)
    record, _ = measure(url, SystemClock())
    before = everything(store)
    reference, slots = planned(settings)
    assert (reference.run_url, slots) == (url, [])
    assert measure(url, SystemClock()) == (record, False)
    assert everything(store) == before


def test_whoever_dies_between_record_and_compaction_leaves_that_to_the_next(store, settings, caplog):
    class Keeps(MemoryStore):
        def delete(self, key):
            raise PermissionError(key)

    url = sampled(settings)
    keeps = memory_store("evaluate", Keeps("evaluate"))
    for key, body in everything(store).items():
        keeps.put(key, body)
    record, _ = measure(url, SystemClock())
    assert "not everything that is no longer needed was deleted" in caplog.text
    whole = memory_store("evaluate")
    for key, body in everything(keeps).items():
        whole.put(key, body)
    assert measure(url, SystemClock()) == (record, False)
    assert connect(url).list(layout.journal(0)) == []


@pytest.mark.slow
def test_graded_but_not_recorded_it_needs_no_crew(store, model):
    """Whoever measures died before the record: the batches stand."""
    settings = config(URL, model, rewards=OWN_REWARD, evaluation=EVALUATION, retention={"compact": False})
    url = sampled(settings)
    first, _ = measure(url, SystemClock())
    assert connect(url).list(layout.journal(0)) != []
    store.delete(layout.evaluation(layout.evaluated(url)[1]))
    assert planned(settings)[1] == []
    again, is_new = measure(url, SystemClock())
    assert is_new
    assert (again.prompts, again.settings) == (first.prompts, first.settings)


def test_weight_versions_are_compared_on_the_same_prompts_and_noise(store, settings):
    plans = [read_plan(connect(planned(settings, version)[0].run_url), 0) for version in (1, 0)]
    of_both = [replace(plan, weight_version=0, created_at_s=0, nonce="") for plan in plans]
    assert of_both[0] == of_both[1]


@pytest.mark.slow
def test_the_same_evaluation_elsewhere_comes_to_the_same(store, trained, settings):
    first, _ = measure(sampled(settings), SystemClock())
    again = memory_store("evaluate")
    for key, body in trained.items():
        again.put(key, body)
    assert measure(sampled(settings), SystemClock())[0].prompts == first.prompts
    other = config(URL, settings.policy.path, rewards=OWN_REWARD, evaluation=OTHER)
    assert measure(sampled(other), SystemClock())[0].prompts != first.prompts


def test_a_member_may_join_an_evaluation_and_leaves_with_it(store, settings):
    reference, _ = planned(settings)
    assert join_run(reference.run_url, JoinLimits(patience_s=0), lambda: False, SystemClock()) == 1
    record, _ = measure(reference.run_url, SystemClock())
    assert record.metrics["val/cost/usd_rollout"] == 0.0  # its machine is nobody's here


def test_an_evaluation_can_be_watched(store, settings):
    reference, slots = planned(settings)
    view = Watcher(connect(reference.run_url), SystemClock()).look()
    assert (view.iteration, view.phase, view.totals.responses_planned) == (0, "rollout", 15)
    for slot in slots:
        generate_slot(reference.run_url, 0, slot, lambda: False, SystemClock())
    assert Watcher(connect(reference.run_url), SystemClock()).look().totals.responses_done == 15


@pytest.mark.slow
def test_reward_models_are_those_of_the_run_or_the_evaluations_own_in_the_run(tmp_path, model, monkeypatch):
    """Whichever it is, the machine that grades need not have the folder that the configuration names."""
    monkeypatch.setattr(user_process, "start", ForkedWorker)  # a new worker imports torch and transformers
    folder = save_reward_model(tmp_path / "model")
    scored = [{"function": "reward_model", "model": str(folder)}]
    whole = memory_store("evaluate")
    plain = config(URL, model, rewards=OWN_REWARD, evaluation=EVALUATION | {"rewards": scored})
    plan_training(plain, "e1", ManualClock())
    own = sampled(plain, 0)
    held = [key for key in whole.list("") if "reward_models" in key]
    assert [key for key in held if key.endswith(".json")] == [layout.reward_model("evaluation-reward_model")]
    assert not [key for key in held if key.startswith(layout.EVALUATIONS)]
    before = set(whole.list(layout.REWARD_MODELS))
    planned(config(URL, model, rewards=OWN_REWARD, evaluation=EVALUATION | {"rewards": scored}), 0)
    assert set(whole.list(layout.REWARD_MODELS)) == before  # the next one finds it there
    moved = shutil.move(folder, tmp_path / "elsewhere")
    of_own, _ = measure(own, SystemClock())
    shutil.move(moved, folder)
    memory_store("evaluate")
    of_run = config(URL, model, rewards=scored, evaluation=EVALUATION)
    plan_training(of_run, "e1", ManualClock())
    shutil.move(folder, moved)
    record, _ = measure(sampled(of_run, 0), SystemClock())
    assert [prompt.reward for prompt in record.prompts] == [prompt.reward for prompt in of_own.prompts]
    assert len({prompt.reward for prompt in record.prompts}) > 1
    counting = config(URL, model, rewards=scored, evaluation=EVALUATION | {"rewards": MATH})
    pools = [grading_pool(evaluation_rewards(each)) for each in (of_run, plain, counting)]
    assert pools == ["train", "train", "control"]


@pytest.mark.slow
def test_another_model_under_the_name_of_an_evaluations_own_is_refused(tmp_path, model, store, monkeypatch):
    monkeypatch.setattr(user_process, "start", ForkedWorker)

    def judged(folder):
        scored = [{"function": "reward_model", "name": "judge", "model": str(folder)}]
        return config(URL, model, rewards=OWN_REWARD, evaluation=EVALUATION | {"rewards": scored})

    first, other = (save_reward_model(tmp_path / name, template=name) for name in ("first", "other"))
    reference, _ = planned(judged(first))
    before = everything(store)
    with pytest.raises(ConflictingRecord, match=r"holds another reward model as 'evaluation-judge' than '.*other'"):
        planned(judged(other))
    assert everything(store) == before
    assert planned(judged(first.rename(tmp_path / "moved")))[0] == reference


# What is told.


def run_tasks(settings, version=-1):
    """Both tasks as Flyte calls them, and the crew between them."""
    reference, slots = plan_evaluation(config=dump(settings), version=version)
    for slot in slots:
        generate_slot(reference.run_url, 0, slot, lambda: False, SystemClock())
    return evaluate(plan=reference)


def beside(settings, version):
    """The same as training does it; the outcomes: one, or none."""
    reference, slots, due = prepare_beside(settings, version, "e", SystemClock(), resume=False)
    for slot in slots:
        generate_slot(reference.run_url, 0, slot, lambda: False, SystemClock())
    return [evaluate(plan=each) for each in due]


def lines(store):
    return [json.loads(line) for line in store.get(layout.METRICS).splitlines()]


def test_it_is_shown_and_told(store, settings):
    outcome = run_tasks(settings)
    [record] = evaluations(store)
    assert (outcome.run_url, outcome.weight_version, outcome.metrics) == (URL, 1, record.metrics)
    assert outcome.evaluation == layout.evaluation_name(1, record.digest)
    iteration, told = lines(store)
    assert (iteration["iteration"], iteration["weight_version"]) == (0, 1)
    assert told == record.metrics | {"evaluation": record.digest, "weight_version": 1, "time_s": record.created_at_s}
    page = store.get(layout.evaluation_deck(outcome.evaluation)).decode()
    assert "pass@3" in page
    assert "<svg" in page


def test_trackers_get_it_as_a_run_of_its_own(store, settings, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    monkeypatch.setattr("tasks.reporting.tracking.DIRECTORY", str(tmp_path))
    tracking = {"backends": ["tensorboard"], "name": "mine"}
    run_tasks(config(URL, settings.policy.path, rewards=OWN_REWARD, evaluation=EVALUATION, tracking=tracking))
    [record] = evaluations(store)
    [folder] = (tmp_path / "tensorboard").iterdir()
    assert folder.name.startswith(f"mine-val-{record.digest}-")
    shown = EventAccumulator(str(folder))
    shown.Reload()
    assert sorted(shown.Tags()["scalars"]) == sorted(record.metrics)
    assert shown.Scalars("val/pass@1")[0].step == 1


@pytest.mark.slow
def test_status_shows_it_on_a_line(store, settings):
    run_tasks(settings)
    [record] = evaluations(store)
    result = CliRunner().invoke(main, ["status", URL], catch_exceptions=False)
    shown = ("pass@1", "pass@2", "pass@3", "reward/mean@3")
    scores = ", ".join(f"{name} {record.metrics[f'val/{name}']:.3f}" for name in shown)
    [line] = [line for line in result.stdout.splitlines() if "evaluation" in line]
    assert line.startswith(f"weight version 1, evaluation {record.digest} of 5 prompts: {scores}, mean length ")


@pytest.mark.slow
def test_the_next_iteration_keeps_the_line(store, settings):
    run_tasks(settings)
    reference = plan_iteration(settings)
    roll_out(URL, 1)
    train_small(URL, 1)
    conclude(trained=TrainOutcome(plan=reference, weight_version=2, reward=0), last=True)
    assert [(line.get("iteration"), line["weight_version"]) for line in lines(store)] == [(0, 1), (None, 1), (1, 2)]


@pytest.mark.slow
def test_training_evaluates_what_is_due_and_never_waits_for_what_is_gone(store, settings, caplog):
    before = everything(store)
    assert beside(settings, 1) == beside(settings, 4) == []
    assert "left out: version: value 4; memory://evaluate holds the weight versions 0, 1" in caplog.text
    assert everything(store) == before
    assert [outcome.weight_version for outcome in beside(settings, 0)] == [0]
    assert [record.weight_version for record in evaluations(store)] == [0]


def test_a_store_that_does_not_answer_is_tried_again(settings):
    memory_store("evaluate", Unreachable("evaluate"))
    with pytest.raises(FlyteRecoverableException, match="no answer"):
        run_tasks(settings)


def test_a_version_that_goes_while_it_is_evaluated_is_told_clearly(store, settings):
    reference, _ = planned(settings)
    store.delete(layout.manifest(layout.weights(1)))
    with pytest.raises(EngineError, match=r"^weight version 1 is not in memory://evaluate any more; allowed: to eval"):
        generate_slot(reference.run_url, 0, 0, lambda: False, SystemClock())


def test_an_evaluations_plan_is_no_plan_elsewhere(store, settings):
    reference, _ = planned(settings)
    plan = read_plan(connect(reference.run_url), 0)
    records.put(store, layout.plan(1), replace(plan, iteration=1))
    with pytest.raises(ValueError, match=r"^evaluation: url 'memory://evaluate'; allowed: <run>/evaluations/"):
        generate_slot(URL, 1, 0, lambda: False, SystemClock())
    assert records.read(store, PlanRecord, layout.plan(1)).weights_url == "../.."


def test_the_record_of_an_evaluation_reads_back(store, settings):
    record, _ = measure(sampled(settings), SystemClock())
    assert records.decode(EvaluationRecord, "k", records.encode("k", record)) == record


@pytest.mark.slow
def test_one_that_nobody_can_finish_fails_and_is_told(store, settings):
    reference, slots = plan_evaluation(config=dump(settings), version=1)
    assert slots
    with pytest.raises(CrewLost, match="slot 0: wrote nothing"):
        evaluate(plan=reference)
    [failure] = last_failures(store, 1)
    assert (failure.task, failure.iteration) == ("evaluation", 1)
    assert failure.error.startswith("CrewLost: iteration 0: no process can generate the missing responses.")
    for slot in slots:
        generate_slot(reference.run_url, 0, slot, lambda: False, SystemClock())
    evaluate(plan=reference)
    assert last_failures(store, 1) == []


@pytest.mark.slow
def test_beside_training_an_evaluation_that_cannot_be_planned_fails_alone(store, settings):
    """What is wrong with held-out prompts is the evaluation's matter; the store's silence is worth another attempt."""
    absent = replace(settings.evaluation, data=replace(settings.evaluation.data, source="/absent.jsonl"))
    with pytest.raises(EvaluationNotPlanned, match="the evaluation of version 0 of memory://evaluate could not be pl"):
        beside(replace(settings, evaluation=absent), 0)
    [failure] = last_failures(store, 1)
    assert (failure.task, failure.iteration) == ("evaluation", 0)
    assert "/absent.jsonl" in failure.error
    memory_store("evaluate", Unreachable("evaluate"))
    with pytest.raises(StoreUnavailable):
        beside(settings, 0)
