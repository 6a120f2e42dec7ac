"""Reward functions of tests; graders import this module by name in processes of their own."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def even_length(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
    """1 for completions of even length: about half of what a random policy says."""
    return [float(len(ids) % 2 == 0) for ids in completion_ids]


def noting(file: str) -> Callable[..., list[float]]:
    """`even_length`, which also adds a line to the file for each response that it grades."""

    def grade(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        with Path(file).open("a") as lines:
            lines.write("graded\n" * len(completion_ids))
        return even_length(completion_ids, **columns)

    return grade


def behind_a_gate(file: str) -> Callable[..., list[float]]:
    """`even_length`, which waits until the file exists; the call that finds "once" in it deletes it."""

    def grade(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        gate = Path(file)
        while not gate.exists():
            time.sleep(0.02)
        if gate.read_text() == "once":
            gate.unlink()
        return even_length(completion_ids, **columns)

    return grade


def stopping_at(file: str, call: int) -> Callable[..., list[float]]:
    """`even_length`, which adds a line to the file at each call, and waits at this call, from 0, for `<file>.go`."""

    def grade(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        with Path(file).open("a+") as lines:
            lines.write("called\n")
        calls = Path(file).read_text().count("\n")
        while calls == call + 1 and not Path(f"{file}.go").exists():
            time.sleep(0.02)
        return even_length(completion_ids, **columns)

    return grade


def beginning_with(n: int) -> Callable[..., list[float]]:
    """The share of the first n tokens that are even; only an integer is a number of tokens."""

    def grade(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
        return [sum(index < len(ids) and ids[index] % 2 == 0 for index in range(n)) / n for ids in completion_ids]

    return grade


def needs_an_answer(completions: list[str], answer: list[str], **_columns: Any) -> list[float]:
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def needs_a_column(completions: list[str], difficulty: list[str], **_columns: Any) -> list[float]:
    return [float(len(text) > len(hard)) for text, hard in zip(completions, difficulty, strict=True)]


def no_multiples_of_three(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
    """Raises for completions whose length is a multiple of three."""
    if any(len(ids) % 3 == 0 for ids in completion_ids):
        raise RuntimeError("three is too many")
    return even_length(completion_ids)


def only_even_length(completion_ids: list[list[int]], **_columns: Any) -> list[float | None]:
    """1 for completions of even length, and no opinion on others."""
    return [1.0 if len(ids) % 2 == 0 else None for ids in completion_ids]


def messages_seen(solution_str: str, extra_info: dict[str, object]) -> float:
    messages = extra_info.get("messages", [])
    assert isinstance(messages, list)
    return float(len(messages))


_CALLS: list[int] = []


def counts_calls(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
    """A value that shows the call's number in this process, and which responses it has been given together."""
    _CALLS.append(len(completion_ids))
    return [len(_CALLS) + sum(ids) / 7 / (1 + sum(map(sum, completion_ids))) for ids in completion_ids]


def characters(solution_str: str) -> float:
    """A value per response, in verl's signature."""
    return len(solution_str) / 7


def answers_at_random(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
    """Other values at every call."""
    return [random.random() for _ in completion_ids]
