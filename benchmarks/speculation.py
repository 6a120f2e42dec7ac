"""What drafts change and save: the same tokens for every drafter, steps by source, and seconds of a long tail.

Run: python -m benchmarks.speculation --json (8 min). The policy is the demo's, warm-started on worked sums. The long
tail is paced: each step takes the seconds of a model of 7B on an H100, on a clock of its own to which the drafter's
real processor time is added; the drafts are right with a given share. Nothing here runs on a GPU.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.draft_sources import two_epochs
from benchmarks.reporting import Target, finish, interleave, ratios
from benchmarks.weight_steps import make_random_policy
from examples.warm_start import WarmStart, warm_start
from storage.journal.noise_keys import noise_key
from storage.records.records import SamplingParams
from tasks.configuration.rollout import DRAFTS_MAX
from tasks.learning.pretrained import read_tensors
from tasks.prompts.arithmetic import problem
from tasks.sampling.engines.drafter import Drafter
from tasks.sampling.engines.engine import GenerationRequest
from tasks.sampling.engines.scripted_drafter import ScriptedDrafter, changing, perfect, wrong
from tasks.sampling.engines.speculation import Speculation
from tasks.sampling.engines.suffix_drafter import SuffixDrafter
from tasks.sampling.engines.torch_engine import TorchEngine

GROUPS, GENERATIONS, CONTEXT_LENGTH = 32, 8, 256
LONG = 1024
SAMPLING = SamplingParams(max_completion_length=160, stop_token_ids=(2,))
LOGPROBS_WITHIN = 1e-4
# Seconds of a step of 7B in bfloat16 on an H100 by the tokens fed: 15.2 GB are read at 60 % of 3.35 TB/s, and from 172
# tokens on arithmetic takes longer. Computed, not measured.
STEP_S = ((1, 7.6e-3), (64, 8.4e-3), (172, 10e-3), (344, 18e-3), (688, 34e-3), (2752, 130e-3))
SHARE, TAIL_MAX, IDLE_WITHIN = 0.6, 0.7, 0.01

Drafts = int | Literal["auto"]
Found = dict[int, tuple[list[int], list[float]]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Decoded:
    """What an engine gave for all requests: tokens and log-probs by response, the number of steps, and seconds."""

    found: Found
    steps: int
    seconds: float


def requests_of(directory: Path, iteration: int, groups: int) -> list[GenerationRequest]:
    """The groups of an iteration: in each the same prompts, and other noise."""
    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    prompts = [tuple(tokenizer(problem(7, index, WarmStart().task).prompt)["input_ids"]) for index in range(groups)]
    numbers = range(groups * GENERATIONS)
    return [
        GenerationRequest(r, r // GENERATIONS, prompts[r // GENERATIONS], (), noise_key(3, iteration, r), SAMPLING)
        for r in numbers
    ]


def make_engine(
    directory: Path,
    rows: int,
    speculation: Speculation | None,
    kind: type[TorchEngine],
    context_length: int = CONTEXT_LENGTH,
) -> TorchEngine:
    engine = kind(
        directory,
        device="cpu",
        max_responses_in_flight=rows,
        context_length=context_length,
        speculation=speculation,
    )
    engine.load_weights(0, read_tensors(directory))
    return engine


def decode(engine: TorchEngine, requests: Sequence[GenerationRequest]) -> Decoded:
    """Decode all requests; a response that ends makes room for the next."""
    waiting, flying, steps = list(requests), 0, 0
    found: Found = {request.response: ([], []) for request in requests}
    began_s = time.process_time()
    while waiting or flying:
        room = engine.max_responses_in_flight - flying
        if coming := waiting[:room]:
            engine.start(coming)
            flying += len(coming)
            del waiting[:room]
        steps += 1
        for delta in engine.step():
            tokens, logprobs = found[delta.response]
            tokens += delta.token_ids
            logprobs += delta.logprobs
            flying -= delta.finish_reason is not None
    return Decoded(found, steps, time.process_time() - began_s)


def identical(found: Found, wanted: Found) -> int:
    """How many responses have the same tokens, each with the same log-prob."""

    def same(response: int) -> bool:
        (tokens, logprobs), (others, other_logprobs) = found[response], wanted[response]
        near = all(abs(a - b) <= LOGPROBS_WITHIN for a, b in zip(logprobs, other_logprobs, strict=False))
        return tokens == others and near

    return sum(map(same, wanted))


def drafters(wanted: Found, rows: int, vocab_size: int) -> dict[str, Callable[[], Drafter]]:
    """By name, makers of drafters that know plain decoding's answers, or nothing."""

    def answer(request: GenerationRequest) -> Sequence[int]:
        return wanted[request.response][0]

    def scripted(share: Callable[[int], float], **given: Any) -> Callable[[], Drafter]:
        return lambda: ScriptedDrafter(vocab_size, share, **given)

    return {
        "perfect": scripted(perfect, answer=answer),
        "always wrong": scripted(wrong, answer=answer),
        "random": scripted(wrong, ragged=True),
        "right with 0.8": scripted(lambda _: 0.8, answer=answer, ragged=True),
        "changing": scripted(changing, answer=answer),
        "siblings": lambda: SuffixDrafter(rows=rows, context_length=CONTEXT_LENGTH),
        "ngram": lambda: SuffixDrafter(rows=rows, context_length=CONTEXT_LENGTH, siblings=False),
    }


def steps_by_source(
    directory: Path, before: Found, requests: Sequence[GenerationRequest], plain: Mapping[int, Decoded]
) -> list[dict[str, Any]]:
    """Steps and tokens by source, rows in flight and number of drafts; "past" has an epoch's responses at hand."""
    table = []
    for rows, wanted in plain.items():
        for source in ("ngram", "siblings", "siblings and past"):
            for drafts in (1, 2, 4, 8, "auto"):
                drafter = SuffixDrafter(rows=rows, context_length=CONTEXT_LENGTH, siblings=source != "ngram")
                if source == "siblings and past":
                    for request in requests:
                        drafter.remember(request.prompt_ids, [before[request.response][0]])
                speculation = Speculation(drafter, drafts)
                found = decode(make_engine(directory, rows, speculation, TorchEngine), requests)
                totals = speculation.totals
                table.append(
                    {
                        "rows": rows,
                        "source": source,
                        "drafts": drafts,
                        "identical": identical(found.found, wanted.found),
                        "fewer steps": wanted.steps / found.steps,
                        "accepted": totals.accepted / max(1, totals.drafted),
                        "tokens/step": totals.tokens / found.steps,
                        "as fast": wanted.seconds / found.seconds,
                    }
                )
    return table


class PacedClock:
    """Seconds that steps take by STEP_S, and processor time while the clock runs."""

    def __init__(self) -> None:
        self._now_s, self._runs, self._since_s = 0.0, False, 0.0

    def __call__(self) -> float:
        return self._now_s + (time.process_time() - self._since_s if self._runs else 0.0)

    def step(self, tokens: int) -> None:
        low, high = next((a, b) for a, b in pairwise(STEP_S) if tokens <= b[0])
        self._now_s += low[1] + (high[1] - low[1]) * (tokens - low[0]) / (high[0] - low[0])

    def run(self, runs: bool) -> bool:
        """Start or stop; returns whether the clock ran."""
        ran, now_s = self._runs, time.process_time()
        if ran:
            self._now_s += now_s - self._since_s
        self._runs, self._since_s = runs, now_s
        return ran


class PacedDrafter:
    """Drafts of a scripted drafter, for which the processor time of a real one passes on a paced clock."""

    def __init__(self, scripted: Drafter, real: Drafter, clock: PacedClock) -> None:
        self._scripted, self._real, self._clock = scripted, real, clock

    def start(self, requests: Sequence[GenerationRequest], tokens: Sequence[Sequence[int]]) -> None:
        self._real.start(requests, tokens)
        self._free(lambda: self._scripted.start(requests, tokens))

    def draft(self, responses: Sequence[int], most: int) -> list[Sequence[int]]:
        self._real.draft(responses, most)
        return self._free(lambda: self._scripted.draft(responses, most))

    def leave(self, responses: Sequence[int]) -> None:
        self._real.leave(responses)
        self._free(lambda: self._scripted.leave(responses))

    def _free(self, called: Callable[[], Result]) -> Result:
        ran = self._clock.run(False)
        result = called()
        self._clock.run(ran)
        return result


def timed(clock: PacedClock, method: Callable[..., Result]) -> Callable[..., Result]:
    """The same, while the clock runs."""

    def run(*given: Any) -> Result:
        ran = clock.run(True)
        result = method(*given)
        clock.run(ran)
        return result

    return run


def paced_speculation(drafter: Drafter, clock: PacedClock) -> Speculation:
    """Speculation of which all processor time passes on the clock: the drafter's, and the choice of drafts."""
    speculation: Any = Speculation(
        PacedDrafter(drafter, SuffixDrafter(rows=256, context_length=LONG), clock), "auto", now_s=clock
    )
    for name in ("start", "drafts", "settle", "leave"):
        setattr(speculation, name, timed(clock, getattr(speculation, name)))
    return speculation


def paced(clock: PacedClock) -> type[TorchEngine]:
    """The kind of engine whose steps take their time on this clock."""

    class PacedEngine(TorchEngine):
        def _draw(self, logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
            clock.step(len(logits))
            return super()._draw(logits, batch)

    return PacedEngine


def tail_requests(count: int, longest: int, *, equal: bool) -> list[GenerationRequest]:
    """Responses without stop tokens whose lengths are log-normal, or all the longest."""
    lengths = random.Random(0)
    drawn = [longest if equal else min(longest, int(lengths.lognormvariate(4.6, 0.9)) + 1) for _ in range(count)]
    return [
        GenerationRequest(
            r,
            r // GENERATIONS,
            (5 + r // GENERATIONS % 50, 6, 7),
            (),
            noise_key(5, 0, r),
            SamplingParams(max_completion_length=drawn[r]),
        )
        for r in range(count)
    ]


def paced_seconds(
    directory: Path, requests: Sequence[GenerationRequest], rows: int, wanted: Found | None, share: float
) -> tuple[float, Found]:
    """Seconds on the paced clock to the last response, by "auto" with drafts of this share, or without any drafter."""
    clock, speculation = PacedClock(), None
    if wanted is not None:
        known = wanted
        scripted = ScriptedDrafter(4096, lambda _: share, answer=lambda request: known[request.response][0])
        speculation = paced_speculation(scripted, clock)
    found = decode(make_engine(directory, rows, speculation, paced(clock), LONG), requests)
    return clock(), found.found


def long_tails(directory: Path, count: int, longest: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The table of paced iterations, and by name the seconds with drafts over those without."""
    cases = {
        f"long tail, share {SHARE}": (count, 64, SHARE, False),
        "long tail, share 0": (count, 64, 0.0, False),
        f"full batch, share {SHARE}": (768, 256, SHARE, True),
    }
    table, found = [], {}
    for name, (responses, rows, share, equal) in cases.items():
        requests = tail_requests(responses, longest, equal=equal)
        plain_s, wanted = paced_seconds(directory, requests, rows, None, 0.0)
        drafted_s, drafted = paced_seconds(directory, requests, rows, wanted, share)
        found[name] = drafted_s / plain_s
        table.append(
            {
                "iteration": name,
                "rows": rows,
                "identical": identical(drafted, wanted),
                "of": responses,
                "plain s": plain_s,
                "with drafts s": drafted_s,
                "ratio": found[name],
            }
        )
    return table, found


def few_rows(
    directory: Path, before: Found, requests: Sequence[GenerationRequest], rounds: int
) -> list[dict[str, Any]]:
    """Processor time of few rows in flight on this CPU, without drafts over with `auto`, in interleaved rounds."""
    rows, asked = 4, requests[: 4 * GENERATIONS]

    def arm(source: str | None) -> Callable[[], float]:
        def run() -> float:
            speculation = None
            if source is not None:
                drafter = SuffixDrafter(rows=rows, context_length=CONTEXT_LENGTH, siblings=source != "ngram")
                if source == "siblings and past":
                    for request in asked:
                        drafter.remember(request.prompt_ids, [before[request.response][0]])
                speculation = Speculation(drafter, "auto")
            return decode(make_engine(directory, rows, speculation, TorchEngine), asked).seconds

        return run

    sources = ("ngram", "siblings", "siblings and past")
    found = interleave({"plain": arm(None)} | {source: arm(source) for source in sources}, rounds)
    return [
        {"rows": rows, "source": source, "drafts": "auto", "as fast": ratios(found["plain"], found[source])}
        for source in sources
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--warm-start-steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        warm_start(model, replace(WarmStart(), steps=given.warm_start_steps), lambda *_: None)
        small = make_random_policy(Path(folder) / "small", hidden=64, layers=1)
        tails, ratio = long_tails(small, 640, 960)
        past = decode(make_engine(model, 64, None, TorchEngine), requests_of(model, 0, given.groups)).found
        requests = requests_of(model, 1, given.groups)
        plain = {rows: decode(make_engine(model, rows, None, TorchEngine), requests) for rows in (64, 8)}
        vocab_size = len(AutoTokenizer.from_pretrained(str(model), local_files_only=True, trust_remote_code=False))
        identity = []
        for name, make in drafters(plain[64].found, 64, vocab_size).items():
            for drafts in range(1, DRAFTS_MAX + 1):
                found = decode(make_engine(model, 64, Speculation(make(), drafts), TorchEngine), requests)
                same = identical(found.found, plain[64].found)
                identity.append({"drafter": name, "drafts": drafts, "identical": same, "steps": found.steps})
        sources = steps_by_source(model, past, requests, plain)
        early = Path(folder) / "early"
        warm_start(early, replace(WarmStart(), steps=given.warm_start_steps * 5 // 6), lambda *_: None)
        engine = partial(make_engine, kind=TorchEngine)
        epochs = two_epochs((early, model), requests_of, given.groups, engine, decode, context_length=CONTEXT_LENGTH)
        few = few_rows(model, past, requests, given.rounds)
    responses = len(requests)
    least = min(row["identical"] for row in identity + sources)
    targets = [
        Target(f"responses of {responses} that every drafter leaves identical", least, f">= {responses}"),
        Target("paced responses that drafts change", sum(row["of"] - row["identical"] for row in tails), "== 0"),
    ]
    bounds = (TAIL_MAX, 1 + IDLE_WITHIN, 1 + IDLE_WITHIN)
    targets += [
        Target(f"seconds over plain: {name}", value, f"<= {bound}")
        for (name, value), bound in zip(ratio.items(), bounds, strict=True)
    ]
    notes = {"responses": responses, "rounds": given.rounds, "warm-start steps": given.warm_start_steps}
    finish("speculation", [*tails, *identity, *sources, *epochs, *few], targets, as_json=given.json, notes=notes)


if __name__ == "__main__":
    main()
