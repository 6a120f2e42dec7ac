# ruff: noqa: ARG005 - the names of parameters are the subject here
from collections.abc import Callable
from typing import Any

import pytest

from tasks.grading.binding import bind
from tasks.grading.reward import GradedConversation, GradingCase, GradingError

CHAT = [{"role": "user", "content": "2+2?"}]
TEXT_CASES = [
    GradingCase(10, "p0", "c0", (1, 2), {"answer": "a0", "level": 3}),
    GradingCase(11, "p1", "c1", (3,), {"answer": "a1"}),
]


def test_trl_gets_lists_of_prompts_completions_tokens_and_columns():
    def reward(prompts, completions, completion_ids, answer, **columns):
        return prompts, completions, completion_ids, answer, columns["level"]

    bound = bind(reward, "r")
    assert bound.batched
    assert bound.needs == (("answer",),)
    assert bound.call(TEXT_CASES) == (["p0", "p1"], ["c0", "c1"], [[1, 2], [3]], ["a0", "a1"], [3, None])


def test_trl_gets_chat_completions_for_chat_prompts():
    bound = bind(lambda completions, **_: completions, "r")
    assert bound.call([GradingCase(1, CHAT, "4", (), {})]) == [[{"role": "assistant", "content": "4"}]]


def test_trl_functions_take_any_subset():
    assert bind(lambda completion_ids: [len(ids) for ids in completion_ids], "r").call(TEXT_CASES) == [2, 1]
    assert bind(lambda prompts, level=None: (prompts, level), "r").call(TEXT_CASES) == (["p0", "p1"], [3, None])
    assert bind(lambda completions, level=None: (completions, level), "r").needs == ()


def test_what_trl_hands_over_besides_is_there():
    def reward(completions, trainer_state, log_metric, **kwargs):
        log_metric("accuracy", 0.5)
        kwargs["log_extra"]("column", completions)
        return trainer_state

    bound = bind(reward, "r")
    assert bound.needs == ()
    assert bound.call(TEXT_CASES) is None


def verl_case(**columns: Any) -> GradingCase:
    return GradingCase(1, CHAT, "#### 4", (), {"data_source": "gsm8k", "ground_truth": "4", **columns})


def test_verl_gets_one_response():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return data_source, solution_str, ground_truth, extra_info

    bound = bind(compute_score, "r")
    assert not bound.batched
    assert bound.needs == (("data_source",), ("ground_truth",))
    assert bound.call([verl_case(extra_info={"index": 3})]) == ("gsm8k", "#### 4", "4", {"index": 3})
    assert bound.call([verl_case()]) == ("gsm8k", "#### 4", "4", {})


def test_verl_functions_may_take_less_or_anything():
    assert bind(lambda solution_str, ground_truth: (solution_str, ground_truth), "r").call([verl_case()]) == (
        "#### 4",
        "4",
    )
    bound = bind(lambda solution_str, **rest: sorted(rest), "r")
    assert bound.needs == ()
    assert bound.call([verl_case(answer="4")]) == ["data_source", "extra_info", "ground_truth"]


def test_verl_gets_a_batch_of_responses():
    def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
        return list(zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True))

    bound = bind(compute_scores, "r")
    assert bound.batched
    assert bound.needs == (("data_source",), ("ground_truth",))
    found = bound.call([verl_case(extra_info={"index": 3}), verl_case(ground_truth="5")])
    assert found == [("gsm8k", "#### 4", "4", {"index": 3}), ("gsm8k", "#### 4", "5", {})]
    assert bind(lambda solution_strs, ground_truths=None: (solution_strs, ground_truths), "r").call(
        [GradingCase(1, CHAT, "4", (), {})]
    ) == (["4"], None)
    assert bind(lambda solution_strs, **rest: sorted(rest), "r").call([verl_case(answer="4")]) == [
        "data_sources",
        "extra_infos",
        "ground_truths",
    ]


def test_callable_objects_are_functions():
    class Judge:
        def __call__(self, completions, **kwargs):
            return [1.0] * len(completions)

    assert bind(Judge(), "r").call(TEXT_CASES) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda args, sample: 0, r"has the signature \(args, sample\): it is neither"),
        (lambda **kwargs: 0, "it is neither"),
        (lambda completions, solution_str: 0, "it is both"),
        (lambda solution_str, solution_strs: 0, "it is both"),
        (lambda solution_strs, tokenizer: 0, "nothing is known to pass as tokenizer"),
        (lambda solution_str, ground_truth, tokenizer: 0, "nothing is known to pass as tokenizer"),
        (lambda completions, /: 0, "parameters must have usable names"),
    ],
)
def test_other_signatures_are_refused_with_both_forms(function: Callable[..., Any], reason: str):
    with pytest.raises(GradingError, match=rf"reward 'pkg:f' .*{reason}; allowed: TRL's f\(prompts.*verl's f\(data"):
        bind(function, "pkg:f")


SPOKEN = [
    *({"role": "user", "content": "4?"}, {"role": "assistant", "content": "look"}),
    *({"role": "tool", "name": "look", "content": "4"}, {"role": "assistant", "content": "#### 4"}),
]
TURNS = GradingCase(
    1, SPOKEN[:1], "#### 4", (5, 9, 6), {"extra_info": {"index": 3}}, GradedConversation(SPOKEN, 1, 2, 0.5)
)


def test_with_turns_trl_gets_all_messages_after_the_prompt():
    assert bind(lambda completions: completions, "r").call([TURNS]) == [SPOKEN[1:]]


def test_with_turns_verl_gets_the_last_answer_and_the_conversation():
    bound = bind(lambda solution_str, extra_info: (solution_str, extra_info), "r")
    assert bound.call([TURNS]) == ("#### 4", {"index": 3, "messages": SPOKEN})
    batched = bind(lambda solution_strs, extra_infos: (solution_strs, extra_infos), "r")
    assert batched.call([TURNS]) == (["#### 4"], [{"index": 3, "messages": SPOKEN}])


def test_a_function_that_wants_the_environments_is_told_why_it_cannot_have_them():
    with pytest.raises(GradingError, match="wants the environments, which have ended where the responses were"):
        bind(lambda completions, environments: [0.0], "r")
    # As TRL's examples with environments write it.
    with pytest.raises(GradingError, match=r"let the environment's get_reward\(\) return the value"):
        bind(lambda environments, **kwargs: [each.score for each in environments], "r")
    assert bind(lambda completions, environments=None: [environments], "r").call([TURNS]) == [None]
