from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.configuration.data import ArithmeticConfig
from tasks.prompts.arithmetic import ALPHABET, ArithmeticPrompts, Problem, demonstration, problem

CONFIG = ArithmeticConfig()


def test_the_worked_answer_is_the_documented_one():
    example = Problem((7, 3, 9))
    assert (example.prompt, example.worked, example.answer) == ("a7b3c9=", "a707;b370;c909;#9", "9")


def test_problems_never_change_silently():
    assert [problem(0, index, CONFIG).prompt for index in range(4)] == [
        "a1b1c7d3e0f9g8h2i6=",
        "a9b0c8d0e5f6g1=",
        "a7b3c4d8e2f7g1h4i3j9k8l8=",
        "a2b9=",
    ]


@given(seed=st.integers(0, 2**40), index=st.integers(0, 2**40), items_max=st.integers(1, 26))
def test_a_problem_is_a_function_of_seed_and_index(seed: int, index: int, items_max: int):
    config = ArithmeticConfig(items_max=items_max)
    task = problem(seed, index, config)
    assert task == problem(seed, index, config)
    assert 1 <= len(task.digits) <= items_max
    assert all(0 <= digit < 10 for digit in task.digits)
    assert set(task.prompt + task.worked) <= set(ALPHABET)


def test_lengths_have_a_geometric_tail():
    counts = [len(problem(1, index, CONFIG).digits) for index in range(4000)]
    assert 0.18 < sum(count == 1 for count in counts) / 4000 < 0.22
    assert 0.02 < sum(count == 16 for count in counts) / 4000 < 0.05  # 0.8 ** 15 = 0.035
    assert 4.6 < sum(counts) / 4000 < 5.1  # (1 - 0.8 ** 16) / 0.2 = 4.86


def test_a_demonstration_without_noise_is_the_worked_answer():
    task = problem(5, 7, CONFIG)
    assert demonstration(task, Random(0), 0.0) == task.worked


def test_a_noisy_demonstration_goes_on_from_its_wrong_sum():
    rng, changed, steps = Random(3), 0, 0
    for index in range(300):
        task = problem(5, index, CONFIG)
        *shown, last = demonstration(task, rng, 0.5).split(";")
        total = 0
        for step, digit in zip(shown, task.digits, strict=True):
            assert int(step[1]) == digit
            assert int(step[2]) == total
            changed += int(step[3]) != (total + digit) % 10
            steps += 1
            total = int(step[3])
        assert last == f"#{total}"
    assert 0.40 < changed / steps < 0.50  # a tenth of the random digits are right by chance


def test_noise_is_a_probability():
    with pytest.raises(ValueError, match="noise: value 2"):
        demonstration(Problem((1,)), Random(0), 2)


def test_generated_prompts_carry_what_rewards_need():
    prompts = ArithmeticPrompts(3, 0, CONFIG)
    assert len(prompts) == 3
    assert [prompt.id for prompt in prompts] == ["0", "1", "2"]
    assert set(prompts[1].columns) == prompts.columns == {"answer", "worked"}
    assert prompts[1].text_or_messages == problem(0, 1, CONFIG).prompt
    with pytest.raises(IndexError, match="prompt 3 of 3"):
        prompts[3]
