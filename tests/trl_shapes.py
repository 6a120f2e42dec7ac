"""Tools and environments of the shapes that TRL's examples have; child processes import this module by name.

A read-only database tool that limits its own time by an alarm; a word game whose end is an exception, over a client
that is made in the constructor and reset with a text for the prompt; a class whose tools are asynchronous; dice.
"""

import asyncio
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from random import randrange
from typing import Any

import numpy as np


class TooLong(Exception):  # noqa: N818
    pass


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    def ring(number: int, frame: Any) -> None:
        raise TooLong(f"stopped after {seconds} seconds")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def query(sql: str) -> list[tuple]:
    """
    Ask the database.

    Args:
        sql: a command in SQL

    Returns:
        The rows.
    """
    with alarm(60), closing(sqlite3.connect(":memory:")) as connection:
        return connection.execute(sql).fetchall()


def ponder(seconds: float) -> str:
    """
    Think about it.

    Args:
        seconds: how long
    """
    with alarm(1):
        time.sleep(seconds)
    return "thought"


async def weather(city: str) -> dict[str, Any]:
    """
    Ask for the weather.

    Args:
        city: where
    """
    await asyncio.sleep(0)
    return {"city": city, "degrees": len(city)}


class GameClient:
    """What a client of a game's server does."""

    def __init__(self, url: str) -> None:
        self.url, self.said = url, ""

    def reset(self) -> str:
        self.said = "Guess a word of five letters."
        return self.said

    def step(self, word: str) -> tuple[str, float, bool]:
        self.said += f" {word}: {'right' if word == 'crane' else 'wrong'}."
        return self.said, float(word == "crane"), word == "crane"


class WordGame:
    def __init__(self):
        self.client = GameClient("http://127.0.0.1")

    def reset(self, **kwargs) -> str | None:
        self.seen = self.client.reset()
        self.reward, self.done = 0.0, False
        return self.seen

    def guess(self, word: str) -> str:
        """
        Guess a word.

        Args:
            word: the guess

        Returns:
            What the game says.
        """
        if self.done:
            raise ValueError("Game over.")
        everything, self.reward, self.done = self.client.step(word)
        answer, self.seen = everything[len(self.seen) :], everything
        return answer

    def get_reward(self) -> float:
        return self.reward


class Dice:
    """It draws from the modules' generators without a seed, partly by functions that were imported by name."""

    def reset(self, **kwargs: Any) -> str:
        self.total = 0
        time.sleep(0.01 * random.SystemRandom().random())
        numpys = f"{np.random.rand():.6f} {np.random.choice(1000)}"  # noqa: NPY002 - as users' code does
        return f"{random.random():.6f} {randrange(1000)} {numpys}"

    async def roll(self, sides: int) -> str:
        """
        Roll a die.

        Args:
            sides: how many it has
        """
        await asyncio.sleep(0)
        self.total += random.randint(1, sides)
        return f"{self.total} {np.random.randint(1000)}"  # noqa: NPY002 - as above
