import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.forecasting.events import Events, Stalled
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
