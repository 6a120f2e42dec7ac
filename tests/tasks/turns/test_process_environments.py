"""Tools and environments in real child processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resources.process import descendants
from storage.journal.shard import Finish
from storage.journal.turns import call_id
from tasks.configuration.turns import TurnsConfig
from tasks.turns.opened_environments import load_schemas, reset_texts
from tasks.turns.testing import LIMIT_S, answered, gathered, record_of
from tasks.turns.tool_processes import ToolsUnusable
from tests.character_turns import said, text_of, then
from tests.opened_tools import Open, config, workers
from tests.processes import are_gone, wait_until

pytestmark = pytest.mark.slow


def test_calls_are_made_in_order_and_become_one_observation(opened: Open, notes: Callable[[], list[str]]):
    environments = opened("add", "fails")
    answer = answered(environments, said('!add {"a": 1, "b": 2}\n!fails {"text": "no"}\n!add {"a": 3, "b": 4}'))
    assert answer.finish is Finish.RUNNING
    assert text_of(answer) == "<3><error: ValueError: no><7>\n"
    record = record_of(answer)
    assert [call.outcome for call in record.calls] == ["answered", "raised", "answered"]
    assert [call.call_id for call in record.calls] == [call_id(11, 2, 0, 0, index) for index in range(3)]
    assert [call.arguments for call in record.calls] == [{"a": 1, "b": 2}, {"text": "no"}, {"a": 3, "b": 4}]
    assert answer.seconds >= sum(call.seconds for call in record.calls) > 0
    assert notes() == ["add", "add"]


def test_a_turn_without_calls_ends_the_response(opened: Open):
    answer = answered(opened("add"), said("three"))
    assert (answer.finish, answer.token_ids, record_of(answer).reward) == (Finish.STOP, (), None)


def test_what_length_ended_calls_nothing_and_is_rewarded(opened: Open, notes: Callable[[], list[str]]):
    environments = opened("add", environment="Counter")
    call = '!add {"a": 1, "b": 2}'
    for response, (turn, finish) in enumerate(
        [
            (said(call, stopped=False), Finish.LENGTH),
            (said("three", stopped=False), Finish.LENGTH),
            (said(call, room=0), Finish.LENGTH),
            (said("three", room=0), Finish.STOP),
            (said("", stopped=False, room=0), Finish.LENGTH),
        ]
    ):
        answer = answered(environments, replace(turn, response=response))
        assert (answer.finish, answer.token_ids, record_of(answer).calls) == (finish, (), ()), response
        assert record_of(answer).reward == 3.0
    assert "add" not in notes()


def test_an_observation_needs_room_for_itself_and_a_token(opened: Open):
    environments = opened("add")
    call = '!add {"a": 1, "b": 2}'
    assert answered(environments, said(call, room=4)).finish is Finish.LENGTH
    answer = answered(environments, said(call, room=5))
    assert (answer.finish, text_of(answer)) == (Finish.RUNNING, "<3>\n")
    assert record_of(answered(environments, said(call, room=4))).calls[0].result == "3"


def test_long_results_are_cut_and_marked(opened: Open):
    environments = opened("enormous", "add", observation_tokens_max=200)
    answer = answered(environments, said('!enormous\n!add {"a": 1, "b": 2}'))
    assert answer.finish is Finish.RUNNING
    assert 150 < len(answer.token_ids) <= 200
    long, short = record_of(answer).calls
    assert long.result.startswith("xxxx")
    assert long.result.endswith("\n[cut: the result is longer than allowed]")
    assert short.result == "3"


def test_100_mb_do_not_stop_the_others(opened: Open):
    environments = opened("enormous", "add")
    environments.begin([said("!enormous", 0), *(said('!add {"a": 1, "b": 2}', i) for i in range(1, 9))])
    answers = gathered(environments, 9)
    assert all(text_of(answers[i]) == "<3>\n" for i in range(1, 9))
    assert 1800 < len(answers[0].token_ids) <= 2048


def test_results_that_are_no_text_become_text(opened: Open):
    results = {"dict": '{"é": [1, null]}', "none": "None", "set": "[{1}]", "surrogate": "a?b", "float": "0.5"}
    environments = opened("shapes")
    found = {kind: text_of(answered(environments, said(f'!shapes {{"kind": "{kind}"}}'))) for kind in results}
    assert found == {kind: f"<{result}>\n" for kind, result in results.items()}


def test_what_a_tool_prints_goes_to_standard_error(opened: Open, capfd: pytest.CaptureFixture[str]):
    environments = opened("chatty")
    assert text_of(answered(environments, said("!chatty"))) == "<>\n"
    environments.close()
    out, errors = capfd.readouterr()
    assert out == ""
    assert "and below Python" in errors


@pytest.mark.parametrize(("tool", "status"), [("leaves", 3), ("leaves_async", 4)])
def test_system_exit_is_an_error_and_ends_nothing(opened: Open, tool: str, status: int):
    environments = opened(tool, "sleeps_async")
    before = answered(environments, said('!sleeps_async {"seconds": 0}'))
    assert text_of(answered(environments, said(f"!{tool}"))) == f"<error: SystemExit: {status}>\n"
    after = answered(environments, said('!sleeps_async {"seconds": 0}'))
    assert text_of(after) == text_of(before)


def test_a_process_that_a_tool_forked_answers_nothing(opened: Open):
    environments = opened("forks", "add")
    assert text_of(answered(environments, said("!forks"))) == "<parent>\n"
    assert text_of(answered(environments, said('!add {"a": 1, "b": 2}'))) == "<3>\n"


def test_a_call_whose_process_ends_is_made_once_more_under_its_name(opened: Open, notes: Callable[[], list[str]]):
    answer = answered(opened("dies_once"), said("!dies_once"))
    (call,) = record_of(answer).calls
    assert (call.outcome, call.result, call.unknown) == ("answered", "alive", True)
    assert notes() == [f"dies_once {call.call_id}"] * 2


def test_a_call_whose_process_always_ends_is_answered(opened: Open, notes: Callable[[], list[str]]):
    environments = opened("dies", "add")
    answer = answered(environments, said('!dies\n!add {"a": 1, "b": 2}'))
    assert [call.outcome for call in record_of(answer).calls] == ["lost", "answered"]
    assert text_of(answer) == "<error: the tool's process ended with status 7><3>\n"
    assert notes() == ["dies", "dies", "add"]


def test_with_fail_a_side_effect_is_not_tried_again(opened: Open, notes: Callable[[], list[str]]):
    environments = opened("dies", side_effects=("dies",), on_unknown="fail")
    assert record_of(answered(environments, said("!dies"))).calls[0].outcome == "lost"
    assert notes() == ["dies"]


def test_a_call_that_takes_too_long_is_answered_and_the_others_finish(opened: Open):
    environments = opened("sleeps", "add", call_time_limit_s=2.0)
    environments.begin([said('!sleeps {"seconds": 1000}', 0)])
    environments.begin([said('!sleeps {"seconds": 0.5}', 1)])
    answers = gathered(environments, 2)
    assert text_of(answers[0]) == "<error: timed out after 2 s>\n"
    assert record_of(answers[0]).calls[0].outcome == "timed_out"
    assert text_of(answers[1]) == "<awake>\n"
    assert text_of(answered(environments, said('!add {"a": 1, "b": 2}', 2))) == "<3>\n"
    wait_until(lambda: len(workers()) <= 1)


def test_calls_of_responses_run_side_by_side_in_threads_and_on_one_loop(opened: Open):
    environments = opened("meets", "sleeps_async")
    environments.begin([said('!meets {"others": 8}', i) for i in range(8)])
    assert {text_of(answer) for answer in gathered(environments, 8).values()} == {"<met>\n"}
    environments.begin([said('!sleeps_async {"seconds": 0.1}', i) for i in range(8)])
    loops, calls = zip(*(text_of(a).strip("<>\n").split() for a in gathered(environments, 8).values()), strict=True)
    assert len(set(loops)) == 1
    assert set(calls) == {call_id(11, 2, i, 0, 0) for i in range(8)}


def test_begin_waits_for_nothing(opened: Open):
    environments = opened("sleeps", call_time_limit_s=LIMIT_S)
    environments.begin([said('!sleeps {"seconds": 2}', i) for i in range(3)])
    assert environments.answers(0.0) == []
    assert len(gathered(environments, 3)) == 3


def test_a_tool_learns_which_call_it_is(opened: Open):
    environments = opened("who")
    answer = answered(environments, said("!who", 6))
    assert text_of(answer) == f'<["{call_id(11, 2, 6, 0, 0)}", 5, 2, 6]>\n'


def test_invalid_calls_are_answered_and_end_the_response_when_they_repeat(opened: Open, notes: Callable[[], list[str]]):
    environments = opened("add")
    turn = said('!add {"a": 1\n!multiply {"a": 1}')
    first = answered(environments, turn)
    assert text_of(first).startswith("<error: the arguments are no JSON")
    assert "<error: there is no tool 'multiply'; there are: add>" in text_of(first)
    assert [call.outcome for call in record_of(first).calls] == ["invalid", "invalid"]
    last = answered(environments, then(turn, first, '!add nothing\n!add {"a": 1, "b": 2}'))
    assert (last.finish, last.token_ids, len(record_of(last).calls)) == (Finish.STOP, (), 1)
    valid = then(turn, first, '!add {"a": 1, "b": 2}\n!add nothing\n!add nothing')
    assert answered(environments, valid).finish is Finish.RUNNING
    assert notes() == ["add"]


def test_the_last_allowed_turn_calls_nothing(opened: Open, notes: Callable[[], list[str]]):
    environments = opened("add", turns_max=2)
    turn = said('!add {"a": 1, "b": 2}')
    first = answered(environments, turn)
    last = answered(environments, then(turn, first, '!add {"a": 1, "b": 2}'))
    assert (last.finish, record_of(last).calls) == (Finish.STOP, ())
    assert notes() == ["add"]


def test_tools_with_side_effects_wait_for_the_journal(opened: Open):
    environments = opened("add", "who", side_effects=("add",))
    assert environments.waits_for_journal(said('!who\n!add {"a": 1, "b": 2}'))
    assert not environments.waits_for_journal(said("!who"))
    assert not environments.waits_for_journal(said('!add {"a": 1, "b": 2}', stopped=False))


def test_an_unknown_call_is_made_under_its_name_and_marked(opened: Open):
    environments = opened("add", "who")
    (known,) = record_of(answered(environments, said("!who"))).calls
    (unknown, invalid) = record_of(answered(environments, said("!who\n!nothing", unknown=True))).calls
    assert (known.unknown, unknown.unknown, invalid.unknown) == (False, True, False)
    assert unknown.result == known.result


def test_with_fail_an_unknown_call_gives_the_response_up(opened: Open, notes: Callable[[], list[str]]):
    environments = opened("add", "who", environment="Counter", side_effects=("add",), on_unknown="fail")
    for text in ('!add {"a": 1, "b": 2}', '!count {"n": 1}'):
        answer = answered(environments, said(text, unknown=True))
        assert answer.finish is Finish.FAILED
        assert "turns.on_unknown is fail" in str(record_of(answer).failure)
    assert answered(environments, said("!who", unknown=True)).finish is Finish.RUNNING
    assert "add" not in notes()
    assert "count" not in notes()


def test_forgotten_answers_are_not_given(opened: Open):
    environments = opened("sleeps", "add")
    environments.begin([said('!sleeps {"seconds": 1}', 0), said('!add {"a": 1, "b": 2}', 1)])
    environments.forget([0, 7])
    environments.begin([said('!add {"a": 5, "b": 5}', 0)])
    assert text_of(gathered(environments, 2)[0]) == "<10>\n"
    time.sleep(1.5)
    assert environments.answers(0.0) == []


def test_processes_and_what_they_started_end_at_close(opened: Open, notes: Callable[[], list[str]]):
    environments = opened("starts", call_time_limit_s=LIMIT_S)
    environments.begin([said("!starts")])
    wait_until(lambda: bool(notes()))
    children = [*workers(), int(notes()[0] if notes()[0].isdecimal() else notes()[0].split()[-1])]
    assert not are_gone(children)
    environments.close()
    environments.close()
    wait_until(lambda: all(are_gone([each]) for each in children))


def test_what_a_process_that_ends_by_itself_has_started_ends_too(opened: Open, tmp_path: Path):
    answer = answered(opened("starts_and_dies"), said("!starts_and_dies"))
    assert text_of(answer) == "<error: the tool's process ended with status 9>\n"
    children = [int(line.split()[-1]) for line in (tmp_path / "notes").read_text().splitlines()]
    assert len(children) == 2
    wait_until(lambda: are_gone(children))


def test_processes_end_if_they_start_while_the_environments_are_closed(opened: Open):
    environments = opened("add")
    environments.begin([said('!add {"a": 1, "b": 2}')])
    environments.close()
    assert workers() == []


def test_a_killed_process_is_replaced(opened: Open):
    environments = opened("add", processes=2)
    environments.begin([said('!add {"a": 1, "b": 2}', i) for i in range(4)])
    gathered(environments, 4)
    wait_until(lambda: len(workers()) == 2)
    for worker in workers():
        os.kill(worker, signal.SIGKILL)
    environments.begin([said('!add {"a": 1, "b": 2}', i) for i in range(4)])
    assert {text_of(answer) for answer in gathered(environments, 4).values()} == {"<3>\n"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": ("tests.tool_functions:nothing",)}, "turns.tools: 'tests.tool_functions:nothing': tests.tool"),
        ({"tools": ("no_such_module:f",)}, "turns.tools: 'no_such_module:f' cannot be loaded: ModuleNotFoundError"),
        ({"environment": "Nothing"}, "turns.environment: 'tests.tool_functions:Nothing': tests.tool"),
    ],
)
def test_what_cannot_be_loaded_is_named(opened: Open, settings: dict[str, Any], message: str):
    environments = opened("add", **settings)
    environments.begin([said('!add {"a": 1, "b": 2}')])
    with pytest.raises(ToolsUnusable) as refused:
        gathered(environments, 1)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_schemas_come_from_a_child():
    found = load_schemas(TurnsConfig(environment="tests.tasks.turns.environments_for_plan:Maze"))
    assert [schema["function"]["name"] for schema in found] == ["go"]


def test_plans_reset_each_group(notes: Callable[[], list[str]]):
    settings = config(environment="Closing", processes=2)
    texts = reset_texts(settings, [{"start": n, "label": "x"} for n in range(5)], [70 + n for n in range(5)])
    assert texts == [f"from {n}" for n in range(5)]
    assert sorted(line for line in notes() if "reset" in line) == [f"reset {n} {70 + n} ['label']" for n in range(5)]
    assert reset_texts(config("add"), [{}, {}], [1, 2]) == [None, None]


@pytest.mark.parametrize(
    ("environment", "why"),
    [("Broken", "RuntimeError: no such server"), ("Wordless", "reset returned int; allowed: str or None")],
)
def test_a_class_that_cannot_be_reset_is_refused(notes: Callable[[], list[str]], environment: str, why: str):
    with pytest.raises(ToolsUnusable) as refused:
        reset_texts(config(environment=environment), [{}], [1])
    assert str(refused.value).startswith(
        f"turns.environment: 'tests.tool_functions:{environment}' cannot be reset: {why}"
    )


def test_processes_end_with_their_parent(notes: Callable[[], list[str]], tmp_path: Path):
    """Even in the middle of a call that never returns."""
    script = f"""
from tests.character_turns import STOP, CharacterConversation, said
from tasks.configuration.turns import TurnsConfig
from tasks.turns.living_environments import Reset
from tasks.turns.opened_environments import ProcessEnvironments
config = TurnsConfig(tools=("tests.tool_functions:sleeps",), call_time_limit_s={LIMIT_S}, processes=2)
reset = Reset({{}}, 0, None)
environments = ProcessEnvironments(config, lambda _: CharacterConversation(), [STOP], lambda _: reset, bytes)
environments.begin([said('!sleeps {{"seconds": 1000}}', response) for response in range(4)])
environments.answers({LIMIT_S})
"""
    (tmp_path / "member.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, str(tmp_path / "member.py")], env=environment) as member:
        try:
            wait_until(lambda: len(notes()) == 4)
            wait_until(lambda: len(descendants(member.pid)) == 4)  # two workers, each with its keeper
            children = descendants(member.pid)
        finally:
            member.kill()
    wait_until(lambda: are_gone(children))
