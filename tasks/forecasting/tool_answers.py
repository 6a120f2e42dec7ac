"""Where responses wait for tools, and how long, drawn from a seed.

As the lengths of responses, they are part of the work: no policy's decision changes them.
"""

import numpy as np

from tasks.crew_model.response_progress import ToolAnswer
from tasks.forecasting.response_lengths import Ints
from tasks.forecasting.scenario import ToolsScenario

# A key of its own among those of tasks.forecasting.response_lengths.
_TOOLS = 4


def tool_answers(tools: ToolsScenario, lengths: Ints, seed: int, iteration: int) -> list[tuple[ToolAnswer, ...]]:
    """The answers of each response in order, by its number; lengths: [groups, num_generations] in tokens.

    Their number is drawn from a Poisson distribution, their places evenly between the response's tokens, with at least
    one token in each turn, and their seconds from a log-normal distribution.
    """
    rng = np.random.default_rng((seed, _TOOLS, iteration))
    tokens = lengths.ravel()
    counts = np.minimum(rng.poisson(tools.answers, tokens.size), np.minimum(tokens - 1, tools.answers_max))
    # The mean of a log-normal distribution is exp(mu + sigma^2 / 2).
    waits_s = tools.answer_s * np.exp(tools.sigma * rng.standard_normal(int(counts.sum())) - tools.sigma**2 / 2)
    found, drawn = [], iter(waits_s.tolist())
    for length, count in zip(tokens.tolist(), counts.tolist(), strict=True):
        places = np.sort(rng.choice(length - 1, count, replace=False, shuffle=False)) + 1 if count else ()
        found.append(tuple(ToolAnswer(int(place), next(drawn)) for place in places))
    return found
