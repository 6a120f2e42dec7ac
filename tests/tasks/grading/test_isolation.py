"""Reward functions that misbehave, in real child processes."""

import logging
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tasks.grading.isolation import IsolatedReward
from tasks.grading.reward import GradingCase, GradingError, RewardOutcome

REWARDS = '''
import asyncio, os, subprocess, sys, time
from tasks.grading.binding import ProcessSpoiled

def length(completions, **columns):
    return [float(len(text)) for text in completions]

def chatty(completions, **columns):
    print("to the terminal" * 100_000)
    os.write(1, b"and below Python")
    sys.stdin.read()
    return [1.0 for _ in completions]

async def patient(completions, **columns):
    await asyncio.sleep(0.01)
    return [float(id(asyncio.get_running_loop()) % 1000)] * len(completions)

def picky(completions, **columns):
    """Does to the caller what the completion says."""
    for text in completions:
        if text == "raise":
            raise ValueError("cannot read " + text)
        if text == "exit":
            sys.exit(3)
        if text == "die":
            os._exit(7)
        if text == "spin":
            while True:
                pass
        if text == "interrupt":
            raise KeyboardInterrupt
        if text == "recurse":
            picky_again(text)
    return [1.0 for _ in completions]

def picky_again(text):
    picky_again(text)

async def picky_async(completions, **columns):
    return picky(completions)

def picky_score(data_source, solution_str, ground_truth, extra_info=None):
    picky([solution_str])
    return {"score": float(solution_str == ground_truth), "source": data_source}

def short(completions, **columns):
    return [1.0]

def odd(completions, **columns):
    return [{"nan": float("nan"), "none": None, "text": "1.0"}.get(text, 1.0) for text in completions]

def endless(completions, **columns):
    return ([0.0] * 1_000_000 for _ in iter(int, 1))

def spoiling(completions, **columns):
    if "spoil" in completions:
        raise ProcessSpoiled("the device is gone")
    return [float(os.getpid())] * len(completions)

def seeing(completions, **columns):
    return [float("HF_TOKEN" in os.environ) + 2 * ("MY_KEY" in os.environ)] * len(completions)

def forging(completions, **columns):
    from tests.tool_functions import replies
    from resources.wire import pack
    if "forge" in completions:
        os.write(replies(), pack({"outcomes": [[99.0, None, None]]}) * 3)
    return [1.0] * len(completions)

def leaving(completions, **columns):
    from tests.tool_functions import forks_twice
    open(os.environ["PID_FILE"], "w").write(forks_twice())
    time.sleep(60)

def parent(completions, **columns):
    child = subprocess.Popen(["sleep", "60"])
    open(os.environ["PID_FILE"], "w").write(str(child.pid))
    time.sleep(60)

class Judge:
    def score(self, completions):
        return [2.0 for _ in completions]

judge = Judge()
unfit = lambda args, sample: 0.0
number = 3
'''

Open = Callable[..., IsolatedReward]


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens a function of the module above; its process ends with the test."""
    (tmp_path / "odd_rewards.py").write_text(REWARDS)
    (tmp_path / "slow_rewards.py").write_text("import time; time.sleep(60)")
    (tmp_path / "leaving_rewards.py").write_text("import os; os._exit(5)")
    (tmp_path / "broken_rewards.py").write_text("import sys\nsys.exit('not today')")
    monkeypatch.syspath_prepend(str(tmp_path))
    opened: list[IsolatedReward] = []

    def open_reward(
        function: str, time_limit_s: float = 300.0, load_time_limit_s: float = 300.0, *, stops: bool = False
    ) -> IsolatedReward:
        name = function.rpartition(":")[2]
        opened.append(IsolatedReward(name, function, time_limit_s, load_time_limit_s, stops=stops))
        return opened[-1]

    yield open_reward
    for reward in opened:
        reward.close()


def cases(*completions: str) -> list[GradingCase]:
    columns = {"data_source": "test", "ground_truth": "yes"}
    return [GradingCase(100 + number, "prompt", text, (1,), columns) for number, text in enumerate(completions)]


def test_values_come_back_in_order(rewards: Open):
    reward = rewards("odd_rewards:length")
    assert reward.grade(cases("a", "bbb", "")) == [RewardOutcome(1.0), RewardOutcome(3.0), RewardOutcome(0.0)]
    assert reward.grade([]) == []
    assert reward.needs == ()


def test_any_text_survives_the_way(rewards: Open):
    texts = ("é🎲", "\u2028", "lone \ud800", "x" * 5_000_000)
    assert [outcome.value for outcome in rewards("odd_rewards:length").grade(cases(*texts))] == [
        float(len(text)) for text in texts
    ]


def test_what_a_function_prints_reaches_neither_the_protocol_nor_standard_output(
    rewards: Open, capfd: pytest.CaptureFixture[str]
):
    assert rewards("odd_rewards:chatty").grade(cases("a", "b")) == [RewardOutcome(1.0)] * 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "to the terminal" in captured.err
    assert "and below Python" in captured.err


def test_coroutine_functions_share_one_event_loop(rewards: Open):
    reward = rewards("odd_rewards:patient")
    assert reward.grade(cases("a")) == reward.grade(cases("b"))


def test_methods_are_functions(rewards: Open):
    assert rewards("odd_rewards:judge.score").grade(cases("a")) == [RewardOutcome(2.0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("raise", "raised ValueError: cannot read raise ("),
        ("exit", "raised SystemExit: 3"),
        ("die", "ended its process with status 7"),
        ("interrupt", "raised KeyboardInterrupt"),
        ("recurse", "raised RecursionError"),
    ],
)
@pytest.mark.parametrize("function", ["picky", "picky_async", "picky_score"])
def test_a_failure_hits_only_the_guilty_response(rewards: Open, function: str, word: str, error: str):
    outcomes = rewards(f"odd_rewards:{function}").grade(cases("yes", word, "yes"))
    assert [outcome.value for outcome in outcomes] == [1.0, None, 1.0]
    assert [outcome.error is None for outcome in outcomes] == [True, False, True]
    assert str(outcomes[1].error).startswith(f"reward {function} of response 101 {error}")


def test_the_place_of_an_exception_is_named(rewards: Open):
    outcome = rewards("odd_rewards:picky").grade(cases("raise"))[0]
    line = REWARDS.splitlines().index('            raise ValueError("cannot read " + text)') + 1
    assert f"odd_rewards.py:{line})" in str(outcome.error)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["picky", "picky_score"])
def test_an_endless_loop_is_killed_and_the_rest_graded(rewards: Open, function: str, caplog: pytest.LogCaptureFixture):
    reward = rewards(f"odd_rewards:{function}", time_limit_s=1.5)
    with caplog.at_level(logging.WARNING):
        outcomes = reward.grade(cases("yes", "spin", "yes"))
    assert [outcome.value for outcome in outcomes] == [1.0, None, 1.0]
    assert outcomes[1].error == f"reward {function} of response 101 did not answer within 1.5 s"
    assert (function == "picky") == ("grading one response at a time" in caplog.text)


def test_a_wrong_number_of_values_is_an_error_of_every_response(rewards: Open):
    assert [outcome.error for outcome in rewards("odd_rewards:short").grade(cases("a", "b"))] == [
        f"reward short of response {response} returned 1 values for 2 completions" for response in (100, 101)
    ]


def test_values_that_are_no_rewards_are_errors_of_their_responses(rewards: Open):
    outcomes = rewards("odd_rewards:odd").grade(cases("nan", "none", "text", "fine"))
    assert [outcome.value for outcome in outcomes] == [None, None, None, 1.0]
    assert outcomes[0].error == "reward odd of response 100 returned nan; allowed: a finite number or None"
    assert outcomes[1].error is None
    assert outcomes[2].error == "reward odd of response 102 returned '1.0' of type str; allowed: float or None"


def test_a_result_without_end_is_an_error(rewards: Open):
    assert "returned more than 1 values" in str(rewards("odd_rewards:endless").grade(cases("a"))[0].error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:f", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("odd_rewards:lenght", "odd_rewards has no 'lenght'; there are: .*length"),
        ("odd_rewards:number", "is of type int; allowed: a function"),
        ("odd_rewards:unfit", r"has the signature \(args, sample\): it is neither; allowed: TRL's"),
        ("broken_rewards:f", "cannot be loaded: SystemExit: not today"),
        ("leaving_rewards:f", "cannot be loaded: it ended its process with status 5"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_start(rewards: Open, function: str, message: str):
    with pytest.raises(GradingError, match=f"reward '{function}'.*{message}"):
        rewards(function)


@pytest.mark.slow
def test_an_import_that_never_ends_is_given_up(rewards: Open):
    with pytest.raises(GradingError, match=r"cannot be loaded: it did not answer within 0.5 s"):
        rewards("slow_rewards:f", load_time_limit_s=0.5)


@pytest.mark.slow
def test_the_children_of_a_function_end_with_it(rewards: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    outcome = rewards("odd_rewards:parent", time_limit_s=3.0).grade(cases("a"))[0]
    assert "did not answer within 3 s" in str(outcome.error)
    wait_until_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_what_a_function_leaves_behind_by_forking_twice_ends_with_it(
    rewards: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    rewards("odd_rewards:leaving", time_limit_s=5.0).grade(cases("a"))
    wait_until_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_what_a_function_writes_beside_the_protocol_is_no_reward(rewards: Open):
    reward = rewards("odd_rewards:forging")
    [forged] = reward.grade(cases("forge"))
    assert forged.value is None
    assert str(forged.error).endswith("wrote what is no reply")
    assert [outcome.value for outcome in reward.grade(cases("a", "b"))] == [1.0, 1.0]


@pytest.mark.slow
def test_functions_see_no_credentials_but_those_that_are_named(rewards: Open, monkeypatch: pytest.MonkeyPatch):
    for name in ("HF_TOKEN", "MY_KEY"):
        monkeypatch.setenv(name, "seen")
    assert rewards("odd_rewards:seeing").grade(cases("a"))[0].value == 2.0
    named = ("HF_TOKEN",)
    with closing(IsolatedReward("r", "odd_rewards:seeing", 300.0, 300.0, environment_variables=named)) as reward:
        assert reward.grade(cases("a"))[0].value == 3.0


@pytest.mark.slow
def test_mathematics_is_graded_in_the_same_way(rewards: Open):
    reward = rewards("math")
    assert reward.needs == (("ground_truth", "answer", "solution"),)
    outcomes = reward.grade(
        [
            GradingCase(0, "?", r"\boxed{72}", (), {"answer": "#### 72"}),
            GradingCase(1, "?", r"\boxed{73}", (), {"answer": "#### 72"}),
            GradingCase(2, "?", r"\boxed{73}", (), {"answer": ""}),
        ]
    )
    assert [outcome.value for outcome in outcomes] == [1.0, 0.0, None]
    assert "reward math of response 2 raised ValueError: the ground truth '' is no mathematics" in str(
        outcomes[2].error
    )


def test_a_process_that_a_call_has_spoiled_serves_no_other_call(rewards: Open):
    first, spoiled, last = rewards("odd_rewards:spoiling").grade(cases("a", "spoil", "b"))
    assert str(spoiled.error).startswith("reward spoiling of response 101 raised ProcessSpoiled: the device is gone")
    assert first.value is not None
    assert last.value is not None
    assert first.value != last.value


@pytest.mark.slow
def test_an_expression_that_takes_for_ever_is_interrupted_and_the_rest_graded():
    with closing(IsolatedReward("format", "format", 1.5, 300.0, {"pattern": "(a+)+b"})) as reward:
        process = reward._worker._process
        outcomes = reward.grade(cases("aab", "a" * 60, "aa"))
        assert reward._worker._process is process
    assert [outcome.value for outcome in outcomes] == [1.0, 0.0, 0.0]
    assert outcomes[1].given_up == "reward format of response 101 did not answer within 1.5 s"


@pytest.mark.slow
def test_a_function_that_always_hangs_costs_a_few_time_limits_and_says_how_often_meanwhile(
    rewards: Open, caplog: pytest.LogCaptureFixture
):
    reward = rewards("odd_rewards:picky_score", time_limit_s=0.5)
    outcomes = reward.grade(cases(*["spin"] * 200))
    assert all(outcome.value is None and outcome.error for outcome in outcomes)
    assert reward._patience.hung < 200
    assert reward._patience.lost_s < 20 * (0.5 + reward._worker.start_s)
    assert "was not called, after " in str(outcomes[-1].error)
    told = [record.getMessage() for record in caplog.records if "for which it hung" in record.getMessage()]
    assert [line.partition("it hung: ")[2].partition(";")[0] for line in told[:3]] == ["1", "2", "4"]
    assert told[0].startswith("reward picky_score: ")
    assert told[0].endswith(", and 199 more wait for it")
    # What is not called any more is not called in the next micro-batch either.
    assert "was not called" in str(reward.grade(cases("spin"))[0].error)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["picky", "picky_score"])
@pytest.mark.parametrize("word", ["raise", "die"])
def test_a_reward_that_stops_stops_at_the_first_failure(rewards: Open, function: str, word: str):
    """The response after it would never be graded."""
    reward = rewards(f"odd_rewards:{function}", time_limit_s=20.0, stops=True)
    with pytest.raises(GradingError, match=f"reward {function} of response 101 "):
        reward.grade(cases("yes", word, "spin", "spin"))
    assert reward._patience.hung == 0


def test_the_worker_ends_when_its_parent_is_killed(rewards: Open, tmp_path: Path):
    """Even in the middle of a call that never returns."""
    script = """
        import sys
        from tasks.grading.isolation import IsolatedReward
        from tasks.grading.reward import GradingCase
        reward = IsolatedReward("picky", "odd_rewards:picky", 300.0, 300.0)
        print(reward._worker._process.pid, flush=True)
        reward.grade([GradingCase(0, "p", "spin", (), {})])
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.kill()
    wait_until_gone(worker)


def test_a_module_path_of_many_repetitions_is_no_obstacle(rewards: Open, monkeypatch: pytest.MonkeyPatch):
    """flytekit makes one in a process that unrolls many iterations."""
    monkeypatch.setattr(sys, "path", [*sys.path, *["/a/folder/that/is/named/again/and/again"] * 5000])
    assert rewards("odd_rewards:length").grade(cases("ab"))[0].error is None


def test_closing_ends_the_process_and_may_be_repeated(rewards: Open):
    with closing(rewards("odd_rewards:length")) as reward:
        process = reward._worker._process
        assert process is not None
        assert process.poll() is None
    assert process.poll() is not None
    reward.close()


def wait_until_gone(process_id: int) -> None:
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":  # dead; nobody has asked for its status yet
            return
        time.sleep(0.02)
    pytest.fail(f"process {process_id} still runs")
