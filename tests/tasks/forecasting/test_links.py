import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.crew_model.events import Events, Stalled
from tasks.forecasting.links import Links

GB = 1e9


def ends(upload_gbps, pulls, links_gbps=(("slow", 8.0), ("fast", 80.0))) -> dict[int, float]:
    """When each of (second, pool, bytes) has ended."""
    events, found = Events(), {}
    links = Links(events, upload_gbps, dict(links_gbps))
    for number, (at_s, pool, size) in enumerate(pulls):
        done = lambda number=number: found.setdefault(number, events.now_s)  # noqa: E731
        events.at(at_s, lambda pool=pool, size=size, done=done: links.pull(pool, size, done))
    with pytest.raises(Stalled):
        events.run(lambda: False)
    assert links.active == 0
    return found


def test_a_pull_takes_as_long_as_its_link_and_the_shared_upload_say():
    assert ends(None, [(0, "slow", GB), (0, "fast", GB)]) == pytest.approx({0: 1.0, 1: 0.1})
    assert ends(8.0, [(0, "slow", GB), (0, "slow", GB)]) == pytest.approx({0: 2.0, 1: 2.0})
    # The slow one takes 1 GB/s, and leaves 1 GB/s of 2 to the fast one.
    assert ends(16.0, [(0, "slow", 2 * GB), (0, "fast", GB)]) == pytest.approx({0: 2.0, 1: 1.0})
    # Alone for 0.5 s, then both have half, until the first has had its 1 GB after 1.5 s.
    assert ends(8.0, [(0, "fast", GB), (0.5, "fast", GB)]) == pytest.approx({0: 1.5, 1: 2.0})
    assert ends(8.0, [(3, "fast", 0.0)]) == pytest.approx({0: 3.0})


def test_a_link_that_is_slower_than_its_share_leaves_the_rest_to_others():
    links_gbps = (("slow", 2.0), ("fast", 80.0))
    # Of 1 GB/s the slow one takes a quarter, until it has ended after 2 s.
    assert ends(8.0, [(0, "slow", GB / 2), (0, "fast", 2 * GB)], links_gbps) == pytest.approx({0: 2.0, 1: 2.5})
    three = [(0, "slow", GB), (0, "fast", GB), (0, "fast", GB)]
    assert ends(8.0, three, links_gbps) == pytest.approx({0: 4.0, 1: 8 / 3, 2: 8 / 3})


def filled(upload_per_s, links_per_s):
    """The rates of pulls by progressive filling: nobody can have more without another, who has no more, having less.

    D. Bertsekas and R. Gallager, Data Networks, 2nd edition, 1992, section 6.5.2.
    """
    rates = [0.0] * len(links_per_s)
    rising = set(range(len(links_per_s)))
    while rising and (left_per_s := upload_per_s - sum(rates)) > 1e-6:
        step = min(left_per_s / len(rising), *(links_per_s[each] - rates[each] for each in rising))
        for each in rising:
            rates[each] += step
        rising = {each for each in rising if links_per_s[each] - rates[each] > 1e-6}
    return rates


def filled_ends(upload_gbps, pulls, links_gbps):
    """When each pull ends at these rates, which are found anew whenever one begins or ends."""
    left = {number: size for number, (_, _, size) in enumerate(pulls)}
    found, now_s = {}, 0.0
    while left:
        active = [number for number in left if pulls[number][0] <= now_s]
        rates = filled(upload_gbps * GB / 8, [links_gbps[pulls[number][1]] * GB / 8 for number in active])
        next_s = min(
            *(pulls[number][0] - now_s if number not in active else math.inf for number in left),
            *(left[number] / rate for number, rate in zip(active, rates, strict=True)),
            math.inf,
        )
        now_s += next_s
        for number, rate in zip(active, rates, strict=True):
            left[number] -= rate * next_s
            if left[number] <= 1.0:
                found[number] = now_s
                del left[number]
    return found


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from("abc"), st.floats(0.01, 5).map(lambda gb: gb * GB)),
        min_size=1,
        max_size=8,
    ),
    st.floats(1, 100),
    st.lists(st.floats(0.5, 90), min_size=3, max_size=3),
)
def test_what_a_link_cannot_carry_is_shared_fairly_among_the_others(pulls, upload_gbps, gbps):
    """No capacity is idle that some pull could use."""
    links_gbps = dict(zip("abc", gbps, strict=True))
    found = ends(upload_gbps, pulls, tuple(links_gbps.items()))
    assert found == pytest.approx(filled_ends(upload_gbps, pulls, links_gbps), abs=1e-4)


def test_a_pull_that_was_stopped_never_ends_and_leaves_its_share():
    events, found = Events(), []
    links = Links(events, 8.0, {"fast": 80.0})
    number = links.pull("fast", GB, lambda: found.append("stopped"))
    links.pull("fast", GB, lambda: found.append(events.now_s))
    events.at(1.0, lambda: links.stop("fast", number))
    events.at(1.0, lambda: links.stop("fast", number))
    with pytest.raises(Stalled):
        events.run(lambda: False)
    assert found == pytest.approx([1.5])


@given(
    st.lists(
        st.tuples(st.floats(0, 9), st.sampled_from(["slow", "fast"]), st.floats(0, 5).map(lambda gb: gb * GB)),
        min_size=1,
        max_size=8,
    ),
    st.floats(1, 100),
)
def test_nobody_is_faster_than_his_link_and_all_together_than_the_upload(pulls, upload_gbps):
    found = ends(upload_gbps, pulls)
    assert len(found) == len(pulls)
    for number, (at_s, pool, size) in enumerate(pulls):
        link = {"slow": 1.0, "fast": 10.0}[pool] * GB
        assert found[number] - at_s >= size / min(link, upload_gbps * GB / 8) - 1e-6
    first_s = min(at_s for at_s, _, _ in pulls)
    assert max(found.values()) - first_s >= sum(size for _, _, size in pulls) / (upload_gbps * GB / 8) - 1e-6
