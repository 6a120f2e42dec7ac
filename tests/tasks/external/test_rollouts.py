"""The contract of an external trainer: groups in, weights out, and the same of both after any death."""

import os
from dataclasses import replace

import pytest

import gleaner
from storage.clock import SystemClock
from storage.process_identity import _start, process_space
from storage.records import layout
from storage.records.run import RunBusy, acquire_lease, next_iteration, read_report
from storage.stores.connect import connect
from tasks.external.plans import WrongStep
from tasks.external.rollouts import Rollouts
from tasks.prompts.prompt import PromptError
from tasks.reporting.run_charts import run_charts
from tasks.viewing.run_status import table
from tests.dying_store import Killed, ProgramDies
from tests.external_program import advance, arrays, one_step, seen, settings, trained, versions
from tests.small_run import document, memory_store, roll_out

STEPS = 3
KEPT = {"retention": {"keep_weights": 9}}


def test_a_program_trains_step_by_step_and_the_run_is_committed(tmp_path, model):
    url = str(tmp_path / "run")
    taken = advance(settings(url, model, **KEPT), STEPS)
    run = gleaner.open(url)
    assert list(run.iterations) == list(range(STEPS))
    assert len(versions(url)) == STEPS + 1
    for step, groups in taken.items():
        table = run.responses(step).to_pylist()
        assert [len(group[4]) for group in groups] == [3] * 4
        by_place = {(row["group"], row["response"] % 3): row for row in table}
        for number, group in enumerate(groups):
            for sample, tokens, logprobs, sampled_from, *_, reward, _ in group[4]:
                row = by_place[number, sample]
                assert (tokens, logprobs, reward) == (row["token_ids"], row["logprobs"], row["reward"])
                assert set(sampled_from) == {step}
        assert read_report(connect(url), step).metrics["loss"] == 0.5


def test_a_program_killed_at_any_write_ends_with_the_same_groups_and_weights(model):
    name, steps = "external-undisturbed", 2
    undisturbed = ProgramDies(name, {})
    memory_store(name, undisturbed)
    expected = advance(settings(f"memory://{name}", model, **KEPT), steps)
    published = versions(f"memory://{name}")
    assert len(undisturbed.written) > 40
    for at, key in list(enumerate(undisturbed.written))[::2]:
        name = f"external-{at}"
        store = ProgramDies(name, {}, writes=at)
        memory_store(name, store)
        given = settings(f"memory://{name}", model, **KEPT)
        with pytest.raises(Killed):
            advance(given, steps)
        store.left = 1 << 30
        taken = advance(given, steps)
        assert taken == {step: expected[step] for step in taken}, f"killed at write {at}, {key}"
        assert versions(f"memory://{name}") == published, f"killed at write {at}, {key}"
        assert next_iteration(connect(f"memory://{name}")) == steps


def test_groups_of_an_earlier_step_are_read_again(tmp_path, model):
    url = str(tmp_path / "run")
    given = settings(url, model, **KEPT)
    taken = advance(given, STEPS)
    with Rollouts(given) as rollouts:
        for step in (1, 0, 2):
            assert seen(rollouts.next(step)) == taken[step]
        assert rollouts.step == STEPS


def test_weights_published_first_stay(tmp_path, model):
    url = str(tmp_path / "run")
    given = settings(url, model, **KEPT)
    advance(given, 1)
    before = versions(url)
    with Rollouts(given) as rollouts:
        list(rollouts.next(0))
        assert not rollouts.publish({name: array + 1 for name, array in arrays(url, 0).items()})
        groups = list(rollouts.next(0))
        assert rollouts.publish(trained(arrays(url, 0), groups))
    assert versions(url) == before


def test_weights_may_stay_as_they_are(tmp_path, model):
    """Also after a version that is stored as differences, which no later version may name."""
    url = str(tmp_path / "run")
    given = settings(url, model, **KEPT)
    advance(given, 1)
    with Rollouts(given) as rollouts:
        for step in (1, 2):
            groups = rollouts.next(step)
            roll_out(url, step)
            list(groups)
            assert rollouts.publish(None)
    first, *others = [
        {name: array.tobytes() for name, array in arrays(url, version).items()} for version in (1, 2, 3, 0)
    ]
    assert [other == first for other in others] == [True, True, False]


def test_a_second_program_is_refused_while_the_first_lives(tmp_path, model, monkeypatch):
    given = settings(str(tmp_path / "run"), model)
    with Rollouts(given) as first, Rollouts(given) as second:
        first.next(0)
        # The second has another process's name.
        second._plans._execution = "here:elsewhere"
        with pytest.raises(RunBusy, match="being advanced by"):
            second.next(0)


def test_of_one_process_the_second_is_refused_until_the_first_is_closed(tmp_path, model):
    url = str(tmp_path / "run")
    given = settings(url, model)
    with Rollouts(given) as second:
        with Rollouts(given) as first:
            groups = first.next(0)
            roll_out(url, 0)
            taken = list(groups)
            with pytest.raises(RunBusy, match=r"another gleaner\.rollouts of this process; allowed: one"):
                second.next(0)
            with pytest.raises(RunBusy, match=r"another gleaner\.rollouts of this process; allowed: one"):
                second.publish(None, step=0)
            assert first.step == 0
        assert seen(second.next(0)) == seen(taken)
        assert second.publish(trained(arrays(url, 0), taken))
        with first, pytest.raises(RunBusy, match="allowed: one"):
            first.next(1)
    # A program that is dropped in a notebook blocks no other one.
    dropped = Rollouts(given)
    dropped.next(1)
    dropped.itself = dropped
    del dropped
    with Rollouts(given) as last:
        last.next(1)


@pytest.mark.parametrize("step", ["0", 0.0, None])
def test_a_step_that_is_no_number_is_refused_in_a_line(tmp_path, model, step):
    with Rollouts(settings(str(tmp_path / "run"), model)) as rollouts:
        calls = [lambda: rollouts.next(step)]
        if step is not None:
            calls.append(lambda: rollouts.publish(None, step=step))
        for call in calls:
            with pytest.raises(WrongStep, match=f"^step: value {step!r}; allowed: a whole number$"):
                call()


def test_a_second_program_publishes_nothing_for_the_first(tmp_path, model):
    """Neither while the first lives, nor by a first that another has succeeded meanwhile."""
    url = str(tmp_path / "run")
    given = settings(url, model, **KEPT)
    with Rollouts(given) as first, Rollouts(given) as second:
        second._plans._execution = "here:elsewhere"
        groups = first.next(0)
        roll_out(url, 0)
        taken = list(groups)
        with pytest.raises(RunBusy, match="being advanced by"):
            second.publish(trained(arrays(url, 0), []), step=0)
        assert first.step == 0
        # The process that runs the tests lives for as long as they do.
        parent = os.getppid()
        third = f"here:x:{parent}:{process_space()}-{_start(parent)}"
        acquire_lease(connect(url), third, 60.0, SystemClock(), known_dead=lambda _: True)
        with pytest.raises(RunBusy, match=f"being advanced by process {parent} "):
            first.publish(trained(arrays(url, 0), taken))
        assert first.step == 0


@pytest.mark.parametrize("metrics", [{"loss": "low"}, {"loss": None}, {"loss": [0.5, 1.0]}, {3: 0.5}, {"n": 10**400}])
def test_a_metric_that_is_no_number_is_refused_before_anything_is_published(tmp_path, model, metrics):
    with Rollouts(settings(str(tmp_path / "run"), model)) as rollouts:
        groups = rollouts.next(0)
        roll_out(rollouts.url, 0)
        list(groups)
        with pytest.raises(ValueError, match=r"^metrics: .* allowed: numbers by name"):
            rollouts.publish(None, metrics)
        assert rollouts.step == 0


def test_a_step_is_published_again_after_its_base_was_deleted(tmp_path, model):
    url = str(tmp_path / "run")
    given = settings(url, model, **KEPT)
    advance(given, 2)
    published, weights = versions(url), arrays(url, 2)
    for key in connect(url).list(layout.weights(1)):
        connect(url).delete(key)
    with Rollouts(given) as rollouts:
        list(rollouts.next(1))
        assert rollouts.publish(weights)
        list(rollouts.next(1))
        assert not rollouts.publish({name: array + 1 for name, array in weights.items()})
    assert versions(url).items() <= published.items()


@pytest.mark.parametrize("step", [-1, 1, 2])
def test_a_step_out_of_order_is_refused(tmp_path, model, step):
    with Rollouts(settings(str(tmp_path / "run"), model)) as rollouts, pytest.raises(WrongStep, match="allowed now: 0"):
        rollouts.next(step)


def test_nothing_is_published_without_all_groups(tmp_path, model):
    with Rollouts(settings(str(tmp_path / "run"), model)) as rollouts:
        with pytest.raises(WrongStep, match="no step is under way"):
            rollouts.publish({})
        groups = rollouts.next(0)
        roll_out(rollouts.url, 0)
        with pytest.raises(WrongStep, match="step 0 has groups to come"):
            rollouts.publish(arrays(rollouts.url, 0))
        list(groups)
        assert rollouts.publish(arrays(rollouts.url, 0))


def test_rollout_runs_ahead_by_the_staleness_that_is_allowed(tmp_path, model):
    url = str(tmp_path / "run")
    given = settings(url, model, algorithm={"max_staleness": 1}, **KEPT)
    with Rollouts(given) as rollouts:
        rollouts.next(0)
        roll_out(url, 0)
        roll_out(url, 1)
        [first, second, third] = [one_step(rollouts, step) for step in range(3)]
    sampled_from = [
        {version for group in step for each in group[4] for version in each[3]} for step in (first, second, third)
    ]
    assert sampled_from == [{0}, {0}, {1}]


def test_groups_of_the_next_step_are_taken_ahead_of_publish(tmp_path, model):
    url = str(tmp_path / "run")
    given = settings(url, model, algorithm={"max_staleness": 1}, **KEPT)
    with Rollouts(given) as rollouts:
        first = rollouts.next(0)
        roll_out(url, 0)
        groups = list(first)
        ahead = rollouts.next(1)
        roll_out(url, 1)
        begun = [next(ahead)]
        with pytest.raises(WrongStep, match="allowed now: 0 to 1"):
            rollouts.next(2)
        assert rollouts.publish(trained(arrays(url, 0), groups), step=0)
        taken = seen([*begun, *ahead])
        assert rollouts.publish(arrays(url, 1))
        assert seen(rollouts.next(1)) == taken
    reports = [read_report(connect(url), step) for step in range(2)]
    assert [len(group[4]) for group in taken] == [3] * 4
    assert [report.metrics["timing_s/wait"] >= 0 for report in reports] == [True, True]


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_weights_of_a_later_step_do_not_come_first(tmp_path, model, keeps_weights):
    url = str(tmp_path / "run")
    given = settings(url, model, algorithm={"max_staleness": 1}, **KEPT)
    with Rollouts(given) as rollouts:
        for step in range(2):
            groups = rollouts.next(step)
            roll_out(url, step)
            list(groups)
        weights = arrays(url, 0)
        with pytest.raises(WrongStep, match="publish: step 1; allowed now: 0"):
            rollouts.publish(None if keeps_weights else weights, {"loss": 0.1}, step=1)
        assert rollouts.publish(weights, step=0)
        assert rollouts.publish(weights, {"loss": 0.9}, step=1)
    assert read_report(connect(url), 1).metrics["loss"] == 0.9


def test_replayed_groups_name_their_source(tmp_path, model):
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    taken = advance(settings(first, model), 1)[0]
    replay = {"runs": [f"{first}@0:1"], "share": 0.5}
    data = {"source": "arithmetic", "limit": 10, "replay": replay}
    with Rollouts(settings(second, model, data=data)) as rollouts:
        groups = rollouts.next(0)
        roll_out(second, 0)
        found = sorted(groups, key=lambda group: group.number)
    assert [group.replayed is None for group in found] == [True, True, False, False]
    for group in found[2:]:
        [(*_, responses)] = [each for each in taken if each[1] == group.replayed.group]
        assert [each.logprobs.tolist() for each in group.responses] == [each[2] for each in responses]
        assert (connect(group.replayed.url).url, group.replayed.weight_version) == (connect(first).url, 0)


SUBMITTED = {"data": {"source": "submitted"}, "rewards": []}
PROMPTS = [["1+1=", "2+2="], ["3+3=", "4+4=", "1+1="]]


def submitting(url, model):
    found = []
    with Rollouts(settings(url, model, **SUBMITTED, **KEPT)) as rollouts:
        for step in range(rollouts.step, len(PROMPTS)):
            rollouts.submit(step, PROMPTS[step])
            found.append(one_step(rollouts, step))
    return found


def test_a_program_gives_the_prompts_of_each_step_and_grades_itself(tmp_path, model):
    found = submitting(str(tmp_path / "run"), model)
    assert [[group[2] for group in step] for step in found] == PROMPTS
    assert {each[6] for step in found for group in step for each in group[4]} == {0.0}


def test_a_run_without_rewards_shows_none(tmp_path, model):
    url = str(tmp_path / "run")
    with Rollouts(settings(url, model, rewards=[], **KEPT)) as rollouts:
        groups = rollouts.next(0)
        roll_out(url, 0)
        list(groups)
        rollouts.publish(arrays(url, 0), {"quality": 0.25})
    run, store = gleaner.open(url), connect(url)
    report = read_report(store, 0)
    assert (report.rewards, report.metrics["quality"]) == ((), 0.25)
    assert not [
        name for name in report.metrics if name.startswith(("reward", "frac_reward")) and name != "reward_errors"
    ]
    assert set(run.responses(0)["reward"].to_pylist()) == {None}
    titles = [column.header for column in table([report]).columns]
    assert not {"reward", "loss"} & set(titles)
    assert not [
        chart for chart in run_charts({0: report.metrics}, [], 400.0) if "no data" in chart or "Reward" in chart
    ]
    # A program's own mean is shown.
    assert "reward" in [column.header for column in table([replace(report, metrics={"reward": 1.0})]).columns]


def test_prompts_are_given_before_their_step_and_once(tmp_path, model):
    url = str(tmp_path / "run")
    with Rollouts(settings(url, model, **SUBMITTED)) as rollouts:
        with pytest.raises(WrongStep, match="after its submit"):
            rollouts.next(0)
        rollouts.submit(0, PROMPTS[0])
        rollouts.submit(0, PROMPTS[0])
        with pytest.raises(WrongStep, match="planned with other prompts"):
            rollouts.submit(0, PROMPTS[1])
        with pytest.raises(WrongStep, match="allowed now: 0"):
            rollouts.submit(1, PROMPTS[1])
        with pytest.raises(PromptError, match=r"prompts\.1: the prompt is empty"):
            rollouts.submit(0, ["a", ""])
    with (
        Rollouts(settings(str(tmp_path / "other"), model)) as rollouts,
        pytest.raises(WrongStep, match=r"data\.source"),
    ):
        rollouts.submit(0, PROMPTS[0])


def test_rollouts_of_a_configuration_in_the_user_s_form(tmp_path, model):
    url = str(tmp_path / "run")
    given = document(url, model, trainer={"placement": "external", "micro_batch_tokens_max": 320})
    given["optimizer"] = {}
    with gleaner.rollouts(given) as rollouts:
        assert one_step(rollouts, 0)
    given["trainer"]["placement"] = "own"
    with pytest.raises(WrongStep, match=r"trainer\.placement: value 'own'; allowed here: 'external'"):
        gleaner.rollouts(given)
