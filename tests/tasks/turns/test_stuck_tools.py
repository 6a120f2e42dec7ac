"""Tools that stick, forge, fork and look around: they cost their own response only."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.turns.living_environments import Reset
from tasks.turns.testing import LIMIT_S, answered, gathered, record_of
from tasks.turns.tool_processes import ToolProcesses
from tests.character_turns import said, text_of
from tests.opened_tools import Open, config, workers
from tests.processes import are_gone, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("tool", ["holds_the_interpreter", "stops_its_process", "writes_half_a_reply"])
def test_a_call_that_leaves_its_process_stuck_is_the_only_one_that_is_blamed(opened: Open, tool: str):
    environments = opened(tool, "sleeps", "add", call_time_limit_s=4.0)
    environments.begin([said('!sleeps {"seconds": 1}', i) for i in range(3)])
    environments.begin([said(f"!{tool}", 3)])
    environments.begin([said('!add {"a": 1, "b": 2}', i) for i in (4, 5)])
    answers = gathered(environments, 6)
    blamed = {i: record_of(answer).calls[0].outcome for i, answer in answers.items()}
    assert blamed == dict.fromkeys(range(6), "answered") | {3: "timed_out"}
    assert [text_of(answers[i]) for i in (0, 1, 2, 4, 5)] == ["<awake>\n"] * 3 + ["<3>\n"] * 2
    wait_until(lambda: len(workers()) <= 1)


def test_with_fail_a_side_effect_of_a_stuck_process_is_not_tried_again(opened: Open, notes: Callable[[], list[str]]):
    how: dict[str, Any] = {"side_effects": ("note_once",), "on_unknown": "fail", "call_time_limit_s": 3.0}
    environments = opened("stops_its_process", "note_once", **how)
    environments.begin([said("!note_once", 0)])
    wait_until(lambda: bool(notes()))
    environments.begin([said("!stops_its_process", 1)])
    answers = gathered(environments, 2)
    assert record_of(answers[0]).calls[0].outcome == "lost"
    assert record_of(answers[1]).calls[0].outcome == "timed_out"
    assert notes() == ["note_once"]


def test_an_environment_that_leaves_its_process_stuck_costs_the_others_nothing(opened: Open):
    environments = opened(environment="Stops", call_time_limit_s=3.0, reset=Reset({}, 99, None))
    environments.begin([said('!go {"stop": false}', 0), said('!go {"stop": true}', 1), said('!go {"stop": false}', 2)])
    answers = gathered(environments, 3)
    assert [text_of(answers[i]) for i in (0, 2)] == ["<went>\n"] * 2
    assert record_of(answers[1]).calls[0].outcome == "timed_out"


def test_a_tool_that_forges_replies_answers_no_other_call(opened: Open):
    environments = opened("forges", "sleeps", call_time_limit_s=30.0)
    environments.begin([said('!sleeps {"seconds": 2}', i) for i in range(3)])
    environments.begin([said("!forges", 3)])
    assert {text_of(gathered_one) for gathered_one in gathered(environments, 4).values()} == {"<awake>\n", "<forged>\n"}


def test_what_has_forked_twice_ends_with_the_member(opened: Open, notes: Callable[[], list[str]]):
    environments = opened("forks_twice")
    answer = answered(environments, said("!forks_twice"))
    orphan = int(text_of(answer).strip("<>\n"))
    assert not are_gone([orphan])
    environments.close()
    assert are_gone([orphan])


def test_a_process_of_its_own_ends_with_the_response_for_which_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "loads_for_long.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def cancelled() -> None:
        processes = ToolProcesses(replace(config("sleeps"), tools=("loads_for_long:tool",)), count=1)
        starting = asyncio.create_task(processes.alone())
        await asyncio.to_thread(wait_until, lambda: bool(workers()))
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert workers() == []

    asyncio.run(asyncio.wait_for(cancelled(), LIMIT_S))


@pytest.mark.parametrize("named", [(), ("HF_TOKEN",)])
def test_tools_see_no_credentials_but_those_that_are_named(
    opened: Open, monkeypatch: pytest.MonkeyPatch, named: tuple[str, ...]
):
    secrets = ("AWS_SECRET_ACCESS_KEY", "FLYTE_AWS_ACCESS_KEY_ID", "AZURE_STORAGE_ACCOUNT_KEY", "HF_TOKEN")
    for name in (*secrets, "MY_OWN_KEY"):
        monkeypatch.setenv(name, "seen")
    environments = opened("variables", environment_variables=named)
    seen = json.loads(text_of(answered(environments, said("!variables")))[1:-2])
    assert {*seen} & {*secrets, "MY_OWN_KEY"} == {*named, "MY_OWN_KEY"}
