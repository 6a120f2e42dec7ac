"""Claim: dropping interrupted responses, or sampling them anew, biases the training data; resuming them does not.

Training on the surviving responses favours short ones: with a loss rate r, a response of duration d survives with
probability exp(-r d). Sampling an interrupted response anew until an attempt is not interrupted weighs the lengths of
its prompt in the same way, however long one tries. Restarting it with its own noise is unbiased for a trainer that
waits, but favours short responses under a deadline. If the reward depends on length, advantages are biased too.
benchmarks/interruption.py defines each policy exactly.

Two sources of responses, each with a length per response and a reward that depends on it:
(a) real: the demo's warm-started policy on its arithmetic task with its verifier. Every response is sampled undisturbed
    and, for the policy that samples anew, once more. Here the prompt almost determines the length.
(b) stated: lengths of DeepSeek-R1 as served, of whose variance half is due to the prompt, and a reward that falls with
    the rank of the length.
Losses strike workers, with all their unfinished responses, at random. Time is that of a model that decodes 40 tokens/s
and at most 32,768 tokens; (a) is scaled so that its longest response takes that time. Intervals are 95 % intervals of
the mean over independent iterations, paired with the same responses undisturbed.

A trainer that waits gets unbiased data when responses are resumed, or restarted with their own noise, because they end
with the same tokens. This equality is what the benchmark measures: real responses are cut at random tokens, resumed by
the engine, and compared.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.interruption import POLICIES, Circumstances, Policy, draw_losses, trained_on
from benchmarks.learning_run import TASK, WARM_START
from benchmarks.reporting import Target, finish
from examples.warm_start import warm_start
from storage.journal.noise_keys import noise_key
from storage.records.records import SamplingParams
from tasks.prompts.arithmetic import ArithmeticPrompts
from tasks.sampling.engines.engine import GenerationRequest
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.weight_tensors import as_block

GROUP_SIZE = 8
WORKERS = 16
LOSSES_PER_H = (0.1, 0.61, 1.8, 4.0)
TOKENS_PER_S = 40.0
LENGTH_MAX = 32_768
LONGEST_S = LENGTH_MAX / TOKENS_PER_S
DEADLINES = (math.inf, 1.5)
COSTS = Circumstances(cold_start=100 / LONGEST_S, takeover=2 / LONGEST_S, flush_interval=5 / LONGEST_S)
# Output tokens of DeepSeek-R1 as served: (quantile, tokens) of 1.38 million requests, ServeGen (alibaba/ServeGen at
# f891d11, Apache-2.0). Linear between these points; mean 1579 (all quantiles: 1528).
R1_LENGTHS = (
    (0.0, 9),
    (0.01, 141),
    (0.05, 225),
    (0.1, 287),
    (0.2, 387),
    (0.3, 470),
    (0.4, 582),
    (0.5, 792),
    (0.6, 1104),
    (0.7, 1367),
    (0.8, 1680),
    (0.9, 3432),
    (0.95, 5701),
    (0.98, 9338),
    (0.99, 12_607),
    (0.995, 15_737),
    (0.999, 20_833),
    (1.0, 32_768),
)
PROMPT_SHARE = 0.5  # the prompt's share of the variance of a length's normal score
REWARD_AT_SHORTEST, REWARD_AT_LONGEST = 0.9, 0.3
REAL_LENGTH_MAX = 64
CUTS = 128


@dataclass(frozen=True)
class Responses:
    """The responses of one iteration, whole groups in order: lengths and rewards, both [n, k].

    Column 0 is the response; further columns are new samples. duration_per_token: as a share of the longest duration.
    """

    lengths: npt.NDArray[np.float64]
    rewards: npt.NDArray[np.float64]
    duration_per_token: float

    @property
    def groups(self) -> list[int]:
        return [response // GROUP_SIZE for response in range(len(self.lengths))]


@dataclass(frozen=True)
class Estimate:
    """A mean over iterations, and the half width of its (normal) 95 % interval."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half_width:.3f}"


def estimate(values: Sequence[float]) -> Estimate:
    """The estimate from at least two independent values."""
    return Estimate(statistics.fmean(values), 1.96 * statistics.stdev(values) / math.sqrt(len(values)))


def stated_responses(rng: np.random.Generator, groups: int, attempts: int) -> Responses:
    """Source (b): lengths from R1_LENGTHS; a response is right with a probability that falls linearly with its rank."""
    shape = (groups * GROUP_SIZE, attempts)
    prompt = np.repeat(rng.standard_normal(groups), GROUP_SIZE)[:, None]
    score = math.sqrt(PROMPT_SHARE) * prompt + math.sqrt(1 - PROMPT_SHARE) * rng.standard_normal(shape)
    rank = np.vectorize(NormalDist().cdf)(score)
    quantiles, tokens = zip(*R1_LENGTHS, strict=True)
    right = rng.random(shape) < REWARD_AT_SHORTEST + (REWARD_AT_LONGEST - REWARD_AT_SHORTEST) * rank
    return Responses(np.rint(np.interp(rank, quantiles, tokens)), right.astype(float), 1 / LENGTH_MAX)


class RealPolicy:
    """Source (a): the warm-started model and its task."""

    def __init__(self, model_dir: Path, problems: int, attempts: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
        self._problems = list(ArithmeticPrompts(problems, 987_654, TASK))
        self._prompts = [tuple(self._tokenizer(each.text_or_messages)["input_ids"]) for each in self._problems]
        self._count, self._attempts = problems * GROUP_SIZE, attempts
        self._engine = TorchEngine(model_dir, max_responses_in_flight=256, context_length=96)
        model = AutoModelForCausalLM.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
        self._engine.load_weights(0, {name: as_block(tensor) for name, tensor in model.named_parameters()})
        self._tokens = [
            self._decode([self._request(response, attempt) for response in range(self._count)])
            for attempt in range(attempts)
        ]

    def responses(self) -> Responses:
        """The lengths and the verifier's rewards of all samples."""
        lengths = [[len(each[response]) for each in self._tokens] for response in range(self._count)]
        rewards = [[self._reward(response, each[response]) for each in self._tokens] for response in range(self._count)]
        return Responses(np.array(lengths, float), np.array(rewards, float), 1 / REAL_LENGTH_MAX)

    def changed_by_resuming(self, cuts: int, seed: int) -> int:
        """Cut responses at random tokens, resume them, and count those that end differently."""
        rng = np.random.default_rng(seed)
        drawn = rng.choice(self._count, cuts, replace=False).tolist()
        kept = {response: int(rng.integers(0, len(self._tokens[0][response]))) for response in drawn}
        ends = self._decode([self._request(r, 0, self._tokens[0][r][:cut]) for r, cut in kept.items()])
        return sum(self._tokens[0][r][:cut] + ends[r] != self._tokens[0][r] for r, cut in kept.items())

    def _request(self, response: int, attempt: int, generated: Sequence[int] = ()) -> GenerationRequest:
        sampling = SamplingParams(max_completion_length=REAL_LENGTH_MAX, stop_token_ids=(2,))
        group = response // GROUP_SIZE
        key = noise_key(1, attempt, response)
        return GenerationRequest(response, group, self._prompts[group], tuple(generated), key, sampling)

    def _decode(self, requests: list[GenerationRequest]) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {request.response: [] for request in requests}
        waiting, in_flight = requests, 0
        while waiting or in_flight:
            room = self._engine.max_responses_in_flight - in_flight
            now, waiting = waiting[:room], waiting[room:]
            self._engine.start(now)
            in_flight += len(now)
            for delta in self._engine.step():
                tokens[delta.response] += delta.token_ids
                in_flight -= delta.finish_reason is not None
        return tokens

    def _reward(self, response: int, token_ids: list[int]) -> float:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return float(text == self._problems[response // GROUP_SIZE].columns["worked"])


@dataclass(frozen=True)
class Seen:
    """A policy's training data in one iteration against the undisturbed data: shares, ratios and reward difference."""

    share: float
    length_ratio: float
    reward_difference: float


def seen(policy: Policy, responses: Responses, losses: list[list[float]], deadline: float) -> Seen:
    """The training data of one iteration under one policy."""
    given = Circumstances(**(asdict(COSTS) | {"deadline": deadline}))
    durations = responses.lengths * responses.duration_per_token
    columns = trained_on(policy, durations, responses.groups, losses, given)
    (kept,) = np.nonzero(columns >= 0)
    if not len(kept):
        raise ValueError(f"{policy}: nothing of {len(columns)} responses is left to train on; allowed: a milder storm")
    lengths, rewards = (table[kept, columns[kept]].mean() for table in (responses.lengths, responses.rewards))
    truth_length, truth_reward = responses.lengths[:, 0].mean(), responses.rewards[:, 0].mean()
    return Seen(len(kept) / len(columns), float(lengths / truth_length), float(rewards - truth_reward))


def biases(source: str, iterations: Sequence[Responses], seed: int) -> list[dict[str, Any]]:
    """Table rows per loss rate and policy; each iteration has its own losses, which are the same for all policies."""
    rows = []
    for rate_index, per_h in enumerate(LOSSES_PER_H):
        rng = np.random.default_rng([seed, rate_index])
        rate = per_h * LONGEST_S / 3600
        storms = [draw_losses(rng, WORKERS, rate, until=64.0) for _ in iterations]
        for policy in POLICIES:
            row: dict[str, Any] = {"source": source, "losses/h": per_h, "policy": policy}
            for deadline in DEADLINES:
                found = [seen(policy, each, losses, deadline) for each, losses in zip(iterations, storms, strict=True)]
                when = "" if deadline == math.inf else ", deadline"
                row[f"trained{when}"] = statistics.fmean(one.share for one in found)
                row[f"length ratio{when}"] = estimate([one.length_ratio for one in found])
                row[f"reward bias{when}"] = estimate([one.reward_difference for one in found])
            rows.append(row)
    return rows


def report(
    rows: list[dict[str, Any]], truths: dict[str, Any], changed: int, notes: dict[str, Any], *, as_json: bool
) -> None:
    """Print table, targets and JSON."""

    def worst(policy: Policy, source: str, per_h: float) -> float:
        """The upper end of the interval of the length ratio."""
        found: Estimate = next(
            row["length ratio"]
            for row in rows
            if (row["policy"], row["source"], row["losses/h"]) == (policy, source, per_h)
        )
        return found.mean + found.half_width

    resumed = [row for row in rows if row["policy"] == "resume"]
    off = max(abs(row["length ratio"].mean - 1) + abs(row["reward bias"].mean) for row in resumed)
    targets = [
        Target("resume_bias_largest", off, "<= 0"),
        Target("resumed_responses_changed", changed, "<= 0"),
        Target("drop_length_ratio_upper_95_stated_1.8_per_h", worst("drop response", "stated", 1.8), "< 1"),
        Target(
            "sampled_anew_length_ratio_upper_95_stated_1.8_per_h", worst("restart, sampled anew", "stated", 1.8), "< 1"
        ),
        Target("drop_length_ratio_upper_95_real_4_per_h", worst("drop response", "real", 4.0), "< 1"),
    ]
    shown = [{key: str(value) if isinstance(value, Estimate) else value for key, value in row.items()} for row in rows]
    exact = [
        {key: asdict(value) if isinstance(value, Estimate) else value for key, value in row.items()} for row in rows
    ]
    results = {
        "truth": truths,
        "estimates": exact,
        "costs": asdict(COSTS) | {"unit_s": LONGEST_S, "deadline": DEADLINES[1]},
    }
    finish("bias", shown, targets, as_json=as_json, notes=notes, results=results)


def truth_of(iterations: Sequence[Responses]) -> dict[str, float]:
    """The undisturbed mean length, mean reward, and the correlation of the two."""
    lengths = np.concatenate([each.lengths[:, 0] for each in iterations])
    rewards = np.concatenate([each.rewards[:, 0] for each in iterations])
    correlation = float(np.corrcoef(lengths, rewards)[0, 1])
    return {"length": float(lengths.mean()), "reward": float(rewards.mean()), "correlation": correlation}


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--full", action="store_true", help="400 iterations, 512 problems: some minutes")
    given = parser.parse_args()
    iterations, problems, attempts = (400, 512, 6) if given.full else (100, 96, 4)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        warm_start(Path(temporary) / "model", WARM_START, lambda _step, _loss: None)
        policy = RealPolicy(Path(temporary) / "model", problems, attempts)
    changed = policy.changed_by_resuming(CUTS, seed=0)
    real = [policy.responses()] * iterations
    rng = np.random.default_rng(1)
    stated = [stated_responses(rng, WORKERS * 8, attempts) for _ in range(iterations)]
    rows = [*biases("real", real, seed=2), *biases("stated", stated, seed=3)]
    truths = {"real": truth_of(real[:1]), "stated": truth_of(stated)}
    notes = {"iterations": iterations, "responses_real": problems * GROUP_SIZE, "workers": WORKERS}
    report(rows, truths, changed, notes | {"responses_stated": WORKERS * 8 * GROUP_SIZE}, as_json=given.json)


if __name__ == "__main__":
    main()
