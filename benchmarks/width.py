"""Following a wide crew: what one reader of the journals of 64 to 1,000 members asks for, computes, and lags behind.

Run: python -m benchmarks.width --json. The reader is production's (GroupFollower over JournalReader), the store is in
memory, and the members are a schedule: each decodes 5,000 tokens per second in 64 responses and writes a shard every
flush interval, at a moment of its own. Time is virtual, but for the reader's own processor time, which the clock adds
to every look, and for requests, each of which is given LATENCY_S.

Needs memory for all journals: 0.7 GiB for 250 members, less than 6 GiB for 1,000, and 24 GiB for 4,000.
"""

import argparse
import heapq
import math
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.reporting import Target, finish
from storage.journal.assembly import JournalReader
from storage.journal.journal import PARALLEL_READS
from storage.journal.shard import Finish, Row, encode_shard
from storage.records import layout, records
from storage.records.records import ClaimRecord, PlanRecord, SamplingParams, SlotPlan
from storage.stores.memory import MemoryStore
from storage.stores.metered import MeteredStore
from tasks.configuration.rollout import RolloutConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.journal_follower import FollowConfig, GroupFollower

WIDTHS = (64, 250, 1000)
TOKENS_PER_S = 5000.0
IN_FLIGHT, GENERATIONS = 64, 8
MEAN_TOKENS = 8000
VOCABULARY = 150_000
# A GET of an object of 200 KB from S3 in its region, 5 to 40 ms as published; of a missing one about the same.
LATENCY_S = 0.02
SEED = 1
# How much of the run is measured, after what it takes until every member has written twice.
WARM_INTERVALS, MEASURED_INTERVALS = 2.0, 3.0
REQUESTS_PER_S, CORES, LAG_INTERVALS, GROWTH = 300, 0.5, 1.5, 1.05
JUDGED = 1000


class Ended(Exception):  # noqa: N818 - not an error
    """The measured time is over."""


@dataclass
class Running:
    """A response that a member decodes: how many tokens it has and will have."""

    response: int
    length: int
    written: int = 0


@dataclass
class Member:
    """One member's schedule. A response that ends makes room for the next of its slot."""

    slot: int
    waiting: Iterator[Running]
    running: list[Running] = field(default_factory=list)
    shards: int = 0
    tokens: int = 0

    @property
    def name(self) -> str:
        return f"{self.slot:05d}-{self.slot:016x}"

    def rows(self, rng: np.random.Generator, interval_s: float) -> list[Row]:
        """What the member decoded in one flush interval."""
        while len(self.running) < IN_FLIGHT and (begun := next(self.waiting, None)):
            self.running.append(begun)
        each = round(TOKENS_PER_S * interval_s / IN_FLIGHT)
        rows = []
        for running in self.running:
            count = min(each, running.length - running.written)
            end = running.written + count == running.length
            rows.append(
                Row(
                    response=running.response,
                    epoch=1,
                    start=running.written,
                    token_ids=rng.integers(VOCABULARY, size=count, dtype=np.uint32),
                    logprobs=rng.standard_normal(count, dtype=np.float32),
                    weight_version=0,
                    finish=Finish.STOP if end else Finish.RUNNING,
                )
            )
            running.written += count
            self.tokens += count
        self.running = [running for running in self.running if running.written < running.length]
        return rows


class NotedStore(MemoryStore):
    """Notes how long after its writing each shard was first read."""

    def __init__(self, clock: "CrewClock") -> None:
        super().__init__()
        self._clock = clock
        self.written_s: dict[str, float] = {}
        self.lags_s: dict[str, float] = {}

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        body = super().get(key, start, end)
        if key in self.written_s and key not in self.lags_s:
            self.lags_s[key] = self._clock.monotonic() - self.written_s[key]
        return body


class CrewClock:
    """Virtual time in which the members write what is due while the reader sleeps."""

    def __init__(self, width: int, interval_s: float) -> None:
        self._rng = np.random.default_rng(SEED)
        self._interval_s = interval_s
        self._now_s = 0.0
        self.plan = a_plan(width)
        self.store = NotedStore(self)
        self.asked = MeteredStore(self.store)
        self.members = [Member(slot, self._responses(slot)) for slot in range(width)]
        self._due = [(float(self._rng.uniform(0, interval_s)), slot) for slot in range(width)]
        heapq.heapify(self._due)
        self._since_cpu_s, self._requests = time.process_time(), 0
        self.cpu_s = 0.0
        for member in self.members:
            claim = ClaimRecord(
                unit=member.slot, epoch=1, incarnation=member.name, slot=member.slot, responses=None, sealed={}
            )
            records.commit(self.store, layout.claim(0, member.slot, 1), claim)

    @property
    def num_requests(self) -> int:
        """How many requests the reader has made."""
        return self.asked.requests.gets + self.asked.requests.puts

    def monotonic(self) -> float:
        return self._now_s

    def wall(self) -> float:
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        """Count the look that has ended, let its time pass, and let the members write."""
        look_s = time.process_time() - self._since_cpu_s
        asked = self.num_requests
        self.cpu_s += look_s
        self._now_s += look_s + LATENCY_S * (asked - self._requests) / PARALLEL_READS + duration_s
        self._requests = asked
        while self._due and self._due[0][0] <= self._now_s:
            at_s, slot = heapq.heappop(self._due)
            self._write(self.members[slot], at_s)
            heapq.heappush(self._due, (at_s + self._interval_s, slot))
        self._since_cpu_s = time.process_time()

    def _write(self, member: Member, at_s: float) -> None:
        rows = member.rows(self._rng, self._interval_s)
        if rows:
            key = layout.shard(0, member.name, member.shards)
            self.store.create(key, encode_shard(rows))
            self.store.written_s[key] = at_s
            member.shards += 1

    def _responses(self, slot: int) -> Iterator[Running]:
        """The responses of a slot; those that run first are met in the middle of their lives."""
        for index, response in enumerate(self.plan.responses_of(slot)):
            length = 1 + int(self._rng.exponential(MEAN_TOKENS))
            yield Running(response, max(1, int(length * self._rng.random())) if index < IN_FLIGHT else length)


def a_plan(width: int) -> PlanRecord:
    """A plan with half as many responses again as the members decode at once."""
    groups = IN_FLIGHT * 3 // 2 // GENERATIONS
    return PlanRecord(
        iteration=0,
        weight_version=0,
        run_seed=SEED,
        num_generations=GENERATIONS,
        prompts_key="prompts",
        first_prompt=0,
        slots=tuple(
            SlotPlan(slot=slot, pool="rollout", groups=tuple(range(slot * groups, (slot + 1) * groups)))
            for slot in range(width)
        ),
        sampling=SamplingParams(max_completion_length=10 * MEAN_TOKENS),
        config={},
        created_at_s=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What following cost in the measured time. Lags are in flush intervals.

    bytes_per_token: by how much the process grew for each journalled token, the store's own copy of it included.
    """

    width: int
    requests_per_s: float
    cores: float
    lag_median: float
    lag_p99: float
    bytes_per_token: float
    groups: int

    def row(self) -> dict[str, object]:
        return {
            "members": self.width,
            "requests/s": self.requests_per_s,
            "cores": self.cores,
            "lag, median (intervals)": self.lag_median,
            "lag, 99 % (intervals)": self.lag_p99,
            "memory (bytes a token)": self.bytes_per_token,
            "groups that ended": self.groups,
        }


def follow(width: int) -> Followed:
    """Follow a crew for WARM_INTERVALS and then MEASURED_INTERVALS flush intervals."""
    rollout, trainer = RolloutConfig(), TrainerConfig()
    interval_s = rollout.flush_interval_s
    clock = CrewClock(width, interval_s)
    began = _Mark()

    def watch(_: bool) -> None:
        if not began.is_set and clock.monotonic() >= WARM_INTERVALS * interval_s:
            began.set(clock)
        elif began.is_set and clock.monotonic() >= began.at_s + MEASURED_INTERVALS * interval_s:
            raise Ended

    config = FollowConfig(
        in_plan_order=False,
        timeout_s=trainer.group_timeout_s,
        poll_interval_s=rollout.poll_interval_s,
        flush_interval_s=interval_s,
    )
    follower = GroupFollower(JournalReader(clock.asked, clock.plan), clock.plan, config, clock, watch)
    pending, groups = list(range(clock.plan.num_groups)), 0
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        while True:
            group = follower.wait(pending)
            pending.remove(group)
            groups += 1
    except Ended:
        pass
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024
    took_s = clock.monotonic() - began.at_s
    # What is not read yet lags at least since it was written.
    lags = sorted(
        clock.store.lags_s.get(key, clock.monotonic() - written_s) / interval_s
        for key, written_s in clock.store.written_s.items()
        if began.at_s - interval_s <= written_s <= clock.monotonic() - rollout.poll_interval_s
    )
    tokens = sum(member.tokens for member in clock.members)
    return Followed(
        width=width,
        requests_per_s=(clock.num_requests - began.requests) / took_s,
        cores=(clock.cpu_s - began.cpu_s) / took_s,
        lag_median=lags[len(lags) // 2],
        lag_p99=lags[int(0.99 * len(lags))],
        bytes_per_token=grown / max(1, tokens),
        groups=groups,
    )


class _Mark:
    """What was counted when the measured time began."""

    def __init__(self) -> None:
        self.is_set, self.at_s, self.cpu_s, self.requests = False, 0.0, 0.0, 0

    def set(self, clock: CrewClock) -> None:
        self.is_set, self.at_s, self.cpu_s = True, clock.monotonic(), clock.cpu_s
        self.requests = clock.num_requests


def growth(followed: Sequence[Followed], figure: str) -> float:
    """The exponent with which a figure grows from the second width to the last; 1 is in proportion."""
    first, last = followed[min(1, len(followed) - 1)], followed[-1]
    return math.log(getattr(last, figure) / getattr(first, figure)) / math.log(last.width / first.width)


def targets_of(followed: Sequence[Followed]) -> list[Target]:
    judged = next((each for each in followed if each.width == JUDGED), None)
    found = []
    if judged is not None:
        found += [
            Target(f"requests_per_s_at_{JUDGED}", judged.requests_per_s, f"<= {REQUESTS_PER_S}"),
            Target(f"cores_at_{JUDGED}", judged.cores, f"<= {CORES}"),
            Target(f"lag_intervals_at_{JUDGED}", judged.lag_p99, f"<= {LAG_INTERVALS}"),
        ]
    if len(followed) > 2:
        found += [
            Target(f"growth_of_{figure}", growth(followed, figure), f"<= {GROWTH}")
            for figure in ("requests_per_s", "cores")
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    followed = [follow(width) for width in arguments.widths]
    notes = {"tokens/s of a member": TOKENS_PER_S, "flush interval s": RolloutConfig().flush_interval_s}
    finish("width", [each.row() for each in followed], targets_of(followed), as_json=arguments.json, notes=notes)


if __name__ == "__main__":
    main()
