"""Hidden sums: a task that a policy can only solve with a tool, as an environment with the methods that TRL asks for.

The prompt names keys. The digit behind each is known to the environment alone. The policy looks the keys up, one call
for each, and after each answer writes the sum before and after it. Sums are taken modulo BASE. A problem has one key or
a few, and now and then ten, so the numbers of turns have a long tail.
"""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.call_ledger import CallLedger
from tasks.turns.current_call import current_call

BASE = 5
KEYS = "abcdefghijklmnop"
# How many keys the problems of a step have.
STEP_COUNTS = (*[1] * 12, *[2] * 8, *[3] * 5, *[4] * 3, 5, 6, 8, 10)
UNKNOWN_KEY = "x"
# The path of a ledger of all calls; without it, none is kept.
LEDGER = "HIDDEN_SUMS_LEDGER"


def problem(rng: random.Random, count: int) -> tuple[str, dict[str, str]]:
    """`count` keys, and the digit behind each key there is."""
    return "".join(rng.choice(KEYS) for _ in range(count)), {key: str(rng.randrange(BASE)) for key in KEYS}


def dataset_rows(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Endless problems as rows of a dataset: chat messages, and the columns that `reset` and `right_sum` receive.

    The problems of every step have as many keys as STEP_COUNTS says, so that all steps are equally hard.
    """
    while True:
        for count in rng.sample(STEP_COUNTS, len(STEP_COUNTS)):
            keys, table = problem(rng, count)
            yield {"prompt": [{"role": "user", "content": keys}], "keys": keys, "table": table}


class HiddenSums:
    """The environment of one response."""

    def reset(self, keys: str, table: dict[str, str], **_columns: Any) -> None:
        self._keys, self._table, self._looked_up = keys, table, ""

    def look(self, key: str) -> str:
        """Look up the digit behind a key.

        Args:
            key: one of the letters that the question names.
        """
        if path := os.environ.get(LEDGER):
            ledger, call = CallLedger(Path(path)), current_call()
            time.sleep(ledger.begin(call, os.getpid()))
            ledger.end(call)
        self._looked_up += key
        return self._table.get(key, UNKNOWN_KEY)

    def get_reward(self) -> float:
        """1 if the keys were looked up that the question names, in its order and nothing else."""
        return float(self._looked_up == self._keys)

    def restore(self, turns: list[dict[str, Any]]) -> None:
        """Become the environment after these turns, without any look-up."""
        self._looked_up = "".join(call["arguments"]["key"] for turn in turns for call in turn["calls"])


def right_sum(
    completions: list[list[dict[str, Any]]], keys: list[str], table: list[dict[str, str]], **_columns: Any
) -> list[float]:
    """1 for each conversation whose last message names the sum of the digits behind the keys."""
    wanted = [sum(int(digits[key]) for key in asked) % BASE for asked, digits in zip(keys, table, strict=True)]
    said = [messages[-1]["content"].rpartition("#") for messages in completions]
    return [float(mark == "#" and text == str(total)) for (_, mark, text), total in zip(said, wanted, strict=True)]
