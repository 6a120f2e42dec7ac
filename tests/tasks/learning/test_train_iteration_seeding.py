"""Training that begins with generating: alone, beside a crew, again after a restart, and with an engine that dies."""

import threading
import time
from dataclasses import replace

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from storage.clock import SystemClock
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord, note_rollout_ended
from storage.records.planning_records import SeedingRecord
from storage.records.records import TRAIN_POOL, SlotPlan, TrainingRecord
from storage.records.run import exists, read_plan
from storage.stores.connect import connect
from storage.weights.tensor_sets import read_manifest
from tasks.configuration.references import PlanReference
from tasks.learning.journal_follower import GroupTimeout
from tasks.learning.recorded_batches import RecordedBatches
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.session import seeding_member
from tasks.sampling.session.crew_watch import CrewLost
from tasks.sampling.session.member import generate_slot
from tasks.sampling.session.seeding_member import Seeded, TrainersMachine, is_due, is_seeded, seed
from tasks.sampling.session.session_outcome import Preempted
from tasks.train import train
from tests.small_run import (
    EXECUTION,
    commit_iteration,
    config,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)

URL = "memory://seeding"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(model):
    return config(URL, model, trainer={"group_timeout_s": 1.0})


def seeded_plan(settings, pools, seeding_s):
    """A store with a planned iteration of 4 groups, dealt in turn to slots on `pools`, and its plan."""
    store = memory_store("seeding") if settings.run.url == URL else connect(settings.run.url)
    plan_iteration(settings)
    plan = read_plan(store, 0)
    slots = tuple(
        SlotPlan(slot=slot, pool=pool, groups=tuple(range(slot, 4, len(pools)))) for slot, pool in enumerate(pools)
    )
    seeding = SeedingRecord(seeding_s=seeding_s, members=pools.count("rollout"))
    records.put(store, layout.plan(0), replace(plan, slots=slots, seeding=seeding))
    return store, read_plan(store, 0)


def digests(store):
    return {name: entry.digest for name, entry in read_manifest(store, layout.weights(1)).tensors.items()}


def beats(store, pool):
    found = [records.read(store, HeartbeatRecord, key) for key in store.list(layout.alive_all(0))]
    return [beat for beat in found if beat.pool == pool]


@pytest.fixture(scope="module")
def trained_by_a_crew(model):
    """The weights that a step on the responses of a crew publishes."""
    store = memory_store("seeding")
    plan_iteration(config(URL, model))
    roll_out(URL, 0)
    assert not any(name.startswith("seeding/") for name in train_small(URL, 0).metrics)
    return digests(store)


@pytest.mark.slow
def test_alone_the_trainers_machine_generates_everything_and_learns_the_same(settings, trained_by_a_crew):
    store, _ = seeded_plan(settings, [TRAIN_POOL], None)
    record = train_small(URL, 0)
    assert digests(store) == trained_by_a_crew
    assert record.metrics["seeding/seconds"] > 0
    report = commit_iteration(URL, 0)
    assert record.metrics["seeding/tokens"] == report.metrics["num_tokens"] == sum(report.lengths)
    assert [beat.state for beat in beats(store, TRAIN_POOL)] == ["gone"]


@pytest.mark.slow
def test_alone_it_generates_what_is_missing_after_a_restart_though_batches_are_recorded(settings, trained_by_a_crew):
    store, plan = seeded_plan(settings, [TRAIN_POOL, TRAIN_POOL], None)
    assert is_due(store, plan)
    with pytest.raises(EngineDied):
        seed(store, plan, settings, machine(), SystemClock(), build=dying(30, settings))
    assert is_due(store, plan)
    store.create(layout.batch(0, 0), b"an attempt before began to train")
    assert is_due(store, plan)
    store.delete(layout.batch(0, 0))
    generated = train_small(URL, 0).metrics["seeding/tokens"]
    assert digests(store) == trained_by_a_crew
    assert 0 < generated < sum(commit_iteration(URL, 0).lengths)


@pytest.mark.slow
def test_beside_a_crew_that_has_finished_no_member_is_begun(settings, trained_by_a_crew):
    store, plan = seeded_plan(settings, ["rollout", TRAIN_POOL], 60.0)
    assert is_due(store, plan)
    generate_slot(URL, 0, 0, lambda: False, SystemClock())  # takes what nobody has come for, too
    assert not is_due(store, plan)
    record = train_small(URL, 0)
    assert (record.metrics["seeding/seconds"], record.metrics["seeding/tokens"]) == (0.0, 0.0)
    assert beats(store, TRAIN_POOL) == []
    assert digests(store) == trained_by_a_crew


@pytest.mark.slow
def test_every_rank_of_the_trainer_seeds_its_own_slot(tmp_path, ranks_server, model, trained_by_a_crew):
    often = {"flush_interval_s": 0.1}
    store, _ = seeded_plan(config(str(tmp_path / "run"), model, rollout=often), [TRAIN_POOL, TRAIN_POOL], None)
    ranks_server.launch("train_iteration 0", tmp_path / "run", 2)
    assert {beat.slot: beat.state for beat in beats(store, TRAIN_POOL)} == {0: "gone", 1: "gone"}
    metrics = records.read(store, TrainingRecord, layout.training(0)).metrics
    report = commit_iteration(str(tmp_path / "run"), 0)
    assert metrics["seeding/tokens"] == sum(report.lengths) + report.metrics["resume/tokens_regenerated"]
    assert digests(store).keys() == trained_by_a_crew.keys()


@pytest.mark.slow
def test_a_rank_without_a_slot_waits_longer_for_the_others_than_a_collective_may_take(tmp_path, ranks_server, model):
    seeded_plan(config(str(tmp_path), model), [TRAIN_POOL], None)
    found = ranks_server.launch("seed", tmp_path, 2)
    assert found[0] == found[1]
    assert min(found[0].values()) > 0


def slow(step_s):
    """Builds scripted engines that take so long for a token."""

    def build(rollout, _folder, vocab_size):
        return ScriptedEngine(
            vocab_size, rollout.max_responses_in_flight, clock=SystemClock(), step_time_s=lambda _: step_s
        )

    return build


def machine(rank=0, device=None):
    return TrainersMachine(rank=rank, ranks=1, device=device, execution="test")


def dying(steps, settings):
    """Builds scripted engines that die after so many steps, and at every start from then on."""

    class Dying(ScriptedEngine):
        left = steps

        def step(self):
            if self.left == 0:
                raise EngineDied("gone")
            self.left -= 1
            return super().step()

    return lambda rollout, _folder, vocab_size: Dying(vocab_size, rollout.max_responses_in_flight)


@pytest.mark.slow
def test_when_its_time_is_up_it_hands_over_and_the_crew_goes_on_at_the_token(settings, trained_by_a_crew):
    store, plan = seeded_plan(settings, ["rollout", TRAIN_POOL], 0.3)
    seeded = seed(store, plan, settings, machine(), SystemClock(), build=slow(0.02))
    assert 0.3 <= seeded.seconds < 5
    assert seeded.tokens > 0
    [left] = beats(store, TRAIN_POOL)
    assert (left.state, left.unfinished > 0) == ("gone", True)
    assert is_due(store, plan)
    outcome = generate_slot(URL, 0, 0, lambda: False, SystemClock())
    assert outcome.tokens_recovered > 0
    assert not is_due(store, plan)
    train_small(URL, 0)
    assert digests(store) == trained_by_a_crew
    assert sum(commit_iteration(URL, 0).lengths) == outcome.tokens_generated + seeded.tokens


def test_beside_a_crew_it_does_not_seed_again_once_a_batch_is_recorded(settings):
    store, plan = seeded_plan(settings, ["rollout", TRAIN_POOL], 60.0)
    assert is_due(store, plan)
    store.create(layout.batch(0, 0), b"an attempt before began to train")
    assert not is_due(store, plan)


def test_an_engine_that_dies_is_the_crews_business_where_there_is_one(settings, caplog):
    store, plan = seeded_plan(settings, ["rollout", TRAIN_POOL], 60.0)
    seeded = seed(store, plan, settings, machine(), SystemClock(), build=dying(0, settings))
    assert seeded.tokens == 0
    assert "the crew continues" in caplog.text
    assert [beat.state for beat in beats(store, TRAIN_POOL)] == ["gone"]


def test_alone_an_engine_that_dies_is_worth_another_attempt(settings, monkeypatch):
    seeded_plan(settings, [TRAIN_POOL], None)

    def dies(_engine):
        raise EngineDied("out of memory")

    monkeypatch.setattr(ScriptedEngine, "step", dies)
    with pytest.raises(FlyteRecoverableException, match="out of memory"):
        train(plan=PlanReference(run_url=URL, iteration=0, weight_version=0, execution="test"))


@pytest.mark.slow
def test_without_work_for_the_trainer_nothing_is_seeded(settings):
    store, plan = seeded_plan(settings, ["rollout", TRAIN_POOL], 0.0)
    assert not is_seeded(plan)
    assert not is_due(store, plan)
    with pytest.raises(GroupTimeout):
        train_small(URL, 0)
    assert beats(store, TRAIN_POOL) == []


def test_a_rank_without_a_slot_does_nothing(settings):
    store, plan = seeded_plan(settings, ["rollout", TRAIN_POOL], 60.0)
    assert seed(store, plan, settings, machine(1), SystemClock()) == Seeded()
    assert beats(store, TRAIN_POOL) == []


def test_a_rank_shows_its_engine_its_own_gpu_only(settings, monkeypatch):
    seen = []
    store, plan = seeded_plan(settings, [TRAIN_POOL, TRAIN_POOL], None)

    def build(rollout, folder, vocab_size):
        seen.append((seeding_member.os.environ["CUDA_VISIBLE_DEVICES"], rollout.vllm.process))
        return slow(0.0)(rollout, folder, vocab_size)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    seed(store, plan, settings, machine(1, 1), SystemClock(), build=build)
    assert seeding_member.os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    seed(store, plan, settings, machine(0, 3), SystemClock(), build=build)
    assert "CUDA_VISIBLE_DEVICES" not in seeding_member.os.environ
    assert seen == [("6", "own"), ("3", "own")]


@pytest.mark.slow
def test_the_training_record_is_read_by_a_second_attempt(settings):
    store, _ = seeded_plan(settings, [TRAIN_POOL], None)
    first = train_small(URL, 0)
    assert train_small(URL, 0) == first == records.read(store, TrainingRecord, layout.training(0))


# In the middle of an iteration, when no other member lives.

ALONE = {"seeding": "auto"}
# The trainer generates after 0.8 s.
OFTEN = {"claim_ttl_s": 0.2, "flush_interval_s": 0.05}


@pytest.fixture(scope="module")
def trained_group_by_group(model):
    """The same with micro-batches of one group: another division adds up in another order."""
    store = memory_store("seeding")
    plan_iteration(config(URL, model, trainer={"micro_batch_tokens_max": 1}))
    roll_out(URL, 0)
    train_small(URL, 0)
    return digests(store)


def half_done(model, url=URL, **sections):
    """A plan of four slots: two are done, one was given notice in the middle, one never came."""
    given = {"trainer": {"group_timeout_s": 600.0, "micro_batch_tokens_max": 1}, "planning": ALONE, "rollout": OFTEN}
    settings = config(url, model, **(given | sections))
    store, _ = seeded_plan(settings, ["rollout"] * 4, 0.0)
    for slot in (0, 1):
        generate_slot(url, 0, slot, lambda: False, SystemClock(), build=slow(0.0))
    noticed = iter([False] * 12 + [True] * 1000)
    with pytest.raises(Preempted):
        generate_slot(url, 0, 2, lambda: next(noticed), SystemClock(), build=slow(0.0))
    return store


@pytest.mark.slow
def test_left_alone_it_generates_the_rest_replays_what_was_recorded_and_learns_the_same(
    model, trained_group_by_group, caplog
):
    store = half_done(model)
    record = train_small(URL, 0)
    assert "no member has lived" in caplog.text
    assert digests(store) == trained_group_by_group
    report = commit_iteration(URL, 0)
    [alone] = beats(store, TRAIN_POOL)
    assert (alone.slot, alone.state) == (4, "gone")  # on no slot of the plan
    assert 0 < record.metrics["seeding/tokens"] < sum(report.lengths)
    assert sum(life.tokens_kept for life in report.lives) == sum(report.lengths)


@pytest.mark.slow
def test_with_a_batch_recorded_already_the_learner_is_dropped_and_the_batch_replayed(model, trained_group_by_group):
    store = half_done(model)
    seen = []
    record = RecordedBatches._batch

    def noted(self, number):
        seen.append((number, exists(store, layout.batch(0, number))))
        return record(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedBatches, "_batch", noted)
        train_small(URL, 0)
    # It is recorded before the trainer is left alone, and read when it trains again.
    assert (0, False) in seen
    assert (0, True) in seen
    assert digests(store) == trained_group_by_group


@pytest.mark.slow
def test_with_seeding_off_it_does_not(model):
    half_done(model, planning={}, trainer={"group_timeout_s": 0.3, "micro_batch_tokens_max": 1})
    with pytest.raises(GroupTimeout):
        train_small(URL, 0)


@pytest.mark.slow
def test_with_seeding_off_and_every_slot_ended_it_fails_at_once(model):
    store = half_done(model, planning={})
    note_rollout_ended(store, 0, EXECUTION, "rollout", range(4))
    with pytest.raises(CrewLost, match="slot 3: wrote nothing"):
        train_small(URL, 0)


@pytest.mark.slow
def test_when_members_return_it_hands_over_and_trains_on(model, trained_group_by_group):
    """The rest takes long, so that the member comes in the middle of it."""
    store = half_done(model)
    began, built = threading.Event(), seeding_member.equipped

    def told(planned, build, clock):
        began.set()
        return built(planned, slow(0.2), clock)

    def returns():
        began.wait(600)
        while not beats(store, TRAIN_POOL) or not beats(store, TRAIN_POOL)[0].tokens_generated:
            time.sleep(0.01)
        generate_slot(URL, 0, 3, lambda: False, SystemClock(), build=slow(0.02))

    member = threading.Thread(target=returns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seeding_member, "equipped", told)
        member.start()
        train_small(URL, 0)
    member.join()
    [alone] = beats(store, TRAIN_POOL)
    [back] = [beat for beat in beats(store, "rollout") if beat.slot == 3]
    assert alone.state == "gone"
    assert back.tokens_generated > 0
    assert digests(store) == trained_group_by_group


@pytest.mark.slow
def test_a_plan_that_seeds_goes_on_while_nobody_has_come(model, trained_by_a_crew):
    """Handing over to nobody would leave the work undone."""
    settings = config(URL, model, planning=ALONE, rollout=OFTEN | {"claim_ttl_s": 15.0, "idle_timeout_s": 5.0})
    store, plan = seeded_plan(settings, ["rollout", TRAIN_POOL], 0.05)
    seeded = seed(store, plan, settings, machine(), SystemClock(), build=slow(0.01))
    assert seeded.seconds > 0.3
    assert not is_due(store, plan)
    train_small(URL, 0)
    assert digests(store) == trained_by_a_crew


@pytest.mark.slow
def test_all_ranks_drop_their_learners_and_generate(tmp_path, ranks_server, model, trained_group_by_group):
    url = str(tmp_path / "run")
    store = half_done(model, url)
    ranks_server.launch("train_iteration 0", tmp_path / "run", 2)
    assert {beat.state for beat in beats(store, TRAIN_POOL)} == {"gone"}
    assert records.read(store, TrainingRecord, layout.training(0)).metrics["seeding/tokens"] > 0
    commit_iteration(url, 0)
    assert digests(store).keys() == trained_group_by_group.keys()
