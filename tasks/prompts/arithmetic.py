"""The keyed running sum: an endless supply of small tasks with worked answers whose lengths have a long tail.

An example: the prompt `a7b3c9=` has the worked answer `a707;b370;c909;#9`, which lists for each item its key, its
digit, the old sum and the new sum modulo 10, and then the answer. A problem is a pure function of (seed, index).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase, digits

from tasks.configuration.data import ArithmeticConfig
from tasks.prompts.prompt import Prompt

ALPHABET = ascii_lowercase + digits + "=;#"
"""All characters of prompts and worked answers."""
BASE = 10


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: the sum of digits, modulo BASE.

    Attributes:
        digits: The digits to sum; their keys are a, b, c, ... in order.
    """

    digits: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return "".join(f"{key}{digit}" for key, digit in zip(ascii_lowercase, self.digits, strict=False)) + "="

    @property
    def answer(self) -> str:
        return str(sum(self.digits) % BASE)

    @property
    def worked(self) -> str:
        return _worked(self, Random(0), 0.0)


def problem(seed: int, index: int, config: ArithmeticConfig) -> Problem:
    """Problem `index` of the sequence with this `seed`."""
    # Only random() is used, because Python promises to keep its sequence for a given seed.
    rng = Random(f"{seed}/{index}")
    count = 1
    while count < config.items_max and rng.random() >= config.stop_probability:
        count += 1
    return Problem(tuple(int(rng.random() * BASE) for _ in range(count)))


def demonstration(problem: Problem, rng: Random, noise: float) -> str:
    """A worked answer for supervised training, in which each new sum is a random digit with probability `noise`.

    Later steps continue from the wrong sum. A policy trained with noise is right only sometimes, so that reinforcement
    learning can improve it.
    """
    if not 0 <= noise <= 1:
        raise ValueError(f"noise: value {noise}; allowed: 0 to 1")
    return _worked(problem, rng, noise)


def _worked(problem: Problem, rng: Random, noise: float) -> str:
    steps, total = [], 0
    for key, digit in zip(ascii_lowercase, problem.digits, strict=False):
        new_total = (total + digit) % BASE
        if noise and rng.random() < noise:
            new_total = int(rng.random() * BASE)
        steps.append(f"{key}{digit}{total}{new_total};")
        total = new_total
    return f"{''.join(steps)}#{total}"


class ArithmeticPrompts:
    """A PromptSet of `size` generated problems with the columns "answer" and "worked"; ids are the indices."""

    columns = frozenset({"answer", "worked"})

    def __init__(self, size: int, seed: int, config: ArithmeticConfig) -> None:
        self._size = size
        self._seed = seed
        self._config = config

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self._size:
            raise IndexError(f"prompt {index} of {self._size}")
        task = problem(self._seed, index, self._config)
        return Prompt(str(index), task.prompt, {"answer": task.answer, "worked": task.worked})

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(self._size))

    def place(self, index: int) -> str:
        """The number of a problem, for messages."""
        return f"problem {index}"
