"""Traces of interruptible machines: which machines came and went, and when.

Owns the readers of the two public formats, processes that draw a trace, and scaling, cutting and sampling. Knows
neither clocks nor prices. Availability is not preemption: a falling count does not say which machine was lost. No
public trace of H100 losses is known, so vary the rates, and say that you did.
"""

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from resources.regular_files import read_file

_SECONDS_PER_HOUR = 3600.0


class TraceError(ValueError):
    """A trace that cannot be used."""


class TooFewPlacesError(TraceError):
    """A trace has fewer machines at a time than were asked for."""


@dataclass(frozen=True, slots=True)
class SpotEvent:
    """One machine came (`up`) or was taken away, `time_s` seconds after the trace began."""

    time_s: float
    node: str
    up: bool


@dataclass(frozen=True)
class SpotTrace:
    """The events of many machines, in order, from second 0 to `span_s`; every node is down before its first event.

    Raises TraceError if times go back or leave the span, if a node comes that is up, or if one is lost that is down.
    """

    events: tuple[SpotEvent, ...]
    span_s: float

    def __post_init__(self) -> None:
        up: set[str] = set()
        last_s = 0.0
        for number, event in enumerate(self.events):
            if not last_s <= event.time_s <= self.span_s:
                raise TraceError(
                    f"event {number}: time_s: value {event.time_s:g}; allowed: {last_s:g} to {self.span_s:g}"
                )
            if event.up == (event.node in up):
                state = "comes although it is up" if event.up else "is lost although it is not up"
                raise TraceError(f"event {number}: node {event.node!r} {state} at {event.time_s:g} s")
            up ^= {event.node}
            last_s = event.time_s

    @property
    def losses(self) -> int:
        return sum(not event.up for event in self.events)

    @property
    def up_node_s(self) -> float:
        """Seconds up, summed over nodes."""
        gone_s = sum(self.span_s - event.time_s if event.up else event.time_s - self.span_s for event in self.events)
        return float(gone_s)

    @property
    def losses_per_node_h(self) -> float:
        """Losses per node-hour of being up; 0 if no node is ever up."""
        return self.losses / (self.up_node_s / _SECONDS_PER_HOUR) if self.up_node_s else 0.0

    def scaled(self, factor: float) -> "SpotTrace":
        """The same events, `factor` times as far apart."""
        if factor <= 0:
            raise TraceError(f"factor: value {factor}; allowed: above 0")
        moved = tuple(SpotEvent(event.time_s * factor, event.node, event.up) for event in self.events)
        return SpotTrace(moved, self.span_s * factor)

    def window(self, start_s: float, duration_s: float) -> "SpotTrace":
        """The part that begins at start_s; nodes that are up at start_s come at second 0 of the part."""
        if start_s < 0 or duration_s <= 0 or start_s + duration_s > self.span_s:
            raise TraceError(
                f"window: {start_s:g} s to {start_s + duration_s:g} s; allowed: within 0 to {self.span_s:g}"
            )
        up: dict[str, None] = {}
        for event in self.events:
            if event.time_s > start_s:
                break
            if event.up:
                up[event.node] = None
            else:
                del up[event.node]
        first = [SpotEvent(0.0, node, up=True) for node in up]
        later = [e for e in self.events if start_s < e.time_s <= start_s + duration_s]
        return SpotTrace((*first, *(SpotEvent(e.time_s - start_s, e.node, e.up) for e in later)), duration_s)

    def part(self, places: int, seed: int) -> "SpotTrace":
        """The trace of fewer machines: the history of `places` places drawn at random; nodes are called "place-<k>".

        Providers give a replacement a new name. A place is what a node and its replacements take in turn: an arriving
        node takes the place that has been free longest, else a new one. RLBoost samples its trace of nodes in the same
        way (arXiv 2510.19225, C).
        """
        placed = list(_placed(self.events))
        known = max((place for _, place in placed), default=-1) + 1
        if not 1 <= places <= known:
            raise TooFewPlacesError(f"places: value {places}; allowed: 1 to {known}, the most nodes up at one time")
        drawn = {place: f"place-{k}" for k, place in enumerate(random.Random(seed).sample(range(known), places))}
        events = (SpotEvent(e.time_s, drawn[place], e.up) for e, place in placed if place in drawn)
        return SpotTrace(tuple(events), self.span_s)


@dataclass(frozen=True, kw_only=True)
class LossProcess:
    """How a set of machines loses machines: at random times a share of the machines that are up is lost, all at once.

    Attributes:
        name: for reports.
        source: where the figures were measured.
        losses_per_node_h: machines lost per hour of one machine being up.
        shares: (share of the machines that are up, weight); an event takes at least one machine.
        down_s: (quantile, seconds) until a lost machine is replaced, ascending; linear in between, from (0, 0) on.
    """

    name: str
    source: str
    losses_per_node_h: float
    shares: tuple[tuple[float, float], ...]
    down_s: tuple[tuple[float, float], ...]

    def lost(self, up: int, share: float) -> int:
        """How many of `up` machines an event with this share takes."""
        return min(up, max(1, round(share * up)))

    def lost_mean(self, up: int) -> float:
        """Mean machines taken per event."""
        weights = sum(weight for _, weight in self.shares)
        return sum(weight * self.lost(up, share) for share, weight in self.shares) / weights

    def down_time_s(self, uniform: float) -> float:
        """The quantile `uniform` of the time until a replacement; beyond the last point, the last point's."""
        low, low_s = 0.0, 0.0
        for quantile, time_s in self.down_s:
            if uniform < quantile:
                return low_s + (time_s - low_s) * (uniform - low) / (quantile - low)
            low, low_s = quantile, time_s
        return low_s


# Minutes with a removal in the trace of 32 machines, of which 24 were up on average: 39 lost one, 13 two, and so on.
AWS_P3 = LossProcess(
    name="aws-p3",
    source="uclasystem/bamboo, traces/p3-trace.csv at 8080929: AWS p3 in an autoscaling group, 11.4 h, 167 losses",
    losses_per_node_h=0.61,
    shares=((1 / 24, 39), (2 / 24, 13), (3 / 24, 15), (4 / 24, 7), (5 / 24, 1), (6 / 24, 4)),
    down_s=((0.1, 60.0), (0.5, 540.0), (0.9, 840.0)),
)
# 36 % of its losses take everything; the share of the others follows from the mean loss, 6.7 of about 14 that were up.
AWS_V100_EAST = LossProcess(
    name="aws-v100-us-east-2b",
    source="skypilot-org/spot-traces at 221da1a: 16 V100 in us-east-2b, 11 d; down times of its 9 single V100",
    losses_per_node_h=0.38,
    shares=((1.0, 0.36), (0.19, 0.64)),
    down_s=((0.5, 1764.0), (0.9, 15840.0)),
)
# 68 % of its losses take everything; a mean loss of 10.2 of about 15 leaves one machine for each of the others.
AWS_V100_WEST = LossProcess(
    name="aws-v100-us-west-2a",
    source="skypilot-org/spot-traces at 221da1a: 16 V100 in us-west-2a, 16 d; down times of its 9 single V100",
    losses_per_node_h=0.54,
    shares=((1.0, 0.68), (0.0, 0.32)),
    down_s=((0.5, 1764.0), (0.9, 15840.0)),
)
PROCESSES = {process.name: process for process in (AWS_P3, AWS_V100_EAST, AWS_V100_WEST)}


def draw_trace(process: LossProcess, nodes: int, span_s: float, seed: int) -> SpotTrace:
    """A trace of `nodes` machines, all up at second 0, drawn from a process; the same for the same seed.

    Loss events are Poisson. Their rate gives each machine `losses_per_node_h`, however many an event takes. Real gaps
    are burstier (AWS p3: median 4 min, 90th percentile 19; an exponential of the same mean: 6 and 20).
    """
    if nodes < 1 or span_s <= 0:
        raise TraceError(f"nodes: value {nodes}, span_s: value {span_s:g}; allowed: at least 1, above 0")
    rng = random.Random(seed)
    up = [f"node-{k}" for k in range(nodes)]
    events = [SpotEvent(0.0, node, up=True) for node in up]
    returns: list[tuple[float, str]] = []
    shares, weights = zip(*process.shares, strict=True)
    now_s = 0.0
    while True:
        per_s = process.losses_per_node_h * len(up) / (process.lost_mean(len(up)) * _SECONDS_PER_HOUR) if up else 0.0
        next_s = now_s + rng.expovariate(per_s) if per_s else float("inf")
        if returns and returns[0][0] <= next_s:
            now_s, node = heapq.heappop(returns)
            if now_s > span_s:
                return SpotTrace(tuple(events), span_s)
            up.append(node)
            events.append(SpotEvent(now_s, node, up=True))
            continue
        now_s = next_s
        if now_s > span_s:
            return SpotTrace(tuple(events), span_s)
        for node in rng.sample(up, process.lost(len(up), rng.choices(shares, weights)[0])):
            up.remove(node)
            events.append(SpotEvent(now_s, node, up=False))
            heapq.heappush(returns, (now_s + process.down_time_s(rng.random()), node))


def read_trace(path: Path | str, seed: int = 0) -> SpotTrace:
    """Read a public trace; the suffix names the format.

    `.csv` is Bamboo's: lines `milliseconds,add|remove,node`. `.json` is SkyPilot's: `{"metadata": {"gap_seconds": g},
    "data": [n, ...]}`, n machines *available* at each tick (some readers take the opposite polarity, which turns losses
    into launches); further fields, such as prices, are not read. `.txt` is Bamboo's second format: lines `date, time,
    count`. Its lines are in the order in which counts changed, and some repeat a count at times at which the next line
    already has another; the later line holds. Counts name no machine, so the lost one is drawn with `seed`.

    Raises TraceError if the file cannot be read or is no such trace; it names the file, the line or tick, and the
    value.
    """
    path = Path(path)
    readers = {".csv": _from_events, ".json": _from_ticks, ".txt": _from_dated_counts}
    if path.suffix not in readers:
        raise TraceError(f"{path}: file type {path.suffix!r}; allowed: {', '.join(readers)}")
    try:
        text = read_file(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    try:
        trace = readers[path.suffix](text, seed)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    # It is repeated, which would lead nowhere.
    if not trace.span_s:
        raise TraceError(f"{path}: all its events are at second 0; allowed: a trace that lasts longer")
    return trace


@dataclass(frozen=True)
class _Metadata:
    __pydantic_config__ = ConfigDict(extra="ignore", strict=True)
    gap_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class _Counts:
    __pydantic_config__ = ConfigDict(extra="ignore", strict=True)
    metadata: _Metadata
    data: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


_COUNTS = TypeAdapter(_Counts)


def _from_events(text: str, _seed: int) -> SpotTrace:
    events = []
    for number, line in enumerate(text.splitlines(), start=1):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3 or not fields[0].isdecimal() or fields[1] not in ("add", "remove") or not fields[2]:
            raise TraceError(f"line {number}: value {line[:80]!r}; allowed: milliseconds,add|remove,node")
        events.append(SpotEvent(int(fields[0]) / 1000.0, fields[2], up=fields[1] == "add"))
    if not events:
        raise TraceError("it is empty; allowed: lines milliseconds,add|remove,node")
    return SpotTrace(tuple(events), max(event.time_s for event in events))


def _from_ticks(text: str, seed: int) -> SpotTrace:
    try:
        counts = _COUNTS.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise TraceError(f"{where}: value {first['input']!r:.80}; {first['msg']}") from None
    gap_s = counts.metadata.gap_seconds
    timed = [(tick * gap_s, count) for tick, count in enumerate(counts.data)]
    return _from_counts(timed, len(counts.data) * gap_s, seed)


def _from_dated_counts(text: str, seed: int) -> SpotTrace:
    timed: list[tuple[float, int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        day, _, rest = line.partition(",")
        time, _, count = rest.partition(",")
        try:
            at = datetime.fromisoformat(f"{day.strip()} {time.strip()}+00:00")
            row = at.timestamp(), int(count)
        except ValueError:
            row = 0.0, -1
        if row[1] < 0:
            raise TraceError(f"line {number}: value {line[:80]!r}; allowed: date, time, count")
        while timed and timed[-1][0] >= row[0]:
            timed.pop()
        timed.append(row)
    if len(timed) < 2:
        raise TraceError("it has less than two lines; allowed: lines date, time, count")
    began_s = timed[0][0]
    return _from_counts([(at_s - began_s, count) for at_s, count in timed], timed[-1][0] - began_s, seed)


def _from_counts(timed: Iterable[tuple[float, int]], span_s: float, seed: int) -> SpotTrace:
    """Turns (time, machines up) into events; draws the machine that is lost."""
    rng = random.Random(seed)
    up: list[str] = []
    events: list[SpotEvent] = []
    born = 0
    for at_s, count in timed:
        while len(up) > count:
            node = up.pop(rng.randrange(len(up)))
            events.append(SpotEvent(at_s, node, up=False))
        while len(up) < count:
            born += 1
            up.append(f"node{born}")
            events.append(SpotEvent(at_s, up[-1], up=True))
    return SpotTrace(tuple(events), span_s)


def _placed(events: Iterable[SpotEvent]) -> Iterator[tuple[SpotEvent, int]]:
    """Every event with its place: an arriving node takes the place that has been free longest, else a new one."""
    free: list[int] = []
    place_of: dict[str, int] = {}
    places = 0
    for event in events:
        if not event.up:
            free.append(place_of.pop(event.node))
            yield event, free[-1]
            continue
        if free:
            place_of[event.node] = free.pop(0)
        else:
            place_of[event.node] = places
            places += 1
        yield event, place_of[event.node]


def lost_at_once(trace: SpotTrace) -> Sequence[int]:
    """For each moment with a loss, in order of time, how many machines were lost."""
    return tuple(Counter(event.time_s for event in trace.events if not event.up).values())
