"""A game that OpenEnv serves, and a class with the signatures of TRL's `environment_factory` over OpenEnv's client."""

import os
from typing import Any

from openenv.core import GenericEnvClient
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

URL = "OPENENV_GAME_URL"


class Guess(Action):
    number: int


class Answer(Observation):
    text: str = ""


class NumberGame(Environment):
    """The number follows from the seed. A session of the server has an instance of its own."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number, self._state = 0, State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Answer:
        self._number, self._state = (seed or 0) % 10, State(episode_id=episode_id, step_count=0)
        return Answer(text="Guess a digit.", reward=0.0)

    def step(self, action: Action, timeout_s: float | None = None, **given: Any) -> Answer:
        assert isinstance(action, Guess)
        self._state.step_count += 1
        right = action.number == self._number
        text = "right" if right else "too low" if action.number < self._number else "too high"
        return Answer(text=f"{text} after {self._state.step_count}", reward=float(right), done=right)

    @property
    def state(self) -> State:
        return self._state


def served() -> Any:
    """The ASGI application."""
    return create_fastapi_app(NumberGame, Guess, Answer, max_concurrent_envs=8)


class GuessingEnv:
    def __init__(self):
        self.client = GenericEnvClient(base_url=os.environ[URL]).sync()

    def reset(self, seed: int, **kwargs) -> str | None:
        self.reward = 0.0
        return self.client.reset(seed=seed).observation["text"]

    def guess(self, number: int) -> str:
        """
        Guess the digit.

        Args:
            number: The digit

        Returns:
            What the game says.
        """
        result = self.client.step({"number": number})
        self.reward = result.reward
        return result.observation["text"]

    def get_reward(self) -> float:
        return self.reward

    def close(self) -> None:
        self.client.close()


class LookingEnv:
    """The same game for a policy that writes one character per token: its only tool guesses three, and answers so."""

    def __init__(self):
        self.client = GenericEnvClient(base_url=os.environ[URL]).sync()

    def reset(self, seed: int, **kwargs) -> str | None:
        self.told = self.client.reset(seed=seed).observation["text"]
        return "h"

    def look(self, key: str) -> str:
        """
        Guess three.

        Args:
            key: Any character
        """
        self.told = self.client.step({"number": 3}).observation["text"]
        return "3"

    def get_reward(self) -> float:
        return float(self.told.endswith("after 1"))

    def close(self) -> None:
        self.client.close()
