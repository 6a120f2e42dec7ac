"""The times at which the places of a pool have a machine: from a trace file, a random process, or counts."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from resources.spot_trace import PROCESSES, SpotTrace, draw_trace, read_trace
from tasks.forecasting.scenario import AvailabilityScenario

# The span drawn from a process; a longer run goes through it again.
DRAWN_SPAN_S = 24 * 3600.0
Change = tuple[float, int, bool]


def changes(scenario: AvailabilityScenario | None, places: int, seed: int) -> Iterator[Change]:
    """(second, place, True if the place has a machine from then on), in order; a place begins without a machine.

    A trace repeats for ever, counts do not repeat. Raises TraceError for a trace that cannot be used.
    """
    if scenario is None or not places:
        return iter([(0.0, place, True) for place in range(places)])
    if scenario.counts is not None:
        return _of_counts(scenario.counts, places)
    trace = _trace(scenario, places, seed)
    drawn_s = random.Random(seed).uniform(0, trace.span_s)
    return _of_trace(trace, drawn_s if scenario.start_s is None else scenario.start_s % trace.span_s)


def _trace(scenario: AvailabilityScenario, places: int, seed: int) -> SpotTrace:
    if scenario.path is not None:
        return read_trace(scenario.path, seed).part(places, seed).scaled(1 / scenario.rate_factor)
    process = PROCESSES[scenario.process or ""]
    hastened = replace(process, losses_per_node_h=process.losses_per_node_h * scenario.rate_factor)
    return draw_trace(hastened, places, DRAWN_SPAN_S, seed)


def _of_counts(counts: tuple[tuple[float, int], ...], places: int) -> Iterator[Change]:
    up = 0
    for at_s, there in counts:
        wanted = min(there, places)
        yield from ((at_s, place, True) for place in range(up, wanted))
        yield from ((at_s, place, False) for place in range(up - 1, wanted - 1, -1))
        up = wanted


def _of_trace(trace: SpotTrace, begin_s: float) -> Iterator[Change]:
    """The trace from begin_s on, repeated as long as a repetition has changes.

    Places keep their state from the end of the trace to its repetition, so the repetition of a trace without losses has
    no changes.
    """
    names = sorted({event.node for event in trace.events})
    places = {name: place for place, name in enumerate(names)}
    before = {places[event.node]: event.up for event in trace.events if event.time_s <= begin_s}
    there = {place for place, up in before.items() if up}
    yield from ((0.0, place, True) for place in sorted(there))
    for turn in count():
        changed = False
        for event in trace.events:
            place = places[event.node]
            if (turn or event.time_s > begin_s) and event.up != (place in there):
                changed = True
                there ^= {place}
                yield turn * trace.span_s - begin_s + event.time_s, place, event.up
        if turn and not changed:
            return


def losses_per_h(availability: AvailabilityScenario | None) -> float:
    """Losses of one machine in an hour; 0 without losses, and for counts of machines."""
    if availability is None:
        return 0.0
    if availability.path is not None:
        return read_trace(availability.path).losses_per_node_h * availability.rate_factor
    process = PROCESSES.get(availability.process or "")
    return process.losses_per_node_h * availability.rate_factor if process else 0.0
