"""A configuration to forecast that takes a second: sixteen groups on L4s, one reserved; and the figures of a setup."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from storage.records.forecast_records import SetupForecast, Spread


@contextmanager
def few_simulations(iterations: int = 3) -> Iterator[None]:
    """Forecasts simulate two seeds of so many iterations meanwhile."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tasks.forecasting.comparison.SEEDS", 2)
        patched.setattr("tasks.forecasting.inputs.ITERATIONS_SIMULATED", iterations)
        yield


def document(url: str = "memory://nothing-to-probe", **sections: Any) -> dict[str, Any]:
    """Sections given are laid over these."""
    whole: dict[str, Any] = {
        "run": {"url": url, "num_prompts_per_step": 16, "num_generations": 4},
        "policy": {"path": "/nowhere/model"},
        "data": {"source": "arithmetic"},
        "rewards": [{"function": "arithmetic"}],
        "sampling": {"max_completion_length": 2048},
        "rollout": {"dtype": "bfloat16", "max_responses_in_flight": 8},
        "pools": {
            "rollout": {"machine": "g6.xlarge", "count": 2, "count_min": 0, "gpus": 1},
            "train": {"machine": "g6.xlarge", "gpus": 1},
        },
        "planning": {"seeding": "auto"},
        "forecast": {
            "iterations": 10,
            "parameters_billions": 1.2,
            "kv_bytes_per_token": 28672,
            "response_median": 400,
        },
    }
    for name, section in sections.items():
        whole[name] = {**whole.get(name, {}), **section}
    return whole


def spread(median: float, share: float = 0.1) -> Spread:
    return Spread(low=median * (1 - share), median=median, high=median * (1 + share))


def a_setup(name: str, hours: float, usd: float, **settings: Any) -> SetupForecast:
    """Of a million tokens."""
    return SetupForecast(
        name=name,
        settings=settings,
        hours=spread(hours),
        usd=spread(usd),
        tokens_per_s=spread(1e6 / hours / 3600),
        usd_per_mtok=spread(usd),
        usd_parts={"useful": usd * 0.75, "idle": usd * 0.25},
    )
