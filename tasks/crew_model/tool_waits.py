"""Waiting for tools: the step time of a member by the number of responses that it holds. No IO, no clock.

A response that waits for a tool takes no place among those that are decoded, so a member may hold more than it decodes
together. Of b held responses it decodes d together, where each is decoded for tau(d) and waits for w seconds per token:

    d = b tau(d) / (tau(d) + w), and a token of each takes tau(d) + w.

So all of planning, which times members by a curve and a largest batch, times them by the curve tau(d(b)) + w up to the
largest b whose d fits. Waiting is taken to be in proportion to length, because longer responses have more turns: of the
ways that were simulated this predicts best, also where the number of turns does not depend on the length.
"""

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tasks.crew_model.step_time import StepTime

# Points of the curve; between them it is linear.
_POINTS = 48
_ROUNDS = 30


@lru_cache(maxsize=64)
def while_held(step_time: StepTime, responses_max: int, tool_s_per_token: float, held_max: int) -> tuple[StepTime, int]:
    """(seconds of a token by the responses that a member holds, the most that it holds).

    responses_max: the most that it decodes together. tool_s_per_token: w. held_max: at most so many are there to hold;
    a member may hold responses_max in any case. Without waiting, both are those of the engine.
    """
    if not tool_s_per_token:
        return step_time, responses_max
    room = math.floor(responses_max * (1 + tool_s_per_token / step_time.step_s(responses_max)))
    most = max(responses_max, min(room, held_max))
    held = np.unique(np.rint(np.geomspace(1, most, _POINTS))).astype(np.int64)
    steps_s = _steps_s(step_time, responses_max, tool_s_per_token, held.astype(np.float64))
    points = zip(held.tolist(), (steps_s + tool_s_per_token).tolist(), strict=True)
    return StepTime(tuple(points)), most


def decoded_together(step_time: StepTime, responses_max: int, tool_s_per_token: float, held: int) -> int:
    """d, the nearest whole number from 1 on."""
    if not tool_s_per_token:
        return held
    [step_s] = _steps_s(step_time, responses_max, tool_s_per_token, np.array([float(held)]))
    together = round(held * float(step_s) / (float(step_s) + tool_s_per_token))
    return max(1, min(responses_max, together))


def _steps_s(
    step_time: StepTime, responses_max: int, tool_s_per_token: float, held: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """tau(d) for each number of held responses: the largest fixed point, from above."""
    table = step_time.table(responses_max)
    batch = np.minimum(held, responses_max)
    for _ in range(_ROUNDS):
        steps_s = np.interp(np.maximum(1.0, batch), np.arange(len(table)), table)
        batch = np.minimum(held * steps_s / (steps_s + tool_s_per_token), responses_max)
    return np.asarray(np.interp(np.maximum(1.0, batch), np.arange(len(table)), table))
