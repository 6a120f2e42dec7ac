"""When each journal is asked for its next shard, against members that write on a schedule of their own."""

import random

import pytest

from tasks.learning.arrivals import ASKED_AT_EVERY_LOOK, Arrivals

FLUSH_S, POLL_S = 5.0, 1.0
WIDTH = 3 * ASKED_AT_EVERY_LOOK
NAMES = [f"{slot:05d}-a" for slot in range(WIDTH)]


def followed(writes_s, looks_s):
    """(requests, lag of each shard) of a reader that looks at these moments; `writes_s`: by name, when it writes."""
    arrivals, read, requests, lags_s = Arrivals(FLUSH_S, POLL_S), dict.fromkeys(NAMES, 0), 0, []
    for now_s in looks_s:
        whole, one = arrivals.due(NAMES, now_s)
        came = set()
        for name in (*whole, *one):
            there = [at_s for at_s in writes_s[name][read[name] :] if at_s <= now_s]
            found = there if name in whole else there[:1]
            requests += len(found) + (name in whole or not there)
            lags_s += [now_s - at_s for at_s in found]
            read[name] += len(found)
            if found:
                came.add(name)
        arrivals.note((*whole, *one), came, now_s)
    return requests, lags_s, read


def schedule(period_s, end_s, rng, jitter_s=0.0):
    start_s = rng.uniform(0, FLUSH_S)
    count = int((end_s - start_s) / period_s) + 1
    return sorted(start_s + n * period_s + rng.uniform(0, jitter_s) for n in range(count))


@pytest.mark.parametrize(("period_s", "jitter_s"), [(5.0, 0.0), (4.8, 0.0), (5.4, 0.0), (5.0, 0.6)])
def test_a_shard_costs_little_more_than_a_request_and_is_read_soon(period_s, jitter_s):
    rng = random.Random(1)
    writes_s = {name: schedule(period_s, 200.0, rng, jitter_s) for name in NAMES}
    looks_s = [POLL_S * look for look in range(205)]
    requests, lags_s, read = followed(writes_s, looks_s)
    assert read == {name: len(at_s) for name, at_s in writes_s.items()}
    shards = sum(read.values())
    assert requests <= 2.1 * shards  # five, if everybody is asked at every look
    assert max(lags_s) <= FLUSH_S + 2 * POLL_S
    assert sorted(lags_s)[len(lags_s) // 2] <= 2 * POLL_S


def test_a_member_that_writes_more_often_than_expected_does_not_fall_behind():
    rng = random.Random(2)
    writes_s = {name: schedule(FLUSH_S / 2, 100.0, rng) for name in NAMES}
    _, lags_s, read = followed(writes_s, [POLL_S * look for look in range(106)])
    assert read == {name: len(at_s) for name, at_s in writes_s.items()}
    assert max(lags_s) <= 4 * FLUSH_S


def test_after_a_pause_of_the_reader_or_of_a_member_everything_is_read():
    rng = random.Random(3)
    writes_s = {name: schedule(FLUSH_S, 100.0, rng) for name in NAMES}
    for name in NAMES[:50]:
        writes_s[name] = [at_s for at_s in writes_s[name] if not 30 < at_s < 60]
    looks_s = [look for look in range(110) if not 40 < look < 70]
    _, _, read = followed(writes_s, looks_s)
    assert read == {name: len(at_s) for name, at_s in writes_s.items()}


def test_a_small_crew_is_asked_at_every_look():
    arrivals, few = Arrivals(FLUSH_S, POLL_S), NAMES[:ASKED_AT_EVERY_LOOK]
    for now_s in range(5):
        assert arrivals.due(few, float(now_s)) == (few, [])
        arrivals.note(few, set(few), float(now_s))
