"""The prompts of each iteration, the length of each response and its tools' answers, drawn from a seed.

Every draw has a key of its own, so all policies of a comparison get equal work, whatever a policy decides.
"""

import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from resources.documents import parse_json
from resources.regular_files import open_file
from tasks.crew_model.response_progress import ToolAnswer
from tasks.forecasting.scenario import LengthsScenario, ScenarioError, ToolsScenario, WorkScenario

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_ORDER, _PROMPTS, _SHIFTS, _SAMPLES, _TOOLS = range(5)


class ResponseLengths:
    """The draws of a seed; raises ScenarioError if a file of lengths cannot be used."""

    def __init__(self, work: WorkScenario, seed: int) -> None:
        self._work = work
        self._seed = seed
        self._quantiles = _quantiles(work.lengths)

    def prompts(self, iteration: int) -> Ints:
        """Prompt numbers, [groups]; every epoch has its own order."""
        work = self._work
        places = np.arange(iteration * work.num_prompts_per_step, (iteration + 1) * work.num_prompts_per_step)
        size = work.prompts_in_dataset
        if size is None:
            return places
        drawn = [self._rng(_ORDER, int(epoch)).permutation(size)[places[places // size == epoch] % size]
                 for epoch in np.unique(places // size)]  # fmt: skip
        return np.concatenate(drawn)

    def lengths(self, iteration: int) -> Ints:
        """Lengths in tokens, [groups, num_generations], from 1 to the cap.

        A response's normal score is sqrt(rho) times its prompt's plus sqrt(1 - rho) times its own; its length is the
        quantile of that score.
        """
        work, settings = self._work, self._work.lengths
        of_prompt, shift = self._prompt_scores(iteration)
        own = self._rng(_SAMPLES, iteration).standard_normal((work.num_prompts_per_step, work.num_generations))
        scores = math.sqrt(settings.rho) * of_prompt[:, None] + math.sqrt(1 - settings.rho) * own
        if settings.median is not None and settings.sigma is not None:
            tokens = settings.median * np.exp(settings.sigma * scores)
        else:
            tokens = np.interp(_normal_cdf(scores), *self._quantiles)
        tokens = tokens * (1 + settings.drift) ** iteration + shift[:, None]
        return np.rint(np.clip(tokens, 1, settings.cap)).astype(np.int64)

    def _prompt_scores(self, iteration: int) -> tuple[Floats, Floats]:
        """Normal score and shift in tokens of each group's prompt.

        Shifts of two epochs are independent, so the difference has sqrt(2) times the deviation of a shift.
        """
        work, size = self._work, self._work.prompts_in_dataset
        if size is None:
            scores = self._rng(_PROMPTS, iteration).standard_normal(work.num_prompts_per_step)
            return scores, np.zeros(work.num_prompts_per_step)
        prompts = self.prompts(iteration)
        places = np.arange(len(prompts)) + iteration * len(prompts)
        deviation = work.lengths.epoch_change_tokens / math.sqrt(2)
        shift = np.zeros(len(prompts))
        for epoch in np.unique(places // size):
            within = places // size == epoch
            shift[within] = deviation * self._rng(_SHIFTS, int(epoch)).standard_normal(size)[prompts[within]]
        return self._rng(_PROMPTS, 0).standard_normal(size)[prompts], shift

    def _rng(self, purpose: int, number: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, purpose, number))


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


def _quantiles(settings: LengthsScenario) -> tuple[Floats, Floats]:
    """(quantiles, tokens), ascending; empty for a log-normal distribution."""
    if settings.quantiles is not None:
        points = np.array(settings.quantiles)
    elif settings.path is not None and settings.column is not None:
        points = _read_quantiles(settings.path, settings.column)
    else:
        points = np.empty((0, 2))
    return points[:, 0], points[:, 1]


def _read_quantiles(path: str, column: str) -> Floats:
    """The quantiles in a file, [points, 2].

    A CSV file with a column `quantile` holds them. Any other CSV or JSONL file (`.jsonl`: an object a line) has one
    response in each row, as Azure's and Mooncake's traces have; then the lengths are sorted.
    """
    try:
        rows = _rows(Path(path))
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from None
    if not rows:
        raise ScenarioError(f"{path}: it has no rows; allowed: at least 2")
    if column not in rows[0]:
        names = ", ".join(map(str, rows[0]))
        raise ScenarioError(f"{path}: no column {column!r}; allowed: {names}")
    lengths = [_number(path, number, column, row.get(column)) for number, row in enumerate(rows, start=1)]
    if "quantile" in rows[0]:
        at = [_number(path, number, "quantile", row.get("quantile")) for number, row in enumerate(rows, start=1)]
        points = np.array([at, lengths]).T
        if len(points) < 2 or (np.diff(points[:, 0]) <= 0).any() or (np.diff(points[:, 1]) < 0).any():
            raise ScenarioError(f"{path}: column {column!r}: {len(points)} rows; allowed: at least 2, ascending")
        return points
    if len(lengths) < 2:
        raise ScenarioError(f"{path}: it has 1 row; allowed: at least 2")
    return np.array([np.linspace(0, 1, len(lengths)), np.sort(lengths)]).T


def _rows(path: Path) -> list[Mapping[str, object]]:
    with io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:
        if path.suffix != ".jsonl":
            return list(csv.DictReader(file))
        found = [parse_json(line) for line in file if line.strip()]
    rows: list[Mapping[str, object]] = [row for row in found if isinstance(row, dict)]
    if len(rows) < len(found):
        raise ValueError("a line is no object; allowed: a JSON object in each")
    return rows


def _number(path: str, row: int, column: str, value: object) -> float:
    try:
        found = float(str(value))
    except ValueError:
        found = math.nan
    if not (math.isfinite(found) and found >= 0):
        raise ScenarioError(f"{path}: row {row}: {column}: value {str(value)[:40]!r}; allowed: a number from 0 on")
    return found


def _normal_cdf(scores: Floats) -> Floats:
    flat = [0.5 * math.erfc(-score / math.sqrt(2)) for score in scores.ravel()]
    return np.array(flat).reshape(scores.shape)
