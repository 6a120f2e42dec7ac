"""Waiting for tools: the step time of a member by the number of responses held. No IO, no clock.

A response that waits for a tool takes no place in the batch, so a member may hold more responses than a batch has
places. With b held responses the batch has d responses, where each token takes tau(d) of decoding and w seconds of
waiting:

    d = b tau(d) / (tau(d) + w), and a token of each response takes tau(d) + w.

Planning times members by a curve and a largest batch, here by the curve tau(d(b)) + w up to the largest b whose d fits.
The wait is taken in proportion to length, because longer responses have more turns: among the simulated rules the rule
predicts best, also where the number of turns does not depend on the length.
"""

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tasks.crew_model.step_time import StepTime

# Points of the curve, which is linear between points.
_POINTS = 48
_ROUNDS = 30


@lru_cache(maxsize=64)
def while_held(step_time: StepTime, responses_max: int, tool_s_per_token: float, held_max: int) -> tuple[StepTime, int]:
    """(seconds of a token by the number of held responses, the most responses held).

    Args:
        step_time: The curve of the engine.
        responses_max: The largest batch.
        tool_s_per_token: w; 0 returns `step_time` and `responses_max`.
        held_max: The most responses to hold; `responses_max` may be held in any case.
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
    """The batch d of `held` responses, as the nearest whole number from 1 on."""
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
