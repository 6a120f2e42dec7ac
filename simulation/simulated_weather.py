"""The weather between processes and their store: how often which fault strikes, drawn once for a history."""

import random
from dataclasses import replace

from storage.stores.faults import FaultRates


def draw_weather(rng: random.Random, ttl_s: float) -> FaultRates:
    """Draw the store's fault rates, from none to one failed call in twelve; pauses last about as long as `ttl_s`."""
    factor = rng.choice((0.0, 0.3, 1.0, 2.0))
    return FaultRates(
        throttled=0.010 * factor,
        request_lost=0.006 * factor,
        request_late=0.004 * factor,
        answer_lost=0.010 * factor,
        answer_retried=0.008 * factor,
        pause_before=0.0015 * factor,
        pause_after=0.0015 * factor,
        latency_s=rng.choice((0.005, 0.05, 0.2)),
        timeout_s=rng.uniform(1, 10),
        pause_s=(0.5 * ttl_s, 4 * ttl_s),
    )


def in_calm(weather: FaultRates) -> FaultRates:
    """The rates when there are no more faults."""
    return FaultRates(latency_s=weather.latency_s, page_keys=weather.page_keys)


def in_outage(weather: FaultRates) -> FaultRates:
    """The rates in an outage, when every request fails."""
    return replace(in_calm(weather), request_lost=0.8, throttled=0.2, timeout_s=weather.timeout_s)


def in_refusal(weather: FaultRates, *, denied: bool) -> FaultRates:
    """The rates while the store refuses requests: all if `denied`, else those that take room."""
    return replace(in_calm(weather), denied=float(denied), full=float(not denied))
