"""Paced iterations: engines whose steps take the seconds of a 7B model on an H100, with drafts and without.

Real processor time is added to the clock for whatever drafts cost on the host: the work of the suffix drafter, beside
which a scripted one drafts that is right with a given share, and the choice of the number of drafts. A part of
benchmarks.speculation.
"""

import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from benchmarks.reporting import Measured, ratios
from storage.journal.noise_keys import noise_key
from storage.records.records import SamplingParams
from tasks.sampling.engines.drafter import Drafter
from tasks.sampling.engines.engine import GenerationRequest
from tasks.sampling.engines.scripted_drafter import ScriptedDrafter
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.engines.slot_table import Slot
from tasks.sampling.engines.speculation import Speculation
from tasks.sampling.engines.suffix_drafter import SuffixDrafter

# Seconds of a step of 7B in bfloat16 on an H100 by the tokens fed: 15.2 GB are read at 60 % of 3.35 TB/s, and from 172
# tokens on arithmetic takes longer. Computed, not measured.
STEP_S = ((1, 7.6e-3), (64, 8.4e-3), (172, 10e-3), (344, 18e-3), (688, 34e-3), (2752, 130e-3))
VOCAB_SIZE, CONTEXT_LENGTH, GENERATIONS, LONGEST = 4096, 1024, 8, 960
SHARE, TAIL_MAX, IDLE_WITHIN = 0.6, 0.7, 0.01

Tokens = dict[int, list[int]]
Result = TypeVar("Result")


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

    def timed(self, method: Callable[..., Result], *, runs: bool = True) -> Callable[..., Result]:
        """The same method, in which the clock runs, or stands."""

        def call(*given: Any) -> Result:
            ran = self.run(runs)
            result = method(*given)
            self.run(ran)
            return result

        return call


class PacedDrafter:
    """Drafts of a scripted drafter, which take no time, and the work of a real one, which does."""

    def __init__(self, scripted: Drafter, real: Drafter, clock: PacedClock) -> None:
        self._real = real
        self._start = clock.timed(scripted.start, runs=False)
        self._draft = clock.timed(scripted.draft, runs=False)
        self._leave = clock.timed(scripted.leave, runs=False)

    def start(self, requests: Sequence[GenerationRequest], tokens: Sequence[Sequence[int]]) -> None:
        self._real.start(requests, tokens)
        self._start(requests, tokens)

    def draft(self, responses: Sequence[int], most: int) -> list[Sequence[int]]:
        self._real.draft(responses, most)
        return self._draft(responses, most)

    def leave(self, responses: Sequence[int]) -> None:
        self._real.leave(responses)
        self._leave(responses)


class PacedEngine(ScriptedEngine):
    """An engine whose steps take their time on a clock."""

    def __init__(self, rows: int, clock: PacedClock, speculation: Speculation | None) -> None:
        super().__init__(VOCAB_SIZE, rows, context_length=CONTEXT_LENGTH, speculation=speculation)
        self._paced = clock
        self.load_weights(0, {})

    def _drafts(self, live: Sequence[Slot]) -> Sequence[Sequence[int]]:
        drafts = super()._drafts(live)
        self._paced.step(len(live) * (1 + len(drafts[0])))
        return drafts


def paced_speculation(drafter: Drafter, rows: int, clock: PacedClock) -> Speculation:
    """Speculation by `auto`, with all of its processor time on the clock but the drafter's."""
    real = SuffixDrafter(rows=rows, context_length=CONTEXT_LENGTH)
    speculation: Any = Speculation(PacedDrafter(drafter, real, clock), "auto", now_s=clock)
    for name in ("start", "drafts", "settle", "leave"):
        setattr(speculation, name, clock.timed(getattr(speculation, name)))
    found: Speculation = speculation
    return found


def tail_requests(count: int, *, equal: bool, seed: int = 0) -> list[GenerationRequest]:
    """Responses without stop tokens in groups; their lengths are log-normal, or all the longest."""
    lengths = random.Random(seed)
    drawn = [LONGEST if equal else min(LONGEST, int(lengths.lognormvariate(4.6, 0.9)) + 1) for _ in range(count)]
    return [
        GenerationRequest(
            r,
            r // GENERATIONS,
            (5 + r // GENERATIONS, 6, 7),
            (),
            noise_key(5, seed, r),
            SamplingParams(max_completion_length=drawn[r]),
        )
        for r in range(count)
    ]


def decode(engine: PacedEngine, requests: Sequence[GenerationRequest]) -> Tokens:
    """Decode all requests; a response that ends makes room for the next."""
    waiting, flying = list(requests), 0
    found: Tokens = {request.response: [] for request in requests}
    while waiting or flying:
        if coming := waiting[: engine.max_responses_in_flight - flying]:
            engine.start(coming)
            flying += len(coming)
            del waiting[: len(coming)]
        for delta in engine.step():
            found[delta.response] += delta.token_ids
            flying -= delta.finish_reason is not None
    return found


def paced_seconds(
    requests: Sequence[GenerationRequest], rows: int, wanted: Tokens | None, share: float
) -> tuple[float, Tokens]:
    """Seconds on the paced clock to the last response, by "auto" with drafts of this share, or without any drafter."""
    clock, speculation = PacedClock(), None
    if wanted is not None:
        known = wanted
        scripted = ScriptedDrafter(VOCAB_SIZE, lambda _: share, answer=lambda request: known[request.response])
        speculation = paced_speculation(scripted, rows, clock)
    found = decode(PacedEngine(rows, clock, speculation), requests)
    return clock(), found


def long_tails(rounds: int, count: int = 320) -> tuple[list[dict[str, Any]], dict[str, Measured]]:
    """The table of paced iterations, and by name the seconds with drafts over those without; each round has a seed."""
    cases = {
        f"long tail, share {SHARE}": (count, 64, SHARE, False),
        "long tail, share 0": (count, 64, 0.0, False),
        f"full batch, share {SHARE}": (256, 256, SHARE, True),
    }
    table, found = [], {}
    for name, (responses, rows, share, equal) in cases.items():
        plain_s, drafted_s, changed = [], [], 0
        for seed in range(rounds):
            requests = tail_requests(responses, equal=equal, seed=seed)
            seconds, wanted = paced_seconds(requests, rows, None, 0.0)
            plain_s.append(seconds)
            seconds, drafted = paced_seconds(requests, rows, wanted, share)
            drafted_s.append(seconds)
            changed += sum(drafted[response] != wanted[response] for response in wanted)
        found[name] = ratios(drafted_s, plain_s)
        table.append(
            {"iteration": name, "rows": rows, "responses": responses, "changed": changed, "ratio": found[name]}
        )
    return table, found
