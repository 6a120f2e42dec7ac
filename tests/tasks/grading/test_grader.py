import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks.configuration.data import DataConfig
from tasks.configuration.rewards import RewardConfig
from tasks.grading.grader import Graded, Grader, check_rewards
from tasks.grading.reward import GradingCase, GradingError
from tasks.prompts.loading import load_prompts
from tasks.prompts.prompt import Prompt

REWARDS = """
def length(completions, **columns):
    return [float(len(text)) for text in completions]

def only_long(completions, **columns):
    return [1.0 if len(text) > 3 else None for text in completions]

def explicit(completions, target, **columns):
    return [float(text == wanted) for text, wanted in zip(completions, target)]

def plain_number():
    return 7

def longer_than(limit, by=1):
    def reward(completions, **columns):
        return [float(len(text) >= limit + by) for text in completions]
    return reward

def batch_scores(data_sources, solution_strs, ground_truths, extra_infos=None):
    rows = zip(solution_strs, ground_truths, strict=True)
    return [{"score": float(text == truth), "acc": 1} for text, truth in rows]

def failing(completions, **columns):
    return [1 / (text != "bad") for text in completions]
"""


@pytest.fixture(autouse=True)
def reward_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "graded_rewards.py").write_text(REWARDS)
    (tmp_path / "other_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return


def config(function: str, **settings: Any) -> RewardConfig:
    return RewardConfig(function=function if function == "arithmetic" else f"graded_rewards:{function}", **settings)


def case(response: int, completion: str, **columns: Any) -> GradingCase:
    return GradingCase(response, "p", completion, (), {"worked": "#1", **columns})


def test_the_reward_is_the_weighted_sum():
    with Grader([config("arithmetic", weight=2.0), config("length", weight=-0.5)]) as grader:
        assert grader.names == ("arithmetic", "length")
        assert grader.grade([case(7, "#1"), case(8, "abc")]) == [
            Graded(7, 1.0, {"arithmetic": 1.0, "length": 2.0}, {}),
            Graded(8, -1.5, {"arithmetic": 0.0, "length": 3.0}, {}),
        ]


def test_a_function_with_arguments_returns_the_reward_function():
    configs = [
        config("longer_than", name="some", arguments={"limit": 2}),
        config("longer_than", name="many", arguments={"limit": 2, "by": 2}),
    ]
    with Grader(configs) as grader:
        graded = grader.grade([case(0, "ab"), case(1, "abc"), case(2, "abcd")])
    assert [list(each.values.values()) for each in graded] == [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("longer_than", None, "it is neither; allowed: .* needs the field 'arguments'"),
        ("longer_than", {}, "cannot be loaded: TypeError: .* missing 1 required positional argument: 'limit'"),
        ("longer_than", {"limits": 1}, "cannot be loaded: TypeError: .* unexpected keyword argument 'limits'"),
        ("plain_number", {}, "with arguments returned int; allowed: a reward function"),
    ],
)
def test_factories_that_give_no_reward_function_are_refused(function: str, arguments: Any, message: str):
    with pytest.raises(GradingError, match=message):
        Grader([config(function, arguments=arguments)])


def test_verls_batched_form_is_graded():
    with Grader([config("batch_scores")]) as grader:
        graded = grader.grade([case(n, text, data_source="d", ground_truth="a") for n, text in enumerate("ab")])
    assert [each.reward for each in graded] == [1.0, 0.0]


def test_a_function_may_be_there_twice_under_names_of_its_own():
    brief = [
        RewardConfig(function="length", name="soft", arguments={"free_tokens": 1, "scale_tokens": 4}),
        RewardConfig(function="length", name="hard", arguments={"free_tokens": 2, "scale_tokens": 1}, weight=3.0),
        RewardConfig(function="format", arguments={"pattern": "a|b+"}),
    ]
    with Grader([*brief, config("length")]) as grader:
        assert grader.names == ("soft", "hard", "format", "length")
        cases = [GradingCase(0, "p", "bbb", (1, 2), {}), GradingCase(1, "p", "a\n", (1, 2, 3, 4, 5), {})]
        assert grader.grade(cases) == [
            Graded(0, 3.75, {"soft": -0.25, "hard": 0.0, "format": 1.0, "length": 3.0}, {}),
            Graded(1, -2.0, {"soft": -1.0, "hard": -1.0, "format": 0.0, "length": 2.0}, {}),
        ]


def test_none_is_left_out_of_the_sum():
    with Grader([config("length"), config("only_long", weight=10.0)]) as grader:
        assert [
            (graded.reward, graded.values["only_long"]) for graded in grader.grade([case(0, "a"), case(1, "abcd")])
        ] == [
            (1.0, None),
            (14.0, 1.0),
        ]


def test_none_from_every_function_is_a_failure_by_name():
    with Grader([config("only_long", on_failure=-1.0)]) as grader:
        assert grader.grade([case(2, "abcd"), case(3, "a")])[1] == Graded(
            3, -1.0, {"only_long": -1.0}, {"only_long": "reward only_long of response 3 is None, as are all others"}
        )


def test_a_failure_counts_what_is_configured_and_is_reported(caplog: pytest.LogCaptureFixture):
    settings = {"weight": 2.0, "on_failure": -0.25}
    with Grader([config("failing", **settings), config("length")]) as grader, caplog.at_level(logging.WARNING):
        graded = grader.grade([case(4, "good"), case(5, "bad")])
    assert graded[0] == Graded(4, 6.0, {"failing": 1.0, "length": 4.0}, {})
    assert (graded[1].reward, graded[1].values) == (2.5, {"failing": -0.25, "length": 3.0})
    assert graded[1].errors["failing"].startswith("reward failing of response 5 raised ZeroDivisionError")
    assert "response 5 raised ZeroDivisionError" in caplog.text
    assert "it counts as -0.25" in caplog.text


def test_a_failure_may_end_grading():
    with (
        Grader([config("failing", on_failure="stop")]) as grader,
        pytest.raises(GradingError, match="reward failing of response 5 raised ZeroDivisionError"),
    ):
        grader.grade([case(4, "good"), case(5, "bad")])


GOOD, BAD = "good", "bad"


@pytest.mark.parametrize(
    ("share", "micro_batches", "failed"),
    [
        (0.5, [[BAD, BAD]], "2 of 2"),
        (1.0, [[BAD, BAD]], "2 of 2"),
        (1.0, [[GOOD, BAD], [BAD, BAD]], None),
        (0.5, [[GOOD, BAD], [BAD, BAD, GOOD]], "2 of 3"),
        (0.5, [[GOOD], [BAD]], "1 of 1"),
        (0.0, [[GOOD, GOOD, BAD]], "1 of 3"),
        (0.5, [[GOOD, BAD], [BAD, GOOD], []], None),
    ],
)
def test_a_function_that_mostly_fails_ends_grading_with_its_first_error(
    share: float, micro_batches: list[list[str]], failed: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tasks.grading.grader.FAILED_SHARE_MAX", share)
    with Grader([config("failing", on_failure=-1.0), config("length")]) as grader:
        *before, last = [
            [case(10 * i + j, text) for j, text in enumerate(each)] for i, each in enumerate(micro_batches)
        ]
        for cases in before:
            grader.grade(cases)
        if failed is None:
            grader.grade(last)
            return
        number = 10 * len(before) + micro_batches[-1].index(BAD)
        with pytest.raises(
            GradingError,
            match=rf"^reward failing fails for {failed} responses; .*; the first error: reward failing of response "
            rf"{number} raised ZeroDivisionError",
        ):
            grader.grade(last)


def test_missing_columns_are_found_before_anything_is_generated():
    with Grader([config("arithmetic"), config("explicit")]) as grader:
        grader.check_columns({"worked", "target"})
        with pytest.raises(GradingError, match="missing reward column: explicit needs 'target'; there are: 'worked'"):
            grader.check_columns({"worked"})
        with pytest.raises(GradingError, match="missing reward column: arithmetic needs 'worked'; there are: none"):
            grader.check_columns(())
        with pytest.raises(GradingError, match="missing reward column: explicit"):
            grader.grade([case(0, "a")])


@pytest.mark.slow
def test_checking_opens_every_function_but_the_models_that_are_known(tmp_path: Path):
    absent = RewardConfig(function="reward_model", name="judge", model=str(tmp_path / "nowhere"))
    check_rewards([config("explicit"), absent], {"target"}, {"judge"})
    with pytest.raises(GradingError, match="missing reward column: explicit needs 'target'; there are: none"):
        check_rewards([config("explicit"), absent], (), {"judge"})
    with pytest.raises(GradingError, match=r"^reward 'judge': model: value '.*nowhere' does not exist; allowed: a Hug"):
        check_rewards([absent], ())
    with pytest.raises(GradingError, match="no function is configured"):
        check_rewards([], ())


@pytest.mark.slow
def test_mathematics_needs_one_of_several_columns():
    with Grader([RewardConfig(function="math")]) as grader:
        grader.check_columns({"solution"})
        with pytest.raises(
            GradingError, match="math needs 'ground_truth' or 'answer' or 'solution'; there are: 'truth'"
        ):
            grader.check_columns({"truth"})


@dataclass(frozen=True)
class Rows:
    """Prompts with one column."""

    answers: tuple[str, ...]
    columns: frozenset[str] = frozenset({"answer"})

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(str(index), "?", {"answer": self.answers[index]})

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))


@pytest.mark.slow
def test_every_ground_truth_is_read_before_anything_is_generated():
    mathematics, prompts = [RewardConfig(function="math")], Rows((r"\$18.90", *"7" * 3000, "", "8"))
    with pytest.raises(GradingError, match=r"^reward 'math' cannot grade row 3001: the ground truth '' is no mathemat"):
        check_rewards(mathematics, prompts.columns, prompts=prompts)
    check_rewards(mathematics, prompts.columns, prompts=prompts, is_new=False)
    check_rewards(mathematics, prompts.columns, prompts=Rows((r"\$18.90", "7")))


@pytest.mark.slow
def test_ground_truths_are_read_in_calls_of_a_few_hundred_each_with_its_own_time_limit():
    prompts = Rows(("", *map(str, range(1_000)), "?"))
    with pytest.raises(
        GradingError, match=r"^reward 'math' cannot grade row 0: the ground truth '' is no mathematics$"
    ):
        check_rewards([RewardConfig(function="math")], prompts.columns, prompts=prompts)


@pytest.mark.slow
def test_a_ground_truth_that_cannot_be_read_is_named_by_file_and_line(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "7"}\n\n{"prompt": "b", "answer": {"target": 7}}\n')
    prompts = load_prompts(DataConfig(source=str(rows)))
    where = f"{rows}: line 3: the ground truth \"{{'target': 7}}\" is an object"
    with pytest.raises(GradingError, match=f"^reward 'math' cannot grade {re.escape(where)}"):
        check_rewards([RewardConfig(function="math")], prompts.columns, prompts=prompts)


def test_names_that_would_collide_are_written_out():
    functions = [RewardConfig(function=f"{module}_rewards:length") for module in ("graded", "other")]
    with Grader(functions) as grader:
        assert grader.names == ("graded_rewards:length", "other_rewards:length")


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([], "rewards: no function is configured"),
        ([config("length"), config("length")], "rewards: 'graded_rewards:length' is configured twice"),
        ([config("length", name="a"), config("only_long", name="a")], "rewards: 2 functions are called 'a'"),
        ([config("length"), config("lenght")], "graded_rewards has no 'lenght'"),
    ],
)
def test_functions_that_cannot_be_used_are_refused_at_start(configs: list[RewardConfig], message: str):
    with pytest.raises(GradingError, match=message):
        Grader(configs)
