"""Reward functions of a user's that give no reward are refused by `check --files` and by the plan of a new run.

To add a case, add a line to REFUSED: a function of the module below, and what the line about it says.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage.clock import ManualClock
from storage.records.run import holds_run
from tasks.grading.reward import GradingError
from tasks.preparing.checks import check_files
from tasks.preparing.iteration import prepare
from tests.chat_tokenizers import QWEN
from tests.small_run import config, everything, memory_store, plan_iteration
from tests.tasks.preparing.test_tools import MODULE, SCHEMAS_TOKENS, model_with

pytestmark = pytest.mark.slow
NAME = "own-rewards"
URL = f"memory://{NAME}"
REWARDS = """
import math, os, time

def raising(completions, answer, **columns):
    return [int(text) == number for text, number in zip(completions, answer)]

def raising_over_lines(completions, **columns):
    raise ValueError("first line\\nsecond line")

def forgetful(completions, **columns):
    for text in completions:
        len(text)

def forgetful_score(solution_str, ground_truth=None):
    solution_str == ground_truth

def abstaining(completions, **columns):
    return [None for text in completions]

def undefined(completions, **columns):
    return [math.nan for text in completions]

def infinite_score(solution_str):
    return {"score": -math.inf}

def text(completions, **columns):
    return ["1.0" for text in completions]

def scoreless(solution_str):
    return {"reward": 1.0}

def one(completions, **columns):
    return [1.0]

def too_many(completions, **columns):
    return [1.0] * 3

def hanging(completions, **columns):
    time.sleep(600)

async def hanging_later(completions, **columns):
    import asyncio
    await asyncio.sleep(600)

def leaving(completions, **columns):
    os._exit(3)

def brief(completion_ids, **columns):
    return [1 / len(ids) for ids in completion_ids]

def seen(prompts, completions, completion_ids, answer, **columns):
    assert [text for text in completions] == [""] * len(prompts), completions
    assert prompts[0] == "1+1" and answer[0] == 2, (prompts, answer)
    return [0.5 for ids in completion_ids]

def seen_messages(solution_str, extra_info):
    last = extra_info["messages"][-1]
    assert (solution_str, last) == ("", {"role": "assistant", "content": ""}), extra_info
    return 0.0
"""
CALLED = "rewards.0: value 'user_rewards:{}', which for the first prompt and an empty completion "
REFUSED = [
    ("raising", "raised ValueError: invalid literal for int() with base 10: '' ("),
    ("raising_over_lines", "raised ValueError: first line second line ("),
    ("forgetful", "returned None of type NoneType; allowed: a list of float or None"),
    ("forgetful_score", "gave None; allowed: a number from one of rewards"),
    ("abstaining", "gave None; allowed: a number from one of rewards"),
    ("undefined", "returned nan; allowed: a finite number or None"),
    ("infinite_score", "returned -inf; allowed: a finite number or None"),
    ("text", "returned '1.0' of type str; allowed: float or None"),
    ("scoreless", "returned {'reward': 1.0} of type dict; allowed: a dict with 'score'"),
    ("one", "returned 1 values for 2 completions; allowed: "),
    ("too_many", "returned more than 2 values for 2 completions; allowed: "),
    ("hanging", "did not answer within 0.5 s; allowed: "),
    ("hanging_later", "did not answer within 0.5 s; allowed: "),
    ("leaving", "ended its process with status 3; allowed: "),
]
MATH = {"function": "math"}


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The rows of the user; its module is on the path."""
    (tmp_path / "user_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": 2}) + "\n")
    return tmp_path / "rows.jsonl"


def rewarded(model: Path, rows: Path, *functions: Any, **sections: Any) -> Any:
    own = [name if isinstance(name, dict) else {"function": f"user_rewards:{name}"} for name in functions]
    return config(URL, model, data={"source": str(rows)}, rewards=own, **sections)


def in_time(name: str) -> dict[str, Any]:
    return {"function": f"user_rewards:{name}", "time_limit_s": 0.5 if "hanging" in name else 60.0}


@pytest.mark.parametrize(("name", "told"), REFUSED, ids=[name for name, _ in REFUSED])
def test_a_function_that_gives_no_reward_is_refused(model: Path, user_module: Path, name: str, told: str):
    settings, store = rewarded(model, user_module, in_time(name)), memory_store(NAME)
    with pytest.raises(GradingError, match="^" + re.escape(CALLED.format(name) + told)) as caught:
        check_files(settings)
    assert "\n" not in str(caught.value)
    with pytest.raises(GradingError, match="^" + re.escape(CALLED.format(name) + told)):
        prepare(settings, "test", ManualClock())
    assert everything(store) == {}


def test_the_place_of_the_function_is_named_and_evaluation_has_its_own(model: Path, user_module: Path):
    settings = rewarded(model, user_module, MATH, "seen", "undefined")
    with pytest.raises(GradingError, match=r"^rewards\.2: value 'user_rewards:undefined', which "):
        check_files(settings)
    evaluation = {"data": {"source": str(user_module)}, "rewards": [MATH, {"function": "user_rewards:undefined"}]}
    with pytest.raises(GradingError, match=r"^evaluation: rewards\.1: value 'user_rewards:undefined', which "):
        check_files(rewarded(model, user_module, MATH, evaluation=evaluation))


def test_none_beside_a_function_that_gives_a_number_is_a_doubt(model: Path, user_module: Path):
    told = check_files(rewarded(model, user_module, MATH, "abstaining"))
    [doubt] = [line for line in told if line.startswith("not sure: ")]
    assert doubt.startswith("not sure: rewards.1: value 'user_rewards:abstaining', which for the first prompt and an")
    assert not [line for line in check_files(rewarded(model, user_module, "seen")) if "not sure" in line]


def test_what_is_called_is_a_response_of_one_token_without_text(model: Path, user_module: Path):
    check_files(rewarded(model, user_module, "seen", "brief"))


def test_a_run_that_has_begun_does_not_call_them(model: Path, user_module: Path, tmp_path: Path):
    """The function may have side effects, and fails in training as it is configured."""
    store = memory_store(NAME)
    settings = rewarded(model, user_module, "seen")
    plan_iteration(settings)
    assert holds_run(store)
    (tmp_path / "user_rewards.py").write_text("def seen(completions, **columns): raise ValueError")
    plan_iteration(settings)


def test_with_turns_a_function_gets_the_conversation(tmp_path: Path):
    model = model_with(tmp_path / "chat", QWEN)
    rows = tmp_path / "chats.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1"}]}) + "\n")
    turns = {"tools": [f"{MODULE}:look"]}
    settings = rewarded(model, rows, "seen_messages", turns=turns)
    # The store of the tests before holds a run.
    elsewhere = replace(settings.run, url=f"{URL}-in-turns")
    check_files(replace(settings, run=elsewhere, data=replace(settings.data, max_prompt_length=SCHEMAS_TOKENS)))
